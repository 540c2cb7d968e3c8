"""The kernels around the memory of a whole layer: from its projection to q, k, v and rates, and from o to its output.

A layer's input projection p (B, T, columns) has, side by side for every token, sections of columns: q, k and v of all
heads, then the gate, the write rates and the decays. mixer_plan.py launches

    prepare            reads p and writes q, k, v, beta and log_decay: the short convolution, the feature map and its
                       norm for q and k, SiLU for convolved values, the sigmoid of the write rates, and the decays,
                       log a = -exp(decay_log) softplus(column + decay_bias)
    finish             divides o, what each head has read, by its root mean square, and multiplies it by the gate
    finish_backward    the gradient of o, and those of the gate's columns of p
    prepare_backward   from the gradients of q, k, v and the rates to those of p, or of what the convolution gave

Gradients of p are written into one tensor with its columns, so that nothing is concatenated. In the kernels b is a row
of the batch, t a token, d a number of a head, h a head, c a column of p, and N the number of convolved columns, which
are those of q, k and v. A token has units * UNIT columns; UNIT is known when compiling (convolution.py says why).
"""

import triton
import triton.language as tl

from fastweights.torch.kernels.features import activate, activate_backward, norm_factor, normalise_backward
from fastweights.torch.kernels.packed_convolution import convolved


@triton.jit
def _load_inputs(p, before, b, t, c, mask, T, token_stride, batch_stride, W: tl.constexpr, N: tl.constexpr):
    """p at tokens t and columns c, a tile [BT, BD] in float32; before the first token it is `before` (B, W - 1, N)."""
    in_p = mask & ((t >= 0) & (t < T))[:, None]
    value = tl.load(p + b * batch_stride + t[:, None] * token_stride + c[None, :], mask=in_p, other=0.0).to(tl.float32)
    if before is not None:
        offsets = (b * (W - 1) + t + W - 1)[:, None] * N + c[None, :]
        value += tl.load(before + offsets, mask=mask & (t < 0)[:, None], other=0.0).to(tl.float32)
    return value


