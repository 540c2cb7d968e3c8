"""What PyTorch users do with the general memory beyond calling it: derivatives, transforms, compilation."""

import numpy as np
import pytest
import torch
from oracle import assert_close, oracle, problem

from fastweights import FastWeightError
from fastweights.core import Inputs, Spec
from fastweights.torch import chunked, fast_weight, methods
from fastweights.torch.ops import HAS_TRITON, choose

NAMES = ("q", "k", "v", "beta", "log_decay", "erase", "state")


def tensors(rng, grad=False, dtype=torch.float64, **shape):
    args = problem(rng, **{"decay": "hard", "erase": True, **shape})
    return [torch.tensor(args[n], dtype=dtype).requires_grad_(grad) for n in NAMES]


def call(*inputs, **how):
    how = {"method": "chunked", "chunk_size": 8} | how
    return fast_weight(**dict(zip(NAMES, inputs, strict=True)), **how)


@pytest.mark.parametrize(("read", "writes", "T"), [("after", 1, 6), ("before", 2, 3)])  # six writes: past a chunk
def test_first_and_second_derivatives(rng, read, writes, T):
    inputs = tensors(rng, grad=True, B=1, T=T, H=1, K=2, V=2, decay="channel", writes=writes)
    run = lambda *x: call(*x, read=read, writes=writes, chunk_size=4)  # noqa: E731
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs)


def test_derivatives_of_packed_sequences(rng):
    inputs = tensors(rng, grad=True, B=1, T=6, H=1, K=2, V=2, sequences=3, decay="channel")
    run = lambda *x: call(*x, cu_seqlens=torch.tensor([0, 5, 5, 6]), chunk_size=4)  # noqa: E731
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs)


def test_compiles_without_a_graph_break(rng):
    for writes, packed in ((1, None), (2, torch.tensor([0, 13, 20]))):
        inputs = tensors(rng, grad=True, B=1, T=20, sequences=1 if packed is None else 2, writes=writes)
        eager = lambda *x, cu=packed, n=writes: call(*x, cu_seqlens=cu, writes=n)  # noqa: E731
        compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*inputs), eager(*inputs), strict=True):
            torch.testing.assert_close(got, want)
        got, want = (torch.autograd.grad(f(*inputs)[0].sum(), inputs) for f in (compiled, eager))
        torch.testing.assert_close(got, want)


def test_vmap_and_functional_gradients(rng):
    many = [torch.stack([x, 0.5 * x]) for x in tensors(rng, T=11)]
    loss = lambda *x: call(*x)[0].sin().sum() + call(*x)[1].sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(NAMES)))))(*many)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in many]
        torch.testing.assert_close([g[i] for g in got], list(torch.autograd.grad(loss(*leaves), leaves)))


def test_operators_pass_torchs_own_check(rng):
    operators = methods.ADDED["chunked"]
    inputs, spec = [*tensors(rng, B=1, T=11), None], Spec(chunk_size=8).as_text()
    torch.library.opcheck(operators.forward, (inputs, spec, chunked.ALL))
    o, S, *saved = operators.forward(inputs, spec, chunked.ALL)
    torch.library.opcheck(operators.backward, (o, S, inputs, saved, spec))


def test_strided_inputs_and_inputs_that_are_not_changed(rng):
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(rng, T=20)]
    before = [x.detach().clone() for x in inputs]
    o, S = call(*inputs)
    torch.autograd.grad(o.sum() + S.sum(), inputs)
    want = oracle(**dict(zip(NAMES, (x.numpy() for x in before), strict=True)))
    for got, exact in zip((o, S), want, strict=True):
        assert_close(got.detach().numpy(), exact)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x.detach(), y)


def test_features_map_the_erase_key_too_and_before_the_writes_are_spread(rng):
    """ELU+1 of a zero query is not zero: a token's own read alone may be mapped."""
    q, k, v, beta, log_decay, erase, state = tensors(rng, T=7, writes=2, decay="channel")
    phi = lambda x: torch.where(x > 0, x + 1, x.exp()) / torch.where(x > 0, x + 1, x.exp()).sum(-1, keepdim=True)  # noqa: E731
    got = call(q, k, v, beta, log_decay, erase, state, features="elu+1", norm="sum", writes=2)
    want = call(phi(q), phi(k), v, beta, log_decay, phi(erase), state, writes=2)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_autocast_and_half_precision(rng):
    inputs = tensors(rng, grad=True, dtype=torch.float32, T=40, decay="channel")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, S = call(*inputs)
    assert (o.dtype, S.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = oracle(**dict(zip(NAMES, (x.detach().numpy() for x in inputs), strict=True)))
    assert np.abs(o.detach().double().numpy() - exact).max() < 0.05 * np.abs(exact).max()
    for g, x in zip(torch.autograd.grad(o.float().sum(), inputs), inputs, strict=True):
        assert g.dtype == x.dtype


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_kernels_say_what_they_lack(monkeypatch):
    from fastweights.torch import kernels

    monkeypatch.setattr(kernels, "INTERPRETED", True)
    wide = torch.zeros(1, 4, 2, 160)
    lacks = (
        "method='kernel' takes keys of at most 128 features in torch.float32 with {}, got 160; use method=\"chunked\""
    )
    with pytest.raises(FastWeightError, match=lacks.format("log_decay per channel")):
        fast_weight(wide, wide, wide, log_decay=wide, method="kernel")
    with pytest.raises(FastWeightError, match=lacks.format("erase")):
        fast_weight(wide, wide, wide, erase=wide, method="kernel")
    assert choose(Inputs(wide, wide, wide, None, wide), Spec()) == "chunked"
