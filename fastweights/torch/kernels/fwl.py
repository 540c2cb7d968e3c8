"""The passes of published_passes.py, each once through memory; that file says what each function returns.

A program is a block of BLOCK numbers where every number is by itself, or one row (a token) where a mean over the row is
needed: it is then held whole, in float32. Loads and stores convert from and to the dtype of the products.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _load(x, at, mask):
    """Numbers at x + at as float32, zero where not masked."""
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, at, value, mask):
    """Numbers into x + at, in its dtype, where masked."""
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _inputs(x, e, rows, keys, T, length, D, width, BLOCK: tl.constexpr):
    """rows and keys of one token: [x, 1, 0 ...] and [e_0 x, e_1, 0 ...]; a token of padding, t >= T, has x = 0.

    One program: one token, whose row it reads once and writes twice. The 1 carries the bias through the same product as
    the weights, and a key is scaled by its step, so that a write is one product without anything in between.

        x           (B, T, D);  e (6,), the steps
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
def _inputs_backward(dq, dk, rows, e, dx, dots, D, width, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """dx of one token, from the gradients of its row and (KEYS) of its key; de_0 and de_1 go into dots.

    One program: one token.

        dq, dk      (N, width), gradients of rows and keys;  rows as in the forward pass
        dx          (N, D), written;  dots (N, 6), columns 0 and 1 written: summed over tokens afterwards
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    k = _load(dk + row * width, column, column < D)
    tl.store(dots + row * 6, tl.sum(k * _load(rows + row * width, column, column < D), 0))
    tl.store(dots + row * 6 + 1, tl.load(dk + row * width + D).to(tl.float32))
    x = _load(dq + row * width, column, column < D)
    if KEYS:
        x += k * tl.load(e)
    _store(dx + row * D, column, x, column < D)


@triton.jit
def _square(h, change, a, numbers, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """a = relu(h)^2, of BLOCK numbers; ADD: of h + change, which takes the place of change.

    h, change, a    `numbers` numbers each; a is written, change too with ADD
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    x = _load(h, at, mask)
    if ADD:
        x = (x + _load(change, at, mask)).to(change.dtype.element_ty).to(tl.float32)
        _store(change, at, x, mask)
    r = tl.maximum(x, 0.0)
    _store(a, at, r * r, mask)


@triton.jit
def _gate(x, h, out, factor, numbers, BLOCK: tl.constexpr):
    """out = factor relu(h) x, of BLOCK numbers.

    The slope of relu(h)^2 is 2 relu(h); the 2 and the sign are in `factor`.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    _store(out, at, factor * tl.maximum(_load(h, at, mask), 0.0) * _load(x, at, mask), mask)


@triton.jit
def _total(y, dv, u, da, h, numbers, BLOCK: tl.constexpr):
    """y += 2 relu(h) da - 2 [h > 0] u dv, of BLOCK numbers, in place.

    Two ways lead to h: the value a = relu(h)^2, whose slope is 2 relu(h), and the slope itself, which the slow gradient
    contains and whose own slope is 2 where h > 0.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    r = _load(h, at, mask)
    change = r * _load(da, at, mask) - _load(u, at, mask) * _load(dv, at, mask)
    _store(y, at, _load(y, at, mask) + tl.where(r > 0, 2.0 * change, 0.0), mask)


@triton.jit
def _exclusive(S, n, numbers, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums over chunks, in place: each of n becomes the sum of those before it (REVERSE: after it).

    One program: BLOCK numbers of one sequence, all its chunks in turn. The next chunk is loaded before the sum is
    stored, so that a program never waits for both.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    S += tl.program_id(1).to(tl.int64) * n * numbers
    stride = numbers.to(tl.int64)
    if REVERSE:
        S += (n - 1) * stride
        stride = -stride
    total = tl.zeros([BLOCK], tl.float32)
    x = _load(S, at, mask)
    for _ in range(n - 1):
        following = _load(S + stride, at, mask)  # ahead of the store
        _store(S, at, total, mask)
        total += x
        x = following
        S += stride
    _store(S, at, total, mask)


@triton.jit
def _back(dxhat, xhat, rstd, size):
    """The gradient at the input of a layer norm, from that at its output xhat, for one row held whole.

    A layer norm takes out the mean and the length of its row, so the gradient loses its parts along both.
    """
    return (dxhat - tl.sum(dxhat, 0) / size - xhat * (tl.sum(dxhat * xhat, 0) / size)) * rstd


@triton.jit
def _normal(y, bias, within, chunks, scale, shift, xhat, rstd, fast_scale, features, C, size, y_stride, eps,
            FAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """xhat, 1 / std and features of one token; FAST: of y plus its bias less all changes of earlier tokens.

    Changes come in two parts, within the token's chunk and of all chunks before it, three vectors side by side: of the
    bias, of the scale and of the shift.

        y           (N, size) with this stride;  bias, scale, shift (size,)
        within      (N, 3 size), chunks (N / C, 3 size): changes of earlier tokens, for FAST
        xhat, features, fast_scale (N, size), rstd (N,), written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(y + row * y_stride, column, mask)
    s, b = _load(scale, column, mask), _load(shift, column, mask)
    if FAST:
        within += row * 3 * size
        chunks += row // C * 3 * size
        x += _load(bias, column, mask) - _load(within, column, mask) - _load(chunks, column, mask)
        s -= _load(within + size, column, mask) + _load(chunks + size, column, mask)
        b -= _load(within + 2 * size, column, mask) + _load(chunks + 2 * size, column, mask)
        _store(fast_scale + row * size, column, s, mask)
    # Mean 0 and variance 1 over the row; columns past its end stay 0.
    x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    x *= inverse
    tl.store(rstd + row, inverse)
    _store(xhat + row * size, column, x, mask)
    _store(features + row * size, column, x * s + b, mask)


@triton.jit
def _slow_gradient(r, share, xhat, rstd, scale, e, g, v, changes, size, BLOCK: tl.constexpr):
    """g2, -e_2 g2 and the three changes of one token, from the gradient r at its features.

    r, xhat     (N, size);  share, rstd (N,);  scale (size,);  e (6,)
    g, v        (N, size), changes (N, 3 size), written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(xhat + row * size, column, mask)
    slow_dn = _load(r + row * size, column, mask) * tl.load(share + row)
    gradient = _back(slow_dn * _load(scale, column, mask), x, tl.load(rstd + row), size)
    _store(g + row * size, column, gradient, mask)
    _store(v + row * size, column, -gradient * tl.load(e + 2), mask)
    changes += row * 3 * size
    _store(changes, column, gradient * tl.load(e + 3), mask)
    _store(changes + size, column, slow_dn * x * tl.load(e + 4), mask)
    _store(changes + 2 * size, column, slow_dn * tl.load(e + 5), mask)


@triton.jit
def _fast_backward(dfeatures, ratio, xhat, rstd, scale, out, size, BLOCK: tl.constexpr):
    """[dy, dscale, dshift] of one token, from the gradient of its fast features.

    dfeatures   (N, size), made while the loss was scored;  ratio (1,): what the loss's own gradient adds
    out         (N, 3 size), written: three vectors side by side, as the changes of `_normal`
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = _load(xhat + row * size, column, mask)
    features = _load(dfeatures + row * size, column, mask) * tl.load(ratio)
    out += row * 3 * size
    _store(out, column, _back(features * _load(scale + row * size, column, mask), x, tl.load(rstd + row), size), mask)
    _store(out + size, column, features * x, mask)
    _store(out + 2 * size, column, features, mask)


@triton.jit
def _slow_second(dg, dv, within, chunks, r, share, xhat, rstd, g, scale, e, dr, dxhat, dstd, dscale, dots,
                 C, size, BLOCK: tl.constexpr):  # fmt: skip
    """Back through `_slow_gradient` for one token; its shares of the gradients of e_2 to e_5 go into dots.

    dg, dv  (N, size), within (N, 3 size), chunks (N / C, 3 size): gradients of what `_slow_gradient` wrote
    dr, dxhat, dscale (N, size), dstd (N,), and columns 2 to 5 of dots (N, 6), written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    at = row * size + column
    within += row * 3 * size
    chunks += row // C * 3 * size
    added0 = _load(within, column, mask) + _load(chunks, column, mask)
    added1 = _load(within + size, column, mask) + _load(chunks + size, column, mask)
    added2 = _load(within + 2 * size, column, mask) + _load(chunks + 2 * size, column, mask)
    x, gradient, value, s = _load(xhat, at, mask), _load(g, at, mask), _load(dv, at, mask), _load(scale, column, mask)
    part = tl.load(share + row)
    slow_dn = _load(r, at, mask) * part
    e2, e3, e4, e5 = tl.load(e + 2), tl.load(e + 3), tl.load(e + 4), tl.load(e + 5)
    # As in published_passes.slow_second, a row at a time.
    dq = (_load(dg, at, mask) - value * e2 - added0 * e3) * tl.load(rstd + row)
    along = tl.sum(x * dq, 0) / size
    dslow_dxhat = dq - tl.sum(dq, 0) / size - x * along
    back = -tl.sum(slow_dn * s * x, 0) / size * dq - slow_dn * s * along - added1 * slow_dn * e4
    _store(dr, at, (dslow_dxhat * s - added1 * x * e4 - added2 * e5) * part, mask)
    _store(dxhat, at, back, mask)
    _store(dscale, at, dslow_dxhat * slow_dn, mask)
    tl.store(dstd + row, -tl.sum(dq * gradient, 0))
    tl.store(dots + row * 6 + 2, -tl.sum(value * gradient, 0))
    tl.store(dots + row * 6 + 3, -tl.sum(added0 * gradient, 0))
    tl.store(dots + row * 6 + 4, -tl.sum(added1 * slow_dn * x, 0))
    tl.store(dots + row * 6 + 5, -tl.sum(added2 * slow_dn, 0))


@triton.jit
def _slow_backward(dxhat, dfeatures, dstd, dscale, xhat, rstd, scale, out, size, BLOCK: tl.constexpr):
    """[dy, dscale, dshift] of the slow norm for one token.

    The slow norm has three users: the features, the gradient that the fast weights are changed by, and the standard
    deviation in it. Their gradients meet here.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    at = row * size + column
    x, features = _load(xhat, at, mask), _load(dfeatures, at, mask)
    y = _back(_load(dxhat, at, mask) + features * _load(scale, column, mask), x, tl.load(rstd + row), size)
    out += row * 3 * size
    _store(out, column, y + x * (tl.load(dstd + row) / size), mask)
    _store(out + size, column, features * x + _load(dscale, at, mask), mask)
    _store(out + 2 * size, column, features, mask)


def inputs(x, length, e, dtype):
    """As published_passes.inputs: rows padded to a multiple of 8 numbers, which matrix units want."""
    B, T, D = x.shape
    width = D + 1 + -(D + 1) % 8
    rows, keys = (torch.empty(B * length, width, dtype=dtype, device=x.device) for _ in range(2))
    _inputs[(len(rows),)](x.contiguous(), e, rows, keys, T, length, D, width, **_wide(width))
    return rows, keys


def inputs_backward(dq, dk, rows, e, D, dots, keys):
    """As published_passes.inputs_backward."""
    dx = torch.empty(len(dq), D, dtype=dq.dtype, device=dq.device)
    _inputs_backward[(len(dq),)](dq, dk, rows, e, dx, dots, D, rows.shape[1], KEYS=keys, **_wide(D))
    return dx


def square(h):
    """As published_passes.square.

    The grid has a program for every BLOCK numbers; the last one is masked.
    """
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


def total(y, dv, u, da, h):
    """As published_passes.total."""
    _total[(triton.cdiv(h.numel(), BLOCK),)](y, dv, u, da, h, h.numel(), BLOCK=BLOCK)


def exclusive(S, reverse):
    """As published_passes.exclusive."""
    B, n, size = S.shape
    _exclusive[(triton.cdiv(size, 1024), B)](S, n, size, REVERSE=reverse, BLOCK=1024)


def normal(y, scale, shift, eps):
    """As published_passes.normal."""
    xhat, features, rstd = torch.empty_like(y), torch.empty_like(y), _row(y)
    _normal[(len(y),)](y, y, y, y, scale, shift, xhat, rstd, y, features, 1, y.shape[1], y.stride(0), eps,
                       FAST=False, **_wide(y.shape[1]))  # fmt: skip
    return xhat, rstd, features


def fast_normal(y, bias, within, before, scale, shift, eps):
    """As published_passes.fast_normal."""
    xhat, features, fast_scale, rstd = torch.empty_like(y), torch.empty_like(y), torch.empty_like(y), _row(y)
    _normal[(len(y),)](y, bias, within, before, scale, shift, xhat, rstd, fast_scale, features,
                       len(y) // len(before), y.shape[1], y.stride(0), eps, FAST=True, **_wide(y.shape[1]))  # fmt: skip
    return xhat, rstd, fast_scale, features


def slow_gradient(r, share, xhat, rstd, scale, e):
    """As published_passes.slow_gradient."""
    g, v, changes = torch.empty_like(r), torch.empty_like(r), _three(r)
    _slow_gradient[(len(r),)](r, share, xhat, rstd, scale, e, g, v, changes, r.shape[1], **_wide(r.shape[1]))
    return g, v, changes


def fast_backward(dfeatures, ratio, xhat, rstd, scale):
    """As published_passes.fast_backward."""
    out = _three(dfeatures)
    _fast_backward[(len(dfeatures),)](
        dfeatures, ratio, xhat, rstd, scale, out, dfeatures.shape[1], **_wide(dfeatures.shape[1])
    )
    return out


def slow_second(dg, dv, within, after, r, share, xhat, rstd, g, scale, e, dots):
    """As published_passes.slow_second."""
    dr, dxhat, dscale, dstd = torch.empty_like(r), torch.empty_like(r), torch.empty_like(r), _row(r)
    _slow_second[(len(r),)](dg, dv, within, after, r, share, xhat, rstd, g, scale, e, dr, dxhat, dstd,
                            dscale, dots, len(r) // len(after), r.shape[1], **_wide(r.shape[1]))  # fmt: skip
    return dr, dxhat, dstd, dscale


def slow_backward(dxhat, dfeatures, dstd, dscale, xhat, rstd, scale):
    """As published_passes.slow_backward."""
    out = _three(dxhat)
    _slow_backward[(len(out),)](dxhat, dfeatures, dstd, dscale, xhat, rstd, scale, out, xhat.shape[1],
                                **_wide(xhat.shape[1]))  # fmt: skip
    return out


def _row(y):
    """A float32 number per token, to be filled."""
    return torch.empty(len(y), device=y.device)


def _three(y):
    """Three vectors per token side by side, to be filled."""
    return torch.empty(len(y), 3 * y.shape[1], dtype=y.dtype, device=y.device)


def _wide(size):
    """BLOCK and warps of a program that holds a row of `size` numbers."""
    block = triton.next_power_of_2(size)
    return dict(BLOCK=block, num_warps=max(1, min(16, block // 256)))
