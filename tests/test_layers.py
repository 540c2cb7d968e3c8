"""The layers of PyTorch: the whole grid, streaming, packing, padding, derivatives, export."""

import itertools
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from safetensors.torch import load_file, save_file

from fastweights import FastWeightError, checks
from fastweights.attention.arguments import NORMS
from fastweights.attention.config import AttentionConfig
from fastweights.attention.presets import PRESETS
from fastweights.features import parse
from fastweights.torch import AttentionState, FastWeightAttention, feature_map

RULES = ["sum", "delta"]
FEATURES = ["identity", "relu", "silu", "elu+1", "dpfp-2", "favor-4"]
GRID = list(itertools.product(RULES, FEATURES, NORMS))
EVERYTHING = dict(conv=3, gate=True, decay="learned", key_heads=1, beta_max=2.0, key_dim=3, value_dim=5)


@pytest.fixture(autouse=True)
def quiet():
    """The grid holds cells that warn; the warnings have a test of their own."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def make(rule="delta", features="silu", norm="l2", dim=6, heads=2, **how):
    return FastWeightAttention(dim, heads, rule=rule, features=features, norm=norm, dtype=torch.float64, **how)


def tokens(B=2, T=9, dim=6):
    return torch.randn(B, T, dim, dtype=torch.float64)


def row(state, n):
    return AttentionState(*(None if x is None else x[n : n + 1] for x in state))


def assert_same_state(got, want):
    for name, a, b in zip(AttentionState._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_close(a.detach().numpy(), b.detach().numpy(), name=name)


def assert_same(got, want):
    assert_close(got[0].detach().numpy(), want[0].detach().numpy(), name="output")
    assert_same_state(got[1], want[1])


@pytest.mark.parametrize(("rule", "features", "norm"), GRID)
def test_streaming_equals_one_pass(rule, features, norm):
    for options in ({}, EVERYTHING):
        layer, x = make(rule, features, norm, **options), tokens()
        outputs, state = [], None
        for t in range(x.shape[1]):
            y, state = layer.step(x[:, t], state)
            outputs.append(y)
        assert_same(layer(x), (torch.stack(outputs, 1), state))


@pytest.mark.parametrize(("rule", "features", "norm"), GRID)
def test_gradients_of_the_whole_grid(rule, features, norm):
    """With respect to the input, every parameter and the carried state. ReLU's kinks are kept at a distance.

    So is a normaliser of zero, which features that have nothing in common give: all keys are positive there.
    """
    layer = make(rule, features, norm, dim=4, **EVERYTHING | {"key_dim": 2, "value_dim": 2})
    x = tokens(1, 5, 4)
    if layer.config.attention_norm:
        x = x.abs()
        with torch.no_grad():
            for weight in (layer.in_proj.weight, layer.conv):
                weight.abs_()
    _, state = layer(tokens(1, 3, 4).abs())
    inputs = [x, *(s.detach() for s in state if s is not None), *(p.detach() for p in layer.parameters())]
    names = [n for n, _ in layer.named_parameters()]
    present = [s is not None for s in state]

    def run(x, *rest):
        states, parameters = rest[: sum(present)], rest[sum(present) :]
        given_state = iter(states)
        state = AttentionState(*(next(given_state) if here else None for here in present))
        y, new = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, state))
        return y, *(s for s in new if s is not None)

    torch.autograd.gradcheck(run, [i.requires_grad_() for i in inputs], eps=1e-7, atol=1e-4, rtol=1e-4, fast_mode=True)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 30), max_size=3), cell=st.sampled_from(GRID))
def test_any_split_equals_the_whole(cuts, cell):
    layer, x = make(*cell, **EVERYTHING), tokens(1, 30)
    outputs, state = [], None
    for a, b in pairwise([0, *sorted(cuts), 30]):
        y, state = layer(x[:, a:b], state)
        outputs.append(y)
    assert_same((torch.cat(outputs, 1), state), layer(x))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rule", RULES)
def test_packed_documents_do_not_leak(rule, norm):
    layer = make(rule, "elu+1", norm, **EVERYTHING)
    x, cu = tokens(1, 20), [0, 1, 1, 12, 20]  # one of a single token (shorter than the convolution), one empty
    _, start = layer(tokens(4, 3))
    y, state = layer(x, start, cu_seqlens=torch.tensor(cu))
    for n, (a, b) in enumerate(pairwise(cu)):
        assert_same((y[:, a:b], row(state, n)), layer(x[:, a:b], row(start, n)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_nothing(rule, norm):
    """Padding on both sides and in the middle, holding NaN, with a carried state."""
    layer, x = make(rule, "elu+1", norm, **EVERYTHING), tokens(2, 9)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    _, start = layer(tokens(2, 4))
    y, state = layer(torch.where(mask[..., None], x, torch.nan), start, mask=mask)
    assert (y[~mask] == 0).all()
    for n in range(2):
        assert_same((y[n : n + 1, mask[n]], row(state, n)), layer(x[n : n + 1, mask[n]], row(start, n)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    layer = FastWeightAttention.preset(name, dim=8, heads=2, dtype=torch.float64)
    x = tokens(3, 70, 8)
    y, state = layer(x)
    for n in range(3):
        assert_same((y[n : n + 1], row(state, n)), layer(x[n : n + 1]))


def test_delta_with_attention_norm_is_equations_26_to_28():
    """Schlag 2021: v_bar = W k / (z . k), 0 at the first token; W += beta (v - v_bar) k; y = W q / (z . q)."""
    layer = make("delta", "elu+1", "attention", heads=1, out_norm=False)
    x = tokens(1, 12)
    width = layer.config.key_width
    q, k, v, beta = (x[0] @ layer.in_proj.weight.mT).split([width, width, width, 1], -1)
    q, k = feature_map(q, "elu+1"), feature_map(k, "elu+1")
    W, z, outputs = torch.zeros(width, width, dtype=x.dtype), torch.zeros(width, dtype=x.dtype), []
    for i in range(12):
        v_bar = W @ k[i] / (z @ k[i]) if i else torch.zeros_like(v[i])
        W = W + beta[i].sigmoid() * torch.outer(v[i] - v_bar, k[i])
        z = z + k[i]
        outputs.append(W @ q[i] / (z @ q[i]))
    y, state = layer(x)
    assert_close(y[0].detach().numpy(), (torch.stack(outputs) @ layer.out_proj.weight.mT).detach().numpy())
    assert_close(state.memory[0, 0].detach().numpy(), W.T.detach().numpy())
    assert_close(state.z[0, 0].detach().numpy(), z.detach().numpy())


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_attention_norm_with_decay(rule):
    """Memory and normaliser decay together, before what a key retrieves is divided by its share of the normaliser."""
    from fastweights.attention.memory import mix
    from fastweights.torch.framework import OPS

    config = AttentionConfig(6, 1, features="elu+1", norm="attention", rule=rule)
    (q, k), v, T = torch.randn(2, 1, 9, 1, 6).double(), torch.randn(1, 9, 1, 6).double(), 9
    log_decay, beta = -torch.rand(1, T, 1).double(), torch.rand(1, T, 1).double()
    how = dict(cu_seqlens=None, mask=None, method="chunked", chunk_size=4, log_decay=log_decay)
    o, memory, _ = mix(config, OPS, q, k, v, beta if rule == "delta" else None, None, None, None, how)
    q, k = (torch.nn.functional.elu(a[0, :, 0]) + 1 for a in (q, k))
    S, z = torch.zeros(6, 6).double(), torch.zeros(6).double()
    for t in range(T):
        a = log_decay[0, t, 0].exp()
        S, z = a * S, a * z
        retrieved = S.T @ k[t] / (z @ k[t]) if t and rule == "delta" else 0.0
        S = S + (beta[0, t, 0] if rule == "delta" else 1.0) * torch.outer(k[t], v[0, t, 0] - retrieved)
        z = z + k[t]
        assert_close(o[0, t, 0].numpy(), (S.T @ q[t] / (z @ q[t])).numpy())
    assert_close(memory[0, 0].numpy(), S.numpy())


def test_sum_with_attention_norm_is_the_linear_transformer():
    layer = FastWeightAttention.preset("linear-transformer", dim=6, heads=2, dtype=torch.float64)
    x = tokens()
    q, k, v = (x @ layer.in_proj.weight.mT).unflatten(-1, (3, 2, 3)).unbind(2)
    q, k = (torch.nn.functional.elu(a) + 1 for a in (q, k))
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    weights = scores / scores.sum(-1, keepdim=True)
    want = torch.einsum("bhts,bshv->bthv", weights, v).flatten(2) @ layer.out_proj.weight.mT
    assert_close(layer(x)[0].detach().numpy(), want.detach().numpy())


def test_nlms_overwrites_whatever_the_length_of_the_key():
    """After writing v to k at full rate, k retrieves v: the point of dividing the rate by |k|^2."""
    from fastweights.attention.memory import mix
    from fastweights.torch.framework import OPS

    config = AttentionConfig(6, 1, features="identity", norm="nlms")
    k, v = 10 * torch.randn(1, 8, 1, 6, dtype=torch.float64), torch.randn(1, 8, 1, 6, dtype=torch.float64)
    beta = torch.ones(1, 8, 1, dtype=torch.float64)
    how = dict(cu_seqlens=None, mask=None, method="chunked", chunk_size=None, log_decay=None)
    o, _, _ = mix(config, OPS, k, k, v, beta, None, None, None, how)
    assert_close(o.numpy(), v.numpy())


@pytest.mark.parametrize("features", ["relu", "elu+1", "dpfp-2"])
def test_hellinger_keys_have_unit_length_and_the_shares_of_sum_norm(features):
    x = tokens()
    phi = feature_map(x, features, norm="hellinger")
    assert_close(phi.norm(dim=-1).numpy(), np.ones(x.shape[:2]), 1e-5)
    assert_close((phi**2).numpy(), feature_map(x, features, norm="sum").numpy(), 1e-5)


def test_negative_eigenvalues_flip_what_is_stored():
    """beta up to 2: a repeated key with value 0 turns the memory along it to its negative at rate 2."""
    layer = make(beta_max=2.0)
    with torch.no_grad():
        layer.in_proj.weight[-2:] = 0
        layer.in_proj.weight[-2:, 0] = 1e3  # the rate is 2 for tokens whose first number is large
        layer.in_proj.weight[12:18] = 0  # values are 0
        x = tokens(1, 1).abs()
        _, state = layer(x, AttentionState(torch.randn(1, 2, 3, 3, dtype=x.dtype)))
        _, after = layer(x, state)
        k = feature_map((x @ layer.in_proj.weight.mT)[..., 6:12].unflatten(-1, (2, 3)), "silu", norm="l2")[0, 0]
    assert_close(torch.einsum("hk,hkv->hv", k, after.memory[0]).numpy(),
                 -torch.einsum("hk,hkv->hv", k, state.memory[0]).numpy(), 1e-9)  # fmt: skip


def test_favor_is_redrawn_in_training_only():
    layer, again = (make(features="favor-8", redraw=True) for _ in range(2))
    first = layer.projection.clone()
    assert torch.equal(first, again.projection)
    layer.eval()(tokens())
    assert torch.equal(layer.projection, first)
    layer.train()(tokens())
    assert not torch.equal(layer.projection, first)
    again.train()(tokens())
    assert torch.equal(layer.projection, again.projection)
    other = make(features="favor-8", redraw=True)
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        each(tokens())
    assert torch.equal(layer.projection, other.projection)  # the count of draws is saved too


def test_weights_and_states_survive_safetensors(tmp_path):
    layer = FastWeightAttention.preset("performer", dim=8, heads=2, dtype=torch.float64)
    x = tokens(2, 9, 8)
    want = layer(x)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = FastWeightAttention.preset("performer", dim=8, heads=2, dtype=torch.float64, seed=5)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert_same(other(x), want)


def test_bfloat16_layer_under_autocast():
    layer = FastWeightAttention.preset("gated-deltanet", dim=16, heads=2)
    x = torch.randn(2, 70, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
    assert y.dtype == torch.bfloat16
    assert state.memory.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x)[0], rtol=0.1, atol=0.05)


def test_init_state_is_what_none_stands_for():
    for name in PRESETS:
        layer = FastWeightAttention.preset(name, dim=8, heads=2, dtype=torch.float64)
        assert_same(layer(tokens(2, 5, 8)[:, :0], layer.init_state(2)), layer(tokens(2, 5, 8)[:, :0]))


def test_repr_says_what_differs_from_the_defaults():
    layer = FastWeightAttention.preset("gated-deltanet", dim=64, heads=4)
    assert layer.extra_repr() == ("64, heads=4, features='silu', rule='delta', norm='l2', decay='learned', conv=4, "
                                  "gate=True")  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dim=10, heads=3), "dim is 10 with heads=3; expected a multiple of heads"),
        (dict(heads=0), "heads is 0; expected a whole number of at least 1"),
        (dict(dim=-8), "dim is -8; expected a whole number"),
        (dict(key_dim=2.5), "key_dim is 2.5; expected a whole number"),
        (dict(decay="channel", decay_rank=0), "decay_rank is 0; expected a whole number"),
        (dict(rule="hebb"), "rule is 'hebb'; expected one of 'delta', 'sum'"),
        (dict(norm="layer"), "norm is 'layer'; expected one of 'none', 'sum', 'l2', 'max', 'hellinger', 'attention'"),
        (dict(features="cos"), "features is 'cos'; expected 'identity'"),
        (dict(key_heads=3, heads=4), "key_heads is 3; expected a divisor of heads=4"),
        (dict(beta_max=3.0), "beta_max is 3.0; expected above 0 and at most 2"),
        (dict(conv=1), "conv is 1; expected 0 for none, or a width of at least 2"),
        (
            dict(decay=(0.9,)),
            r"decay is \(0.9,\); expected None, 'learned', 'channel', 'gla', 'rwkv-7', 'retnet'",
        ),
        (dict(decay=1.5), r"decay is 1.5; expected None"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(FastWeightError, match=message):
        FastWeightAttention(**dict(dim=8, heads=2) | arguments)


def test_call_errors():
    layer = make()
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 9, 7\); expected \(B, T, 6\): dim is 6"):
        layer(tokens(dim=7))
    with pytest.raises(FastWeightError, match=r"state has shape \(1, 2, 3, 3\); expected \(2, 2, 3, 3\)"):
        layer(tokens(), layer.init_state(1))
    with pytest.raises(FastWeightError, match="preset is 'mamba'; expected one of 'linear-transformer'"):
        FastWeightAttention.preset("mamba", 8, 2)


def test_unbounded_combinations_warn_once(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            make("delta", "relu", "none")
            make("sum", "silu", "attention")
            make("delta", "silu", "l2")
    assert [str(w.message).split(":")[0] for w in caught] == [
        'rule="delta" with norm="none"',
        "norm='attention' with features='silu'",
    ]


def test_every_feature_map_is_in_the_grid():
    assert {parse(f).kind for f in FEATURES} == {"identity", "relu", "silu", "elu+1", "dpfp", "favor"}
