"""The plans of mixer.py as operators for torch.compile: fastweights::mix and fastweights::mix_backward.

A compiler sees one operator each way, with the shapes of what it returns, and fuses what lies around it. The tensors of
a call go in as one list, in the order of `LayerTensors`, and the config of the layer as text, since the schema of an
operator knows no objects of ours.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs
from fastweights.torch.kernels import memory_plan, mixer
from fastweights.torch.kernels.mixer_plan import N_DIFFERENTIABLE, LayerTensors, spec_of
from fastweights.torch.kernels.plan import aligned
from fastweights.torch.methods import register


def mix(config: AttentionConfig, tensors: LayerTensors, *, carried: bool = True) -> tuple[Tensor, AttentionState]:
    """`mixer.mix`, by the operators.  carried: whether the state after the call may have gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        y, memory, *others = Mixed.apply(config.text, 3 if config.conv else 2, carried, *tensors)
    else:
        y, memory, *others = mix_op(list(tensors), config.text, False)
    return y, AttentionState(memory, None, others[0] if config.conv else None)


def _run(tensors, text, save):
    """The operator fastweights::mix: `mixer.forward`, without results that are None.  text: the config of the layer."""
    tensors = LayerTensors(*(None if x is None else aligned(x) for x in tensors))
    return [x for x in mixer.forward(AttentionConfig.of_text(text), tensors, save) if x is not None]


def _fake(tensors, text, save):
    """Empty tensors that agree with those of `_run` in number, shape and dtype: compilers work out shapes first."""
    x, config = LayerTensors(*tensors), AttentionConfig.of_text(text)
    (B, T), N, H, K, V = x.p.shape[:2], x.sequences, config.heads, config.key_width, config.value_width
    empty = [x.p.new_empty(B, T, H * V), x.p.new_empty(N, H, config.feature_width, V, dtype=torch.float32)]
    if config.conv:
        dtype = x.p.dtype if x.before is None else x.before.dtype
        empty.append(x.p.new_empty(N, config.conv - 1, config.channels, dtype=dtype))
    if save:
        q, v, rates = x.p.new_empty(B, T, H, K), x.p.new_empty(B, T, H, V), x.p.new_empty(B, T, H)
        decays = rates if config.decay is not None else None
        inputs = Inputs(q, q, v, rates if config.has_beta else None, decays, cu_seqlens=x.cu_seqlens)
        empty += [v] if config.out_norm or config.gate else []
        shapes = memory_plan.saved_shapes(inputs, spec_of(config))
        empty += [x.p.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return empty


def _run_backward(upstream, tensors, saved, text):
    """The operator fastweights::mix_backward: `mixer.backward`, gradients in the order of `LayerTensors`.

    upstream: [dy, dmemory, dlast], the gradients of y, of the memory and of the last inputs.
    """
    tensors = LayerTensors(*(None if x is None else aligned(x) for x in tensors))
    dy, dmemory, dlast = upstream
    grads = mixer.backward(AttentionConfig.of_text(text), dy, dmemory, dlast, tensors, saved)
    return [tensors.p.new_empty(0) if g is None else g for g in grads]  # an operator cannot return None


def _fake_backward(upstream, tensors, saved, text):
    """Empty tensors of the shapes that `_run_backward` returns."""
    p = tensors[0]
    return [
        p.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in tensors[:N_DIFFERENTIABLE]
    ]


mix_op: Any = register("mix", "(Tensor?[] given, str config, bool save) -> Tensor[]", _run, _fake)
mix_backward_op: Any = register(
    "mix_backward",
    "(Tensor?[] ups, Tensor?[] given, Tensor[] saved, str config) -> Tensor[]",
    _run_backward,
    _fake_backward,
)


class Mixed(torch.autograd.Function):
    """`mix_op` with its gradient: (y, memory, last inputs if there is a convolution, *saved).

    n_results: how many of these are results of the call, and not saved for the backward pass alone.
    carried: whether the state may have a gradient; where it has none, a compiler would make one of zeros.
    """

    @staticmethod
    def forward(text, n_results, carried, *tensors):
        """The results of the call, and what the backward pass needs, by the operator."""
        return tuple(mix_op(list(tensors), text, True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs and what was saved, which has no gradient of its own."""
        ctx.text, ctx.n_results, ctx.carried, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[ctx.n_results :])
        ctx.save_for_backward(*tensors, *output[ctx.n_results :])

    @staticmethod
    def backward(ctx, dy, dmemory, *others):
        """Gradients of the tensors; dy is zero where only the memory was used."""
        kept = ctx.saved_tensors
        tensors, saved = kept[: N_DIFFERENTIABLE + 1], list(kept[N_DIFFERENTIABLE + 1 :])
        if dy is None:
            config = AttentionConfig.of_text(ctx.text)
            dy = tensors[0].new_zeros((*tensors[0].shape[:2], config.heads * config.value_width))
        dlast = others[0] if ctx.n_results == 3 else None
        if not ctx.carried:
            dmemory = dlast = None
        grads = mix_backward_op([dy, dmemory, dlast], list(tensors), saved, ctx.text)
        return None, None, None, *(None if x is None else g for x, g in zip(tensors, grads, strict=False)), None
