"""Elementwise functions whose plain composition would pass over memory too often, with gradients by hand.

The gradients are made of differentiable operations of saved tensors, so second derivatives follow by themselves.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import relu, sigmoid, silu, softplus

from fastweights.debugging import debugging
from fastweights.torch.derivatives import differentiable
from fastweights.torch.dtypes import accumulation_dtype, autocast_dtype, wide
from fastweights.torch.private import has_modes, is_forward, is_transformed, is_watched
from fastweights.torch.watching import watchers

__all__ = [
    "convolve",
    "depthwise",
    "gated_norm",
    "mix_heads",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "softplus",
    "unit",
]

HAS_TRITON = find_spec("triton") is not None


class Unit(torch.autograd.Function):
    """y = scale x / sqrt(sum x^2 + eps) over the last axis, and scale / sqrt(...), which the backward pass needs.

    The gradient is (dy - y (dy . y) / scale^2) scale / sqrt(sum x^2 + eps): two passes over memory instead of seven.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, eps, scale):
        """(y, 1 / sqrt(...)): two passes over x."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length * length + eps) * scale
        return x * inverse, inverse

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep x, y and the inverse length; the latter is no output that can be differentiated."""
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], *output)
        ctx.eps, ctx.scale = inputs[1:]

    @staticmethod
    def backward(ctx, dy, _):
        """The part of dy along y goes, since y cannot change its length; the rest is scaled as x was."""
        x, y, inverse = ctx.saved_tensors
        if dy is None:
            return None, None, None
        if torch.is_grad_enabled():  # a second derivative: `inverse` as a function of x
            inverse = torch.rsqrt((x * x).sum(-1, keepdim=True) + ctx.eps) * ctx.scale
            y = x * inverse
        elif y.is_cpu and not is_watched():  # some rows at a time, which stay in cache
            dx = torch.empty_like(y, memory_format=torch.contiguous_format)
            parts = [z.reshape(-1, z.shape[-1]) for z in (dx, dy, y, inverse)]
            for rows in _in_cache(parts[0]):
                to, up, of, scaled = (z[rows] for z in parts)
                along = (up * of).sum(-1, keepdim=True)
                torch.addcmul(up, of, along, value=-(ctx.scale**-2), out=to).mul_(scaled)
            return dx, None, None
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-(ctx.scale**-2)) * inverse, None, None


def unit(x: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """scale x / sqrt(sum x^2 + eps) over the last axis.

    Examples:
        >>> unit(torch.tensor([3.0, 4.0]), 0.0)
        tensor([0.6000, 0.8000])
    """
    if is_forward() or (torch.compiler.is_compiling() and not x.is_cpu):  # a compiler fuses the plain form itself
        return x * (torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) * scale)
    learning = (x.requires_grad and torch.is_grad_enabled()) or is_watched()
    return Unit.apply(x, eps, scale)[0] if learning else Unit.forward(x, eps, scale)[0]


