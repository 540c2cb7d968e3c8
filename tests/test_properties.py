"""Random calls equal the oracle or are refused: some here, 10,000 by `make properties`."""

import pytest
from reliability import properties


@pytest.mark.parametrize("name, cases", [("torch", 100), ("keras", 12), ("jax", 3)])
def test_random_calls_equal_the_oracle_or_are_refused(name, cases):
    pytest.importorskip(name)
    framework = properties.FRAMEWORKS[name]()
    outcomes = {properties.check(framework, number) for number in range(20_000, 20_000 + cases)}
    assert {"refused", "float64"} <= outcomes or cases < 10


@pytest.mark.parametrize("name, number", [("keras", 128), ("torch", 209)])
def test_what_was_found_stays_mended(name, number):
    """Chunks of one token that read before their write, with a decay per channel; a switch that is a list."""
    pytest.importorskip(name)
    properties.check(properties.FRAMEWORKS[name](), number)


def test_the_check_can_fail():
    """A framework that forgets the decay, and one that says nothing of what was spoiled."""
    framework = properties.Torch()
    real = framework.call
    framework.call = lambda *a, log_decay=None, **how: real(*a, **how)
    with pytest.raises(AssertionError, match=r"is .* off, allowed"):
        for number in range(40):
            properties.check(framework, number)
