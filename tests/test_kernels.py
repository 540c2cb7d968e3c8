"""The Triton kernels against the float64 oracle: on a CUDA device where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so without a device test_interpreter.py runs this file again.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture
from oracle import oracle, oracle_gradients, problem, torch_loop

from fastweights import FastWeightError
from fastweights.core import Inputs, Spec
from fastweights.torch import fast_weight, kernels, methods
from fastweights.torch.ops import choose

NAMES = ("q", "k", "v", "beta", "log_decay", "state")
HALF = [torch.float16] if kernels.INTERPRETED else [torch.bfloat16, torch.float16]  # it has no bfloat16 products


def tensors(args, dtype, device=DEVICE):
    """Leaves in dtype, the state in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    return {n: torch.tensor(x, dtype=wide if n == "state" else dtype, device=device, requires_grad=True)
            for n, x in args.items()}  # fmt: skip


def everything(o, S, leaves, do, dS):
    """Outputs and gradients by name, in float64."""
    ups = [torch.tensor(x, dtype=y.dtype, device=y.device) for x, y in ((do, o), (dS, S))]
    grads = torch.autograd.grad([o, S], list(leaves.values()), ups)
    found = {"o": o, "S": S} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach().double().cpu().numpy() for n, x in found.items()}


def check(args, dtype=torch.float32, rule="delta", read="after", factor=2.0):
    """Output, state and every gradient err at most `factor` times as much as plain PyTorch's in the same dtype.

    Plain PyTorch is the loop in that dtype or, since chunks sum the logarithms of decay, the plain chunked form. The
    error is the root mean square over all entries. For the largest error the bound is half as much again, because a
    single entry depends on how the machine's exponential function rounds.
    """
    rounded = {n: x.detach().double().cpu().numpy() for n, x in tensors(args, dtype).items()}
    rng = np.random.default_rng(1)
    do, dS = rng.standard_normal(args["v"].shape), rng.standard_normal(args["state"].shape)
    do = torch.tensor(do, dtype=dtype).double().numpy()
    exact = dict(zip("oS", oracle(**rounded, rule=rule, read=read), strict=True))
    exact |= {f"d{n}": g for n, g in oracle_gradients(rounded, do, dS, rule=rule, read=read).items()}
    leaves, same, chunks = (tensors(args, dtype) for _ in range(3))
    got = everything(*fast_weight(**leaves, rule=rule, read=read, method="kernel"), leaves, do, dS)
    plain = everything(*torch_loop(**same, rule=rule, read=read), same, do, dS)
    chunked = fast_weight(**chunks, rule=rule, read=read, method="chunked", chunk_size=64)
    chunked = everything(*chunked, chunks, do, dS)
    for n in exact:
        errors = [np.abs(x[n] - exact[n]) for x in (got, plain, chunked)]
        for name, limit, sizes in (
            ("root mean square", factor, [np.sqrt(np.square(x).mean()) for x in errors]),
            ("max", 1.5 * factor, [x.max() for x in errors]),
        ):
            allowed = limit * max(sizes[1:])
            assert sizes[0] <= allowed, (
                f"{n}: {name} error {sizes[0]:.2e} exceeds {allowed:.2e}, {limit} x plain PyTorch's"
            )


@runs
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_outputs_and_gradients(rng, rule, read, decay):
    check(problem(rng, B=1, T=70, H=2, K=16, V=16, decay=decay), rule=rule, read=read)


@runs
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_lengths(rng, T):
    check(problem(rng, B=2, T=T, H=1, K=16, V=16), HALF[0])


@runs
@pytest.mark.parametrize("K, V", [(96, 16), (16, 80), (64, 64), (128, 128)])
@pytest.mark.parametrize("dtype", HALF)
def test_widths_in_half_precision(rng, dtype, K, V):
    check(problem(rng, B=1, T=70, H=1, K=K, V=V), dtype)


