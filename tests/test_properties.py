"""Random calls equal the oracle or are refused: some here, 10,000 each by `make properties` and `make layers`."""

import pytest
import torch
from reliability import attention_cases, fwl_cases, properties

import fastweights.torch as fw
from fastweights import FastWeightError


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


@pytest.mark.parametrize("kind, name, cases", [
    (attention_cases, "torch", 60), (attention_cases, "keras", 15), (fwl_cases, "torch", 20), (fwl_cases, "keras", 6),
])  # fmt: skip
def test_random_calls_of_layers_equal_each_text_alone_or_are_refused(kind, name, cases):
    pytest.importorskip(name)
    framework = kind.FRAMEWORKS[name]()
    outcomes = {kind.check(framework, number) for number in range(20_000, 20_000 + cases)}
    assert {"refused", "float64", "float32"} <= outcomes


@pytest.mark.parametrize("name, number", [("torch", 20), ("torch", 38), ("keras", 2041)])
def test_what_was_found_in_layers_stays_mended(name, number):
    """Padding of no tokens before a convolution; float16 divided by what it rounds to 0; a convolution of q, k and v
    with nothing beside them.
    """
    pytest.importorskip(name)
    attention_cases.check(attention_cases.FRAMEWORKS[name](), number)


def test_sums_beyond_float16_are_divided_before_they_are_rounded():
    layer = fw.FastWeightAttention.preset("linear-transformer", 64, 1)
    with torch.no_grad():
        x = torch.randn(1, 1500, 64)
        want, state = layer(x)
        got, _ = layer.half()(x.half())
    assert state.z.sum() > 65_504  # what queries of ones would be divided by
    assert (got - want).abs().max() < 2e-3


def test_a_state_of_other_texts_is_refused():
    layer, x = fw.FastWeightAttention(8, 2, conv=4), torch.randn(2, 5, 8)
    state = layer.init_state(2)
    with pytest.raises(FastWeightError, match=r"state\.conv has shape \(3, 3, 24\); expected \(2, 3, 24\): .* 2 texts"):
        layer(x, state._replace(conv=torch.zeros(3, 3, 24)))
    layer = fw.FastWeightAttention.preset("linear-transformer", 8, 2)
    with pytest.raises(FastWeightError, match=r"state\.z has shape None; expected \(2, 2, 4\)"):
        layer(x, layer.init_state(2)._replace(z=None))


def test_the_check_can_fail():
    """A framework that forgets the decay, and one that says nothing of what was spoiled."""
    framework = properties.Torch()
    real = framework.call
    framework.call = lambda *a, log_decay=None, **how: real(*a, **how)
    with pytest.raises(AssertionError, match=r"is .* off, allowed"):
        for number in range(40):
            properties.check(framework, number)


@pytest.mark.parametrize("kind, argument", [(attention_cases, "beta_max"), (fwl_cases, "decay")])
def test_the_checks_of_layers_can_fail(kind, argument):
    """A framework that loses an argument."""
    framework = kind.Torch()
    real = framework.make
    framework.make = lambda arguments, *rest: real({n: a for n, a in arguments.items() if n != argument}, *rest)
    with pytest.raises(AssertionError, match=r"is .* off, allowed|nothing was said"):
        for number in range(60):
            kind.check(framework, number)
