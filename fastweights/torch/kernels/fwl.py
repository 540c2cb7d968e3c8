"""The functions of learning/published_passes.py as Triton kernels, for the training loss of published_loss.py.

Below are the kernels, then the functions that launch them: these have the names, arguments and results of
published_passes.py, which says what they are. Each kernel goes through memory once. One program takes BLOCK numbers
where each number is computed by itself, and one row (a token) where a mean over the row is needed: the program then
holds the row whole. All is computed in float32; loads and stores convert from and to the dtype of the products.
N tokens, C tokens of a chunk; `row` is the number of a token, `column` those of its vector.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _load(x, offsets, mask):
    """Numbers at x + offsets as float32, zero where the mask is False."""
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, offsets, value, mask):
    """Write `value` to x + offsets, in the dtype of x, where the mask is True."""
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _input_rows(x, e, rows, keys, T, length, D, width, BLOCK: tl.constexpr):
    """rows and keys of one token: [x, 1, 0 ...] and [e_0 x, e_1, 0 ...]; a token of padding, t >= T, has x = 0.

    One program: one token, whose row it reads once and writes twice. The 1 carries the bias through the same product as
    the weights, and a key is scaled by its step, so that a write is one product without anything in between.

        x           (B, T, D);  e (6,), the step sizes
        rows, keys  (B * length, width), written; length is T rounded up to whole chunks, width D + 1 to a multiple of 8
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    t = row % length
    value = _load(x + (row // length * T + t) * D, column, column < tl.where(t < T, D, 0))
    value = tl.where(column == D, 1.0, value).to(rows.dtype.element_ty).to(tl.float32)
    mask = column < width
    _store(rows + row * width, column, value, mask)
    _store(keys + row * width, column, value * tl.where(column < D, tl.load(e), tl.load(e + 1)), mask)


@triton.jit
def _input_rows_backward(drows, dkeys, rows, e, dx, de, D, width, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """dx of one token, from the gradients of its row and (KEYS) of its key; its parts of de_0 and de_1.

    One program: one token.

        drows, dkeys    (N, width), gradients of rows and keys;  rows as in the forward pass
        dx              (N, D), written;  de (N, 6), columns 0 and 1 written: summed over tokens afterwards
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dkey = _load(dkeys + row * width, column, column < D)
    tl.store(de + row * 6, tl.sum(dkey * _load(rows + row * width, column, column < D), 0))
    tl.store(de + row * 6 + 1, tl.load(dkeys + row * width + D).to(tl.float32))
    gradient = _load(drows + row * width, column, column < D)
    if KEYS:
        gradient += dkey * tl.load(e)
    _store(dx + row * D, column, gradient, column < D)


@triton.jit
def _square(h, change, a, numbers, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """a = relu(h)^2, of BLOCK numbers; ADD: of h + change, which takes the place of change.

    h, change, a    `numbers` numbers each; a is written, change too with ADD
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    x = _load(h, offsets, mask)
    if ADD:
        x = (x + _load(change, offsets, mask)).to(change.dtype.element_ty).to(tl.float32)
        _store(change, offsets, x, mask)
    r = tl.maximum(x, 0.0)
    _store(a, offsets, r * r, mask)


@triton.jit
def _gate(x, h, out, factor, numbers, BLOCK: tl.constexpr):
    """out = factor relu(h) x, of BLOCK numbers.

    The slope of relu(h)^2 is 2 relu(h); the 2 and a sign are in `factor`.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    _store(out, offsets, factor * tl.maximum(_load(h, offsets, mask), 0.0) * _load(x, offsets, mask), mask)


@triton.jit
def _add_hidden_gradients(dh, dv1, u, da, h, numbers, BLOCK: tl.constexpr):
    """dh += 2 relu(h) da - 2 [h > 0] u dv1, of BLOCK numbers, in place.

    The slow pass uses h in two places: in a = relu(h)^2, whose slope is 2 relu(h), and in v1 = -2 relu(h) u, whose
    slope is -2 u where h > 0.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    r = _load(h, offsets, mask)
    change = r * _load(da, offsets, mask) - _load(u, offsets, mask) * _load(dv1, offsets, mask)
    _store(dh, offsets, _load(dh, offsets, mask) + tl.where(r > 0, 2.0 * change, 0.0), mask)


@triton.jit
def _exclusive_sum(S, n, numbers, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """An exclusive scan over chunks, in place: each of n becomes the sum of those before it (REVERSE: after it).

    One program: BLOCK numbers of one sequence, all its chunks in turn. The next chunk is loaded before the sum is
    stored, so that the program need not wait for the store.

        S   (B, n, numbers)
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    S += tl.program_id(1).to(tl.int64) * n * numbers
    stride = numbers.to(tl.int64)
    if REVERSE:
        S += (n - 1) * stride
        stride = -stride
    total = tl.zeros([BLOCK], tl.float32)
    x = _load(S, offsets, mask)
    for _ in range(n - 1):
        following = _load(S + stride, offsets, mask)  # ahead of the store
        _store(S, offsets, total, mask)
        total += x
        x = following
        S += stride
    _store(S, offsets, total, mask)


@triton.jit
def _standardise_backward(dxhat, xhat, rstd, size):
    """The gradient at the input of a layer norm without scale and shift, from that at its output xhat, for one row.

    A layer norm takes out the mean and the length of its row, so the gradient loses its parts along both.
    """
    return (dxhat - tl.sum(dxhat, 0) / size - xhat * (tl.sum(dxhat * xhat, 0) / size)) * rstd


@triton.jit
def _layer_norm(y, bias, within, of_chunks, scale, shift, xhat, rstd, fast_scale, features, C, size, y_stride, eps,
            FAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """xhat, 1 / std and features of one token; FAST: of y + bias less the changes of all earlier tokens.

    Changes are sums in two parts, over the token's chunk and over all chunks before it, each of them three vectors side
    by side: the change of the bias, of the scale and of the shift. One program: one token.

        y           (N, size), y_stride from token to token;  bias, scale, shift (size,)
        within      (N, 3 size), of_chunks (N / C, 3 size): changes of earlier tokens, read if FAST
        xhat, features (N, size), rstd (N,), written; fast_scale (N, size) too if FAST
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(y + row * y_stride, column, mask)
    s, b = _load(scale, column, mask), _load(shift, column, mask)
    if FAST:
        within += row * 3 * size
        of_chunks += row // C * 3 * size
        x += _load(bias, column, mask) - _load(within, column, mask) - _load(of_chunks, column, mask)
        s -= _load(within + size, column, mask) + _load(of_chunks + size, column, mask)
        b -= _load(within + 2 * size, column, mask) + _load(of_chunks + 2 * size, column, mask)
        _store(fast_scale + row * size, column, s, mask)
    # Mean 0 and variance 1 over the row; columns past its end stay 0.
    x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    inverse_std = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    x *= inverse_std
    tl.store(rstd + row, inverse_std)
    _store(xhat + row * size, column, x, mask)
    _store(features + row * size, column, x * s + b, mask)


@triton.jit
def _slow_gradient(gn, share, xhat, rstd, scale, e, g2, v2, changes, size, BLOCK: tl.constexpr):
    """g2, v2 = -e_2 g2 and the three changes of one token, from the gradient gn of its loss at its features.

    One program: one token.

        gn, xhat    (N, size);  share, rstd (N,);  scale (size,);  e (6,)
        g2, v2      (N, size), changes (N, 3 size), written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(xhat + row * size, column, mask)
    g3 = _load(gn + row * size, column, mask) * tl.load(share + row)
    gradient = _standardise_backward(g3 * _load(scale, column, mask), x, tl.load(rstd + row), size)
    _store(g2 + row * size, column, gradient, mask)
    _store(v2 + row * size, column, -gradient * tl.load(e + 2), mask)
    changes += row * 3 * size
    _store(changes, column, gradient * tl.load(e + 3), mask)
    _store(changes + size, column, g3 * x * tl.load(e + 4), mask)
    _store(changes + 2 * size, column, g3 * tl.load(e + 5), mask)


@triton.jit
def _fast_layer_norm_backward(dfeatures, ratio, xhat, rstd, fast_scale, out, size, BLOCK: tl.constexpr):
    """[dy, dscale, dshift] of one token, from the gradient of its fast features. One program: one token.

    dfeatures   (N, size), computed while the loss was scored;  ratio (1,): a factor of it
    fast_scale  (N, size), as `_layer_norm` wrote it
    out         (N, 3 size), written: three vectors side by side, as the changes of `_layer_norm`
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(xhat + row * size, column, mask)
    dn = _load(dfeatures + row * size, column, mask) * tl.load(ratio)
    out += row * 3 * size
    dxhat = dn * _load(fast_scale + row * size, column, mask)
    _store(out, column, _standardise_backward(dxhat, x, tl.load(rstd + row), size), mask)
    _store(out + size, column, dn * x, mask)
    _store(out + 2 * size, column, dn, mask)


@triton.jit
def _slow_gradient_backward(
    dg2, dv2, within, of_chunks, gn, share, xhat, rstd, g2, scale, e, dgn, dxhat, dstd, dscale, de,
    C, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through `_slow_gradient` for one token; its parts of the gradients of e_2 to e_5 go into de.

    One program: one token. The steps are those of published_passes.slow_gradient_backward, a row at a time.

        dg2, dv2 (N, size), within (N, 3 size), of_chunks (N / C, 3 size): gradients of what `_slow_gradient` wrote
        dgn, dxhat, dscale (N, size), dstd (N,), and columns 2 to 5 of de (N, 6), written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    offsets = row * size + column
    within += row * 3 * size
    of_chunks += row // C * 3 * size
    change0 = _load(within, column, mask) + _load(of_chunks, column, mask)
    change1 = _load(within + size, column, mask) + _load(of_chunks + size, column, mask)
    change2 = _load(within + 2 * size, column, mask) + _load(of_chunks + 2 * size, column, mask)
    x, gradient = _load(xhat, offsets, mask), _load(g2, offsets, mask)
    dv, s = _load(dv2, offsets, mask), _load(scale, column, mask)
    share_of_token = tl.load(share + row)
    g3 = _load(gn, offsets, mask) * share_of_token
    e2, e3, e4, e5 = tl.load(e + 2), tl.load(e + 3), tl.load(e + 4), tl.load(e + 5)
    scaled_dg2 = (_load(dg2, offsets, mask) - dv * e2 - change0 * e3) * tl.load(rstd + row)
    along = tl.sum(x * scaled_dg2, 0) / size
    dgxhat = scaled_dg2 - tl.sum(scaled_dg2, 0) / size - x * along
    dx = -tl.sum(g3 * s * x, 0) / size * scaled_dg2 - g3 * s * along - change1 * g3 * e4
    _store(dgn, offsets, (dgxhat * s - change1 * x * e4 - change2 * e5) * share_of_token, mask)
    _store(dxhat, offsets, dx, mask)
    _store(dscale, offsets, dgxhat * g3, mask)
    tl.store(dstd + row, -tl.sum(scaled_dg2 * gradient, 0))
    tl.store(de + row * 6 + 2, -tl.sum(dv * gradient, 0))
    tl.store(de + row * 6 + 3, -tl.sum(change0 * gradient, 0))
    tl.store(de + row * 6 + 4, -tl.sum(change1 * g3 * x, 0))
    tl.store(de + row * 6 + 5, -tl.sum(change2 * g3, 0))


@triton.jit
def _slow_layer_norm_backward(dxhat, dfeatures, dstd, dscale, xhat, rstd, scale, out, size, BLOCK: tl.constexpr):
    """[dy, dscale, dshift] of the slow pass's layer norm for one token. One program: one token.

    Three things use that norm: the features, the gradient that the fast weights learn from, and the standard deviation
    in that gradient. Their gradients meet here.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    offsets = row * size + column
    x, dn = _load(xhat, offsets, mask), _load(dfeatures, offsets, mask)
    dx = _load(dxhat, offsets, mask) + dn * _load(scale, column, mask)
    dy = _standardise_backward(dx, x, tl.load(rstd + row), size)
    out += row * 3 * size
    _store(out, column, dy + x * (tl.load(dstd + row) / size), mask)
    _store(out + size, column, dn * x + _load(dscale, offsets, mask), mask)
    _store(out + 2 * size, column, dn, mask)


def input_rows(x, length, e, dtype):
    """As published_passes.input_rows."""
    B, T, D = x.shape
    width = D + 1 + -(D + 1) % 8
    rows, keys = (torch.empty(B * length, width, dtype=dtype, device=x.device) for _ in range(2))
    _input_rows[(len(rows),)](x.contiguous(), e, rows, keys, T, length, D, width, **_whole_row(width))
    return rows, keys


def input_rows_backward(drows, dkeys, rows, e, D, de, through_keys):
    """As published_passes.input_rows_backward."""
    dx = torch.empty(len(drows), D, dtype=drows.dtype, device=drows.device)
    _input_rows_backward[(len(drows),)](drows, dkeys, rows, e, dx, de, D, rows.shape[1], KEYS=through_keys,
                                        **_whole_row(D))  # fmt: skip
    return dx


def square(h):
    """As published_passes.square."""
    a = torch.empty_like(h)
    _square[(triton.cdiv(h.numel(), BLOCK),)](h, h, a, h.numel(), ADD=False, BLOCK=BLOCK)
    return a


def add_square(h, change):
    """As published_passes.add_square."""
    a = torch.empty_like(h)
    _square[(triton.cdiv(h.numel(), BLOCK),)](h, change, a, h.numel(), ADD=True, BLOCK=BLOCK)
    return change, a


def gate(x, h, factor, out=None):
    """As published_passes.gate."""
    out = torch.empty_like(h) if out is None else out
    _gate[(triton.cdiv(h.numel(), BLOCK),)](x, h, out, factor, h.numel(), BLOCK=BLOCK)
    return out


def add_hidden_gradients(dh, dv1, u, da, h):
    """As published_passes.add_hidden_gradients."""
    _add_hidden_gradients[(triton.cdiv(h.numel(), BLOCK),)](dh, dv1, u, da, h, h.numel(), BLOCK=BLOCK)


def exclusive_sum(S, reverse):
    """As published_passes.exclusive_sum."""
    B, n, size = S.shape
    _exclusive_sum[(triton.cdiv(size, 1024), B)](S, n, size, REVERSE=reverse, BLOCK=1024)


def layer_norm(y, scale, shift, eps):
    """As published_passes.layer_norm."""
    xhat, features, rstd = torch.empty_like(y), torch.empty_like(y), _empty_per_token(y)
    _layer_norm[(len(y),)](y, y, y, y, scale, shift, xhat, rstd, y, features, 1, y.shape[1], y.stride(0), eps,
                           FAST=False, **_whole_row(y.shape[1]))  # fmt: skip
    return xhat, rstd, features


def slow_gradient(gn, share, xhat, rstd, scale, e):
    """As published_passes.slow_gradient."""
    g2, v2, changes = torch.empty_like(gn), torch.empty_like(gn), _empty_triple(gn)
    size = gn.shape[1]
    _slow_gradient[(len(gn),)](gn, share, xhat, rstd, scale, e, g2, v2, changes, size, **_whole_row(size))
    return g2, v2, changes


def fast_layer_norm(y, bias, within, of_chunks, scale, shift, eps):
    """As published_passes.fast_layer_norm."""
    xhat, features, fast_scale = torch.empty_like(y), torch.empty_like(y), torch.empty_like(y)
    rstd, C, size = _empty_per_token(y), len(y) // len(of_chunks), y.shape[1]
    _layer_norm[(len(y),)](y, bias, within, of_chunks, scale, shift, xhat, rstd, fast_scale, features, C, size,
                           y.stride(0), eps, FAST=True, **_whole_row(size))  # fmt: skip
    return xhat, rstd, fast_scale, features


def fast_layer_norm_backward(dfeatures, ratio, xhat, rstd, fast_scale):
    """As published_passes.fast_layer_norm_backward."""
    out, size = _empty_triple(dfeatures), dfeatures.shape[1]
    _fast_layer_norm_backward[(len(dfeatures),)](dfeatures, ratio, xhat, rstd, fast_scale, out, size,
                                                 **_whole_row(size))  # fmt: skip
    return out


def slow_gradient_backward(dg2, dv2, within, of_chunks, gn, share, xhat, rstd, g2, scale, e, de):
    """As published_passes.slow_gradient_backward."""
    dgn, dxhat, dscale, dstd = torch.empty_like(gn), torch.empty_like(gn), torch.empty_like(gn), _empty_per_token(gn)
    C, size = len(gn) // len(of_chunks), gn.shape[1]
    _slow_gradient_backward[(len(gn),)](dg2, dv2, within, of_chunks, gn, share, xhat, rstd, g2, scale, e, dgn, dxhat,
                                        dstd, dscale, de, C, size, **_whole_row(size))  # fmt: skip
    return dgn, dxhat, dstd, dscale


def slow_layer_norm_backward(dxhat, dfeatures, dstd, dscale, xhat, rstd, scale):
    """As published_passes.slow_layer_norm_backward."""
    out, size = _empty_triple(dxhat), xhat.shape[1]
    _slow_layer_norm_backward[(len(out),)](dxhat, dfeatures, dstd, dscale, xhat, rstd, scale, out, size,
                                           **_whole_row(size))  # fmt: skip
    return out


def _empty_per_token(y):
    """An uninitialised float32 number for each row of y."""
    return torch.empty(len(y), device=y.device)


def _empty_triple(y):
    """Three uninitialised vectors side by side for each row of y."""
    return torch.empty(len(y), 3 * y.shape[1], dtype=y.dtype, device=y.device)


def _whole_row(size):
    """BLOCK and warps of a program that holds a row of `size` numbers."""
    block = triton.next_power_of_2(size)
    return dict(BLOCK=block, num_warps=max(1, min(16, block // 256)))