class ScaledNorm(torch.autograd.Function):
    """y = u weight with u = x / sqrt(mean x^2 + eps) over the last axis, and 1 / sqrt(...), for training on a CPU.

    The gradient of x is (g - u mean(g u)) / sqrt(mean x^2 + eps) with g = dy weight. Sums over features and over rows
    are products with vectors, and what lies between is done in place: half the time of the plain form.
    """

    @staticmethod
    def forward(x, weight, eps):
        """(y, 1 / rms)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
        return (x * inverse).mul_(weight), inverse

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep x, the weight and 1 / rms, which is no output that can be differentiated."""
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx, dy, _):
        """Gradients of x and weight."""
        x, weight, inverse = ctx.saved_tensors
        if dy is None:
            return None, None, None
        if torch.is_grad_enabled():  # a second derivative
            plain = lambda x, weight: functional.rms_norm(x, weight.shape, weight, ctx.eps)  # noqa: E731
            return *differentiable(plain, (x, weight), ctx.needs_input_grad, (dy,)), None
        width, shape = x.shape[-1], x.shape
        dy, x, inverse = (z.reshape(-1, z.shape[-1]) for z in (dy, x, inverse))
        product = (dy * x).mul_(inverse)
        along = torch.mv(product, weight)[:, None].mul_(inverse).div_(-width)
        dweight = product.sum(0)
        return torch.mul(dy, weight, out=product).addcmul_(x, along).mul_(inverse).view(shape), dweight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last axis, in the dtype of x, computed in float32 or wider.

    Examples:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
        tensor([0.8485, 1.1314])
    """
    if x.is_cuda and not is_watched():  # there torch has it in one launch
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(x.dtype)
    width, y = x.shape[-1], wide(x)
    if y.is_cpu and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad and not is_transformed():
        return ScaledNorm.apply(y, weight.to(y.dtype), eps)[0].to(x.dtype)
    return (unit(y, width * eps) * (weight.to(y.dtype) * width**0.5)).to(x.dtype)


class GatedNorm(torch.autograd.Function):
    """x / sqrt(mean x^2 + eps) * weight * activation(gate) over the last axis, and 1 / sqrt(...) for the backward pass.

    Rows are done a few at a time, so that what is between two operations stays in cache.
    """

    @staticmethod
    def forward(x, gate, weight, eps, activation):
        """(y, 1 / rms), a few rows at a time, each operation in place."""
        y, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        for rows in _in_cache(x):
            length = torch.linalg.vector_norm(x[rows], dim=-1, keepdim=True)
            torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps), out=inverse[rows])
            torch.mul(x[rows], inverse[rows], out=y[rows])
            y[rows].mul_(weight).mul_(ACTIVATIONS[activation][0](gate[rows]))
        return y, inverse

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep x, gate, weight and 1 / rms: the normalised rows are cheaper to make again than to read."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.eps, ctx.activation = inputs[3:]

    @staticmethod
    def backward(ctx, dy, _):
        """Gradients of x, gate and weight, a few rows at a time.

        With u = x / rms and g = dy act(gate) weight: dx = (g - u mean(g u)) / rms, the weight's is the sum over rows of
        dy act(gate) u, and the gate's is dy u weight times the slope of the activation.
        """
        x, gate, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative
            plain = lambda x, gate, weight: _gated_norm(x, gate, weight, ctx.eps, ctx.activation)  # noqa: E731
            return *differentiable(plain, (x, gate, weight), ctx.needs_input_grad, (dy,)), None, None
        act, act_backward = ACTIVATIONS[ctx.activation]
        dx, dgate, dweight = torch.empty_like(x), torch.empty_like(gate), torch.zeros_like(weight)
        for rows in _in_cache(x):
            unit = x[rows] * inverse[rows]
            of_unit = dy[rows] * act(gate[rows])
            dweight += torch.linalg.vecdot(of_unit, unit, dim=0)
            of_unit.mul_(weight)
            along = torch.linalg.vecdot(of_unit, unit)[:, None].div_(x.shape[-1])
            torch.addcmul(of_unit, unit, along, value=-1, out=dx[rows])
            dx[rows].mul_(inverse[rows])
            dgate[rows] = act_backward(unit.mul_(weight).mul_(dy[rows]), gate[rows])
        return dx, dgate, dweight, None, None


def _sigmoid_backward(dy, x):
    """The gradient of x from that of sigmoid(x), which is computed again."""
    y = x.sigmoid()
    return torch.ops.aten.sigmoid_backward(dy, y)


# name -> the function, and its gradient from that of its result and from its argument
ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "silu": (silu, torch.ops.aten.silu_backward),
    "sigmoid": (torch.sigmoid, _sigmoid_backward),
}


def _in_cache(x):
    """Slices of the first axis of x, each of which fits a cache several times over; one slice off a CPU."""
    step = max(1, 2**16 // max(1, x[:1].numel())) if x.is_cpu else max(1, len(x))
    return [slice(at, at + step) for at in range(0, len(x), step)]


def _gated_norm(x, gate, weight, eps, activation):
    """`gated_norm` in plain operations."""
    return functional.rms_norm(x, weight.shape, weight, eps) * ACTIVATIONS[activation][0](gate)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str) -> torch.Tensor:
    """RMS norm of x (rows, K) times activation(gate), in the dtype of x, computed in float32 or wider.

    Args:
        x, gate: (rows, K).
        weight: (K,).
        eps: added to the mean of squares.
        activation: a name of ACTIVATIONS.
    """
    x, kind = wide(x), x.dtype
    gate, weight = gate.to(x.dtype), weight.to(x.dtype)
    few = x.numel() < 2**14  # a token that is generated: the number of operations counts, not what they pass over
    if few or not x.is_cpu or is_watched():
        return _gated_norm(x, gate, weight, eps, activation).to(kind)
    return GatedNorm.apply(x, gate, weight, eps, activation)[0].to(kind)


class Depthwise(torch.autograd.Function):
    """sum_j weight[j] x[:, j : j + T]: a convolution of every channel by itself.

    Sums go into one tensor in place, so W products are never held at once; on a CPU some tokens at a time, which stay
    in cache.
    """

    @staticmethod
    def forward(x, weight):
        """y (B, T, channels), tap by tap into the same tensor."""
        T = x.shape[1] - len(weight) + 1
        y = x.new_empty(x.shape[0], T, x.shape[2])
        for a, b in _tokens_in_cache(y):
            part = torch.mul(x[:, a:b], weight[0], out=y[:, a:b])
            for j in range(1, len(weight)):
                part.addcmul_(x[:, a + j : b + j], weight[j])
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the input and the weight."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        """dx is a convolution of dy with the taps in reverse order; the weight's gradient is a sum over tokens for
        each tap.
        """
        x, weight = ctx.saved_tensors
        W, T = len(weight), dy.shape[1]
        if torch.is_grad_enabled():  # a second derivative: nothing in place
            around = functional.pad(dy, (0, 0, W - 1, W - 1))
            dx = sum(around[:, W - 1 - j : 2 * W - 2 - j + T] * weight[j] for j in range(W))
            return dx, torch.stack([(dy * x[:, j : j + T]).sum((0, 1)) for j in range(W)])
        return depthwise_backward(x, weight, dy)


def depthwise_backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weight from that of `Depthwise`, where nothing is differentiated once more."""
    T, sums = dy.shape[1], accumulation_dtype(weight.dtype)  # sums over all tokens
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=sums)
    torch.mul(dy, weight[0], out=dx[:, :T])
    dx[:, T:] = 0
    for a, b in _tokens_in_cache(dy):
        part = dy[:, a:b]
        for j, tap in enumerate(weight):
            dweight[j] += (part * x[:, a + j : b + j]).sum((0, 1), dtype=sums)
            if j:
                dx[:, a + j : b + j].addcmul_(part, tap)
    return dx, dweight.to(weight.dtype)