@runs
@pytest.mark.parametrize("rule", ["delta", "sum"])
@pytest.mark.parametrize("dtype, K", [(torch.float32, 160), (HALF[0], 300)])
def test_keys_too_wide_for_registers(rng, dtype, K, rule):
    args = problem(rng, B=2, T=70, H=2, K=K, V=16)
    check(args, dtype, rule=rule, read="after" if rule == "delta" else "before")


@runs
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_without_rates(rng, rule):
    args = problem(rng, B=1, T=70, H=2, K=16, V=16, decay=False)
    del args["beta"]
    check(args, HALF[0], rule=rule)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_write_rates_of_zero_and_nearly_zero(rng, dtype):
    """The gradient of beta is there all the same, though u, which it is computed from, is not."""
    args = problem(rng, B=1, T=70, H=2, K=16, V=16, decay=False)
    args["beta"][:, ::3] = 0.0
    args["beta"][:, 1::3] = 1e-6
    check(args, dtype)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_keys_that_repeat(rng, dtype):
    """The worst case of the inverse. In half precision the sums that cancel there are rounded: a bound of its own."""
    args = problem(rng, B=1, T=128, H=4, K=16, V=16, decay=False)  # of one head the largest error is a matter of luck
    args["k"] = np.broadcast_to(args["k"][:, :1], args["k"].shape).copy()
    args["beta"][:] = 0.9
    if dtype == torch.float32:
        return check(args, dtype)
    leaves, exact = tensors(args, dtype), tensors(args, torch.float64)
    with torch.no_grad():
        for name, x in leaves.items():
            exact[name].copy_(x)
    rng = np.random.default_rng(1)
    do, dS = rng.standard_normal(args["v"].shape), rng.standard_normal(args["state"].shape)
    got = everything(*fast_weight(**leaves, method="kernel"), leaves, do, dS)
    want = everything(*fast_weight(**exact, method="recurrent"), exact, do, dS)
    for n in want:
        error = np.linalg.norm(got[n] - want[n]) / np.linalg.norm(want[n])
        assert error < 4 * torch.finfo(dtype).eps, f"{n}: relative error {error:.1e}"


def short_spans(monkeypatch):
    """Spans of two chunks, so that short sequences have several; plans made with longer ones are forgotten."""
    monkeypatch.setattr(kernels.blocks, "SPAN", 2)
    monkeypatch.setattr(kernels, "_plans", {})


def without_decay(rng, rule, **sizes):
    """What gradients are walked for, piece by piece: the delta rule with its rates, and plain sums."""
    args = problem(rng, decay=False, **sizes)
    if rule == "sum":
        del args["beta"]
    return args


@runs
@pytest.mark.parametrize("K, V", [(80, 16), (16, 80)])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_spans(rng, monkeypatch, rule, read, K, V):
    short_spans(monkeypatch)
    check(without_decay(rng, rule, B=2, T=300, H=1, K=K, V=V), rule=rule, read=read)


@runs
@pytest.mark.parametrize("cuts", [[0, 1, 66, 66, 130], [0, 130, 130, 259, 300]])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_packed_equals_each_by_itself(rng, monkeypatch, rule, decay, cuts):
    short_spans(monkeypatch)
    sizes = dict(B=1, T=cuts[-1], H=2, K=16, V=16, sequences=4)
    args = tensors(problem(rng, **sizes) if decay else without_decay(rng, rule, **sizes), torch.float32)
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
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_sections_in_parallel(rng, monkeypatch, rule, decay):
    monkeypatch.setattr(kernels.sequence_parallel, "sections_per_sequence", lambda *shape: 2)
    monkeypatch.setattr(kernels, "_plans", {})
    sizes = dict(B=2, T=128, H=1, K=16, V=16)
    check(problem(rng, **sizes) if decay else without_decay(rng, rule, **sizes), HALF[0], rule=rule)


@runs
def test_hard_decays(rng):
    """None, mild, and so hard that a chunk's whole decay is no number above zero."""
    args = problem(rng, B=2, T=130, H=1, K=16, V=16)
    args["log_decay"] = rng.choice([0.0, -1e-3, -0.5, -30.0, -400.0], (2, 130, 1), p=[0.4, 0.2, 0.2, 0.1, 0.1])
    check(args)


