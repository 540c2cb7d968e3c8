"""The passes of dual_passes.py, each once through memory; that file says what each function does.

One program is one token, whose row it holds whole in float32, or a block of it where every number is by itself. Tokens
are (B, C, width), rows of numbers side by side; what is part of a larger buffer has a stride from row to row of the
batch, and what is one vector per row of the batch has such a stride too. Nothing is clipped here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.kernels.fwl import _load, _standardise_backward, _store, _whole_row
from fastweights.torch.kernels.fwl_dual_sums import counted, masked, summed, summed_backward  # noqa: F401

BLOCK = 1024


class Norm(NamedTuple):
    """A layer norm without scale and shift: its output, and 1 / deviation of every token."""

    xhat: Tensor
    rstd: Tensor


@triton.jit
def _with(x, more, kept, kept_stride, b, at, column, mask):
    """x + more kept, of one token of row b whose numbers are at `at`; x itself where more is None."""
    if more is not None:
        x += _load(more + at, column, mask) * tl.load(kept + b * kept_stride).to(tl.float32)
    return x


@triton.jit
def _hidden(h, bias, a, r, h_stride, bias_stride, a_stride, C, F, BLOCK: tl.constexpr):
    """r = relu(h + bias) and a = r^2, of BLOCK numbers of one token."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    x = _load(h + b * h_stride + t * F, column, mask) + _load(bias + b * bias_stride, column, mask)
    x = tl.maximum(x, 0.0).to(r.dtype.element_ty).to(tl.float32)
    _store(r + row * F, column, x, mask)
    _store(a + b * a_stride + t * F, column, x * x, mask)


@triton.jit
def _normal(
    y, more, kept, bias, scale, shift, xhat, rstd, features, kept_stride, stride, C, E, eps, BLOCK: tl.constexpr
):
    """The norm of one token's y + bias, and its features.  stride: of bias, scale and shift."""
    row = tl.program_id(0).to(tl.int64)
    b = row // C
    column = tl.arange(0, BLOCK)
    mask = column < E
    x = _load(y + row * E, column, mask) + _load(bias + b * stride, column, mask)
    x = _with(x, more, kept, kept_stride, b, row * E, column, mask)
    x = tl.where(mask, x - tl.sum(x, 0) / E, 0.0)
    scaled = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    x *= scaled
    _store(xhat + row * E, column, x, mask)
    tl.store(rstd + row, scaled)
    n = x * _load(scale + b * stride, column, mask) + _load(shift + b * stride, column, mask)
    _store(features + row * E, column, n, mask)


@triton.jit
def _write_second(
    head, share, xhat, rstd, scale, e, g2, v2, every, scale_stride, stride, C, E, width, BLOCK: tl.constexpr
):
    """g2, v2 and the last three parts of `every` of one token.  stride: of g2 and v2;  width: of every."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    x = _load(xhat + row * E, column, mask)
    dn = _load(head + row * E, column, mask) * tl.load(share + row).to(tl.float32)
    q = dn * _load(scale + b * scale_stride, column, mask)
    g = tl.where(mask, _standardise_backward(q, x, tl.load(rstd + row), E), 0.0)
    _store(g2 + b * stride + t * E, column, g, mask)
    _store(v2 + b * stride + t * E, column, -g * tl.load(e + 2).to(tl.float32), mask)
    every += row * width + width - 3 * E
    _store(every, column, g, mask)
    _store(every + E, column, dn * x, mask)
    _store(every + 2 * E, column, dn, mask)


@triton.jit
def _write_first(u, more, kept, r, e, v1, every, kept_stride, stride, C, F, width, BLOCK: tl.constexpr):
    """v1 and the first part of `every`, of BLOCK numbers of one token; u grows by `more`."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    x = _load(u + row * F, column, mask)
    if more is not None:
        x = _with(x, more, kept, kept_stride, b, row * F, column, mask).to(u.dtype.element_ty).to(tl.float32)
        _store(u + row * F, column, x, mask)
    g = 2.0 * x * _load(r + row * F, column, mask)
    _store(v1 + b * stride + t * F, column, -g * tl.load(e).to(tl.float32), mask)
    _store(every + row * width, column, g, mask)


