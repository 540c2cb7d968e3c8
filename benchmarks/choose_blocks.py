"""Measure the tables of `fastweights/torch/kernels/blocks.py` on this GPU: `python -m benchmarks.choose_blocks`.

Every kernel is timed alone, in bfloat16 with the delta rule, for each pair of warps and stages; the fastest one that
agrees with the table as it stands is printed, to be copied there by hand. LOCAL includes a copy of dy, its output.
"""

import itertools
import sys

import torch
import triton
from triton.testing import do_bench

from fastweights.torch.kernels import backward, blocks, chunks, forward, inverse, scratch

SHAPES = {  # (width of keys and values, more programs than multiprocessors): B, T, H
    (128, True): (8, 4096, 16),
    (64, True): (32, 2048, 16),
    (128, False): (2, 16384, 16),
    (64, False): (4, 8192, 16),
}
CANDIDATES = list(itertools.product((4, 8), (1, 2, 3)))
HOW = dict(delta=True, before=False, precision="tf32")


def stages(width, B, T, H):
    """{table: call} for the four kernels on one shape."""
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    q, k = (torch.nn.functional.normalize(draw(B, T, H, width), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(2, B, T, H, width).bfloat16()
    beta, state = draw(B, T, H).sigmoid().bfloat16(), draw(B, H, width, width)
    layout = chunks.Layout.of(q, None)
    triton.set_allocator(scratch)
    rates, _ = chunks.rates(beta, None, layout, H)
    X = inverse.inverse(k, rates, None, layout, "tf32")
    *_, S = forward.walk(q, k, v, rates, None, X, state, layout, save=True, **HOW)
    dy, D, _ = backward.reverse(q, k, rates, None, X, do, state, layout, **HOW)
    walk = lambda save: lambda: forward.walk(q, k, v, rates, None, X, state, layout, save=save, **HOW)  # noqa: E731
    return {
        "INVERSE": (blocks.INVERSE, lambda: inverse.inverse(k, rates, None, layout, "tf32")),
        "WALK": (blocks.WALK, walk(False)),
        "WALK, saving": (blocks.WALK, walk(True)),
        "REVERSE": (blocks.REVERSE, lambda: backward.reverse(q, k, rates, None, X, do, state, layout, **HOW)),
        "LOCAL": (blocks.LOCAL, lambda: backward.local(
            q, k, v, beta, None, rates, None, X, S, D, do, dy.clone(), layout, **HOW)),
    }  # fmt: skip


def first(result):
    return (result[0] if isinstance(result, tuple) else result).float()


def main():
    for (width, many), shape in SHAPES.items():
        for name, (table, call) in stages(width, *shape).items():
            key = (width, many) if (width, many) in table else width
            if key == width and not many:  # a row by itself: measured once
                continue
            kept, want, times = table[key], first(call()), {}
            for table[key] in CANDIDATES:
                try:
                    error = ((first(call()) - want).norm() / want.norm()).item()
                    times[table[key]] = do_bench(call, warmup=5, rep=25, return_mode="median")
                except Exception as problem:  # too much shared memory, or a kernel that the compiler refuses
                    print("   ", name, table[key], type(problem).__name__, file=sys.stderr)
                    continue
                if not error < 0.02:
                    del times[table[key]]
            table[key] = kept
            best = min(times, key=times.get)
            shown = "  ".join(f"{w}x{s} {t:.3f}" for (w, s), t in times.items())
            print(f"{name}[{key}] = {best}  # now {kept}; ms by warps x stages: {shown}", flush=True)


if __name__ == "__main__":
    main()
