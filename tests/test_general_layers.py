"""Layers of models with decay per channel, erase keys or several writes: each against its paper's equation in a loop.

That they stream, split, pack and agree between frameworks is tested with the other presets (test_layers.py,
test_layers_frameworks.py), and below with everything at once.
"""

from itertools import pairwise

import pytest
import torch
from oracle import assert_close
from torch.nn.functional import conv1d, normalize, sigmoid, silu, softplus

from fastweights import FastWeightError
from fastweights.torch import FastWeightAttention

D, H, K, T = 8, 2, 4, 11
EQUATIONS = {}


def equation(name):
    return lambda f: EQUATIONS.setdefault(name, f)


@equation("mamba-2")
def _(S, p, t):
    """Dao 2024: h = exp(A dt) h + dt B x, y = C h."""
    step = softplus(p["decay"][t] + p["decay_bias"])
    S = torch.exp(-p["decay_log"].exp() * step)[:, None, None] * S
    return S + step[:, None, None] * outer(p["k"][t], p["v"][t])


@equation("gla")
def _(S, p, t):
    """Yang 2023: S = Diag(a) S + k v^T, a = sigmoid(x W_1 W_2 + b)^(1 / 16)."""
    return sigmoid(p["channel"][t]).pow(1 / 16)[..., None] * S + outer(p["k"][t], p["v"][t])


def kda_decay(p, t):
    return torch.exp(-p["decay_log"].exp()[:, None] * softplus(p["channel"][t]))[..., None]


@equation("kda")
def _(S, p, t):
    """Kimi 2025: S = (I - b k k^T) Diag(a) S + b k v^T."""
    k, b = p["k"][t], sigmoid(p["beta"][t])[:, None, None]
    return (torch.eye(K) - b * outer(k, k)) @ (kda_decay(p, t) * S) + b * outer(k, p["v"][t])


@equation("gated-deltanet-2")
def _(S, p, t):
    """Hatamizadeh 2026: S = (I - k (b * k)^T) Diag(a) S + k (w * v)^T."""
    k, b, w = p["k"][t], sigmoid(p["erase"][t].view(H, K)), sigmoid(p["beta"][t].view(H, K))
    return (torch.eye(K) - outer(k, b * k)) @ (kda_decay(p, t) * S) + outer(k, w * p["v"][t])


@equation("comba")
def _(S, p, t):
    """Hu 2025: S = (a - b k p^T) S + b k v^T, p a share of k; the query is q - d p."""
    k, b = p["k"][t], sigmoid(p["beta"][t])[:, None, None]
    a = torch.exp(-p["decay_log"].exp() * softplus(p["decay"][t] + p["decay_bias"]))[:, None, None]
    share = sigmoid(p["feedback_share"]) * k
    p["q"] = torch.cat([p["q"][:t], (p["q"][t] - p["feedback_query"] * share)[None], p["q"][t + 1 :]])
    return (a * torch.eye(K) - b * outer(k, share)) @ S + b * outer(k, p["v"][t])


@equation("rwkv-7")
def _(S, p, t):
    """Peng 2025, transposed: S = Diag(w) S - (a * c) (c^T S) + k' v^T with c = k xi / |k xi|."""
    k, a = p["k"][t], sigmoid(p["erase"][t].view(H, K))
    w = torch.exp(-(torch.tensor(-0.5).exp()) * sigmoid(p["channel"][t]))
    c = normalize(k * p["removal_key"], dim=-1)
    kept = torch.diag_embed(w) - outer(a * c, c)
    return kept @ S + outer(k * (1 + (a - 1) * p["removal_mix"]), p["v"][t])


@equation("delta-product")
def _(S, p, t):
    """Siems 2025: S = product over the token's writes of (I - b k k^T), b up to 2."""
    for k, v, b in zip(p["k"][t], p["v"][t], 2 * sigmoid(p["beta"][t].view(2, H)), strict=True):
        S = (torch.eye(K) - b[:, None, None] * outer(k, k)) @ S + b[:, None, None] * outer(k, v)
    return S


def outer(a, b):
    """(H, K), (H, V) -> (H, K, V)."""
    return a[..., :, None] * b[..., None, :]


