"""Measure the tables of `fastweights/torch/kernels/blocks.py` on this GPU: `python -m benchmarks.choose_blocks`.

Every kernel is timed alone, in bfloat16 with the delta rule, for each pair of warps and stages; the fastest one that
agrees with the table as it stands is printed, to be copied there by hand. LOCAL includes a copy of dy, its output, and
FUTURE clears its own.
"""

import itertools
import sys

import torch
import triton
from triton.testing import do_bench

from fastweights.torch.kernels import backward, blocks, chunks, forward, inverse, pieces, scratch

SHAPES = {  # (width of keys and values, more programs than multiprocessors): B, T, H
    (128, True): (8, 4096, 16),
    (64, True): (32, 2048, 16),
    (128, False): (2, 16384, 16),
    (64, False): (4, 8192, 16),
}
CANDIDATES = list(itertools.product((4, 8), (1, 2, 3)))
HOW = dict(delta=True, before=False, precision="tf32")


def stages(width, B, T, H):
    """{kernel: (table, call)} on one shape."""
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    q, k = (torch.nn.functional.normalize(draw(B, T, H, width), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(2, B, T, H, width).bfloat16()
    beta, state = draw(B, T, H).sigmoid().bfloat16(), draw(B, H, width, width)
    layout, by_row = (chunks.Layout.of(q, None, every) for every in (blocks.PIECE, 1))
    triton.set_allocator(scratch)
    rates, _ = chunks.rates(beta, None, layout, k)
    X = inverse.inverse(k, rates, None, layout, "tf32")
    walk = lambda save, way=layout: forward.walk(q, k, v, rates, None, X, state, way, save=save, **HOW)  # noqa: E731
    back = lambda way=layout: backward.reverse(q, k, rates, None, X, do, state, way, save=True, **HOW)  # noqa: E731
    (*_, S, u), (*_, S_rows, _) = walk(True), walk(True, by_row)
    (dv, _, D), (dy, _, D_rows) = back(), back(by_row)
    dk = torch.zeros_like(k)
    return {
        "INVERSE": (blocks.INVERSE, lambda: inverse.inverse(k, rates, None, layout, "tf32")),
        "WALK": (blocks.WALK, lambda: walk(False)),
        "WALK, saving": (blocks.WALK, lambda: walk(True)),
        "REVERSE": (blocks.REVERSE, back),
        "PAST": (blocks.PAST, lambda: pieces.past(k, beta, S, do, u, dv, layout, **HOW)),
        "FUTURE": (blocks.FUTURE, lambda: pieces.future(q, k, D, do, u, dv, dk.zero_(), layout, **HOW)),
        "LOCAL": (blocks.LOCAL, lambda: backward.local(
            q, k, v, beta, None, rates, None, X, S_rows, D_rows, do, dy.clone(), by_row, **HOW)),
    }  # fmt: skip


def first(result):
    return (result[0] if isinstance(result, tuple) else result).float()


def main():
    for (width, many), shape in SHAPES.items():
        for name, (table, call) in stages(width, *shape).items():
            key = width if width in table else (width, many)  # True also stands for the delta rule, of pieces
            if not many and not any(table is x for x in (blocks.WALK, blocks.REVERSE)):  # rows, pieces: measured once
                continue
            kept, want, times = table[key], first(call()), {}
            for candidate in CANDIDATES:
                table[key] = (*kept[:-2], *candidate)
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
            shown = "  ".join(f"{w}x{s} {t:.3f}" for (*_, w, s), t in times.items())
            print(f"{name}[{key}] = {best}  # now {kept}; ms by warps x stages: {shown}", flush=True)


if __name__ == "__main__":
    main()
