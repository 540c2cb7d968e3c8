"""DPFP and its normalisation in one pass over memory each way: its factors are picked by products.

phi = relu(x A) relu(x B), where every column of A and B holds a single 1 or -1, so that nothing is rounded. The
gradient returns through the same two tables. Gathering would take two loads of one number for each feature.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fastweights.features import EPS

R = 64  # rows, each one token of one head, per program
WIDEST = 128  # inputs of one row that it holds with their gradient


@cache
def table(D, nu, BD, dtype, device):
    """(2, K, BD): row f of each half picks one factor of feature f from x, with its sign.

    Made once for each width, dtype and device. Feature f of DPFP is u_m u_{m - j}, u = [relu(x), relu(-x)], with
    m = f mod 2 D and j = f // 2 D + 1.
    """
    f = torch.arange(2 * D * nu)
    m = f % (2 * D)
    signed = torch.cat([torch.eye(D), -torch.eye(D)])
    picks = torch.zeros(2, len(f), BD)
    picks[0, :, :D], picks[1, :, :D] = signed[m], signed[(m - f // (2 * D) - 1) % (2 * D)]
    with torch.inference_mode(False):
        return picks.to(device, dtype)


@triton.jit
def _picks(table, which, first, W: tl.constexpr, B: tl.constexpr, BD: tl.constexpr):
    """Rows first : first + B of one half of the table [B, BD]."""
    f = first + tl.arange(0, B)
    at = (which * W + f)[:, None] * BD + tl.arange(0, BD)[None, :]
    return tl.load(table + at, mask=(f < W)[:, None], other=0.0)


@triton.jit
def _factors(x, table, first, W: tl.constexpr, B: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """The factors of features first : first + B of rows x [R, BD] before their relu, [R, B] float32."""
    a = tl.dot(x, tl.trans(_picks(table, 0, first, W, B, BD)), input_precision=PRECISION)
    b = tl.dot(x, tl.trans(_picks(table, 1, first, W, B, BD)), input_precision=PRECISION)
    return a, b


@triton.jit
def _scale(total, NORM: tl.constexpr, EPS: tl.constexpr):
    """What normalises features that sum to `total`, themselves or squared."""
    return 1.0 / (total + EPS) if NORM == 1 else 1.0 / tl.sqrt(total + EPS)


@triton.jit
def _slopes(dy, row, rows, first, W: tl.constexpr, B: tl.constexpr):
    """dy[row, first : first + B] [R, B] in float32, zero outside."""
    f = first + tl.arange(0, B)
    inside = (row < rows)[:, None] & (f < W)[None, :]
    return tl.load(dy + row[:, None] * W + f[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rows(x, row, rows, stride, head_stride, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """R rows of x [R, BD], each one token of one head, zero outside."""
    column = tl.arange(0, BD)
    at = row // H * stride + row % H * head_stride
    inside = (row < rows)[:, None] & (column < D)[None, :]
    return tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _forward(x, y, table, rows, stride, head_stride, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
             R: tl.constexpr, B: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
             EPS: tl.constexpr):  # fmt: skip
    """Features of R rows, normalised. One program: R rows, all W features of them, B at a time.

    With a norm it goes over the features twice: once for their sum, and once to write them. They are computed again
    rather than kept: x is on the chip, and two small products cost less than memory.

        x           rows of D numbers as in features.py;  table (2, W, BD);  y (rows, W), written
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x_i = _rows(x, row, rows, stride, head_stride, H, D, BD)
    if NORM:
        # First over all features for what normalises them, then once more to write them.
        total = tl.zeros([R], tl.float32)
        for first in range(0, W, B):
            a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
            phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
            total += tl.sum(phi if NORM == 1 else phi * phi, 1)
        s = _scale(total, NORM, EPS)
    for first in range(0, W, B):
        a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
        phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
        if NORM:
            phi *= s[:, None]
        f = first + tl.arange(0, B)
        inside = (row < rows)[:, None] & (f < W)[None, :]
        tl.store(y + row[:, None] * W + f[None, :], phi.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, dy, dx, table, rows, stride, head_stride, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
              R: tl.constexpr, B: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
              EPS: tl.constexpr):  # fmt: skip
    """dx of R rows from dy. One program: R rows.

    A first pass over the features finds what the norm took out (their sum, and the gradient along them); the second
    sends the gradient of every feature back to its two factors, dx = (g relu(b) [a > 0]) A^T + (g relu(a) [b > 0]) B^T.

        x, table    as in the forward pass;  dy (rows, W);  dx (rows, D), written
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x_i = _rows(x, row, rows, stride, head_stride, H, D, BD)
    dtype = x.dtype.element_ty
    if NORM:
        total = tl.zeros([R], tl.float32)
        along = tl.zeros([R], tl.float32)  # the gradient along the features, which the norm takes out
        for first in range(0, W, B):
            a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
            phi = tl.maximum(a, 0.0) * tl.maximum(b, 0.0)
            total += tl.sum(phi if NORM == 1 else phi * phi, 1)
            along += tl.sum(phi * _slopes(dy, row, rows, first, W, B), 1)
        s = _scale(total, NORM, EPS)
        shrink = along * s * s if NORM == 1 else along * s * s * s
    # dx, added up over the features that each input is a factor of.
    P = tl.zeros([R, BD], tl.float32)
    for first in range(0, W, B):
        a, b = _factors(x_i, table, first, W, B, BD, PRECISION)
        up, other = tl.maximum(a, 0.0), tl.maximum(b, 0.0)
        g = _slopes(dy, row, rows, first, W, B)
        if NORM == 1:
            g = g * s[:, None] - shrink[:, None]
        elif NORM == 2:
            g = g * s[:, None] - shrink[:, None] * up * other
        by_a = tl.where(a > 0, g * other, 0.0).to(dtype)
        by_b = tl.where(b > 0, g * up, 0.0).to(dtype)
        P += tl.dot(by_a, _picks(table, 0, first, W, B, BD), input_precision=PRECISION)
        P += tl.dot(by_b, _picks(table, 1, first, W, B, BD), input_precision=PRECISION)
    column = tl.arange(0, BD)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    tl.store(dx + row[:, None] * D + column[None, :], P.to(dx.dtype.element_ty), mask=inside)


def plan(plan, kernel, x, slots, W, nu, norm, precision):
    """Launch `_forward` or `_backward` in a plan.

    Args:
        kernel: which of the two.
        x: slot of (tokens, H, D), features side by side.
        slots: those that follow it: y, or dy and dx.
        W, nu: width of the features, and NU of the map.
        norm: its number.
        precision: of the products that pick, exact for the dtype of x.
    """
    tokens, H, D = x.shape
    BD = max(16, 1 << (D - 1).bit_length())
    B = 64 if BD <= 64 else 32
    picks = plan.constant(table(D, nu, BD, x.dtype, x.device))
    plan.launch(
        kernel, (-(-tokens * H // R),), (x, *slots, picks), (tokens * H, *x.strides[:2]),
        (H, D, W, R, B, BD, norm, precision, EPS), num_warps=4, num_stages=1)  # fmt: skip