def projected(layer, x):
    """What a layer makes of x (T, D) before its memory, by name, T first; and its parameters."""
    c, p = layer.config, dict(layer.named_parameters())
    raw = x @ layer.in_proj.weight.mT
    if c.conv:
        channels, W = c.channels, c.conv
        padded = torch.cat([raw.new_zeros(W - 1, channels), raw[:, :channels]])
        mixed = conv1d(padded.mT[None], layer.conv.mT[:, None], groups=channels)[0].mT
        raw = torch.cat([mixed, raw[:, channels:]], -1)
    p |= dict(zip(c.sections, raw.split(list(c.sections.values()), -1), strict=True))
    shape = (len(x), *([c.writes] if c.writes > 1 else []))
    p["q"] = p["q"].view(len(x), -1, K)
    p["k"], p["v"] = p["k"].view(*shape, -1, K), p["v"].view(*shape, H, K)
    p["v"] = silu(p["v"]) if c.conv else p["v"]
    if c.features == "silu":
        p["q"], p["k"] = silu(p["q"]), silu(p["k"])
    if c.norm == "l2":
        p["q"], p["k"] = normalize(p["q"], dim=-1), normalize(p["k"], dim=-1)
    if "decay_proj" in p:
        p["channel"] = (p["decay"] @ p["decay_proj"]).view(-1, H, K) + p["decay_bias"]
    return p


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_layer_is_its_papers_equation(name, method):
    layer = FastWeightAttention.preset(name, dim=D, heads=H, method=method, chunk_size=4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(T, D)
    p, S, outputs = projected(layer, x), torch.zeros(H, K, K), []
    for t in range(T):
        S = EQUATIONS[name](S, p, t)
        outputs.append((p["q"][t][:, None, :] @ S)[:, 0])
    o = torch.stack(outputs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.out_norm
    gate = p["gate"].view(T, H, K)
    o = o * (sigmoid(gate) if layer.config.gate == "sigmoid" else silu(gate))
    want = o.flatten(1) @ layer.out_proj.weight.mT
    y, state = layer(x[None])
    assert_close(state.memory[0].detach().numpy(), S.detach().numpy(), name="memory")
    assert_close(y[0].detach().numpy(), want.detach().numpy(), name="output")


def same(got, want):
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        if b is not None:
            assert_close(a.detach().numpy(), b.detach().numpy())


@pytest.mark.parametrize("name", EQUATIONS)
def test_streams_packs_and_pads(name):
    layer = FastWeightAttention.preset(name, dim=D, heads=H)
    x, whole = torch.randn(1, T, D), [0, 1, 1, 7, T]
    outputs, state = [], None
    for t in range(T):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    same((torch.stack(outputs, 1), state), layer(x))
    y, state = layer(x, cu_seqlens=torch.tensor(whole))
    for n, (a, b) in enumerate(pairwise(whole)):
        if b > a:
            same((y[:, a:b], [None if s is None else s[n : n + 1] for s in state]), layer(x[:, a:b]))
    mask = torch.zeros(1, T, dtype=torch.bool)
    mask[:, 3:9] = True
    y, state = layer(torch.where(mask[..., None], x, torch.nan), mask=mask)
    same((y[:, 3:9], state), layer(x[:, 3:9]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(erase=True, rule="sum"), "erase is True with rule='sum'; expected False"),
        (dict(writes=0), "writes is 0; expected a whole number of at least 1"),
        (dict(writes=2, norm="attention", features="elu+1"), "norm is 'attention' with writes=2"),
        (
            dict(decay="channel", norm="attention", features="elu+1"),
            "norm is 'attention' with writes=1, erase=False",
        ),
        (dict(beta="step"), "beta is 'step' with decay=None and writes=1; expected decay='learned'"),
        (dict(beta="rate"), "beta is 'rate'; expected None, True, False, 'value', 'step'"),
        (dict(gate="tanh"), "gate is 'tanh'; expected True, False, 'sigmoid'"),
        (dict(erase="removal"), "erase is 'removal' with decay=None"),
        (dict(erase="feedback", writes=2), "erase is 'feedback' with decay=None and writes=2; expected one decay"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(FastWeightError, match=message):
        FastWeightAttention(8, 2, **arguments)
