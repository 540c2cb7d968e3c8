"""Kernels for decay per channel and for erase keys, against the float64 oracle, as test_kernels.py."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import DEVICE, runs
from oracle import oracle, problem
from test_kernels import HALF, check, poison, tensors  # noqa: F401 - a fixture

from fastweights.core import Inputs, Spec
from fastweights.torch import fast_weight, kernels, methods

SIZES = dict(B=1, T=66, H=4, K=16, V=16)  # of one head the largest error is a matter of luck
KINDS = [("delta", "channel", False, "before"), ("delta", "hard", True, "after"), ("delta", True, True, "before"),
         ("delta", False, True, "after"), ("sum", "channel", False, "after"),
         ("sum", "hard", False, "before")]  # fmt: skip


@runs
@pytest.mark.parametrize("rule, decay, erase, read", KINDS)
def test_outputs_and_gradients(rng, rule, decay, erase, read):
    check(problem(rng, **SIZES, decay=decay, erase=erase), rule=rule, read=read)


@runs
@pytest.mark.parametrize("K, V, decay", [(80, 16, "channel"), (64, 128, "hard")])
def test_widths_in_half_precision(rng, decay, K, V):
    check(problem(rng, B=1, T=65, H=1, K=K, V=V, decay=decay, erase=True), HALF[0])


@runs
@pytest.mark.parametrize("strength", [1e-3, 3.0])
def test_every_strength_of_decay(rng, strength):
    """A chunk is not cut, cut into blocks of 16, or down to tokens, by how strong its decay is: the same equation."""
    args = problem(rng, **SIZES, decay="channel")
    args["log_decay"] *= strength
    check(args, HALF[0])


@runs
def test_decay_is_summed_in_float32_beside_half_precision(rng):
    args = problem(rng, **SIZES, decay="channel", erase=True)
    half = {n: x.to(HALF[0]) if n not in ("log_decay", "state") else x for n, x in tensors(args, torch.float32).items()}
    o, S = fast_weight(**half, method="kernel")
    wanted = oracle(**{n: x.detach().double().cpu().numpy() for n, x in half.items()})
    for got, want in zip((o, S), wanted, strict=True):
        error = np.linalg.norm(got.detach().double().cpu().numpy() - want) / np.linalg.norm(want)
        assert error < 4 * torch.finfo(HALF[0]).eps


@runs
def test_without_rates_or_a_state(rng):
    args = tensors(problem(rng, **SIZES, decay="channel"), torch.float32)
    args = {n: x for n, x in args.items() if n not in ("beta", "state")}
    got, want = (fast_weight(**args, method=method)[0] for method in ("kernel", "chunked"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(o.sin().sum(), list(args.values())) for o in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_packed_equals_each_by_itself(rng, rule):
    cuts = [0, 1, 66, 66, 130]
    args = tensors(problem(rng, B=1, T=130, H=2, K=16, V=16, decay="channel", erase=rule == "delta", sequences=4),
                   torch.float32)  # fmt: skip
    do, dS = torch.randn_like(args["v"]), torch.randn_like(args["state"])
    o, S = fast_weight(**args, rule=rule, cu_seqlens=torch.tensor(cuts, device=DEVICE), method="kernel")
    grads = torch.autograd.grad([o, S], list(args.values()), [do, dS])
    for n, (a, b) in enumerate(pairwise(cuts)):
        where = {m: slice(n, n + 1) if m == "state" else (slice(None), slice(a, b)) for m in args}
        part = {m: x.detach()[where[m]].clone().requires_grad_() for m, x in args.items()}
        o_n, S_n = fast_weight(**part, rule=rule, method="chunked")
        torch.testing.assert_close((o[:, a:b], S[n : n + 1]), (o_n, S_n), rtol=1e-4, atol=1e-4)
        wanted = torch.autograd.grad([o_n, S_n], list(part.values()), [do[:, a:b], dS[n : n + 1]])
        for m, g, want in zip(args, grads, wanted, strict=True):
            torch.testing.assert_close(g[where[m]], want, rtol=1e-3, atol=1e-3, msg=m)


@runs
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_sections_in_parallel(rng, monkeypatch, rule):
    monkeypatch.setattr(kernels.sequence_parallel, "sections_per_sequence", lambda *shape: 2)
    monkeypatch.setattr(kernels, "_plans", {})
    check(problem(rng, B=2, T=128, H=1, K=16, V=16, decay="channel"), HALF[0], rule=rule)


@runs
def test_several_writes_per_token(rng):
    args = problem(rng, B=1, T=35, H=2, K=16, V=16, decay="channel", erase=True, writes=2)
    args = tensors(args, torch.float32)
    got, want = (fast_weight(**args, writes=2, method=method) for method in ("kernel", "chunked"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@runs
@pytest.mark.parametrize("read", ["after", "before"])
def test_one_token(rng, read):
    args = problem(rng, B=3, T=1, H=2, K=20, V=16, decay="channel", erase=True)
    with torch.no_grad():
        got = fast_weight(**tensors(args, torch.float32), read=read, method="kernel")
    for x, want in zip(got, oracle(**args, read=read), strict=True):
        np.testing.assert_allclose(x.cpu().numpy(), want, rtol=1e-5, atol=1e-5)


@runs
def test_operators_pass_torchs_own_check(rng, monkeypatch):
    monkeypatch.undo()  # fresh memory must be what torch gives
    for decay, delta in (("channel", True), (False, True)):
        args = tensors(problem(rng, B=1, T=20, H=1, K=16, V=16, decay=decay, erase=delta), torch.float32)
        given = Inputs(*(None if x is None else x.detach() for x in map(args.get, Inputs._fields[:7])))
        inputs, spec = list(given[:8]), Spec(rule="delta" if delta else "sum").as_text()
        operators, tests = methods.ADDED["kernel"], ("test_schema", "test_faketensor")
        torch.library.opcheck(operators.forward, (inputs, spec, 1), test_utils=tests)
        o, S, *saved = operators.forward(inputs, spec, 1)
        torch.library.opcheck(operators.backward, (o, S, inputs, saved, spec), test_utils=tests)


@runs
@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("kind", [*KINDS, ("delta", True, False, "after"), ("sum", False, False, "after")])
def test_no_operand_of_a_product_is_narrow(rng, monkeypatch, kind, width):
    """Rows of 64 bytes make ptxas of CUDA 12.8 read registers that nothing wrote (blocks.NARROWEST says where).

    Walks hold narrow values as rows of a product, of which there are then too few for the instruction that is wrong.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from benchmarks import kernel_branches

    rule, decay, erase, read = kind
    monkeypatch.setattr(kernels, "_plans", {})
    args = tensors(problem(rng, B=1, T=66, H=1, K=width, V=width, decay=decay, erase=erase), HALF[0])
    launches = kernel_branches.launches(lambda: fast_weight(**args, rule=rule, read=read, method="kernel"))
    assert launches
    for launch in launches:
        sizes = dict(zip(launch.kernel.arg_names[-len(launch.constants) :], launch.constants, strict=True))
        walks = launch.kernel.__name__.endswith("_walk")
        for name in ("BK",) if walks else ("BK", "BV"):
            assert sizes.get(name, 64) >= kernels.blocks.NARROWEST, (launch.kernel.__name__, name)
