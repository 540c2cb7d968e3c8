"""Feature maps and normalisers in every framework, against plain NumPy."""

import math

import numpy as np
import pytest
from oracle import assert_close, oracle, problem

from fastweights import FastWeightError
from fastweights.features import favor_projection, parse

M = 6
MAPS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "dpfp-1": lambda x: _dpfp(x, 1),
    "dpfp-3": lambda x: _dpfp(x, 3),
    f"favor-{M}": lambda x: _favor(x, favor_projection(M, x.shape[-1], 0)),
}
NORMS = {
    "none": lambda x: x,
    "sum": lambda x: x / np.abs(x).sum(-1, keepdims=True),
    "l2": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True),
    "max": lambda x: x / np.abs(x).max(-1, keepdims=True),
}


def _dpfp(x, nu):
    u = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], -1)
    n = u.shape[-1]
    return np.concatenate([u * u[..., [(i - j) % n for i in range(n)]] for j in range(1, nu + 1)], -1)


def _favor(x, projection):
    x = x * x.shape[-1] ** -0.25
    u, half = x @ projection.T, (x**2).sum(-1, keepdims=True) / 2
    return np.concatenate([np.exp(u - half), np.exp(-u - half)], -1) / math.sqrt(2 * len(projection))


def projection_of(name, d, dtype=np.float64):
    return favor_projection(parse(name).size, d, 0).astype(dtype) if parse(name).random else None


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MAPS)
def test_matches_numpy(backend, rng, name, norm):
    x = rng.standard_normal((2, 3, 9))
    got = backend.feature_map(x, name, norm=norm, projection=projection_of(name, 9))
    assert got.shape == (2, 3, parse(name).width(9))
    assert_close(got, NORMS[norm](MAPS[name](x)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["relu", "elu+1", "dpfp-1", "dpfp-3", "favor-64"])
def test_features_are_positive_and_safe_at_zero(backend, name, norm):
    x = np.stack([np.zeros(5), np.full(5, -300.0), np.full(5, 300.0)]).astype(np.float32)
    got = backend.feature_map(x, name, norm=norm, projection=projection_of(name, 5, np.float32))
    assert np.isfinite(got).all()
    assert (got >= 0).all()


@pytest.mark.parametrize(("name", "norm"), [("dpfp-3", "sum"), ("silu", "l2"), ("elu+1", "none"), ("identity", "max")])
@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_the_memory_maps_queries_and_keys(backend, rng, name, norm, method):
    K = parse(name).width(5)
    args = problem(rng, T=20, K=5, V=3) | dict(state=rng.standard_normal((2, 3, K, 3)))
    args["beta"] = args["beta"] / 50  # without a norm keys are long
    mapped = {n: NORMS[norm](MAPS[name](args[n])) for n in "qk"}
    for got, want in zip(
        backend.run(args, features=name, norm=norm, method=method), oracle(**(args | mapped)), strict=True
    ):
        assert_close(got, want)


def test_padding_is_nothing_after_the_map(backend, rng):
    """ELU+1 of zero is one: a token of padding must not write it."""
    args = {n: x for n, x in problem(rng, T=7, K=5, V=3).items() if n in ("q", "k", "v")}
    cut = {n: x[:, :4] for n, x in args.items()}
    o, S = backend.run(args, features="elu+1", norm="sum", mask=np.arange(7)[None].repeat(2, 0) < 4)
    want_o, want_S = backend.run(cut, features="elu+1", norm="sum")
    assert_close(o[:, :4], want_o)
    assert_close(S, want_S)


def test_errors_of_a_map_in_the_memory(backend, rng):
    args = {n: x for n, x in problem(rng, T=3, K=5, V=3).items() if n in ("q", "k", "v", "state")}
    for how, message in (
        (dict(features="favor-4"), "features is 'favor-4'; expected a map without random directions"),
        (dict(features="dpfp"), "features is 'dpfp'; expected"),
        (dict(features="dpfp-3"), r"state has shape \(2, 3, 5, 3\); expected \(2, 3, 30, 3\)"),
        (dict(norm="l3"), "norm is 'l3'; expected one of"),
    ):
        with pytest.raises(FastWeightError, match=message):
            backend.run(args, **how)


def test_elu_plus_one_keeps_its_tail_in_bfloat16():
    """1 + (exp(-8) - 1) is 0 in bfloat16; exp(-8) is not."""
    torch = pytest.importorskip("torch")
    from fastweights.torch import feature_map

    x = torch.tensor([-8.0, -30.0, 3.0, 500.0], dtype=torch.bfloat16, requires_grad=True)
    y = feature_map(x, "elu+1")
    (g,) = torch.autograd.grad(y.sum(), x)
    want = torch.tensor([math.exp(-8), math.exp(-30), 4.0, 501.0])
    torch.testing.assert_close(y.float(), want, rtol=0.004, atol=0)
    torch.testing.assert_close(g.float(), torch.tensor([math.exp(-8), math.exp(-30), 1.0, 1.0]), rtol=0.004, atol=0)


@pytest.mark.parametrize("norm", ["sum", "l2"])
@pytest.mark.parametrize("name", ["relu", "silu", "elu+1", "dpfp-2", "favor-4"])
def test_gradients(name, norm):
    torch = pytest.importorskip("torch")
    from fastweights.torch import feature_map

    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.autograd.gradcheck(lambda x: feature_map(x, name, norm=norm, projection=projection_of(name, 5)), x)


def test_favor_estimates_the_softmax_kernel(rng):
    """phi(q) . phi(k) is, in the mean over projections, exp(q . k / sqrt(d))."""
    d, size = 8, 64
    q, k = rng.standard_normal((2, d))
    feature = parse(f"favor-{size}")
    estimates = [np.dot(*(_phi(feature, x, favor_projection(size, d, seed)) for x in (q, k))) for seed in range(400)]
    exact = math.exp(q @ k / math.sqrt(d))
    assert abs(np.mean(estimates) - exact) < 4 * np.std(estimates) / 20 < 0.2 * exact


def _phi(feature, x, projection):
    return feature.apply(x, np, None, projection=projection)


def test_favor_directions_are_orthogonal_and_seeded():
    w = favor_projection(20, 8, 3)
    np.testing.assert_array_equal(w, favor_projection(20, 8, 3))
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    for block in (unit[:8], unit[8:16], unit[16:]):
        assert_close(block @ block.T, np.eye(len(block)), 1e-12)


@pytest.mark.parametrize("name", ["softmax", "dpfp", "dpfp-0", "favor-x", "elu"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(FastWeightError, match=f"features is '{name}'; expected 'identity', 'relu', 'silu', 'elu"):
        parse(name)


def test_other_errors(rng):
    with pytest.raises(FastWeightError, match=r"features is 'dpfp-9' for width 4; expected NU of at most 2 \* 4 - 1"):
        parse("dpfp-9").width(4)
    with pytest.raises(FastWeightError, match="norm is 'l1'; expected one of 'none', 'sum', 'l2', 'max'"):
        parse("relu").apply(rng.standard_normal(3), np, None, norm="l1")
    with pytest.raises(FastWeightError, match="projection is missing for features 'favor-4'; expected a"):
        parse("favor-4").apply(rng.standard_normal(3), np, None)


def test_unit_has_exact_derivatives_also_at_zero():
    torch = pytest.importorskip("torch")
    from fastweights.torch.hand_gradients import unit

    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.autograd.gradcheck(lambda x: unit(x, 0.1), x)
    torch.autograd.gradgradcheck(lambda x: unit(x, 0.1), x)
    torch.testing.assert_close(torch.func.vmap(lambda x: unit(x, 0.1))(x), unit(x, 0.1))
    zero = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: unit(x, 0.1), zero)