@runs
def test_a_state_carries_across_a_cut(rng):
    args = tensors(problem(rng, B=1, T=130, H=2, K=16, V=16), torch.float32)
    o, S = fast_weight(**args, method="kernel")
    first, second = ({n: x[:, a:b] for n, x in args.items() if n != "state"} for a, b in ((0, 50), (50, 130)))
    o_1, S_1 = fast_weight(**first, state=args["state"], method="kernel")
    o_2, S_2 = fast_weight(**second, state=S_1, method="kernel")
    torch.testing.assert_close((torch.cat([o_1, o_2], 1), S_2), (o, S), rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.parametrize("decay", [True, False])
def test_transforms(rng, decay):
    inputs = list(tensors(problem(rng, B=1, T=20, H=1, K=16, V=16, decay=decay), torch.float32).values())
    names = list(problem(rng, B=1, T=1, H=1, decay=decay))
    call = lambda *x, method="kernel": fast_weight(**dict(zip(names, x, strict=True)), method=method)  # noqa: E731
    many = [torch.stack([x.detach(), 0.5 * x.detach()]) for x in inputs]
    per_sample = lambda method: torch.func.vmap(  # noqa: E731
        torch.func.grad(lambda *x: call(*x, method=method)[0].sin().sum(), argnums=tuple(range(len(names))))
    )(*many)
    torch.testing.assert_close(per_sample("kernel"), per_sample("chunked"), rtol=1e-3, atol=1e-3)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), call(*inputs))
    second = {}
    for method in ("kernel", "chunked"):
        (once,) = torch.autograd.grad(call(*inputs, method=method)[0].sin().sum(), inputs[1], create_graph=True)
        (second[method],) = torch.autograd.grad(once.sum(), inputs[1])
    torch.testing.assert_close(second["kernel"], second["chunked"], rtol=1e-2, atol=1e-2)


@runs
@pytest.mark.parametrize("delta, decay, cuts", [(True, True, None), (True, False, None), (False, False, [0, 40, 1100])])
def test_operators_pass_torchs_own_check(rng, monkeypatch, delta, decay, cuts):
    monkeypatch.undo()  # fresh memory must be what torch gives
    sizes = dict(B=1, T=1100 if cuts else 20, H=1, K=16, V=16, sequences=len(cuts) - 1 if cuts else None)
    inputs = {n: x.detach() for n, x in tensors(problem(rng, **sizes), torch.float32).items()}
    q, k, v, beta, log_decay, state = (inputs[n] for n in NAMES)
    rates = beta if delta else None, log_decay if decay else None
    packed = torch.tensor(cuts, device=DEVICE) if cuts else None
    spec = Spec(rule="delta" if delta else "sum", features="elu+1", norm="sum").as_text()
    inputs = [q, k, v, *rates, None, state, packed]
    tests = ("test_schema", "test_faketensor")
    operators = methods.ADDED["kernel"]
    torch.library.opcheck(operators.forward, (inputs, spec, 1), test_utils=tests)
    o, S, *saved = operators.forward(inputs, spec, 1)
    torch.library.opcheck(operators.backward, (o, S, inputs, saved, spec), test_utils=tests)


def test_what_the_kernels_refuse():
    narrow = torch.zeros(1, 2, 1, 16)
    with pytest.raises(FastWeightError, match=r"method='kernel' computes in float32 or less; q is torch\.float64"):
        fast_weight(*[narrow.double()] * 3, method="kernel")
    if not kernels.INTERPRETED:
        with pytest.raises(FastWeightError, match="method='kernel' needs a CUDA device; q is on cpu"):
            fast_weight(narrow, narrow, narrow, method="kernel")
    assert choose(Inputs(narrow, narrow, narrow), Spec()) == "chunked"  # "auto" on a CPU
