"""The plan of mixer.py as operators that torch.compile knows: fastweights::mix and fastweights::mix_backward.

A compiler sees one operator each way, with the shapes of what it returns, and fuses what lies around it. The config of
the layer goes in as text, since the schema of an operator knows strings and no objects of ours.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs
from fastweights.torch import kernels
from fastweights.torch.kernels import mixer
from fastweights.torch.kernels.mixer_plan import GIVEN, Given, spec_of
from fastweights.torch.kernels.plan import aligned
from fastweights.torch.methods import register


def mix(config: AttentionConfig, given: Given, *, carried: bool = True) -> tuple[Tensor, AttentionState]:
    """`mixer.mix` in operators.  carried: whether the state after the call may have gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        y, memory, *rest = Mixed.apply(config.text, 3 if config.conv else 2, carried, *given)
    else:
        y, memory, *rest = mix_op(list(given), config.text, False)
    return y, AttentionState(memory, None, rest[0] if config.conv else None)


def _run(given, text, save):
    """The operator fastweights::mix: the plan of the forward pass, without the results that this layer has not."""
    given = Given(*(None if x is None else aligned(x) for x in given))
    return [x for x in mixer.forward(AttentionConfig.of_text(text), given, save) if x is not None]


def _fake(given, text, save):
    """Empty tensors of the shapes that `_run` returns.

    A compiler works out shapes before anything runs; these must agree with `_run` in number, shape and type.
    """
    x, config = Given(*given), AttentionConfig.of_text(text)
    (B, T), N, H, K, V = x.p.shape[:2], x.sequences, config.heads, config.key_width, config.value_width
    found = [x.p.new_empty(B, T, H * V), x.p.new_empty(N, H, config.feature_width, V, dtype=torch.float32)]
    if config.conv:
        kept = x.p.dtype if x.before is None else x.before.dtype
        found.append(x.p.new_empty(N, config.conv - 1, config.channels, dtype=kept))
    if save:
        q, v, rates = x.p.new_empty(B, T, H, K), x.p.new_empty(B, T, H, V), x.p.new_empty(B, T, H)
        decays = rates if config.decay is not None else None
        inputs = Inputs(q, q, v, rates if config.has_beta else None, decays, cu_seqlens=x.cu_seqlens)
        found += [v] if config.out_norm or config.gate else []
        found += [x.p.new_empty(shape, dtype=dtype) for shape, dtype in kernels.saves(inputs, spec_of(config), 1)]
    return found


def _run_backward(ups, given, saved, text):
    """The operator fastweights::mix_backward: gradients in the order of Given.

    ups: gradients of y, of the memory and of the last inputs.
    """
    given = Given(*(None if x is None else aligned(x) for x in given))
    dy, dmemory, dlast = ups
    grads = mixer.backward(AttentionConfig.of_text(text), dy, dmemory, dlast, given, saved)
    return [given.p.new_empty(0) if g is None else g for g in grads]  # an operator cannot return None


def _fake_backward(ups, given, saved, text):
    """Empty tensors of the shapes that `_run_backward` returns."""
    empty = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)  # noqa: E731
    return [given[0].new_empty(0) if x is None else empty(x) for x in given[:GIVEN]]


mix_op: Any = register("mix", "(Tensor?[] given, str config, bool save) -> Tensor[]", _run, _fake)
mix_backward_op: Any = register(
    "mix_backward",
    "(Tensor?[] ups, Tensor?[] given, Tensor[] saved, str config) -> Tensor[]",
    _run_backward,
    _fake_backward,
)


class Mixed(torch.autograd.Function):
    """`mix_op` with its gradient: (y, memory, the convolution's last inputs if there is one, *saved).

    outputs: how many of the results are the caller's.  carried: whether a gradient of the state is asked for; where it
    is not, a compiler would make one of zeros.
    """

    @staticmethod
    def forward(text, outputs, carried, *given):
        """All results, with what the backward pass needs."""
        return tuple(mix_op(list(given), text, True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs and what was saved, which is no result of the caller's."""
        ctx.text, ctx.outputs, ctx.carried, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[ctx.outputs :])
        ctx.save_for_backward(*given, *output[ctx.outputs :])

    @staticmethod
    def backward(ctx, dy, dmemory, *rest):
        """Gradients of what was given; y's own gradient is zeros where only the memory was used."""
        tensors = ctx.saved_tensors
        given, saved = tensors[: GIVEN + 1], list(tensors[GIVEN + 1 :])
        if dy is None:
            config = AttentionConfig.of_text(ctx.text)
            dy = given[0].new_zeros((*given[0].shape[:2], config.heads * config.value_width))
        dlast = rest[0] if ctx.outputs == 3 else None
        if not ctx.carried:
            dmemory = dlast = None
        grads = mix_backward_op([dy, dmemory, dlast], list(given), saved, ctx.text)
        return None, None, None, *(None if x is None else g for x, g in zip(given, grads, strict=False)), None
