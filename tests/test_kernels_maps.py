"""Features and memory as one operator, against both in float64; in Triton's interpreter where there is no GPU."""

import pytest
import torch
from interpreter import DEVICE, runs

from fastweights import features
from fastweights.core import Spec
from fastweights.torch import FastWeightAttention, fast_weight, kernels
from fastweights.torch.methods import map_plainly

NAMES = ("q", "k", "v", "beta", "log_decay", "state")
HALF = torch.float16 if kernels.INTERPRETED else torch.bfloat16  # it has no bfloat16 products


def problem(name, T=70, d=12, V=20, B=2, H=2, dtype=torch.float32, sequences=None, rates=True):
    torch.manual_seed(0)
    K = features.parse(name).width(d)
    x = dict(q=torch.randn(B, T, H, d), k=torch.randn(B, T, H, d), v=torch.randn(B, T, H, V),
             state=torch.randn(sequences or B, H, K, V))  # fmt: skip
    x["k"][0, T // 2] = 0.0  # no feature at all, or all alike
    if rates:
        x |= dict(beta=torch.rand(B, T, H), log_decay=-torch.rand(B, T, H) / 8)
    return {n: t.to(DEVICE, torch.float32 if n == "state" else dtype) for n, t in x.items()}


def results(x, up, run=fast_weight, **how):
    """o, the state and every gradient, in float64."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    o, S = run(**leaves, **how)
    grads = torch.autograd.grad([o, S], list(leaves.values()), [up[0].to(o.dtype), up[1].to(S.dtype)])
    return {n: t.detach().double() for n, t in zip(("o", "S", *leaves), (o, S, *grads), strict=True)}


def composed(*, q, k, features, norm, **rest):
    """The kernels on features that PyTorch made."""
    q, k = (map_plainly(x, Spec(features=features, norm=norm)) for x in (q, k))
    return fast_weight(q, k, **rest, method="kernel")


def check(x, name, norm, **how):
    """Every output and gradient errs at most twice as much as features and memory do each by themselves.

    test_kernels.py and test_kernels_features.py hold these to the oracle; here it is what lies between them.
    """
    up = torch.randn_like(x["v"]), torch.randn_like(x["state"])
    how |= dict(features=name, norm=norm)
    exact = results({n: t.double() for n, t in x.items()}, up, **how, method="recurrent")
    plain = [results(x, up, **how, method=method) for method in ("chunked", "recurrent")]
    plain.append(results(x, up, composed, **how))
    got = results(x, up, **how, method="kernel")
    for n, want in exact.items():
        error, *others = ((y[n] - want).abs().max().item() for y in (got, *plain))
        assert error <= 2 * max(others), (n, error, others)


@runs
@pytest.mark.parametrize("norm", ["none", "sum", "l2"])
@pytest.mark.parametrize("name", ["identity", "relu", "silu", "elu+1", "dpfp-1", "dpfp-3"])
def test_outputs_and_gradients(name, norm):
    x = problem(name)
    if norm == "none":  # and the memory grows
        x["beta"] *= 0.05
    check(x, name, norm)


@runs
@pytest.mark.parametrize("rule", ["delta", "sum"])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("rates", [True, False])
def test_rules_and_reads(rule, read, rates):
    check(problem("dpfp-2", B=1, T=65, rates=rates), "dpfp-2", "sum", rule=rule, read=read)
    check(problem("silu", B=1, d=80, T=65, V=70, rates=rates), "silu", "l2", rule=rule, read=read)


@runs
@pytest.mark.parametrize("name,norm", [("dpfp-3", "sum"), ("silu", "l2"), ("elu+1", "sum")])
def test_half_precision(name, norm):
    x = problem(name, d=16, V=16, dtype=HALF)
    x["k"][0, 35] = 1.0  # the gradient of a zero is past float16
    check(x, name, norm)


@runs
def test_packed_sequences():
    cuts = torch.tensor([0, 1, 66, 66, 90], device=DEVICE)
    for name in ("dpfp-1", "elu+1"):
        check(problem(name, B=1, T=90, sequences=4), name, "sum", cu_seqlens=cuts)


@runs
def test_sections(monkeypatch):
    monkeypatch.setattr(kernels.sequence_parallel, "sections_per_sequence", lambda *shape: 2)
    monkeypatch.setattr(kernels, "_plans", {})
    for rule in ("delta", "sum"):
        check(problem("dpfp-1", B=1, T=256), "dpfp-1", "sum", rule=rule)


@runs
@pytest.mark.parametrize("name,norm", [("dpfp-3", "sum"), ("silu", "l2"), ("identity", "none")])
def test_one_token(name, norm):
    x = problem(name, T=1)
    with torch.no_grad():
        got = fast_weight(**x, features=name, norm=norm, method="kernel")
        want = fast_weight(**{n: t.double() for n, t in x.items()}, features=name, norm=norm, method="recurrent")
    for y, z in zip(got, want, strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-5, atol=1e-5)


@runs
def test_transforms():
    x = {n: t for n, t in problem("dpfp-1", B=1, T=5, d=4, V=3).items() if n in ("q", "k", "v")}
    how = dict(features="dpfp-1", norm="sum")
    second = []
    for method in ("kernel", "chunked"):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        (once,) = torch.autograd.grad(
            fast_weight(**leaves, **how, method=method)[0].sin().sum(), leaves["k"], create_graph=True
        )
        second.append(torch.autograd.grad(once.square().sum(), list(leaves.values())))
    for got, want in zip(*second, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    loss = lambda method: lambda q, k, v: fast_weight(q[None], k[None], v[None], **how, method=method)[0].sin().sum()  # noqa: E731
    each = [torch.stack([t[0], 2 * t[0]]) for t in x.values()]
    got, want = (torch.func.vmap(torch.func.grad(loss(m), argnums=1))(*each) for m in ("kernel", "chunked"))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    call = lambda q, k, v: fast_weight(q, k, v, **how, method="kernel")[0]  # noqa: E731
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(**x), call(**x))


@runs
def test_a_layer_computes_the_same():
    for preset in ("delta-network", "linear-transformer", "deltanet"):
        layer = FastWeightAttention.preset(preset, dim=24, heads=2).to(DEVICE)
        x = torch.randn(2, 9, 24, device=DEVICE)
        outputs = []
        for layer.method in ("kernel", "chunked"):
            outputs.append(layer(x)[0])
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@runs
def test_the_backward_pass_keeps_no_features():
    x = {n: t.requires_grad_() for n, t in problem("dpfp-3").items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        fast_weight(**x, features="dpfp-3", norm="sum", method="kernel")
    assert (2, 70, 2, 12) in kept
    assert (2, 70, 2, 72) not in kept
