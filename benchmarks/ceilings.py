"""What fraction of the GPU's memory and matrix ceilings each kernel reaches: `python -m benchmarks.ceilings`.

Both ceilings are measured here and now: a copy of 2 GiB, and a bfloat16 product of 8192 x 8192 matrices. A kernel's
bytes are what it must read and write once, its operations the products it makes, those it repeats for each block of
values included.
"""

import torch
from triton.testing import do_bench

from benchmarks.choose_blocks import SHAPES, stages
from fastweights.torch.kernels.blocks import SPAN

C = 64


def work(name, K, V):
    """(bytes, floating-point operations) of one chunk of one head, 16-bit numbers."""
    k, v, square, memory = C * K, C * V, C * C, K * V
    columns = -(-V // 64)  # programs that share a head
    walk = 2 * C * (3 * K * V + columns * C * K + 2 * C * V)
    return {
        "INVERSE": (2 * (k + square), 2 * C * C * K + 9 * C**3),
        "WALK": (2 * (2 * k + 2 * v + square), walk),
        "WALK, saving": (2 * (2 * k + 3 * v + square + memory // SPAN), walk),
        "REVERSE": (2 * (2 * k + 2 * v + square + memory // SPAN), walk),
        "PAST": (2 * (3 * k + 3 * v + memory // SPAN), 2 * C * (3 * K * V + 2 * C * (K + V))),
        "FUTURE": (2 * (4 * k + 3 * v + memory // SPAN), 2 * C * (3 * K * V + 2 * C * (K + V))),
        "KEYS": (2 * (4 * k + 6 * v + 4 * square + 2 * memory), 2 * C * (3 * K * V + 2 * C * V + 3 * C * K)),
    }[name]


def main():
    measure = lambda call: do_bench(call, warmup=10, rep=50, return_mode="median") / 1e3  # noqa: E731
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / measure(lambda: y.copy_(x))
    x = y = None
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    rate = 2 * 8192**3 / measure(lambda: a @ b)
    print(f"a copy {bandwidth / 1e12:.2f} TB/s, a product {rate / 1e12:.0f} TFLOP/s")
    for (width, _), (B, T, H) in SHAPES.items():
        x = torch.empty(B, T, H, width, dtype=torch.bfloat16, device="cuda")
        clear = measure(x.zero_)
        for name, (_, make) in stages(width, B, T, H).items():
            call = make()
            seconds = measure(call) - (clear if name == "FUTURE" else 0)
            moved, products = (B * T // C * H * n for n in work(name, width, width))
            shares = f"{moved / seconds / bandwidth:4.0%} of memory, {products / seconds / rate:4.0%} of products"
            print(f"({B},{T},{H},{width}) {name:12s} {seconds * 1e3:.3f} ms, {shares}", flush=True)


if __name__ == "__main__":
    main()
