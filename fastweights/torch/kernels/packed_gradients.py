"""The kernels of a packed convolution's gradients: over tokens, and over what stood before each sequence."""

import triton
import triton.language as tl


@triton.jit
def _tap(dy, weight, place, t, c, had, total, added, T, j: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """What tap j gives to dx, added to `total`, and to its own gradient, added to `added`: [BT, BC] each.

    It joins token t to the reader t + back, if that is at least as far into its own sequence.
    """
    back: tl.constexpr = W - 1 - j
    w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
    there = t + back < T
    up = tl.load(dy + (t + back)[:, None] * N + c[None, :], mask=there[:, None] & (c < N)[None, :], other=0.0)
    up = up.to(tl.float32)
    if back:
        p = tl.load(place + 2 * (t + back), mask=there, other=0)
        up = tl.where((p >= back)[:, None], up, 0.0)
    return total + w[None, :] * up, added + up * had


@triton.jit
def tokens_backward(dy, dlast, x, weight, place, cu, dx, dweight, T, units, dx_units, W: tl.constexpr,
                     N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr,
                     DX_UNIT: tl.constexpr):  # fmt: skip
    """Gradients of x, and of the weight as sums over this program's tokens.

    Token t was read by itself and by the next W - 1 tokens of its sequence, each with another tap:
    dx[t] = sum_back weight[W - 1 - back] dy[t + back], plus dlast where t is among its sequence's last inputs. The same
    tiles of dy give the weight's gradient, sum_t dy[t + back] x[t], but for tokens before a sequence's first. Gathering
    from the readers needs no atomic operations, so the result does not depend on the order of programs.

    One program: STEPS tiles of BT tokens and BC channels, one after the other. Of up to four taps it adds up products
    over all tiles before it sums over tokens, since a sum makes its threads wait for each other.

        dy          (T, N);  dlast (sequences, W - 1, N) or None
        dx          (T, N) with dx_units times DX_UNIT numbers from token to token, written
        dweight     (blocks of STEPS * BT tokens, W, N), written: summed over blocks afterwards
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    part = tl.program_id(0).to(tl.int64) * W  # the sums of this block of tokens
    zero = tl.zeros([BT, BC], tl.float32)
    first, second, third, fourth = zero, zero, zero, zero
    for step in range(STEPS):
        t = (tl.program_id(0).to(tl.int64) * STEPS + step) * BT + tl.arange(0, BT)
        inside = (t < T)[:, None] & (c < N)[None, :]
        had = tl.load(x + t[:, None] * (units * UNIT) + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total = zero
        if W <= 4:
            total, first = _tap(dy, weight, place, t, c, had, total, first, T, 0, W, N)
            if W > 1:
                total, second = _tap(dy, weight, place, t, c, had, total, second, T, 1, W, N)
            if W > 2:
                total, third = _tap(dy, weight, place, t, c, had, total, third, T, 2, W, N)
            if W > 3:
                total, fourth = _tap(dy, weight, place, t, c, had, total, fourth, T, 3, W, N)
        else:  # STEPS is 1
            for j in tl.static_range(W):
                total, added = _tap(dy, weight, place, t, c, had, total, zero, T, j, W, N)
                tl.store(dweight + (part + j) * N + c, tl.sum(added, 0), mask=c < N)
        if dlast is not None:
            n = tl.load(place + 2 * t + 1, mask=t < T, other=0).to(tl.int64)
            left = tl.load(cu + n + 1, mask=t < T, other=0).to(tl.int64) - 1 - t  # tokens of the sequence after t
            if tl.min(left, 0) < W - 1:  # few programs meet the end of a sequence
                at = (n * (W - 1) + (W - 2) - left)[:, None] * N + c[None, :]
                total += tl.load(dlast + at, mask=inside & (left < W - 1)[:, None], other=0.0).to(tl.float32)
        tl.store(dx + t[:, None] * (dx_units * DX_UNIT) + c[None, :], total.to(dx.dtype.element_ty), mask=inside)
    if W <= 4:
        tl.store(dweight + part * N + c, tl.sum(first, 0), mask=c < N)
        if W > 1:
            tl.store(dweight + (part + 1) * N + c, tl.sum(second, 0), mask=c < N)
        if W > 2:
            tl.store(dweight + (part + 2) * N + c, tl.sum(third, 0), mask=c < N)
        if W > 3:
            tl.store(dweight + (part + 3) * N + c, tl.sum(fourth, 0), mask=c < N)


@triton.jit
def starts_backward(dy, dlast, weight, before, cu, dbefore, dweight, blocks, W: tl.constexpr, N: tl.constexpr,
                     R: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The gradient of `before`: of the W - 1 inputs that stood before each sequence; and what they give to the weight.

    One program: one sequence and BC channels. Input m was read by the sequence's first tokens p <= m with tap m - p; in
    a sequence that is shorter than W - 1 it may also be among the last inputs, and gets their gradient.

        before      (sequences, W - 1, N);  dbefore like it, written
        dweight     (blocks + sequences, W, N), from `blocks` on written: a part per sequence, after those of tokens
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    start, stop = tl.load(cu + n).to(tl.int64), tl.load(cu + n + 1).to(tl.int64)
    m = tl.arange(0, R)  # the m-th input before the sequence; token p reads it with tap m - p
    inside = (m < W - 1)[:, None] & (c < N)[None, :]
    total = tl.zeros([R, BC], tl.float32)
    for p in tl.static_range(W - 1):
        reads = inside & ((m >= p) & (start + p + m * 0 < stop))[:, None]
        w = tl.load(weight + (m - p)[:, None] * N + c[None, :], mask=reads, other=0.0).to(tl.float32)
        up = tl.load(dy + (start + p) * N + c, mask=(c < N) & (start + p + c * 0 < stop), other=0.0).to(tl.float32)
        total += w * up[None, :]
    for j in tl.static_range(W):
        taps = tl.zeros([BC], tl.float32)
        for p in tl.static_range(W - 1 - j):  # tap j of token p reads input p + j
            real = (c < N) & (start + p + c * 0 < stop)
            up = tl.load(dy + (start + p) * N + c, mask=real, other=0.0).to(tl.float32)
            old = tl.load(before + (n * (W - 1) + p + j) * N + c, mask=real, other=0.0).to(tl.float32)
            taps += up * old
        tl.store(dweight + ((blocks + n) * W + j) * N + c, taps, mask=c < N)
    if dlast is not None:
        i = m - (stop - start)  # where it is still among the last
        kept = inside & (i >= 0)[:, None]
        total += tl.load(dlast + (n * (W - 1) + i)[:, None] * N + c[None, :], mask=kept, other=0.0).to(tl.float32)
    at = (n * (W - 1) + m)[:, None] * N + c[None, :]
    tl.store(dbefore + at, total.to(dbefore.dtype.element_ty), mask=inside)
