"""Hostile numbers: NaN is named with the layer that met it first; extremes of keys, rates, decays and dtypes."""

import itertools

import numpy as np
import pytest
import torch
from oracle import oracle, problem
from reliability import steps

import fastweights
import fastweights.torch as fw
from fastweights import FastWeightError
from fastweights.attention.presets import PRESETS
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel


def test_the_first_layer_that_met_nan_is_named():
    torch.manual_seed(0)
    model = LanguageModel(Config(dim=16, heads=2, layers="delta,softmax,delta", head="linear"), 257)
    tokens = torch.arange(12)[None]
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()
    with fastweights.debug(model):
        model(tokens)
    with torch.no_grad():
        model.blocks[1].feed_forward.out.weight[3, 2] = float("inf")
    with (
        fastweights.debug(model),
        pytest.raises(
            FastWeightError,
            match=r"layer blocks\.1\.feed_forward\.out \(Linear\) returned -?inf at .*no layer before it",
        ),
    ):
        model(tokens)
    assert hooks() == before  # free when off
    model(tokens)
    layer = fw.FastWeightAttention(8, heads=2)
    x = torch.randn(1, 5, 8)
    x[0, 3, 1] = float("nan")
    with fastweights.debug(layer), pytest.raises(FastWeightError, match=r"the model .* was given nan at \(0, 3, 1\)"):
        layer(x)
    with pytest.raises(FastWeightError, match="model is a str; expected a torch"), fastweights.debug("model"):
        pass


@pytest.mark.parametrize("name", [*PRESETS, "FastWeightRNN", "FastWeightProgrammer"])
def test_every_kind_of_layer_is_named(name):
    """Also where NaN arises within the layer, in its decay."""
    attention = name in PRESETS
    layer = fw.FastWeightAttention.preset(name, 8, 2) if attention else getattr(fw, name)(8, 8)
    own = getattr(layer, "decay_bias", None)
    with torch.no_grad():
        (next(layer.parameters()) if own is None else own).view(-1)[0] = float("nan")
    model, x = torch.nn.ModuleDict(dict(inner=layer)), torch.randn(1, 5, 8)
    within, before = r"in layer inner \(FastWeightAttention\), (log_decay|beta) has nan", r"layer inner\S* \(\w+\)"
    found = before if own is None else within
    with fastweights.debug(model), pytest.raises(FastWeightError, match=found):
        model["inner"](x)
    assert not [n for m in model.modules() for n in vars(m) if n == "forward"]  # nothing is left


@pytest.mark.parametrize("refresh", [None, 4])
@pytest.mark.parametrize("entrance", ["forward", "run", "loss", "slow_logits", "slow_loss", "step"])
def test_a_fast_weight_layer_is_named_however_it_is_entered(entrance, refresh):
    x, (labels, weights) = torch.randn(1, 5, 8), fw.make_labels(torch.arange(5)[None])
    block = fw.FWLBlock(8, 10, inputs=8, refresh=refresh, normalizer=4.0)
    given = dict(slow_logits=(x,), slow_loss=(x, labels), step=(x[:, 0], None, block.init_state(1)))
    with torch.no_grad():
        block.dense1[0, 0] = float("nan")
    model = torch.nn.ModuleDict(dict(head=block))
    with fastweights.debug(model), pytest.raises(FastWeightError, match=r"layer head \(FWLBlock\)"):
        getattr(block, entrance)(*given.get(entrance, (x, labels, weights)))


def test_flax_names_it_too():
    jax, linen = pytest.importorskip("jax"), pytest.importorskip("flax.linen")

    class Two(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="second")(jax.numpy.log(linen.Dense(3, name="first")(x) * 0 - 1))

    model, x = Two(), jax.numpy.ones((1, 2))
    weights = model.init(jax.random.PRNGKey(0), x)
    with (
        fastweights.debug(model),
        pytest.raises(FastWeightError, match=r"layer second \(Dense\) was given nan at \(0, 0\)"),
    ):
        model.apply(weights, x)
    assert not np.isfinite(model.apply(weights, x)).any()
    import fastweights.jax as fwj

    block = fwj.FWLBlock(4, 5, refresh=2, normalizer=3.0)
    given = jax.numpy.full((1, 3, 2), jax.numpy.nan), jax.numpy.zeros((1, 3), int), jax.numpy.ones((1, 3))
    with fastweights.debug(block), pytest.raises(FastWeightError, match=r"\(FWLBlock\) was given nan"):
        block.apply({}, *given, method="run")


def call(args, dtype, method, **how):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {n: torch.tensor(x).to(wide if n == "state" else dtype) for n, x in args.items()}
    o, S = fw.fast_weight(**tensors, method=method, **how)
    return o.double().numpy(), S.double().numpy(), {n: x.double().numpy() for n, x in tensors.items()}


