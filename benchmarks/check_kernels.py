"""Check the Triton kernels on a CUDA device, from the root of the repository:

    python -m benchmarks.check_kernels            every case
    python -m benchmarks.check_kernels --quick    the fewest cases that take every branch of every kernel

Against the equation in float64, every output and gradient may err at most twice as much as plain PyTorch does in the
same dtype, the worse of the loop and of the plain chunked form. With TF32 that is the worse of the chunked form on this
GPU, whose library makes some narrow products in float32 all the same, and of one whose products all round. Packed
sequences are held to the same, each by itself. Single tokens, which have a kernel of their own, are held to the loop
alone. Besides: 1000 runs are bit-identical, and a CUDA graph replays them. With --json the results are kept after
each check.

Most of the time is compilation. Processes (--jobs) take one case after the other, the longest first, and Triton keeps
on disk what it compiled (~/.triton/cache, or TRITON_CACHE_DIR): the same code is checked again in a fraction of the
time.
"""

import argparse
import itertools
import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import kernel_branches
from fastweights import core
from fastweights.bench import machine
from fastweights.core import Inputs, Spec
from fastweights.files import write_json
from fastweights.torch import fast_weight, methods

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU can plan the cases, not check them
LONG = 4096  # tokens; of more the chunked form is what is exact: tests hold it to the loop, which takes a minute
FULL = dict(B=8, T=130, H=2, K=64, V=64, dtype=torch.bfloat16, rule="delta", read="after", beta=True, decay=True)


def problem(B, T, H, K, V, dtype, beta, decay, *, erase=False, repeat=False, sequences=None, **_):
    """Inputs by name, rounded to dtype; unit keys.

    decay: True, one per head;  "channel", one per key channel;  "hard", these from none to exp(-400) per token;  "hard
    heads", the same per head, on one token of ten.
    """
    random = torch.Generator(DEVICE).manual_seed(T + K)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=DEVICE)  # noqa: E731
    k = draw(B, T, H, K)
    k = torch.nn.functional.normalize(k[:, :1].expand_as(k) + 0.01 * k if repeat else k, dim=-1)
    x = dict(q=draw(B, T, H, K) * K**-0.5, k=k, v=draw(B, T, H, V), state=draw(sequences or B, H, K, V))
    if beta:
        x["beta"] = draw(B, T, H).sigmoid()
    if decay == "hard":
        kinds = torch.tensor([0.0, -1e-3, -0.5, -30.0, -400.0], device=DEVICE)
        x["log_decay"] = kinds[torch.randint(5, (B, T, H, K), generator=random, device=DEVICE)]
        x["log_decay"][..., 0] = 0.0
    elif decay == "hard heads":
        kinds = torch.tensor([0.0, -1e-3, -0.05, -30.0, -400.0], device=DEVICE)
        often = torch.tensor([0.3, 0.3, 0.3, 0.07, 0.03], device=DEVICE)
        drawn = torch.multinomial(often, B * T * H, replacement=True, generator=random)
        x["log_decay"] = kinds[drawn].view(B, T, H)
    elif decay:
        x["log_decay"] = -draw(B, T, H, *([K] if decay == "channel" else [])).exp() / 8
    if erase:
        x["erase"] = torch.nn.functional.normalize(k + 0.2 * K**-0.5 * draw(B, T, H, K), dim=-1)
    return {n: t if n == "state" else t.to(dtype) for n, t in x.items()}


def loop(q, k, v, beta=None, log_decay=None, state=None, erase=None, *, rule, read, cuts=None):
    """The equation token by token, everything in the dtype of q; packed sequences one after the other."""
    if cuts:
        whole = dict(q=q, k=k, v=v, beta=beta, log_decay=log_decay, erase=erase)
        parts = [
            loop(**{n: None if x is None else x[:, a:b] for n, x in whole.items()}, state=state[n : n + 1], rule=rule,
                 read=read)
            for n, (a, b) in enumerate(itertools.pairwise(cuts))
        ]  # fmt: skip
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    S = state.to(q.dtype)
    spec, outputs = Spec(rule=rule, read=read), []
    for t in range(q.shape[1]):
        token = (None if x is None else x[:, t] for x in (q, k, v, beta, log_decay, erase))
        S, o = core.step(S, Inputs(*token), spec, torch)
        outputs.append(o)
    return (torch.stack(outputs, 1) if outputs else v), S


def upstream(x):
    """Gradients of o and of the state for inputs x, the same in every run."""
    random = torch.Generator(DEVICE).manual_seed(1)
    draw = lambda y: torch.randn(y.shape, generator=random, device=DEVICE).to(y.dtype)  # noqa: E731
    return draw(x["v"]), draw(x["state"])


