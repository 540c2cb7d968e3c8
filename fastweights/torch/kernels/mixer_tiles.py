"""The kernels around the memory of a layer: what turns a projection into q, k, v and rates, and what follows the read.

A layer's input projection has one row per token, (B, T, columns): q, k and v of all heads, then the gate, the write
rates and the decays. `prepare` goes over it once: the short convolution, the feature map and its norm for q and k, SiLU
for convolved values, the sigmoid of the write rates, the softplus of the decays. `finish` divides what each head read
by its root mean square and multiplies it by the gate. Their gradients are written into one array with the columns of
the projection, so nothing is concatenated.

One program computes one head of q, k or v, for BT tokens; one more for each BT tokens computes the rates of all heads.
"""

import triton
import triton.language as tl

from fastweights.torch.kernels.features import activate, normalised_slope, scale, slope
from fastweights.torch.kernels.packed_convolution import convolved


@triton.jit
def _history(p, before, b, t, c, inside, T, stride, batch_stride, W: tl.constexpr, N: tl.constexpr):
    """The projection [BT, BD] at tokens t and columns c; tokens before the first are in `before` (B, W - 1, N)."""
    new = inside & ((t >= 0) & (t < T))[:, None]
    value = tl.load(p + b * batch_stride + t[:, None] * stride + c[None, :], mask=new, other=0.0).to(tl.float32)
    if before is not None:
        at = (b * (W - 1) + t + W - 1)[:, None] * N + c[None, :]
        value += tl.load(before + at, mask=inside & (t < 0)[:, None], other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolved(p, weight, before, place, b, t, c, real, T, stride, batch_stride, W: tl.constexpr, N: tl.constexpr):
    """The convolution [BT, BD] at tokens t and columns c; the projection itself where there is none.

    place (T, 2): where sequences are packed, each token's position in its own, and that one's number; else None.  real:
    columns that are the head's.
    """
    inside = (t < T)[:, None] & real[None, :]
    if W == 0:
        return tl.load(p + b * batch_stride + t[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    elif place is not None:
        return convolved(p, weight, before, place, t, c, real, T, stride, W, N)
    else:
        total = tl.zeros(inside.shape, tl.float32)
        for j in tl.static_range(W):
            w = tl.load(weight + j * N + c, mask=real, other=0.0).to(tl.float32)
            total += w[None, :] * _history(p, before, b, t - (W - 1) + j, c, inside, T, stride, batch_stride, W, N)
        return total


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def prepare(p, weight, before, place, decay_log, decay_bias, q, k, v, beta, log_decay, last, T, units, batch_stride,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
            BH: tl.constexpr, AT_BETA: tl.constexpr, AT_DECAY: tl.constexpr, BETA_MAX: tl.constexpr,
            KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """q, k (B, T, H, K) mapped and normalised, v (B, T, H, V), beta and log_decay (B, T, H) of a projection p.

    last (B, W - 1, columns of q, k and v): the inputs that the next call's convolution needs.

        p           (B, T, columns); a token is `units` times UNIT numbers, so that the compiler sees how it is aligned
        weight      (W, N), and before (B, W - 1, N), of the convolution, or None
        place       (T, 2) of packed sequences, of which B is 1 and `before` has one each, or None
        decay_log   (H,), and decay_bias (H,), or None; without a bias it is the log decay itself, of every token
        q, k, v, beta, log_decay, last: written, None where the layer has none
        W           taps, 0 for none;  BD, BH: head width and heads rounded up to powers of two
        AT_BETA, AT_DECAY: first columns of the rates in the projection;  KIND, NORM: of the features, as in features.py

    The programs of a row of the grid are those of q, k and v, head by head, and one for the rates.
    """
    N: tl.constexpr = 2 * H * K + H * V
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    part = tl.program_id(1) // H
    head = tl.program_id(1) % H
    if part < 3:
        width = K
        if K != V:
            width = tl.where(part < 2, K, V)
        first = part * H * K + head * width
        d = tl.arange(0, BD)
        inside = (t < T)[:, None] & (d < width)[None, :]
        value = _convolved(p, weight, before, place, b, t, first + d, d < width, T, stride, batch_stride, W, N)
        row = (b * T + t) * H + head
        at = row[:, None] * width + d[None, :]
        # Queries and keys: the map and its norm. Values: SiLU where they were convolved, as they are otherwise.
        if part < 2:
            phi = activate(value, inside, KIND)
            if NORM:
                phi *= scale(phi, NORM, EPS)[:, None]
            if part == 0:
                tl.store(q + at, phi.to(q.dtype.element_ty), mask=inside)
            else:
                tl.store(k + at, phi.to(k.dtype.element_ty), mask=inside)
        else:
            if W:
                value = value * tl.sigmoid(value)
            tl.store(v + at, value.to(v.dtype.element_ty), mask=inside)
        if last is not None:  # noqa: SIM102 - this is known when compiling, the other is not
            if tl.program_id(0) == 0:
                i = tl.arange(0, BT)
                some = (i < W - 1)[:, None] & (d < width)[None, :]
                kept = _history(p, before, b, T - (W - 1) + i, first + d, some, T, stride, batch_stride, W, N)
                spot = (b * (W - 1) + i)[:, None] * N + first + d[None, :]
                tl.store(last + spot, kept.to(last.dtype.element_ty), mask=some)
    else:
        h = tl.arange(0, BH)
        real = (t < T)[:, None] & (h < H)[None, :]
        source = p + b * batch_stride + t[:, None] * stride + h[None, :]
        rates = (b * T + t)[:, None] * H + h[None, :]
        if beta is not None:
            raw = tl.load(source + AT_BETA, mask=real, other=0.0).to(tl.float32)
            tl.store(beta + rates, BETA_MAX * tl.sigmoid(raw), mask=real)
        if log_decay is not None:
            log = tl.load(decay_log + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            if decay_bias is None:
                tl.store(log_decay + rates, log + tl.zeros([BT, BH], tl.float32), mask=real)
            else:
                raw = tl.load(source + AT_DECAY, mask=real, other=0.0).to(tl.float32)
                raw += tl.load(decay_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
                tl.store(log_decay + rates, -tl.exp(log) * _softplus(raw), mask=real)


@triton.jit
def prepare_backward(p, weight, before, place, decay_log, decay_bias, dq, dk, dv, dbeta, dlog_decay, dz, dp, log_parts,
                     bias_parts, T, units, batch_stride, dz_units, H: tl.constexpr, K: tl.constexpr,
                     V: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
                     AT_BETA: tl.constexpr, AT_DECAY: tl.constexpr, BETA_MAX: tl.constexpr, KIND: tl.constexpr,
                     NORM: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr, DZ_UNIT: tl.constexpr):  # fmt: skip
    """The gradient of what was convolved, dz, and those of the rates' columns, in dp (the projection's columns).

    log_parts, bias_parts (B, blocks of tokens, H): sums over tokens of the gradients of decay_log and decay_bias.

        dq, dk, dv, dbeta, dlog_decay: gradients of what `prepare` wrote, None where it wrote nothing
        dz          (B, T, N), written: the gradient of the convolution's output, or dp itself without one
        dp          (B, T, columns), the rates' columns written

    The features are computed again from the projection: what they were is not kept.
    """
    N: tl.constexpr = 2 * H * K + H * V
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    part = tl.program_id(1) // H
    head = tl.program_id(1) % H
    if part < 3:
        width = K
        if K != V:
            width = tl.where(part < 2, K, V)
        first = part * H * K + head * width
        d = tl.arange(0, BD)
        inside = (t < T)[:, None] & (d < width)[None, :]
        value = _convolved(p, weight, before, place, b, t, first + d, d < width, T, stride, batch_stride, W, N)
        row = (b * T + t) * H + head
        at = row[:, None] * width + d[None, :]
        # Back through the norm and the map, or through SiLU.
        if part < 2:
            if part == 0:
                g = tl.load(dq + at, mask=inside, other=0.0).to(tl.float32)
            else:
                g = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32)
            phi = activate(value, inside, KIND)
            if NORM:
                g = normalised_slope(g, phi, NORM, EPS)
            g = slope(g, value, phi, KIND)
        else:
            g = tl.load(dv + at, mask=inside, other=0.0).to(tl.float32)
            if W:
                g = slope(g, value, value, 2)
        tl.store(
            dz + (b * T + t)[:, None] * (dz_units * DZ_UNIT) + first + d[None, :],
            g.to(dz.dtype.element_ty),
            mask=inside,
        )
    else:
        h = tl.arange(0, BH)
        real = (t < T)[:, None] & (h < H)[None, :]
        source = p + b * batch_stride + t[:, None] * stride + h[None, :]
        target = dp + (b * T + t)[:, None] * stride + h[None, :]
        rates = (b * T + t)[:, None] * H + h[None, :]
        if dbeta is not None:
            share = tl.sigmoid(tl.load(source + AT_BETA, mask=real, other=0.0).to(tl.float32))
            grad = tl.load(dbeta + rates, mask=real, other=0.0).to(tl.float32) * BETA_MAX * share * (1 - share)
            tl.store(target + AT_BETA, grad.to(dp.dtype.element_ty), mask=real)
        if dlog_decay is not None:
            raw = tl.load(source + AT_DECAY, mask=real, other=0.0).to(tl.float32)
            raw += tl.load(decay_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            rate = -tl.exp(tl.load(decay_log + h, mask=h < H, other=0.0).to(tl.float32))[None, :]
            grad = tl.load(dlog_decay + rates, mask=real, other=0.0).to(tl.float32) * rate
            # log a = -exp(decay_log) softplus(raw): the slope in raw is a sigmoid, that in decay_log is log a itself.
            of_raw = grad * tl.sigmoid(raw)
            tl.store(target + AT_DECAY, of_raw.to(dp.dtype.element_ty), mask=real)
            block = (b * tl.num_programs(0) + tl.program_id(0)) * H
            tl.store(log_parts + block + h, tl.sum(grad * _softplus(raw), 0), mask=h < H)
            tl.store(bias_parts + block + h, tl.sum(of_raw, 0), mask=h < H)


@triton.jit
def finish(o, p, weight, y, T, units, batch_stride, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
           BV: tl.constexpr, AT_GATE: tl.constexpr, GATE: tl.constexpr, EPS: tl.constexpr,
           UNIT: tl.constexpr):  # fmt: skip
    """y = o / sqrt(mean o^2 + eps) * weight * gate, for o and y (B, T, H, V).

    weight None: no norm.  GATE: 0 for none, 1 for SiLU, 2 for a sigmoid of the projection's columns from AT_GATE on.

    One program: one head of BT tokens, a row of V numbers for each, held whole, so that the mean never leaves the
    program.
    """
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BV)
    inside = (t < T)[:, None] & (d < V)[None, :]
    at = ((b * T + t) * H + head)[:, None] * V + d[None, :]
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        w = tl.load(weight + d, mask=d < V, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / V + EPS))[:, None] * w[None, :]
    if GATE:
        source = p + b * batch_stride + t[:, None] * stride + AT_GATE + head * V + d[None, :]
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        x *= tl.sigmoid(gate) * (gate if GATE == 1 else 1.0)
    tl.store(y + at, x.to(y.dtype.element_ty), mask=inside)


@triton.jit
def finish_backward(o, p, weight, dy, do, dp, parts, T, units, batch_stride, H: tl.constexpr, V: tl.constexpr,
                    BT: tl.constexpr, BV: tl.constexpr, AT_GATE: tl.constexpr, GATE: tl.constexpr,
                    EPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """The gradient of o, that of the gate's columns in dp, and parts (B, blocks, H, V): sums of the weight's.

    The program's tile is that of `finish`. With x = o / rms, g the gradient after the gate and w the weight, do =
    (g w - x mean(g w x)) / rms; the gate's own gradient is dy x w times its slope.
    """
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BV)
    inside = (t < T)[:, None] & (d < V)[None, :]
    at = ((b * T + t) * H + head)[:, None] * V + d[None, :]
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.full([BT], 1.0, tl.float32)
    w = tl.full([BV], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + d, mask=d < V, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / V + EPS)
    x *= r[:, None]
    if GATE:
        spot = b * batch_stride + t[:, None] * stride + AT_GATE + head * V + d[None, :]
        gate = tl.load(p + spot, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        steep = share * (1 - share) if GATE == 2 else share * (1 + gate * (1 - share))
        target = (b * T + t)[:, None] * stride + AT_GATE + head * V + d[None, :]
        tl.store(dp + target, (g * x * w[None, :] * steep).to(dp.dtype.element_ty), mask=inside)
        g *= share * (gate if GATE == 1 else 1.0)
    if weight is not None:
        row = (b * tl.num_programs(0) + tl.program_id(0)) * H + head
        tl.store(parts + row * V + d, tl.sum(g * x, 0), mask=d < V)
        g *= w[None, :]
        g = r[:, None] * (g - x * (tl.sum(g * x, 1) / V)[:, None])
    tl.store(do + at, g.to(do.dtype.element_ty), mask=inside)