@triton.jit
def _load_convolved(p, weight, before, places, b, t, c, is_channel, T, token_stride, batch_stride,
                    W: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """p convolved, at tokens t and columns c, a tile [BT, BD] in float32; p itself for W = 0.

    places: (T, 2), of `packed_convolution.token_places`, or None where sequences are not packed.
    is_channel: [BD], which of c are columns of this head.
    """
    mask = (t < T)[:, None] & is_channel[None, :]
    if W == 0:
        row = p + b * batch_stride + t[:, None] * token_stride
        return tl.load(row + c[None, :], mask=mask, other=0.0).to(tl.float32)
    elif places is not None:
        return convolved(p, weight, before, places, t, c, is_channel, T, token_stride, W, N)
    else:
        total = tl.zeros(mask.shape, tl.float32)
        for j in tl.static_range(W):
            w = tl.load(weight + j * N + c, mask=is_channel, other=0.0).to(tl.float32)
            total += w[None, :] * _load_inputs(
                p, before, b, t - (W - 1) + j, c, mask, T, token_stride, batch_stride, W, N
            )
        return total


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def prepare(p, weight, before, places, decay_log, decay_bias, q, k, v, beta, log_decay, last, T, units, batch_stride,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
            BH: tl.constexpr, AT_BETA: tl.constexpr, AT_DECAY: tl.constexpr, BETA_MAX: tl.constexpr, KIND: tl.constexpr,
            NORM: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """q, k, v, beta and log_decay of a projection p, and the last inputs of the convolution.

    One program: one head of q, of k, or of v, for BT tokens; or, the last along the second axis of the grid, beta and
    log_decay of all heads.

        p            (B, T, columns)
        weight       (W, N), of the convolution, or None
        before       (B, W - 1, N), or None; of packed sequences, with B = 1, it is (sequences, W - 1, N)
        places       (T, 2), of packed sequences, or None
        decay_log    (H,), or None;  decay_bias (H,), or None: then decay_log is log_decay itself, of every token
        q, k         (B, T, H, K), written;  v (B, T, H, V), written
        beta, log_decay   (B, T, H), written, or None
        last         (B, W - 1, N), written, or None: the last W - 1 inputs of the convolution
        BD, BH       the widest head, and H, rounded up to powers of two
        AT_BETA, AT_DECAY   first columns of the rates in p
        KIND, NORM   of the feature map, as in features.py
    """
    N: tl.constexpr = 2 * H * K + H * V
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    section = tl.program_id(1) // H
    head = tl.program_id(1) % H
    if section < 3:
        width = K
        if K != V:
            width = tl.where(section < 2, K, V)
        first_column = section * H * K + head * width
        d = tl.arange(0, BD)
        mask = (t < T)[:, None] & (d < width)[None, :]
        value = _load_convolved(
            p, weight, before, places, b, t, first_column + d, d < width, T, token_stride, batch_stride, W, N
        )
        row = (b * T + t) * H + head
        offsets = row[:, None] * width + d[None, :]
        # Queries and keys: the map and its norm. Values: SiLU where they were convolved, as they are otherwise.
        if section < 2:
            phi = activate(value, mask, KIND)
            if NORM:
                phi *= norm_factor(phi, NORM, EPS)[:, None]
            if section == 0:
                tl.store(q + offsets, phi.to(q.dtype.element_ty), mask=mask)
            else:
                tl.store(k + offsets, phi.to(k.dtype.element_ty), mask=mask)
        else:
            if W:
                value = value * tl.sigmoid(value)
            tl.store(v + offsets, value.to(v.dtype.element_ty), mask=mask)
        if last is not None:  # noqa: SIM102 - this is known when compiling, the other is not
            if tl.program_id(0) == 0:
                i = tl.arange(0, BT)
                last_mask = (i < W - 1)[:, None] & (d < width)[None, :]
                last_inputs = _load_inputs(
                    p, before, b, T - (W - 1) + i, first_column + d, last_mask, T, token_stride, batch_stride, W, N
                )
                last_offsets = (b * (W - 1) + i)[:, None] * N + first_column + d[None, :]
                tl.store(last + last_offsets, last_inputs.to(last.dtype.element_ty), mask=last_mask)
    else:
        h = tl.arange(0, BH)
        rate_mask = (t < T)[:, None] & (h < H)[None, :]
        rates_in_p = p + b * batch_stride + t[:, None] * token_stride + h[None, :]
        rate_offsets = (b * T + t)[:, None] * H + h[None, :]
        if beta is not None:
            column = tl.load(rates_in_p + AT_BETA, mask=rate_mask, other=0.0).to(tl.float32)
            tl.store(beta + rate_offsets, BETA_MAX * tl.sigmoid(column), mask=rate_mask)
        if log_decay is not None:
            decay_log_i = tl.load(decay_log + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            if decay_bias is None:
                tl.store(log_decay + rate_offsets, decay_log_i + tl.zeros([BT, BH], tl.float32), mask=rate_mask)
            else:
                column = tl.load(rates_in_p + AT_DECAY, mask=rate_mask, other=0.0).to(tl.float32)
                column += tl.load(decay_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
                tl.store(log_decay + rate_offsets, -tl.exp(decay_log_i) * _softplus(column), mask=rate_mask)


@triton.jit
def prepare_backward(p, weight, before, places, decay_log, decay_bias, dq, dk, dv, dbeta, dlog_decay, dz, dp, log_parts,
                     bias_parts, T, units, batch_stride, dz_units,
                     H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
                     BD: tl.constexpr, BH: tl.constexpr, AT_BETA: tl.constexpr, AT_DECAY: tl.constexpr,
                     BETA_MAX: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                     UNIT: tl.constexpr, DZ_UNIT: tl.constexpr):  # fmt: skip
    """The gradients of what the convolution gave, of the rates' columns of p, and of decay_log and decay_bias.

    Programs are those of `prepare`. What it computed is computed again from p.

        dq, dk, dv, dbeta, dlog_decay: gradients of what `prepare` wrote, None where it wrote nothing
        dz           (B, T, N), written, with dz_units * DZ_UNIT numbers from token to token: the gradient of what the
                     convolution gave; without a convolution it is dp itself
        dp           (B, T, columns): the gradient of p, whose columns of the rates are written
        log_parts, bias_parts   (B, blocks of tokens, H), written: parts of the gradients of decay_log and decay_bias,
                     each a sum over BT tokens

    The other arguments are those of `prepare`.
    """
    N: tl.constexpr = 2 * H * K + H * V
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    section = tl.program_id(1) // H
    head = tl.program_id(1) % H
    if section < 3:
        width = K
        if K != V:
            width = tl.where(section < 2, K, V)
        first_column = section * H * K + head * width
        d = tl.arange(0, BD)
        mask = (t < T)[:, None] & (d < width)[None, :]
        value = _load_convolved(
            p, weight, before, places, b, t, first_column + d, d < width, T, token_stride, batch_stride, W, N
        )
        row = (b * T + t) * H + head
        offsets = row[:, None] * width + d[None, :]
        # Back through the norm and the map, or through SiLU.
        if section < 2:
            if section == 0:
                g = tl.load(dq + offsets, mask=mask, other=0.0).to(tl.float32)
            else:
                g = tl.load(dk + offsets, mask=mask, other=0.0).to(tl.float32)
            phi = activate(value, mask, KIND)
            if NORM:
                g = normalise_backward(g, phi, NORM, EPS)
            g = activate_backward(g, value, phi, KIND)
        else:
            g = tl.load(dv + offsets, mask=mask, other=0.0).to(tl.float32)
            if W:
                g = activate_backward(g, value, value, 2)
        tl.store(
            dz + (b * T + t)[:, None] * (dz_units * DZ_UNIT) + first_column + d[None, :],
            g.to(dz.dtype.element_ty),
            mask=mask,
        )
    else:
        h = tl.arange(0, BH)
        rate_mask = (t < T)[:, None] & (h < H)[None, :]
        rates_in_p = p + b * batch_stride + t[:, None] * token_stride + h[None, :]
        rates_in_dp = dp + (b * T + t)[:, None] * token_stride + h[None, :]
        rate_offsets = (b * T + t)[:, None] * H + h[None, :]
        if dbeta is not None:
            sigmoid = tl.sigmoid(tl.load(rates_in_p + AT_BETA, mask=rate_mask, other=0.0).to(tl.float32))
            dbeta_i = tl.load(dbeta + rate_offsets, mask=rate_mask, other=0.0).to(tl.float32)
            dcolumn = dbeta_i * BETA_MAX * sigmoid * (1 - sigmoid)
            tl.store(rates_in_dp + AT_BETA, dcolumn.to(dp.dtype.element_ty), mask=rate_mask)
        if dlog_decay is not None:
            column = tl.load(rates_in_p + AT_DECAY, mask=rate_mask, other=0.0).to(tl.float32)
            column += tl.load(decay_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            minus_rate = -tl.exp(tl.load(decay_log + h, mask=h < H, other=0.0).to(tl.float32))[None, :]
            dsoftplus = tl.load(dlog_decay + rate_offsets, mask=rate_mask, other=0.0).to(tl.float32) * minus_rate
            # The derivative of softplus is a sigmoid; that of log a with respect to decay_log is log a itself.
            dcolumn = dsoftplus * tl.sigmoid(column)
            tl.store(rates_in_dp + AT_DECAY, dcolumn.to(dp.dtype.element_ty), mask=rate_mask)
            part_offset = (b * tl.num_programs(0) + tl.program_id(0)) * H
            tl.store(log_parts + part_offset + h, tl.sum(dsoftplus * _softplus(column), 0), mask=h < H)
            tl.store(bias_parts + part_offset + h, tl.sum(dcolumn, 0), mask=h < H)


@triton.jit
def finish(o, p, weight, y, T, units, batch_stride,
           H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, AT_GATE: tl.constexpr,
           GATE: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """y = o / sqrt(mean o^2 + eps) * weight * gate. One program: one head of BT tokens, all V numbers of each.

    o            (B, T, H, V): what was read of the memory;  y like it, written
    p            (B, T, columns), whose columns from AT_GATE on are the gate's
    weight       (V,), or None: then there is no norm, and y = o * gate
    GATE         0: none, 1: SiLU of the gate's columns, 2: their sigmoid
    BV           V rounded up to a power of two
    """
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BV)
    mask = (t < T)[:, None] & (d < V)[None, :]
    offsets = ((b * T + t) * H + head)[:, None] * V + d[None, :]
    x = tl.load(o + offsets, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        w = tl.load(weight + d, mask=d < V, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / V + EPS))[:, None] * w[None, :]
    if GATE:
        gate_in_p = p + b * batch_stride + t[:, None] * token_stride + AT_GATE + head * V + d[None, :]
        gate = tl.load(gate_in_p, mask=mask, other=0.0).to(tl.float32)
        x *= tl.sigmoid(gate) * (gate if GATE == 1 else 1.0)
    tl.store(y + offsets, x.to(y.dtype.element_ty), mask=mask)


@triton.jit
def finish_backward(o, p, weight, dy, do, dp, parts, T, units, batch_stride,
                    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, AT_GATE: tl.constexpr,
                    GATE: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """do, the gradients of the gate's columns in dp, and parts of that of the weight. Programs are those of `finish`.

    With x = o / rms and g = dy gate, which is the gradient of x w,

        do = (g w - x mean(g w x)) / rms        dw = g x, summed over tokens        dgate = dy x w

        dy           (B, T, H, V);  do like it, written
        dp           (B, T, columns), whose columns of the gate are written
        parts        (B, blocks of tokens, H, V), written with a weight: each a sum over BT tokens
    """
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BV)
    mask = (t < T)[:, None] & (d < V)[None, :]
    offsets = ((b * T + t) * H + head)[:, None] * V + d[None, :]
    x = tl.load(o + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.full([BT], 1.0, tl.float32)
    w = tl.full([BV], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + d, mask=d < V, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 1) / V + EPS)
    x *= inverse_rms[:, None]
    if GATE:
        gate_offsets = b * batch_stride + t[:, None] * token_stride + AT_GATE + head * V + d[None, :]
        gate = tl.load(p + gate_offsets, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        gate_slope = sigmoid * (1 - sigmoid) if GATE == 2 else sigmoid * (1 + gate * (1 - sigmoid))
        dgate_offsets = (b * T + t)[:, None] * token_stride + AT_GATE + head * V + d[None, :]
        tl.store(dp + dgate_offsets, (g * x * w[None, :] * gate_slope).to(dp.dtype.element_ty), mask=mask)
        g *= sigmoid * (gate if GATE == 1 else 1.0)
    if weight is not None:
        part_row = (b * tl.num_programs(0) + tl.program_id(0)) * H + head
        tl.store(parts + part_row * V + d, tl.sum(g * x, 0), mask=d < V)
        g *= w[None, :]
        g = inverse_rms[:, None] * (g - x * (tl.sum(g * x, 1) / V)[:, None])
    tl.store(do + offsets, g.to(do.dtype.element_ty), mask=mask)