EXTREMES = {
    "huge values": lambda a: a | dict(v=a["v"] * 1e30),
    "zero keys": lambda a: a | dict(k=a["k"] * 0),
    "denormal keys": lambda a: a | dict(k=a["k"] * 1e-40),
    "beta 0": lambda a: a | dict(beta=a["beta"] * 0),
    "beta 1": lambda a: a | dict(beta=a["beta"] * 0 + 1),
    "beta 2": lambda a: a | dict(beta=a["beta"] * 0 + 2),
    "no decay": lambda a: a | dict(log_decay=a["log_decay"] * 0),
    "decay to 0": lambda a: a | dict(log_decay=a["log_decay"] * 0 - 1e4),
    "denormal state": lambda a: a | dict(state=a["state"] * 1e-42),
}


@pytest.mark.parametrize("rule", ["delta", "sum"])
@pytest.mark.parametrize("case", EXTREMES)
def test_extremes_equal_the_oracle(rng, case, rule):
    """In float32, as far as one rounding of the inputs moves the oracle; all finite."""
    args = EXTREMES[case](problem(rng, T=70))
    for method in ("recurrent", "chunked"):
        o, S, rounded = call(args, torch.float32, method, rule=rule)
        moved = {n: x * (1 + 2**-23 * rng.uniform(-1, 1, x.shape)) for n, x in rounded.items()}
        for got, want, near in zip((o, S), oracle(**rounded, rule=rule), oracle(**moved, rule=rule), strict=True):
            assert np.isfinite(got).all()
            assert np.abs(got - want).max() <= 16 * np.abs(near - want).max() + 2**-18 * np.abs(want).max() + 1e-44


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_largest_numbers_of_a_dtype(rng, dtype, method):
    """The memory is wider than its inputs: values at the end of float16 and bfloat16 are kept and read back."""
    largest = float(torch.finfo(dtype).max)
    k = torch.eye(4, dtype=dtype)[None, :, None]
    v = torch.full((1, 4, 1, 3), largest, dtype=dtype)
    v[0, 1] = float(torch.finfo(dtype).smallest_normal)
    o, S = fw.fast_weight(k, k, v, method=method)
    assert torch.equal(o, v)
    assert torch.equal(S[0, 0].to(dtype), v[0, :, 0])
    total, S = fw.fast_weight(k[:, :1].expand(1, 2, 1, 4), k[:, :1].expand(1, 2, 1, 4), v[:, :1].expand(1, 2, 1, 3),
                              rule="sum", method=method)  # fmt: skip
    if dtype == torch.float16:
        assert S.max() == 2 * largest  # beyond what float16 can say; the memory can
    assert total[0, 0].eq(largest).all()


def test_rates_beyond_two_grow_as_the_equation_says_and_are_named_on_request(rng):
    args = problem(rng, T=20)
    args["beta"] = args["beta"] * 0 + 2.5
    o, _, rounded = call(args, torch.float64, "chunked")
    want = oracle(**rounded)
    np.testing.assert_allclose(o, want[0], rtol=1e-7, atol=1e-9 * np.abs(want[0]).max())
    with fastweights.debug(), pytest.raises(FastWeightError, match=r"beta has 2\.5 at .*; expected rates in \[0, 2\]"):
        call(args, torch.float64, "chunked")


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_a_decay_of_exactly_zero_forgets_all(rng, rule):
    """Every third token; in chunks too, whose sums of logarithms stay finite. `debug` names it all the same."""
    args = problem(rng, T=70)
    args["log_decay"][:, ::3] = -np.inf
    want = oracle(**args, rule=rule)
    for method, dtype, off in itertools.product(("recurrent", "chunked"), (torch.float64, torch.float32), (0.0, 1e4)):
        given = args | dict(log_decay=np.maximum(args["log_decay"], -off) if off else args["log_decay"])
        o, S, _ = call(given, dtype, method, rule=rule)
        allowed = 1e-9 if dtype == torch.float64 else 1e-4  # a sum of 104s in float32 is 1e-4 off
        np.testing.assert_allclose(o, want[0], atol=allowed * np.abs(want[0]).max())
        np.testing.assert_allclose(S, want[1], atol=allowed * np.abs(want[1]).max())
    x = {n: torch.tensor(a, requires_grad=True) for n, a in args.items()}
    o, S = fw.fast_weight(**x, rule=rule, method="chunked")
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum() + S.sum(), list(x.values())))
    with (
        fastweights.debug(),
        pytest.raises(FastWeightError, match=r"log_decay has -inf .*; expected finite logarithms"),
    ):
        call(args, torch.float64, "chunked")


@pytest.mark.parametrize("name", ["delta", "sum, decay"])
def test_the_error_of_the_recurrence_does_not_grow(name):
    """20,000 steps; ten million are `make steps`, and in docs/reliability.md."""
    found = steps.growth(20_000, **steps.CASES[name], segment=1000)
    assert found[-1][0] == 20_000
    assert max(error for _, error, _ in found) < 2e-6
    assert steps.slope(found) < 0.35
