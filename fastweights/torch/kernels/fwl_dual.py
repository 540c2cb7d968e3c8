"""The functions of learning/dual_passes.py as Triton kernels, for the training loss of dual.py.

Below are the kernels, then the functions that launch them: these have the names, arguments and results of
dual_passes.py, which says what they are. (Those that sum over tokens or chunks are in fwl_dual_sums.py.) Each kernel
goes through memory once, in float32. One program is one token, whose vector it holds whole, or BLOCK numbers of one
where each number is computed by itself.

Tokens of a chunk are (B, C, width): token `row` of the B C tokens is token t of row b of the batch. Tensors that are
part of a longer one have a stride from row to row of the batch, named after the tensor; so have vectors (B, 1, width),
one per row. `width` is F + 3 E, that of the vector gradients. `gathered`, gathered_factor: as in dual_passes.py; None
for nothing. Gradients are not clipped here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.kernels.fwl import _load, _standardise_backward, _store, _whole_row
from fastweights.torch.kernels.fwl_dual_sums import (  # noqa: F401
    mask_scores,
    multiply_chunks,
    sum_vectors,
    sum_vectors_backward,
)

BLOCK = 1024


class Norm(NamedTuple):
    """A layer norm without scale and shift: its output (B, C, E), and 1 / std (B, C) of every token."""

    xhat: Tensor
    rstd: Tensor


@triton.jit
def _with_gathered(x, gathered, factor, factor_stride, b, offset, column, mask):
    """x + gathered factor, of one token of row b whose numbers begin at `offset`; x itself if gathered is None."""
    if gathered is not None:
        x += _load(gathered + offset, column, mask) * tl.load(factor + b * factor_stride).to(tl.float32)
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
def _layer_norm(
    y, gathered, factor, bias, scale, shift, xhat, rstd, features, factor_stride, stride, C, E, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """xhat and 1 / std of one token's y + bias, and its features.  stride: of bias, scale and shift."""
    row = tl.program_id(0).to(tl.int64)
    b = row // C
    column = tl.arange(0, BLOCK)
    mask = column < E
    x = _load(y + row * E, column, mask) + _load(bias + b * stride, column, mask)
    x = _with_gathered(x, gathered, factor, factor_stride, b, row * E, column, mask)
    x = tl.where(mask, x - tl.sum(x, 0) / E, 0.0)
    inverse_std = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    x *= inverse_std
    _store(xhat + row * E, column, x, mask)
    tl.store(rstd + row, inverse_std)
    n = x * _load(scale + b * stride, column, mask) + _load(shift + b * stride, column, mask)
    _store(features + row * E, column, n, mask)


@triton.jit
def _write_second(
    gn, share, xhat, rstd, scale, e, g2, v2, vector_gradients, scale_stride, stride, C, E, width, BLOCK: tl.constexpr
):
    """g2, v2 and the vector gradients of bias2, scale and shift of one token.  stride: of g2 and v2."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    x = _load(xhat + row * E, column, mask)
    g3 = _load(gn + row * E, column, mask) * tl.load(share + row).to(tl.float32)
    gxhat = g3 * _load(scale + b * scale_stride, column, mask)
    g = tl.where(mask, _standardise_backward(gxhat, x, tl.load(rstd + row), E), 0.0)
    _store(g2 + b * stride + t * E, column, g, mask)
    _store(v2 + b * stride + t * E, column, -g * tl.load(e + 2).to(tl.float32), mask)
    vector_gradients += row * width + width - 3 * E
    _store(vector_gradients, column, g, mask)
    _store(vector_gradients + E, column, g3 * x, mask)
    _store(vector_gradients + 2 * E, column, g3, mask)


@triton.jit
def _write_first(
    u, gathered, factor, r, e, v1, vector_gradients, factor_stride, stride, C, F, width, BLOCK: tl.constexpr
):
    """v1 and the vector gradients of bias1, of BLOCK numbers of one token; what was gathered is added to u in place.

    stride: of v1.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    x = _load(u + row * F, column, mask)
    if gathered is not None:
        x = _with_gathered(x, gathered, factor, factor_stride, b, row * F, column, mask)
        x = x.to(u.dtype.element_ty).to(tl.float32)
        _store(u + row * F, column, x, mask)
    g1 = 2.0 * x * _load(r + row * F, column, mask)
    _store(v1 + b * stride + t * F, column, -g1 * tl.load(e).to(tl.float32), mask)
    _store(vector_gradients + row * width, column, g1, mask)


