"""Measure the tables of `fastweights/torch/kernels/blocks.py` on this GPU: `python -m benchmarks.choose_blocks`.

Every kernel is timed alone, in bfloat16 with the delta rule, for each pair of warps and stages; the fastest one that
agrees with the table as it stands is printed, to be copied there by hand. KEYS is both kernels of local.py; FUTURE
clears its own output.
"""

import itertools
import sys

import torch
from triton.testing import do_bench

from fastweights.core import Inputs, Spec
from fastweights.torch.kernels import backward_walk, blocks, forward_walk, inverse, local, rates, spans
from fastweights.torch.kernels.inverse import ChunkTerms
from fastweights.torch.kernels.layout import Layout
from fastweights.torch.kernels.plan import Plan, Slot

SHAPES = {  # (width of keys and values, more programs than multiprocessors): B, T, H
    (128, True): (8, 4096, 16),
    (64, True): (32, 2048, 16),
    (128, False): (2, 16384, 16),
    (64, False): (4, 8192, 16),
}
CANDIDATES = list(itertools.product((4, 8), (1, 2, 3)))
DELTA = Spec(rule="delta")


def planned(function, *tensors):
    """A function without arguments that runs function(plan, *slots of tensors): the tensors of the slots it returns."""
    plan = Plan(torch.device("cuda", 0), list(tensors))
    found = function(plan, *plan.inputs)
    slots = (found,) if isinstance(found, Slot) else found
    plan.results = [slot.place for slot in slots if slot is not None]
    plan.finish()

    def call():
        everything = plan.run(*tensors)
        return [None if slot is None else everything[slot.place] for slot in slots]

    return call


def stages(width, B, T, H):
    """{kernel: (table, how to make a call of it with the table as it stands)} on one shape."""
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    q, k = (torch.nn.functional.normalize(draw(B, T, H, width), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(2, B, T, H, width).bfloat16()
    beta, state = draw(B, T, H).sigmoid().bfloat16(), draw(B, H, width, width)
    layout, by_chunk = (Layout.plain(B, T, span) for span in (blocks.SPAN, 1))
    (chunk_beta,) = planned(lambda p, beta, k: rates.plan_rates(p, beta, None, layout, DELTA, k)[0], beta, k)()
    invert = lambda p, k, b: inverse.plan_inverse(p, None, k, b, None, layout, DELTA, "tf32").X  # noqa: E731
    (X,) = planned(invert, k, chunk_beta)()

    def walk(save, layout=layout):
        run = lambda p, q, k, v, b, X, S: forward_walk.plan_forward_walk(  # noqa: E731
            p, q, k, v, ChunkTerms(b, None, X, None), S, layout, DELTA, "tf32", width=width, save=save
        )
        return planned(run, q, k, v, chunk_beta, X, state)

    def back(layout=layout):
        run = lambda p, q, k, b, X, do, S: backward_walk.plan_backward_walk(  # noqa: E731
            p, q, k, ChunkTerms(b, None, X, None), do, S, layout, DELTA, "tf32", save=True
        )
        return planned(run, q, k, chunk_beta, X, do, state)

    def local_gradients():
        run = lambda p, q, k, v, beta, b, S, D, do, dv, u: local.plan_local_gradients(  # noqa: E731
            p, Inputs(q, k, v, beta), ChunkTerms(b, None, None, None), S, D, do, dv, u, by_chunk, DELTA, "tf32"
        )
        return planned(run, q, k, v, beta, chunk_beta, S_by_chunk, D_by_chunk, do, dv, u)

    (*_, S, u), (*_, S_by_chunk, _) = walk(True)(), walk(True, by_chunk)()
    (dv, _, D), (_, _, D_by_chunk) = back()(), back(by_chunk)()
    dk = torch.zeros_like(k)
    past = lambda p, *x: spans.plan_past_sums(p, *x, layout, DELTA, "tf32")  # noqa: E731
    future = lambda p, *x: spans.plan_future_sums(p, *x, layout, DELTA, "tf32")  # noqa: E731
    return {
        "INVERSE": (blocks.INVERSE, lambda: planned(invert, k, chunk_beta)),
        "WALK": (blocks.WALK, lambda: walk(False)),
        "WALK, saving": (blocks.WALK, lambda: walk(True)),
        "REVERSE": (blocks.REVERSE, back),
        "PAST": (blocks.PAST, lambda: planned(past, k, beta, S, do, u, dv)),
        "FUTURE": (blocks.FUTURE, lambda: planned(future, q, k, D, do, u, dv, dk.zero_())),
        "KEYS": (blocks.KEYS, local_gradients),
    }


def first(result):
    return result[0].float()


def main():
    for (width, many), shape in SHAPES.items():
        for name, (table, make) in stages(width, *shape).items():
            # True also stands for the delta rule, of spans; False for numbers that are not float32, of KEYS
            key = next(key for key in (width, False, (width, many)) if key in table)
            if not many and not any(table is x for x in (blocks.WALK, blocks.REVERSE)):  # rows, spans: measured once
                continue
            kept, want, times = table[key], first(make()()), {}
            for candidate in CANDIDATES:
                table[key] = (*kept[:-2], *candidate)
                try:
                    call = make()
                    error = ((first(call()) - want).norm() / want.norm()).item()
                    times[table[key]] = do_bench(call, warmup=5, rep=25, return_mode="median")
                except Exception as problem:  # too much shared memory, or a kernel that the compiler refuses
                    print("   ", name, table[key], type(problem).__name__, file=sys.stderr)
                    continue
                if not error < 0.02:
                    del times[table[key]]
            table[key] = kept
            best = min(times, key=times.get)
            shown = "  ".join(f"{w}x{s} {t:.3f}" for (*_, w, s), t in times.items())
            print(f"{name}[{key}] = {best}  # now {kept}; ms by warps x stages: {shown}", flush=True)


if __name__ == "__main__":
    main()