@triton.jit
def _first_backward(dv1, dsums, u, r, e, du, dr, dots, dv1_stride, sums_stride, stride, C, F, BLOCK: tl.constexpr):
    """du and dr of one token, and dv1 . g1."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < F
    dv = _load(dv1 + b * dv1_stride + t * F, column, mask)
    u_, r_ = _load(u + row * F, column, mask), _load(r + row * F, column, mask)
    dg = 2.0 * (_load(dsums + b * sums_stride, column, mask) - dv * tl.load(e).to(tl.float32))
    _store(du + b * stride + t * F, column, dg * r_, mask)
    _store(dr + row * F, column, dg * u_, mask)
    tl.store(dots + row, tl.sum(dv * u_ * r_, 0) * 2.0)


@triton.jit
def _second_backward(
    dv2, dsums, used, more, kept, head, share, xhat, rstd, scale, g2, e, dots, every, dhead, dxhat, dstd,
    kept_stride, dv2_stride, sums_stride, scale_stride, stride, C, E, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through `_write_second`, of one token; the gradient of scale goes into `every`."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    part = tl.load(share + row).to(tl.float32)
    inverse = tl.load(rstd + row)
    x = _load(xhat + row * E, column, mask)
    dn = _load(head + row * E, column, mask) * part
    scaled = _load(scale + b * scale_stride, column, mask)
    g = _load(g2 + b * stride + t * E, column, mask)
    dv = _load(dv2 + b * dv2_stride + t * E, column, mask)
    dsums += b * sums_stride
    dgscale, dgshift = _load(dsums + E, column, mask), _load(dsums + 2 * E, column, mask)
    dg = _load(dsums, column, mask) - dv * tl.load(e + 2).to(tl.float32) + _load(used + row * E, column, mask)
    dg = _with(dg, more, kept, kept_stride, b, row * E, column, mask)
    tl.store(dots + row, tl.sum(dv * g, 0))
    q = dn * scaled
    dq = tl.where(mask, _standardise_backward(dg, x, inverse, E), 0.0)
    along = tl.sum(q * x, 0) / E * dg + q * (tl.sum(x * dg, 0) / E)
    _store(dxhat + row * E, column, dgscale * dn - inverse * along, mask)
    tl.store(dstd + row, -inverse * tl.sum(dg * g, 0))
    _store(every + row * width + width - 2 * E, column, dq * dn, mask)
    _store(dhead + row * E, column, (dq * scaled + dgscale * x + dgshift) * part, mask)


@triton.jit
def _output(
    dfeatures, xhat, rstd, scale, dxhat, dstd, dy, every, scale_stride, stride, C, E, width, SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dy of one token, and its last three parts of `every`; SECOND: with what `_second_backward` found."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    d = _load(dfeatures + row * E, column, mask)
    x = _load(xhat + row * E, column, mask)
    dx = d * _load(scale + b * scale_stride, column, mask)
    dscale = d * x
    every += row * width + width - 3 * E
    if SECOND:
        dx += _load(dxhat + row * E, column, mask)
        dscale += _load(every + E, column, mask)
    g = _standardise_backward(dx, x, tl.load(rstd + row), E)
    if SECOND:
        g += x * (tl.load(dstd + row) / E)
    _store(dy + b * stride + t * E, column, g, mask)
    _store(every, column, g, mask)
    _store(every + E, column, dscale, mask)
    _store(every + 2 * E, column, d, mask)


@triton.jit
def _hidden_backward(
    da, more, kept, late, r, dr, dh, every, kept_stride, late_stride, stride, C, F, width, SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dh = 2 r (da + late) + [r > 0] dr, of BLOCK numbers of one token; SECOND: there is dr."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    r_ = _load(r + row * F, column, mask)
    d = _load(da + row * F, column, mask)
    d = _with(d, more, kept, kept_stride, b, row * F, column, mask)
    if late is not None:
        d += _load(late + b * late_stride + t * F, column, mask)
    d *= 2.0 * r_
    if SECOND:
        d += tl.where(r_ > 0, _load(dr + row * F, column, mask), 0.0)
    _store(dh + b * stride + t * F, column, d, mask)
    _store(every + row * width, column, d, mask)


def hidden(h, bias, a):
    """As dual_passes.hidden."""
    B, C, F = h.shape
    r = torch.empty(B, C, F, dtype=h.dtype, device=h.device)
    _hidden[_blocks(h)](h, bias, a, r, h.stride(0), bias.stride(0), a.stride(0), C, F, BLOCK=BLOCK)
    return r


def normal(y, bias, scale, shift, eps, more=None, kept=None):
    """As dual_passes.normal."""
    B, C, E = y.shape
    xhat, features, rstd = torch.empty_like(y), torch.empty_like(y), _row(y)
    _normal[(B * C,)](y, more, kept, bias, scale, shift, xhat, rstd, features, _stride(kept), bias.stride(0), C, E, eps,
                      **_whole_row(E))  # fmt: skip
    return Norm(xhat, rstd), features


def write_second(head, share, norm, scale, e, clip, g2, v2, every):
    """As dual_passes.write_second."""
    B, C, E = head.shape
    _write_second[(B * C,)](head, share, *norm, scale, e, g2, v2, every, scale.stride(0), g2.stride(0), C, E,
                            every.shape[-1], **_whole_row(E))  # fmt: skip


def write_first(u, r, e, clip, v1, every, more=None, kept=None):
    """As dual_passes.write_first."""
    _, C, F = u.shape
    _write_first[_blocks(u)](u, more, kept, r, e, v1, every, _stride(kept), v1.stride(0), C, F, every.shape[-1],
                             BLOCK=BLOCK)  # fmt: skip


def first_backward(dv1, dsums, u, r, e, clip, du, dots):
    """As dual_passes.first_backward."""
    B, C, F = u.shape
    dr = torch.empty_like(u)
    _first_backward[(B * C,)](
        dv1, dsums, u, r, e, du, dr, dots, dv1.stride(0), dsums.stride(0), du.stride(0), C, F, **_whole_row(F)
    )
    return dr


def second_backward(dv2, dsums, used, head, share, norm, scale, g2, e, clip, dots, every, more=None, kept=None):
    """As dual_passes.second_backward."""
    B, C, E = head.shape
    dhead, dxhat, dstd = torch.empty_like(head), torch.empty_like(head), _row(head)
    _second_backward[(B * C,)](
        dv2, dsums, used, more, kept, head, share, *norm, scale, g2, e, dots, every, dhead, dxhat, dstd,
        _stride(kept), dv2.stride(0), dsums.stride(0), scale.stride(0), g2.stride(0), C, E, every.shape[-1],
        **_whole_row(E),
    )  # fmt: skip
    return dhead, dxhat, dstd


def output(dfeatures, norm, scale, second, dy, every):
    """As dual_passes.output."""
    B, C, E = dfeatures.shape
    dxhat, dstd = (norm.xhat, norm.rstd) if second is None else second
    _output[(B * C,)](dfeatures, *norm, scale, dxhat, dstd, dy, every, scale.stride(0), dy.stride(0), C, E,
                      every.shape[-1], SECOND=second is not None, **_whole_row(E))  # fmt: skip


def hidden_backward(da, r, dr, dh, every, more=None, kept=None, late=None):
    """As dual_passes.hidden_backward."""
    _, C, F = r.shape
    _hidden_backward[_blocks(r)](da, more, kept, late, r, r if dr is None else dr, dh, every, _stride(kept),
                                 _stride(late), dh.stride(0), C, F, every.shape[-1], SECOND=dr is not None,
                                 BLOCK=BLOCK)  # fmt: skip


def _stride(x):
    """From row to row of the batch; 0 where there is nothing."""
    return 0 if x is None else x.stride(0)


def _row(y):
    """A float32 number per token, to be filled."""
    return torch.empty(y.shape[:2], device=y.device)


def _blocks(x):
    """The grid of programs that are blocks of a token's numbers."""
    return x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], BLOCK)
