"""docs/adding-a-rule.md, done literally: one row in core.RULES, one in the oracle's, and everything computes it."""

import numpy as np
import oracle as reference
import pytest
from layer_backends import Torch
from oracle import assert_close, problem

from fastweights import FastWeightError, core

HALF = 0.5


@pytest.fixture
def half_delta(monkeypatch):
    """A toy rule: only half of what a key retrieves is taken from its value."""
    monkeypatch.setitem(core.RULES, "half-delta", core.Rule(lambda S, x: x.v - HALF * core.read(S, x.k)))
    monkeypatch.setitem(reference.RULES, "half-delta", lambda S, k, v: v - HALF * (k[..., None] * S).sum(-2))
    return "half-delta"


def test_the_oracle_knows_nothing_of_the_package():
    with open(reference.__file__) as source:
        assert "fastweights" not in source.read()


@pytest.mark.parametrize("method", ["auto", "recurrent"])
@pytest.mark.parametrize("T", [1, 9])
def test_every_framework_computes_it(backend, rng, half_delta, T, method):
    args = problem(rng, T=T)
    got = backend.run(args, rule=half_delta, method=method)
    for a, b in zip(got, reference.oracle(**args, rule=half_delta), strict=True):
        assert_close(a, b)
    other = backend.run(args, rule="sum", method="recurrent")
    assert np.abs(got[1] - other[1]).max() > 1e-3  # it did not run as another rule


def test_methods_without_its_form_refuse_it(backend, rng, half_delta):
    with pytest.raises(FastWeightError, match="method='chunked' has no chunked form of rule='half-delta'"):
        backend.run(problem(rng, T=9), rule=half_delta, method="chunked")


def test_layers_take_it(framework, rng, half_delta):
    """The layers of PyTorch and of the other frameworks compute the rule alike, and another than the delta rule."""
    x, arguments = rng.standard_normal((2, 7, 8)), dict(dim=8, heads=2, rule=half_delta)
    ours = Torch("FastWeightAttention", arguments, "float64")
    want = ours(x)[0]
    assert_close(framework.make("FastWeightAttention", arguments, "float64", ours.weights)(x)[0], want)
    assert np.abs(want - Torch("FastWeightAttention", arguments | dict(rule="delta"), "float64")(x)[0]).max() > 1e-4


def test_an_unknown_rule_raises_everywhere(backend, rng):
    with pytest.raises(FastWeightError, match="rule is 'half-delta'; expected one of 'delta', 'sum'"):
        backend.run(problem(rng, T=3), rule="half-delta")
    with pytest.raises(ValueError, match="rule is 'half-delta'"):
        reference.oracle(**problem(rng, T=3), rule="half-delta")