@triton.jit
def _write_first_backward(
    dv1, dsums, u, r, e, du, dr, dot_products, dv1_stride, sums_stride, stride, C, F, BLOCK: tl.constexpr
):
    """du and dr of one token, and dv1 . g1.  sums_stride: of dsums;  stride: of du."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < F
    dv = _load(dv1 + b * dv1_stride + t * F, column, mask)
    u_, r_ = _load(u + row * F, column, mask), _load(r + row * F, column, mask)
    dg = 2.0 * (_load(dsums + b * sums_stride, column, mask) - dv * tl.load(e).to(tl.float32))
    _store(du + b * stride + t * F, column, dg * r_, mask)
    _store(dr + row * F, column, dg * u_, mask)
    tl.store(dot_products + row, tl.sum(dv * u_ * r_, 0) * 2.0)


@triton.jit
def _write_second_backward(
    dv2, dsums, dg2, gathered, factor, gn, share, xhat, rstd, scale, g2, e, dot_products, vector_gradients, dgn, dxhat,
    dstd, factor_stride, dv2_stride, sums_stride, scale_stride, stride, C, E, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through `_write_second`, of one token: dgn, dxhat, dstd, dv2 . g2, and the vector gradient of scale.

    sums_stride: of dsums;  stride: of g2.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    share_of_token = tl.load(share + row).to(tl.float32)
    inverse_std = tl.load(rstd + row)
    x = _load(xhat + row * E, column, mask)
    g3 = _load(gn + row * E, column, mask) * share_of_token
    s = _load(scale + b * scale_stride, column, mask)
    g = _load(g2 + b * stride + t * E, column, mask)
    dv = _load(dv2 + b * dv2_stride + t * E, column, mask)
    dsums += b * sums_stride
    dgscale, dgshift = _load(dsums + E, column, mask), _load(dsums + 2 * E, column, mask)
    dg = _load(dsums, column, mask) - dv * tl.load(e + 2).to(tl.float32) + _load(dg2 + row * E, column, mask)
    dg = _with_gathered(dg, gathered, factor, factor_stride, b, row * E, column, mask)
    tl.store(dot_products + row, tl.sum(dv * g, 0))
    gxhat = g3 * s
    dgxhat = tl.where(mask, _standardise_backward(dg, x, inverse_std, E), 0.0)
    along = tl.sum(gxhat * x, 0) / E * dg + gxhat * (tl.sum(x * dg, 0) / E)
    _store(dxhat + row * E, column, dgscale * g3 - inverse_std * along, mask)
    tl.store(dstd + row, -inverse_std * tl.sum(dg * g, 0))
    _store(vector_gradients + row * width + width - 2 * E, column, dgxhat * g3, mask)
    _store(dgn + row * E, column, (dgxhat * s + dgscale * x + dgshift) * share_of_token, mask)


@triton.jit
def _layer_norm_backward(
    dfeatures, xhat, rstd, scale, dxhat, dstd, dy, vector_gradients, scale_stride, stride, C, E, width,
    FROM_WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dy of one token, and its vector gradients of bias2, scale and shift.  stride: of dy.

    FROM_WRITES: with dxhat, dstd and the vector gradient of scale that `_write_second_backward` wrote.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.arange(0, BLOCK)
    mask = column < E
    d = _load(dfeatures + row * E, column, mask)
    x = _load(xhat + row * E, column, mask)
    dx = d * _load(scale + b * scale_stride, column, mask)
    dscale = d * x
    vector_gradients += row * width + width - 3 * E
    if FROM_WRITES:
        dx += _load(dxhat + row * E, column, mask)
        dscale += _load(vector_gradients + E, column, mask)
    g = _standardise_backward(dx, x, tl.load(rstd + row), E)
    if FROM_WRITES:
        g += x * (tl.load(dstd + row) / E)
    _store(dy + b * stride + t * E, column, g, mask)
    _store(vector_gradients, column, g, mask)
    _store(vector_gradients + E, column, dscale, mask)
    _store(vector_gradients + 2 * E, column, d, mask)


@triton.jit
def _hidden_backward(
    da, gathered, factor, da_later, r, dr, dh, vector_gradients, factor_stride, later_stride, stride, C, F, width,
    HAS_DR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dh = 2 r (da + da_later) + [r > 0] dr, of BLOCK numbers of one token, and its vector gradients of bias1.

    later_stride: of da_later, which may be None;  stride: of dh;  HAS_DR: whether dr is added.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t = row // C, row % C
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    r_ = _load(r + row * F, column, mask)
    d = _load(da + row * F, column, mask)
    d = _with_gathered(d, gathered, factor, factor_stride, b, row * F, column, mask)
    if da_later is not None:
        d += _load(da_later + b * later_stride + t * F, column, mask)
    d *= 2.0 * r_
    if HAS_DR:
        d += tl.where(r_ > 0, _load(dr + row * F, column, mask), 0.0)
    _store(dh + b * stride + t * F, column, d, mask)
    _store(vector_gradients + row * width, column, d, mask)


def hidden(h, bias, a):
    """As dual_passes.hidden."""
    B, C, F = h.shape
    r = torch.empty(B, C, F, dtype=h.dtype, device=h.device)
    _hidden[_grid_of_blocks(h)](h, bias, a, r, h.stride(0), bias.stride(0), a.stride(0), C, F, BLOCK=BLOCK)
    return r


def layer_norm(y, bias, scale, shift, eps, gathered=None, gathered_factor=None):
    """As dual_passes.layer_norm."""
    B, C, E = y.shape
    xhat, features, rstd = torch.empty_like(y), torch.empty_like(y), _empty_per_token(y)
    _layer_norm[(B * C,)](y, gathered, gathered_factor, bias, scale, shift, xhat, rstd, features,
                          _stride(gathered_factor), bias.stride(0), C, E, eps, **_whole_row(E))  # fmt: skip
    return Norm(xhat, rstd), features


def write_second(gn, share, norm, scale, e, clip, g2, v2, vector_gradients):
    """As dual_passes.write_second."""
    B, C, E = gn.shape
    _write_second[(B * C,)](gn, share, *norm, scale, e, g2, v2, vector_gradients, scale.stride(0), g2.stride(0), C, E,
                            vector_gradients.shape[-1], **_whole_row(E))  # fmt: skip


def write_first(u, r, e, clip, v1, vector_gradients, gathered=None, gathered_factor=None):
    """As dual_passes.write_first."""
    _, C, F = u.shape
    _write_first[_grid_of_blocks(u)](u, gathered, gathered_factor, r, e, v1, vector_gradients, _stride(gathered_factor),
                                     v1.stride(0), C, F, vector_gradients.shape[-1], BLOCK=BLOCK)  # fmt: skip


def write_first_backward(dv1, dsums, u, r, e, clip, du, dot_products):
    """As dual_passes.write_first_backward."""
    B, C, F = u.shape
    dr = torch.empty_like(u)
    _write_first_backward[(B * C,)](
        dv1, dsums, u, r, e, du, dr, dot_products, dv1.stride(0), dsums.stride(0), du.stride(0), C, F, **_whole_row(F)
    )
    return dr


def write_second_backward(
    dv2, dsums, dg2, gn, share, norm, scale, g2, e, clip, dot_products, vector_gradients, gathered=None,
    gathered_factor=None,
):  # fmt: skip
    """As dual_passes.write_second_backward."""
    B, C, E = gn.shape
    dgn, dxhat, dstd = torch.empty_like(gn), torch.empty_like(gn), _empty_per_token(gn)
    _write_second_backward[(B * C,)](
        dv2, dsums, dg2, gathered, gathered_factor, gn, share, *norm, scale, g2, e, dot_products, vector_gradients, dgn,
        dxhat, dstd, _stride(gathered_factor), dv2.stride(0), dsums.stride(0), scale.stride(0), g2.stride(0), C, E,
        vector_gradients.shape[-1], **_whole_row(E),
    )  # fmt: skip
    return dgn, dxhat, dstd


def layer_norm_backward(dfeatures, norm, scale, from_writes, dy, vector_gradients):
    """As dual_passes.layer_norm_backward."""
    B, C, E = dfeatures.shape
    dxhat, dstd = (norm.xhat, norm.rstd) if from_writes is None else from_writes  # the former are not read
    _layer_norm_backward[(B * C,)](
        dfeatures, *norm, scale, dxhat, dstd, dy, vector_gradients, scale.stride(0), dy.stride(0), C, E,
        vector_gradients.shape[-1], FROM_WRITES=from_writes is not None, **_whole_row(E),
    )  # fmt: skip


def hidden_backward(da, r, dr, dh, vector_gradients, gathered=None, gathered_factor=None, da_later=None):
    """As dual_passes.hidden_backward."""
    _, C, F = r.shape
    _hidden_backward[_grid_of_blocks(r)](
        da, gathered, gathered_factor, da_later, r, r if dr is None else dr, dh, vector_gradients,
        _stride(gathered_factor), _stride(da_later), dh.stride(0), C, F, vector_gradients.shape[-1],
        HAS_DR=dr is not None, BLOCK=BLOCK,
    )  # fmt: skip


def _stride(x):
    """The distance from row to row of the batch; 0 for None."""
    return 0 if x is None else x.stride(0)


def _empty_per_token(y):
    """An uninitialised float32 number for each token of y (B, C, width)."""
    return torch.empty(y.shape[:2], device=y.device)


def _grid_of_blocks(x):
    """A grid of programs for x (B, C, width), each of which takes BLOCK numbers of one token."""
    return x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], BLOCK)
