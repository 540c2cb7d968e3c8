"""The kernels of the gradients of packed_convolution.py: one over tokens, one over the inputs before each sequence.

Letters are those of convolution.py. `places` (T, 2) has for every token its position in its sequence, and the number of
that sequence; cu (sequences + 1,) has the offsets of the sequences.
"""

import triton
import triton.language as tl


@triton.jit
def _tap(dy, weight, places, t, c, x_t, dx_sum, dweight_sum, T, j: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """(dx_sum, dweight_sum) [BT, BC] with what tap j adds to the gradient of x at tokens t, and to its own.

    Tap j multiplies input t in output t + W - 1 - j, if both are of one sequence: if the position of the latter is at
    least W - 1 - j.  x_t: the inputs t as a tile. dweight_sum is still to be summed over tokens.
    """
    back: tl.constexpr = W - 1 - j
    w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
    in_row = t + back < T
    dy_t = tl.load(dy + (t + back)[:, None] * N + c[None, :], mask=in_row[:, None] & (c < N)[None, :], other=0.0)
    dy_t = dy_t.to(tl.float32)
    if back:
        position = tl.load(places + 2 * (t + back), mask=in_row, other=0)
        dy_t = tl.where((position >= back)[:, None], dy_t, 0.0)
    return dx_sum + w[None, :] * dy_t, dweight_sum + dy_t * x_t


@triton.jit
def tokens_backward(dy, dlast, x, weight, places, cu, dx, dweight, T, units, dx_units,
                    W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr,
                    UNIT: tl.constexpr, DX_UNIT: tl.constexpr):  # fmt: skip
    """The gradient of x, and that of the weight but for the inputs before each sequence.

    Input t is in the output of its own token and in those of the next W - 1 tokens of its sequence, each with another
    tap:

        dx[t] = sum over back = 0 ... W - 1 of weight[W - 1 - back] dy[t + back]

    plus dlast where t is among the last inputs of its sequence. The same tiles of dy give the gradient of the weight,
    sum_t dy[t + back] x[t]. To gather from the outputs takes no atomic operations, so that the result does not depend
    on the order of programs.

    One program: STEPS tiles of BT tokens and BC channels, one after the other. Of up to four taps it adds up products
    over all tiles before it sums over tokens, since a sum makes its threads wait for each other.

        x            (T, N), with units * UNIT numbers from token to token;  weight (W, N)
        dy           (T, N);  dlast (sequences, W - 1, N), or None
        dx           (T, N), written, with dx_units * DX_UNIT numbers from token to token
        dweight      (blocks of STEPS * BT tokens, W, N), written: a part for each block
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first_row = tl.program_id(0).to(tl.int64) * W  # of this program's part of dweight
    zeros = tl.zeros([BT, BC], tl.float32)
    first, second, third, fourth = zeros, zeros, zeros, zeros
    for step in range(STEPS):
        t = (tl.program_id(0).to(tl.int64) * STEPS + step) * BT + tl.arange(0, BT)
        mask = (t < T)[:, None] & (c < N)[None, :]
        x_t = tl.load(x + t[:, None] * (units * UNIT) + c[None, :], mask=mask, other=0.0).to(tl.float32)
        dx_sum = zeros
        if W <= 4:
            dx_sum, first = _tap(dy, weight, places, t, c, x_t, dx_sum, first, T, 0, W, N)
            if W > 1:
                dx_sum, second = _tap(dy, weight, places, t, c, x_t, dx_sum, second, T, 1, W, N)
            if W > 2:
                dx_sum, third = _tap(dy, weight, places, t, c, x_t, dx_sum, third, T, 2, W, N)
            if W > 3:
                dx_sum, fourth = _tap(dy, weight, places, t, c, x_t, dx_sum, fourth, T, 3, W, N)
        else:  # STEPS is 1
            for j in tl.static_range(W):
                dx_sum, dweight_sum = _tap(dy, weight, places, t, c, x_t, dx_sum, zeros, T, j, W, N)
                tl.store(dweight + (first_row + j) * N + c, tl.sum(dweight_sum, 0), mask=c < N)
        if dlast is not None:
            sequence = tl.load(places + 2 * t + 1, mask=t < T, other=0).to(tl.int64)
            stop = tl.load(cu + sequence + 1, mask=t < T, other=0).to(tl.int64)
            tokens_after = stop - 1 - t  # of the same sequence
            if tl.min(tokens_after, 0) < W - 1:  # few programs meet the end of a sequence
                offsets = (sequence * (W - 1) + (W - 2) - tokens_after)[:, None] * N + c[None, :]
                is_last = mask & (tokens_after < W - 1)[:, None]
                dx_sum += tl.load(dlast + offsets, mask=is_last, other=0.0).to(tl.float32)
        tl.store(dx + t[:, None] * (dx_units * DX_UNIT) + c[None, :], dx_sum.to(dx.dtype.element_ty), mask=mask)
    if W <= 4:
        tl.store(dweight + first_row * N + c, tl.sum(first, 0), mask=c < N)
        if W > 1:
            tl.store(dweight + (first_row + 1) * N + c, tl.sum(second, 0), mask=c < N)
        if W > 2:
            tl.store(dweight + (first_row + 2) * N + c, tl.sum(third, 0), mask=c < N)
        if W > 3:
            tl.store(dweight + (first_row + 3) * N + c, tl.sum(fourth, 0), mask=c < N)


@triton.jit
def starts_backward(dy, dlast, weight, before, cu, dbefore, dweight, token_blocks,
                    W: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The gradient of `before`, the W - 1 inputs before each sequence, and what these add to that of the weight.

    One program: one sequence and BC channels. Input m of `before` is in the outputs of the first tokens p <= m of the
    sequence, with tap m - p. In a sequence shorter than W - 1 it may also be among the last inputs.

        before       (sequences, W - 1, N);  dbefore like it, written;  the others as for `tokens_backward`
        dweight      (token_blocks + sequences, W, N): a part for each sequence, written after those of the tokens
        R            W - 1 rounded up to a power of two
    """
    sequence = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    start, stop = tl.load(cu + sequence).to(tl.int64), tl.load(cu + sequence + 1).to(tl.int64)
    m = tl.arange(0, R)
    mask = (m < W - 1)[:, None] & (c < N)[None, :]
    dbefore_sum = tl.zeros([R, BC], tl.float32)
    for token in tl.static_range(W - 1):
        reads = mask & ((m >= token) & (start + token + m * 0 < stop))[:, None]
        w = tl.load(weight + (m - token)[:, None] * N + c[None, :], mask=reads, other=0.0).to(tl.float32)
        real = (c < N) & (start + token + c * 0 < stop)
        dy_t = tl.load(dy + (start + token) * N + c, mask=real, other=0.0).to(tl.float32)
        dbefore_sum += w * dy_t[None, :]
    for j in tl.static_range(W):
        dweight_sum = tl.zeros([BC], tl.float32)
        for token in tl.static_range(W - 1 - j):  # tap j of token p multiplies input p + j
            real = (c < N) & (start + token + c * 0 < stop)
            dy_t = tl.load(dy + (start + token) * N + c, mask=real, other=0.0).to(tl.float32)
            before_i = tl.load(before + (sequence * (W - 1) + token + j) * N + c, mask=real, other=0.0).to(tl.float32)
            dweight_sum += dy_t * before_i
        tl.store(dweight + ((token_blocks + sequence) * W + j) * N + c, dweight_sum, mask=c < N)
    if dlast is not None:
        last_m = m - (stop - start)  # its number among the last inputs
        is_last = mask & (last_m >= 0)[:, None]
        rows = (sequence * (W - 1) + last_m)[:, None] * N
        dbefore_sum += tl.load(dlast + rows + c[None, :], mask=is_last, other=0.0).to(tl.float32)
    offsets = (sequence * (W - 1) + m)[:, None] * N + c[None, :]
    tl.store(dbefore + offsets, dbefore_sum.to(dbefore.dtype.element_ty), mask=mask)