def _tokens_in_cache(x):
    """(first, last + 1) of the tokens of x (B, T, channels) to do at once: as many as a cache holds; off a CPU all."""
    B, T, channels = x.shape
    most = max(16, 2**18 // max(1, B * channels)) if x.is_cpu else max(1, T)
    step = max(1, -(-T // max(1, round(T / most))))  # parts of about one length
    return [(a, min(T, a + step)) for a in range(0, T, step)]


def depthwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (B, T + W - 1, channels) convolved along its second axis with weight (W, channels): (B, T, channels).

    Examples:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> depthwise(x, torch.tensor([[1.0], [10.0]])).flatten()     # x[t - 1] + 10 x[t]
        tensor([21., 32.])
    """
    W, T = len(weight), x.shape[1] - len(weight) + 1
    if is_watched() or torch.onnx.is_in_onnx_export():
        return torch.stack([weight[j] * x[:, j : j + T] for j in range(W)]).sum(0)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    return (x * weight).sum(1, keepdim=True) if T == 1 else Depthwise.apply(x, weight)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor | None, cu_seqlens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`depthwise` of x (B, T, channels) after the W - 1 inputs `before` it, zeros when absent, and the last W - 1.

    Those are a copy where they are less than half: a state that is kept must not keep all of x.  None for packed
    sequences where there is no way of ours.
    """
    W, T = len(weight), x.shape[1]
    if cu_seqlens is not None:
        return _packed(x, weight, before, cu_seqlens)
    if x.is_cuda and HAS_TRITON and not is_watched():
        from fastweights.torch.kernels import convolution

        if convolution.takes(x, weight):
            return convolution.convolve(x, weight, before)
    x = functional.pad(x, (0, 0, W - 1, 0)) if before is None else torch.cat([before, x], 1)
    last = x[:, T:]
    return depthwise(x, weight), last.clone() if T >= W else last


def _on_gpu(x):
    """Whether kernels of ours run where x is."""
    return x.is_cuda and HAS_TRITON


def mix_heads(config: Any, layer: Any, p: torch.Tensor, state: Any, cu_seqlens: torch.Tensor | None) -> Any:
    """A layer between its projections as one plan of kernels (kernels/mixer.py), or None where that cannot be.

    One token without gradients is None: its memory has a launch of its own. So is a call that a probe looks at.
    """
    if not _on_gpu(p) or is_transformed() or watchers:
        return None
    if not torch.compiler.is_compiling() and (has_modes() or debugging()):
        return None
    if p.shape[1] == 1 and not torch.is_grad_enabled():
        return None
    from fastweights.torch.kernels import mixer

    memory, _, before = (None, None, None) if state is None else state
    names = ("conv", "decay_log", "decay_bias", "out_norm")
    conv, decay_log, decay_bias, out_norm = (getattr(layer, name, None) for name in names)
    given = mixer.LayerTensors(p, conv, decay_log, decay_bias, out_norm, memory, before, cu_seqlens)
    carried = getattr(layer, "carries_gradients", True)
    return mixer.mix(config, given, carried=carried) if mixer.takes(config, given) else None


def _packed(x, weight, before, cu_seqlens):
    """`convolve` for sequences packed into one row; None where no way of ours can run."""
    if x.is_cpu and not is_transformed() and len(weight) > 1 and x.shape[1] > 0:
        from fastweights.torch import packed_rows

        return packed_rows.convolve(x, weight, before, cu_seqlens)
    if not (x.is_cuda and HAS_TRITON) or is_transformed():
        return None
    from fastweights.torch.kernels import packed_convolution

    if not packed_convolution.takes(x, weight) or len(weight) < 2:
        return None
    dtype = autocast_dtype(x)
    if dtype is not None and x.dtype == dtype:
        weight = weight.to(dtype)  # or all that follows would be float32
    return packed_convolution.convolve(x, weight, before, cu_seqlens)
