"""Feature maps and their normalisation in one pass over memory, forward and backward.

A row is one token of one head. Nothing but the input is saved: the backward computes the features again.
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
WIDEST = 4096  # features of one token that a program holds at once


@triton.jit
def _half(x, at, m, inside, D: tl.constexpr):
    """u_m of u = [relu(x), relu(-x)], for m in [0, 2 D)."""
    value = tl.load(x + at + m % D, mask=inside, other=0.0).to(tl.float32)
    return tl.maximum(tl.where(m < D, value, -value), 0.0)


@triton.jit
def activate(value, inside, KIND: tl.constexpr):
    """An elementwise feature map of numbers, zero outside.

    KIND        0 identity, 1 ReLU, 2 SiLU, 3 ELU+1; `inside` is False for features beyond the row's width, which
    ELU+1
                would otherwise turn into ones
    """
    if KIND == 1:
        value = tl.maximum(value, 0.0)
    elif KIND == 2:
        value = value * tl.sigmoid(value)
    elif KIND == 3:
        value = tl.where(inside, tl.where(value > 0, value + 1, tl.exp(tl.minimum(value, 0.0))), 0.0)
    return value


@triton.jit
def slope(g, value, phi, KIND: tl.constexpr):
    """The gradient of `value` from that of its features phi = activate(value)."""
    if KIND == 1:
        g = tl.where(value > 0, g, 0.0)
    elif KIND == 2:
        share = tl.sigmoid(value)
        g *= share * (1 + value * (1 - share))
    elif KIND == 3:
        g *= tl.where(value > 0, 1.0, phi)
    return g


@triton.jit
def scale(phi, NORM: tl.constexpr, EPS: tl.constexpr):
    """What a row [R, W] of features is multiplied by.

    1 / sum |phi| for the sum norm, 1 / sqrt(sum phi^2) for the L2 norm; EPS keeps rows of zeros finite.
    """
    if NORM == 1:
        return 1.0 / (tl.sum(tl.abs(phi), 1) + EPS)
    else:
        return 1.0 / tl.sqrt(tl.sum(phi * phi, 1) + EPS)


@triton.jit
def normalised_slope(g, phi, NORM: tl.constexpr, EPS: tl.constexpr):
    """The gradient of phi [R, W] from that of its normalised rows."""
    s = scale(phi, NORM, EPS)[:, None]
    # A norm does not see a change along the features: that part of the gradient goes.
    e = s * s * tl.sum(g * phi, 1)[:, None]
    along = s * phi if NORM == 2 else tl.where(phi > 0, 1.0, tl.where(phi < 0, -1.0, 0.0))
    return s * g - e * along


@triton.jit
def _phi(x, at, f, inside, D: tl.constexpr, KIND: tl.constexpr):
    """Features f of the row at address `at`, before normalisation, float32, zero where not `inside`.

    KIND: 0 identity, 1 relu, 2 silu, 3 elu+1, 4 DPFP.
    """
    if KIND == 4:
        # DPFP: feature f is u_m times u rolled by f // (2 D) + 1.
        m = f % (2 * D)
        return _half(x, at, m, inside, D) * _half(x, at, (m - f // (2 * D) - 1 + 2 * D) % (2 * D), inside, D)
    else:
        return activate(tl.load(x + at + f, mask=inside, other=0.0).to(tl.float32), inside, KIND)


@triton.jit
def _forward(x, y, rows, stride, head_stride, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
             R: tl.constexpr, BW: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """y = phi(x), normalised, for R rows, all features of a row in one program.

    A row is one token of one head; the sum that normalises it never leaves the program.

        x           rows of D numbers at row // H * stride + row % H * head_stride;  y (rows, W), written
        R, BW       rows of a program, and features rounded up to a power of two
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    f = tl.arange(0, BW)
    inside = (row < rows)[:, None] & (f < W)[None, :]
    at = row // H * stride + row % H * head_stride
    phi = _phi(x, at[:, None], f[None, :], inside, D, KIND)
    if NORM:
        phi *= scale(phi, NORM, EPS)[:, None]
    tl.store(y + row[:, None] * W + f[None, :], phi.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, dy, dx, rows, stride, head_stride, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
              BW: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """dx for R rows of a map other than DPFP. One program: R rows, all their features.

    Features are computed again from x. With s what normalises and phi the features, the norm's part is
    g <- s g - s^2 (g . phi) times the slope of the sum (sum norm) or times s phi (L2 norm); then comes the map's own
    slope.

        x           as in the forward pass;  dy (rows, W);  dx (rows, W), written
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    f = tl.arange(0, BW)
    inside = (row < rows)[:, None] & (f < W)[None, :]
    at = (row // H * stride + row % H * head_stride)[:, None]
    phi = _phi(x, at, f[None, :], inside, W, KIND)
    g = tl.load(dy + row[:, None] * W + f[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        g = normalised_slope(g, phi, NORM, EPS)
    g = slope(g, tl.load(x + at + f[None, :], mask=inside, other=0.0).to(tl.float32), phi, KIND)
    tl.store(dx + row[:, None] * W + f[None, :], g.to(dx.dtype.element_ty), mask=inside)


def takes(phi: FeatureMap, norm: str, x: Tensor) -> bool:
    """Whether `feature_map` computes this map of x."""
    d = x.shape[-1] if x.dim() else 0
    fits = d and phi.kind in KINDS and phi.width(d) <= WIDEST and (phi.kind != "dpfp" or d <= dpfp.WIDEST)
    return bool(fits) and norm in NORMS and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def feature_map(x: Tensor, phi: FeatureMap, norm: str) -> Tensor:
    """phi(x), normalised, with its gradient; `takes` says for which maps and inputs."""
    return Features.apply(x, phi.kind, phi.size, norm)


def rows(x: Tensor) -> Tensor:
    """x (..., d) as (tokens, heads, d) with features next to each other: a view where there is one."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x.flatten(0, -3) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
    return x.clone() if x.data_ptr() % 16 else x


def _blocks(W):
    """(rows per program, features rounded up)."""
    BW = max(16, 1 << (W - 1).bit_length())
    return max(1, 4096 // BW), BW


def _picking(x):
    """How products that pick numbers out of x are made: so that they come out as they are."""
    return exact_products() if x.dtype == torch.float32 else "tf32"


def plan_forward(plan: Plan, x: Slot, shape: tuple[int, ...], phi: FeatureMap, norm: str) -> Slot:
    """A slot of phi(x), normalised, for x of `shape`, given as `rows` of it."""
    tokens, H, D = x.shape
    W = phi.width(D)
    y = plan.empty((*shape[:-1], W), x.dtype)
    if not y.numel():
        return y
    if phi.kind == "dpfp":
        dpfp.plan(plan, dpfp._forward, x, (y,), W, phi.size, NORMS[norm], _picking(x))
        return y
    R, BW = _blocks(W)
    plan.launch(
        _forward, (-(-tokens * H // R),), (x, y), (tokens * H, *x.strides[:2]),
        (H, D, W, R, BW, KINDS[phi.kind], NORMS[norm], EPS))  # fmt: skip
    return y


def plan_backward(plan: Plan, dy: Slot, x: Slot, shape: tuple[int, ...], phi: FeatureMap, norm: str) -> Slot:
    """A slot of the gradient of x, of `shape`, from that of its features."""
    tokens, H, D = x.shape
    W = phi.width(D)
    dx = plan.empty(shape, x.dtype)
    if not dx.numel():
        return dx
    if phi.kind == "dpfp":
        dpfp.plan(plan, dpfp._backward, x, (dy, dx), W, phi.size, NORMS[norm], _picking(x))
        return dx
    R, BW = _blocks(W)
    plan.launch(
        _backward, (-(-tokens * H // R),), (x, dy, dx), (tokens * H, *x.strides[:2]),
        (H, W, R, BW, KINDS[phi.kind], NORMS[norm], EPS))  # fmt: skip
    return dx


_plans: dict[tuple, Plan] = {}


def features(x: Tensor, kind: str, size: int, norm: str) -> Tensor:
    """phi(x), normalised: the operator fastweights::features. size: NU of DPFP, 0 for other maps."""
    shape, x = x.shape, rows(x)
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
    shape, x, dy = x.shape, rows(x), aligned(dy)
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
        """Keep x: features are made again from it."""
        x, *ctx.how = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy):
        """The gradient of x, by the operator; under autograd, where a second derivative is asked for, by PyTorch's
        own operators.
        """
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # second derivatives
            with torch.enable_grad():
                watched = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                (dx,) = torch.autograd.grad(map_plainly(watched, _spec(*ctx.how)), watched, dy, create_graph=True)
            return dx, None, None, None
        return features_backward_op(dy, x, *ctx.how), None, None, None

    @staticmethod
    def vmap(info, in_dims, x, *how):
        """A mapped axis is one more axis before the last, which the kernels go over anyway."""
        return Features.apply(x.movedim(in_dims[0], 0), *how), 0  # a row is the last axis alone


def _spec(kind, size, norm):
    """The map and norm as a Spec."""
    return Spec(features=FeatureMap(kind, size), norm=norm)
