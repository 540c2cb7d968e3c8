"""The feature map DPFP and its normalisation, in one pass over memory each way.

Every feature of DPFP is a product of two factors, each a number of relu(x) or relu(-x). Here

    phi = relu(x A) relu(x B)

where every column of A and of B selects one number of x: it holds a single 1 or -1, so that nothing is rounded. The
gradient returns through the same two matrices. To gather the numbers instead would take two loads for each feature.
features.py plans these kernels; rows are tokens of one head, as there.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fastweights.features import EPS

R = 64  # rows of a program
WIDEST = 128  # most numbers D of one row of x, which a program holds with their gradient


@cache
def selection_table(D, nu, BD, dtype, device):
    """A and B, transposed, as one tensor (2, W, BD): row f of each selects a factor of feature f from x, with its sign.

    Feature f of DPFP is u_m u_{m - j}, u = [relu(x), relu(-x)], with m = f mod 2 D and j = f // 2 D + 1. Made once for
    each D, nu, dtype and device; BD is D rounded up.
    """
    feature = torch.arange(2 * D * nu)
    m = feature % (2 * D)
    halves = torch.cat([torch.eye(D), -torch.eye(D)])
    selections = torch.zeros(2, len(feature), BD)
    selections[0, :, :D], selections[1, :, :D] = halves[m], halves[(m - feature // (2 * D) - 1) % (2 * D)]
    with torch.inference_mode(False):
        return selections.to(device, dtype)


@triton.jit
def _load_selection(table, factor, first, W: tl.constexpr, B: tl.constexpr, BD: tl.constexpr):
    """Rows first : first + B of A (factor 0) or B (factor 1), transposed: a tile [B, BD] of the table."""
    feature = first + tl.arange(0, B)
    offsets = (factor * W + feature)[:, None] * BD + tl.arange(0, BD)[None, :]
    return tl.load(table + offsets, mask=(feature < W)[:, None], other=0.0)


@triton.jit
def _factors(x, table, first, W: tl.constexpr, B: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """The two factors of features first : first + B before their ReLU, [R, B] in float32 each, of rows x [R, BD]."""
    a = tl.dot(x, tl.trans(_load_selection(table, 0, first, W, B, BD)), input_precision=PRECISION)
    b = tl.dot(x, tl.trans(_load_selection(table, 1, first, W, B, BD)), input_precision=PRECISION)
    return a, b


@triton.jit
def _norm_factor(total, NORM: tl.constexpr, EPS: tl.constexpr):
    """What features are multiplied by to normalise them.  total: their sum (NORM 1), or that of their squares (2)."""
    return 1.0 / (total + EPS) if NORM == 1 else 1.0 / tl.sqrt(total + EPS)


@triton.jit
def _load_dy(dy, row, rows, first, W: tl.constexpr, B: tl.constexpr):
    """dy[row, first : first + B] as a tile [R, B] in float32, zero outside."""
    feature = first + tl.arange(0, B)
    mask = (row < rows)[:, None] & (feature < W)[None, :]
    return tl.load(dy + row[:, None] * W + feature[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_rows(x, row, rows, token_stride, head_stride, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of x as a tile [R, BD], zero outside."""
    column = tl.arange(0, BD)
    offsets = row // H * token_stride + row % H * head_stride
    mask = (row < rows)[:, None] & (column < D)[None, :]
    return tl.load(x + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _dpfp_forward(x, y, table, rows, token_stride, head_stride,
                  H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BD: tl.constexpr,
                  NORM: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """y = phi(x), normalised. One program: R rows, B of their W features at a time.

    With a norm it goes over the features twice: for their sum, and to write them. They are computed again rather than
    kept: x is on the chip, and two small products cost less than memory.

        x            rows of D numbers, as in features.py;  y (rows, W), written
        table        (2, W, BD), of `selection_table`
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x_i = _load_rows(x, row, rows, token_stride, head_stride, H, D, BD)
    if NORM:
        total = tl.zeros([R], tl.float32)
        for first in range(0, W, B):
            a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
            phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
            total += tl.sum(phi if NORM == 1 else phi * phi, 1)
        s = _norm_factor(total, NORM, EPS)
    for first in range(0, W, B):
        a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
        phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
        if NORM:
            phi *= s[:, None]
        feature = first + tl.arange(0, B)
        mask = (row < rows)[:, None] & (feature < W)[None, :]
        tl.store(y + row[:, None] * W + feature[None, :], phi.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _dpfp_backward(x, dy, dx, table, rows, token_stride, head_stride,
                   H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
                   BD: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """dx from dy. One program: R rows.

    A first pass over the features, where there is a norm, finds their sum and that of dy phi. The second sends the
    gradient dphi of every feature back to its two factors,

        dx = (dphi relu(b) [a > 0]) A^T + (dphi relu(a) [b > 0]) B^T        a = x A, b = x B

        x, table     as in the forward pass;  dy (rows, W);  dx (rows, D), written
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x_i = _load_rows(x, row, rows, token_stride, head_stride, H, D, BD)
    dtype = x.dtype.element_ty
    if NORM:
        total = tl.zeros([R], tl.float32)
        dy_dot_phi = tl.zeros([R], tl.float32)
        for first in range(0, W, B):
            a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
            phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
            total += tl.sum(phi if NORM == 1 else phi * phi, 1)
            dy_dot_phi += tl.sum(phi * _load_dy(dy, row, rows, first, W, B), 1)
        s = _norm_factor(total, NORM, EPS)
        taken_out = dy_dot_phi * s * s if NORM == 1 else dy_dot_phi * s * s * s
    dx_i = tl.zeros([R, BD], tl.float32)
    for first in range(0, W, B):
        a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
        relu_a, relu_b = tl.maximum(a, 0.0), tl.maximum(b, 0.0)
        dphi = _load_dy(dy, row, rows, first, W, B)
        if NORM == 1:
            dphi = dphi * s[:, None] - taken_out[:, None]
        elif NORM == 2:
            dphi = dphi * s[:, None] - taken_out[:, None] * relu_a * relu_b
        da = tl.where(a > 0, dphi * relu_b, 0.0).to(dtype)
        db = tl.where(b > 0, dphi * relu_a, 0.0).to(dtype)
        dx_i += tl.dot(da, _load_selection(table, 0, first, W, B, BD), input_precision=PRECISION)
        dx_i += tl.dot(db, _load_selection(table, 1, first, W, B, BD), input_precision=PRECISION)
    column = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    tl.store(dx + row[:, None] * D + column[None, :], dx_i.to(dx.dtype.element_ty), mask=mask)


def plan_launch(plan, kernel, x, slots, W, nu, norm, precision):
    """Add a launch of `_dpfp_forward` or `_dpfp_backward` to a plan.

    Args:
        plan: the plan.
        kernel: which of the two.
        x: slot (tokens, H, D), as `features.as_rows` gives it.
        slots: of the tensors that the kernel takes after x: (y,), or (dy, dx).
        W, nu: how many features a row has, and nu of the map.
        norm: number of the norm.
        precision: of the products that select, exact for the dtype of x.
    """
    tokens, H, D = x.shape
    BD = max(16, 1 << (D - 1).bit_length())
    B = 64 if BD <= 64 else 32
    table = plan.constant(selection_table(D, nu, BD, x.dtype, x.device))
    plan.launch(
        kernel, (-(-tokens * H // R),), (x, *slots, table), (tokens * H, *x.strides[:2]),
        (H, D, W, R, B, BD, norm, precision, EPS), num_warps=4, num_stages=1)  # fmt: skip
