"""Feature maps of queries and keys, and their normalisation, in one pass over memory each way.

    u = phi(x)      the map: identity, ReLU, SiLU, ELU+1, elementwise; or DPFP, which widens x from D to W features
    y = s u         the norm: s = 1 / (sum |u| + eps), or 1 / sqrt(sum u^2 + eps), or 1

A row is one token of one head. Nothing but x is saved: the backward pass computes the features again. Two kinds of
callers: `fast_weight`, whose plans map q and k first (`plan_forward`, `plan_backward`), and `feature_map` by itself,
which is a registered operator with a plan of its own. The kernels for DPFP are in dpfp.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.core import Spec
from fastweights.features import EPS, FeatureMap
from fastweights.torch.kernels import dpfp
from fastweights.torch.kernels.plan import Plan, Slot, aligned, keep
from fastweights.torch.kernels.tiles import exact_products
from fastweights.torch.methods import map_plainly, register_typed

KINDS = {"identity": 0, "relu": 1, "silu": 2, "elu+1": 3, "dpfp": 4}
NORMS = {"none": 0, "sum": 1, "l2": 2}
WIDEST = 4096  # most features of one row, all of which a program holds at once


@triton.jit
def _dpfp_factor(x, row_offset, m, mask, D: tl.constexpr):
    """u_m of u = [relu(x), relu(-x)], for m in [0, 2 D), of the row of x at row_offset."""
    value = tl.load(x + row_offset + m % D, mask=mask, other=0.0).to(tl.float32)
    return tl.maximum(tl.where(m < D, value, -value), 0.0)


@triton.jit
def activate(value, mask, KIND: tl.constexpr):
    """An elementwise feature map of `value`, a tile of float32.

    KIND: 0 identity, 1 ReLU, 2 SiLU, 3 ELU+1.  mask: False for features beyond the row's width, which ELU+1 would
    otherwise turn into ones.
    """
    if KIND == 1:
        value = tl.maximum(value, 0.0)
    elif KIND == 2:
        value = value * tl.sigmoid(value)
    elif KIND == 3:
        value = tl.where(mask, tl.where(value > 0, value + 1, tl.exp(tl.minimum(value, 0.0))), 0.0)
    return value


@triton.jit
def activate_backward(dphi, value, phi, KIND: tl.constexpr):
    """The gradient of `value` from dphi, that of its features phi = activate(value)."""
    if KIND == 1:
        dphi = tl.where(value > 0, dphi, 0.0)
    elif KIND == 2:
        sigmoid = tl.sigmoid(value)
        dphi *= sigmoid * (1 + value * (1 - sigmoid))
    elif KIND == 3:
        dphi *= tl.where(value > 0, 1.0, phi)
    return dphi


@triton.jit
def norm_factor(phi, NORM: tl.constexpr, EPS: tl.constexpr):
    """What each row of features phi [R, W] is multiplied by, [R].

    NORM 1: 1 / sum |phi|;  2: 1 / sqrt(sum phi^2).  EPS keeps rows of zeros finite.
    """
    if NORM == 1:
        return 1.0 / (tl.sum(tl.abs(phi), 1) + EPS)
    else:
        return 1.0 / tl.sqrt(tl.sum(phi * phi, 1) + EPS)


@triton.jit
def normalise_backward(dy, phi, NORM: tl.constexpr, EPS: tl.constexpr):
    """The gradient of features phi [R, W] from dy, that of their normalised rows."""
    factor = norm_factor(phi, NORM, EPS)[:, None]
    # Features that all grow by one factor leave their normalised row as it is: that part of dy is taken out.
    taken_out = factor * factor * tl.sum(dy * phi, 1)[:, None]
    slope_of_norm = factor * phi if NORM == 2 else tl.where(phi > 0, 1.0, tl.where(phi < 0, -1.0, 0.0))
    return factor * dy - taken_out * slope_of_norm


@triton.jit
def load_features(x, row_offset, feature, mask, D: tl.constexpr, KIND: tl.constexpr):
    """Features, by their numbers, of the row of x at row_offset: float32, not normalised, zero where masked out.

    KIND: 0 identity, 1 ReLU, 2 SiLU, 3 ELU+1, 4 DPFP.
    """
    if KIND == 4:
        # Feature f of DPFP is u_m u_{m - j}, with m = f mod 2 D and j = f // 2 D + 1.
        m = feature % (2 * D)
        m_less_j = (m - feature // (2 * D) - 1 + 2 * D) % (2 * D)
        return _dpfp_factor(x, row_offset, m, mask, D) * _dpfp_factor(x, row_offset, m_less_j, mask, D)
    else:
        return activate(tl.load(x + row_offset + feature, mask=mask, other=0.0).to(tl.float32), mask, KIND)


@triton.jit
def _map_forward(x, y, rows, token_stride, head_stride,
                 H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr,
                 KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """y = phi(x), normalised. One program: R rows, all features of each, so that their sum never leaves the program.

    x            rows of D numbers side by side, at row // H * token_stride + row % H * head_stride
    y            (rows, W), written
    BW           W rounded up to a power of two
    KIND, NORM   numbers of `KINDS` and `NORMS`
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    feature = tl.arange(0, BW)
    mask = (row < rows)[:, None] & (feature < W)[None, :]
    row_offset = row // H * token_stride + row % H * head_stride
    phi = load_features(x, row_offset[:, None], feature[None, :], mask, D, KIND)
    if NORM:
        phi *= norm_factor(phi, NORM, EPS)[:, None]
    tl.store(y + row[:, None] * W + feature[None, :], phi.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _map_backward(x, dy, dx, rows, token_stride, head_stride,
                  H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr, KIND: tl.constexpr,
                  NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """dx of a map other than DPFP. One program: R rows, all features of each, which are computed again from x.

    x            as in the forward pass;  dy (rows, W);  dx (rows, W), written
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    feature = tl.arange(0, BW)
    mask = (row < rows)[:, None] & (feature < W)[None, :]
    row_offset = (row // H * token_stride + row % H * head_stride)[:, None]
    phi = load_features(x, row_offset, feature[None, :], mask, W, KIND)
    # g goes from dy to the gradient of phi, and on to dx.
    g = tl.load(dy + row[:, None] * W + feature[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        g = normalise_backward(g, phi, NORM, EPS)
    g = activate_backward(g, tl.load(x + row_offset + feature[None, :], mask=mask, other=0.0).to(tl.float32), phi, KIND)
    tl.store(dx + row[:, None] * W + feature[None, :], g.to(dx.dtype.element_ty), mask=mask)


def takes(phi: FeatureMap, norm: str, x: Tensor) -> bool:
    """Whether these kernels compute this map and norm of x (..., d)."""
    d = x.shape[-1] if x.dim() else 0
    fits = d and phi.kind in KINDS and phi.width(d) <= WIDEST and (phi.kind != "dpfp" or d <= dpfp.WIDEST)
    return bool(fits) and norm in NORMS and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def feature_map(x: Tensor, phi: FeatureMap, norm: str) -> Tensor:
    """phi(x) (..., W), normalised, of x (..., d), with its gradient; `takes` says for which maps and inputs."""
    return Features.apply(x, phi.kind, phi.size, norm)


def as_rows(x: Tensor) -> Tensor:
    """x (..., d) as (tokens, heads, d), aligned and with the d numbers of a row side by side; a view where possible."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x.flatten(0, -3) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
    return x.clone() if x.data_ptr() % 16 else x


def _row_blocks(W):
    """(rows per program, W rounded up to a power of two) for rows of W features."""
    BW = max(16, 1 << (W - 1).bit_length())
    return max(1, 4096 // BW), BW


def _selection_precision(x):
    """PRECISION of products that select numbers of x (dpfp.py), so that these come out as they are."""
    return exact_products() if x.dtype == torch.float32 else "tf32"


def plan_forward(plan: Plan, x: Slot, shape: tuple[int, ...], phi: FeatureMap, norm: str) -> Slot:
    """Plan phi(x), normalised: a slot (*shape[:-1], W).

    Args:
        plan: the plan to add the launch to.
        x: slot (tokens, H, D), as `as_rows` gives it.
        shape: of x before that.
        phi, norm: the map and the norm.
    """
    tokens, H, D = x.shape
    W = phi.width(D)
    y = plan.empty((*shape[:-1], W), x.dtype)
    if not y.numel():
        return y
    if phi.kind == "dpfp":
        dpfp.plan_launch(plan, dpfp._dpfp_forward, x, (y,), W, phi.size, NORMS[norm], _selection_precision(x))
        return y
    R, BW = _row_blocks(W)
    plan.launch(
        _map_forward, (-(-tokens * H // R),), (x, y), (tokens * H, *x.strides[:2]),
        (H, D, W, R, BW, KINDS[phi.kind], NORMS[norm], EPS))  # fmt: skip
    return y


def plan_backward(plan: Plan, dy: Slot, x: Slot, shape: tuple[int, ...], phi: FeatureMap, norm: str) -> Slot:
    """Plan the gradient of x: a slot of `shape`, from dy (*shape[:-1], W).  Arguments as for `plan_forward`."""
    tokens, H, D = x.shape
    W = phi.width(D)
    dx = plan.empty(shape, x.dtype)
    if not dx.numel():
        return dx
    if phi.kind == "dpfp":
        dpfp.plan_launch(plan, dpfp._dpfp_backward, x, (dy, dx), W, phi.size, NORMS[norm], _selection_precision(x))
        return dx
    R, BW = _row_blocks(W)
    plan.launch(
        _map_backward, (-(-tokens * H // R),), (x, dy, dx), (tokens * H, *x.strides[:2]),
        (H, W, R, BW, KINDS[phi.kind], NORMS[norm], EPS))  # fmt: skip
    return dx


_plans: dict[tuple, Plan] = {}


def features(x: Tensor, kind: str, size: int, norm: str) -> Tensor:
    """phi(x), normalised: the operator fastweights::features.  size: nu of DPFP, 0 for other maps."""
    shape, x = x.shape, as_rows(x)
    key = ("forward", shape, x.dtype, x.device, x.stride(), kind, size, norm)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [x])
        plan.results = plan_forward(plan, plan.inputs[0], tuple(shape), FeatureMap(kind, size), norm).place
        keep(_plans, key, plan)
    return plan.run(x)[plan.results]


def features_fake(x, kind, size, norm):
    """An empty tensor of the features' shape, for compilers."""
    return x.new_empty(*x.shape[:-1], FeatureMap(kind, size).width(x.shape[-1]))


def features_backward(dy: Tensor, x: Tensor, kind: str, size: int, norm: str) -> Tensor:
    """The gradient of x from that of its features: the operator fastweights::features_backward."""
    shape, x, dy = x.shape, as_rows(x), aligned(dy)
    key = ("backward", shape, x.dtype, x.device, x.stride(), kind, size, norm)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [dy, x])
        plan.results = plan_backward(
            plan, plan.inputs[0], plan.inputs[1], tuple(shape), FeatureMap(kind, size), norm
        ).place
        keep(_plans, key, plan)
    return plan.run(dy, x)[plan.results]


def features_backward_fake(dy, x, kind, size, norm):
    """An empty tensor of the shape of x, for compilers."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


features_op = register_typed(features, features_fake)
features_backward_op = register_typed(features_backward, features_backward_fake)


class Features(torch.autograd.Function):
    """`features_op` with its gradient. It saves x alone; second derivatives go through PyTorch's own operators."""

    @staticmethod
    def forward(x, kind, size, norm):
        """The features, by the operator."""
        return features_op(x, kind, size, norm)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep x, and the kind, size and norm of the map."""
        x, *ctx.map_and_norm = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy):
        """The gradient of x by the operator; by PyTorch's own operators where a second derivative is asked for."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # second derivatives
            with torch.enable_grad():
                watched = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                y = map_plainly(watched, _spec(*ctx.map_and_norm))
                (dx,) = torch.autograd.grad(y, watched, dy, create_graph=True)
            return dx, None, None, None
        return features_backward_op(dy, x, *ctx.map_and_norm), None, None, None

    @staticmethod
    def vmap(info, in_dims, x, *map_and_norm):
        """A mapped axis is one more axis before the last, and kernels take any number of those."""
        return Features.apply(x.movedim(in_dims[0], 0), *map_and_norm), 0


def _spec(kind, size, norm):
    """The map and norm as a Spec."""
    return Spec(features=FeatureMap(kind, size), norm=norm)