def results(run, x, up, dtype):
    """o, state and all gradients by name, of inputs cast to dtype."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in x.items()}
    if dtype != torch.float64:
        leaves["state"] = x["state"].detach().clone().requires_grad_()
    o, S = run(**leaves)
    grads = torch.autograd.grad([o, S], list(leaves.values()), [up[0].to(o.dtype), up[1].to(S.dtype)])
    return {"o": o, "S": S, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


class Rounding(TorchDispatchMode):
    """Every product of float32 matrices rounds both to TF32."""

    def __torch_dispatch__(self, run, types, args=(), kwargs=None):
        if run in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            args = tuple((x.contiguous().view(torch.int32) + 4096 & -8192).view(torch.float32) for x in args)
        return run(*args, **(kwargs or {}))


def rounded(q, k, v, beta=None, log_decay=None, state=None, erase=None, *, rule, read, cu_seqlens=None):
    """The chunked form in differentiable operators, under `Rounding`."""
    return methods.plain(Inputs(q, k, v, beta, log_decay, erase, state, cu_seqlens), Spec(rule, read, chunk_size=64))


def compare(precision="highest", **case):
    """(name, error, allowed) of the worst quantity."""
    case = FULL | case
    cuts = case.get("cuts")
    x = problem(**case, sequences=cuts and len(cuts) - 1)
    how = dict(rule=case["rule"], read=case["read"])
    ours = how | (dict(cu_seqlens=torch.tensor(cuts, device=DEVICE)) if cuts else {})
    up = upstream(x)
    if case["T"] > LONG:
        exact = results(lambda **a: fast_weight(**a, **ours, method="chunked"), x, up, torch.float64)
    else:
        exact = results(lambda **a: loop(**a, **how, cuts=cuts), x, up, torch.float64)
    torch.set_float32_matmul_precision(precision)
    plain = [results(lambda **a: fast_weight(**a, **ours, method="chunked"), x, up, case["dtype"])]
    if precision == "highest":
        plain.append(results(lambda **a: loop(**a, **how, cuts=cuts), x, up, case["dtype"]))
    else:
        with Rounding():
            plain.append(results(lambda **a: rounded(**a, **ours), x, up, case["dtype"]))
    got = results(lambda **a: fast_weight(**a, **ours, method="kernel"), x, up, case["dtype"])
    torch.set_float32_matmul_precision("highest")
    off = lambda y, n: (y[n].double() - exact[n]).abs().max().item()  # noqa: E731
    errors = [(off(got, n), 2 * max(off(y, n) for y in plain), n) for n in exact]
    bad = [(n, e, a) for e, a, n in errors if not e <= a]
    e, a, n = max(errors, key=lambda x: x[0] / max(x[1], 1e-30))
    return bad, (n, e, a)


def cases():
    for T in (1, 2, 63, 64, 65, 130, 1000):
        yield dict(T=T, B=32 if T < 3 else 8)  # of a few numbers the largest error is luck
    switches = ("delta", "sum"), ("after", "before"), (True, False), (True, False)
    for rule, read, beta, decay in itertools.product(*switches):
        yield dict(rule=rule, read=read, beta=beta, decay=decay)
        yield dict(rule=rule, read=read, beta=beta, decay=decay, T=128, K=128, V=128)
    for K, V in ((16, 16), (16, 96), (96, 16), (32, 64), (128, 64), (64, 128), (128, 128), (192, 80), (256, 256)):
        yield dict(K=K, V=V)
        yield dict(K=K, V=V, dtype=torch.float16, rule="sum")
        yield dict(K=K, V=V, dtype=torch.float32)
        yield dict(K=K, V=V, dtype=torch.float32, precision="high")
    for K, V in ((384, 64), (512, 16), (1024, 128), (100, 1024)):  # some past what registers hold
        yield dict(K=K, V=V)
        yield dict(K=K, V=V, dtype=torch.float32, rule="sum", read="before")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield dict(dtype=dtype, repeat=True)
        yield dict(dtype=dtype, repeat=True, beta=False, decay=False, K=128, V=128)
        yield dict(dtype=dtype, T=1000, H=1)
    for dtype in (torch.bfloat16, torch.float32):
        yield dict(B=1, T=300, dtype=dtype, cuts=(0, 1, 130, 130, 300))
        yield dict(B=1, T=300, dtype=dtype, cuts=(0, 64, 192, 300), rule="sum", read="before")
    for decay, read in itertools.product((True, False, "hard heads"), ("after", "before")):
        yield dict(B=2, T=1152, K=128, V=128, decay=decay, read=read)  # several spans
    yield dict(B=2, T=1152, K=64, V=128, rule="sum", beta=False)
    for decay in (True, False):
        yield dict(T=128, H=10, K=128, V=128, decay=decay)  # more programs than multiprocessors
    yield dict(B=1, T=16384, H=1, read="before")  # cut into segments
    yield dict(B=1, T=16384, H=1, K=128, V=128, decay=False, rule="sum")


def general():
    """Cases of decay per channel and of erase keys, as `cases`."""
    kinds = ("channel", False), ("channel", True), ("hard", True), (True, True), (False, True)
    for (decay, erase), read in itertools.product(kinds, ("after", "before")):
        yield dict(decay=decay, erase=erase, read=read)
        yield dict(decay=decay, erase=erase, read=read, T=128, K=128, V=128)
    for decay, read in itertools.product(("channel", "hard"), ("after", "before")):
        yield dict(rule="sum", decay=decay, read=read)
        yield dict(rule="sum", decay=decay, read=read, T=128, K=128, V=128, beta=False)
    for K, V in ((16, 16), (96, 16), (64, 128), (192, 80), (256, 256)):
        yield dict(K=K, V=V, decay="channel", erase=True)
    for dtype, precision in itertools.product((torch.float16, torch.float32), ("highest", "high")):
        if dtype == torch.float32 or precision == "highest":
            for K, V in ((16, 96), (64, 64), (128, 128)):
                yield dict(K=K, V=V, dtype=dtype, precision=precision, decay="channel")
            yield dict(dtype=dtype, precision=precision, decay="hard", erase=True, read="before")
            yield dict(dtype=dtype, precision=precision, decay=True, erase=True)
            yield dict(dtype=dtype, precision=precision, decay="channel", rule="sum", beta=False)
    for dtype in (torch.bfloat16, torch.float32):
        yield dict(B=1, T=300, dtype=dtype, cuts=(0, 1, 130, 130, 300), decay="channel", erase=True)
        yield dict(B=1, T=300, dtype=dtype, cuts=(0, 64, 192, 300), decay="hard", rule="sum", read="before")
        yield dict(dtype=dtype, repeat=True, decay="channel")
    yield dict(T=128, H=10, K=128, V=128, decay="channel")  # more programs than multiprocessors
    yield dict(B=1, T=16384, H=1, decay="channel", read="before")  # cut into segments
    yield dict(B=1, T=16384, H=1, K=128, V=128, decay="channel", rule="sum")
    for T in (1, 63, 64, 65, 1000):
        yield dict(T=T, B=32 if T < 3 else 8, decay="channel", erase=True)


def tokens():
    """Single tokens without gradients, which have a kernel of their own."""
    switches = ("delta", "sum"), ("after", "before"), (True, False), (torch.float32, torch.bfloat16)
    for (rule, read, rates, dtype), (K, V) in itertools.product(
        itertools.product(*switches), ((16, 16), (64, 64), (96, 80), (384, 128))
    ):
        yield dict(B=5, T=1, H=3, K=K, V=V, dtype=dtype, rule=rule, read=read, beta=rates, decay=rates)
    for read, K in itertools.product(("after", "before"), (16, 96)):
        yield dict(B=5, T=1, H=3, K=K, V=64, read=read, decay="channel", erase=True)


def compare_token(**case):
    """What `compare` returns, of one token into a new state and over the old."""
    case = FULL | case
    x, how = problem(**case), dict(rule=case["rule"], read=case["read"])
    exact = loop(**{n: t.double() for n, t in x.items()}, **how)
    plain = loop(**{n: t.to(case["dtype"]) for n, t in x.items()}, **how)
    fresh = fast_weight(**x, **how, method="kernel")
    given = x["state"].clone()
    over = fast_weight(**(x | dict(state=given)), **how, method="kernel", out_state=given)
    assert over[1] is given, case
    assert all(map(torch.equal, fresh, over)), case
    off = lambda y, i: (y[i].double() - exact[i]).abs().max().item()  # noqa: E731
    errors = [(n, off(fresh, i), max(2 * off(plain, i), 1e-30)) for i, n in enumerate("oS")]
    return [(n, e, a) for n, e, a in errors if not e <= a], max(errors, key=lambda x: x[1] / x[2])


def repeats(times=1000, **case):
    x = problem(**(FULL | case))
    up = upstream(x)
    first = results(lambda **a: fast_weight(**a, method="kernel"), x, up, x["v"].dtype)
    for _ in range(times - 1):
        again = results(lambda **a: fast_weight(**a, method="kernel"), x, up, x["v"].dtype)
        for n in first:
            assert torch.equal(first[n], again[n]), n


def replays(**case):
    """A captured forward and backward gives what it gave outside the graph, on new inputs too."""
    x = problem(**(FULL | case))
    up = upstream(x)
    run = lambda: results(lambda **a: fast_weight(**a, method="kernel"), x, up, x["v"].dtype)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        graph.replay()
        want = run()
        for n in want:
            assert torch.equal(captured[n], want[n]), n
        x["v"].mul_(0.5)


def checks():
    """Every (check, case)."""
    together = itertools.chain(cases(), general())
    return [*((compare, case) for case in together), *((compare_token, case) for case in tokens())]


def plan(check, case):
    """What the kernels would launch for a case, its backward pass included, without compiling or running it."""
    whole = FULL | case
    cuts, precision = whole.get("cuts"), whole.get("precision", "highest")
    x = problem(**whole, sequences=cuts and len(cuts) - 1)
    if check is compare:
        x = {n: t.requires_grad_() for n, t in x.items()}
    how = dict(rule=whole["rule"], read=whole["read"])
    how |= dict(cu_seqlens=torch.tensor(cuts, device=DEVICE)) if cuts else {}
    torch.set_float32_matmul_precision(precision)
    try:
        return kernel_branches.launches(lambda: fast_weight(**x, **how, method="kernel"))
    finally:
        torch.set_float32_matmul_precision("highest")


def cost(case, launches):
    """About how long a case takes: kernels to compile, of much more code in float32, and a loop over tokens."""
    case = FULL | case
    return launches * (4 if case["dtype"] == torch.float32 else 1) + case["T"] / 100


def planned():
    """(check and case, its branches, its cost) of every check."""
    for check, case in checks():
        launches = plan(check, case)
        taken = set().union(*(kernel_branches.branches(launch) for launch in launches))
        yield (check, case), taken, cost(case, len(launches))


def quick(calls=None):
    """(the fewest checks that take every branch, how many branches there are)."""
    return kernel_branches.fewest(calls or list(planned()))


def run(job):
    """Run one check and say how it went.

    Returns its name, why it failed or nothing, the share of what is allowed that it errs, and its seconds.
    """
    check, case = job
    began, what, share, bad = time.perf_counter(), f"{check.__name__} {case}", 0.0, ""
    try:
        if check in (repeats, replays):
            check(**case)
            how = ""
        else:
            wrong, (name, error, allowed) = check(**case)
            share, bad = error / max(allowed, 1e-30), str(wrong or "")
            how = f"{share:5.2f} of allowed in {name:10s} ({error:.1e})"
    except Exception as error:  # one check that breaks is no reason to leave out the others
        how, bad = "", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    print("FAIL" if bad else "ok  ", how, f"{seconds:5.1f} s", what, bad, flush=True)
    return what, bad, share, seconds


def chosen(few):
    """The checks to run, the longest first; `few`: those of `quick`."""
    calls = list(planned())
    some, costs = [job for job, *_ in calls], [cost for *_, cost in calls]
    if few:
        some, number = quick(calls)
        costs = [next(cost for job, _, cost in calls if job is one) for one in some]
        print(f"{len(some)} of {len(calls)} cases take all {number} branches", flush=True)
    return [  # what is repeated takes longest
        (repeats, dict(B=4, T=1000, H=4, K=128, V=128)),
        (repeats, dict(B=2, T=300, H=4, K=64, V=64, dtype=torch.float32)),
        (repeats, dict(B=4, T=1000, H=4, K=128, V=128, decay="channel", erase=True)),
        (replays, dict(B=2, T=256, K=128, V=128)),
        (replays, dict(B=2, T=256, K=128, V=128, decay="channel")),
    ] + [job for _, job in sorted(zip(costs, some, strict=True), key=lambda x: -x[0])]


def main():
    parser = argparse.ArgumentParser(description="Check the Triton kernels on a CUDA device.")
    parser.add_argument("--quick", action="store_true", help="the fewest cases that take every branch")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes side by side")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    asked = parser.parse_args()
    began, done = time.perf_counter(), []
    with get_context("spawn").Pool(asked.jobs) as pool:  # fresh processes: CUDA cannot be forked
        some = chosen(asked.quick)  # while the processes start
        print(f"chosen after {time.perf_counter() - began:.0f} s", flush=True)
        for result in pool.imap_unordered(run, some):
            done.append(result)
            found = summary(done, len(some), time.perf_counter() - began)
            if asked.json:
                write_json(asked.json, found | dict(processes=asked.jobs, cores=machine.cores()))
    failed, took = found["failed"], f"{found['seconds']:.0f} s, {found['at_once']:.1f} at once on average"
    held = f"all {len(some)} held, 1000 runs are bit-identical, a CUDA graph replays them"
    print(f"{len(failed)} of {len(some)} failed, {took}" if failed else f"{held}; {took}")
    sys.exit(bool(failed))


def summary(done, number, seconds):
    """What is kept of results of `run`, so far, after these seconds.

    How many held, of how many; the worst error; what failed and why; and how many ran at once on average.
    """
    failed = {what: bad for what, bad, *_ in done if bad}
    worst, spent = max(share for *_, share, _ in done), sum(took for *_, took in done)
    held = len(done) - len(failed)
    return dict(of=number, held=held, worst=worst, failed=failed, seconds=seconds, at_once=spent / seconds)


if __name__ == "__main__":
    main()
