"""The published hybrid models on our operation: transformers' own layers call `fast_weight` for their delta rule.

Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi Linear and their relatives compute the gated delta rule, with one decay per head
or per key channel, by a function of their module. `accelerate` gives the layers of one model a forward pass in which
that name stands for ours; no other model and no weight changes, and `undo` takes it back.
"""

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.attention.convolution import convolve
from fastweights.core import FastWeightError
from fastweights.torch import fast_weight, hand_gradients
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.framework import OPS

# What their forward passes call: for many tokens, and for one
RULES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
CONVOLUTION = "causal_conv1d_fn"  # of many tokens, before them
NORM_EPS = 1e-6  # of their unit vectors


class Accelerated:
    """The layers of a model that run on our operation, until `undo`; as a context manager, until its end.

    `accelerate` returns one. Its `layers` are the modules that were changed.
    """

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers

    def undo(self) -> None:
        """Give the layers their own forward pass again."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)

    def __enter__(self) -> "Accelerated":
        """The layers are changed already; this lets `with` put them back."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Put the layers back as they were."""
        self.undo()


def accelerate(model: nn.Module) -> Accelerated:
    """Let transformers' own hybrid model compute its delta rule with `fast_weight`: prefill, training and decoding.

        accelerate(model)                   # from now on
        with accelerate(model): ...         # or for a while

    Outputs, gradients, caches and checkpoints stay what they are; packed rows (`cu_seq_lens_q`) work without
    flash-linear-attention. The layers keep nothing of ours: `undo` of what is returned restores them.

    Args:
        model: any model with layers of Qwen3-Next, Qwen3.5, OLMo-hybrid or Kimi Linear.

    Returns:
        An `Accelerated` with the layers that were changed; a second call for the same model changes none.
    """
    found, changed = False, []
    for layer in model.modules():
        if _rebound(type(layer)) is None:
            continue
        found = True
        if "forward" in layer.__dict__:
            if isinstance(layer.forward, Forward):
                continue
            raise FastWeightError(
                f"{type(layer).__name__} has a forward of its own (a hook that moves weights, for example); expected "
                "its class's: accelerate the model before anything else wraps its layers"
            )
        norms = [norm for norm in layer.children() if _is_gated_norm(norm) and "forward" not in norm.__dict__]
        for part in (layer, *norms):
            part.forward = Forward(part)
            changed.append(part)
    if not found:
        raise FastWeightError(
            f"{type(model).__name__} has no layer that computes a gated delta rule; expected a model of Qwen3-Next, "
            "Qwen3.5, OLMo-hybrid or Kimi Linear"
        )
    return Accelerated(changed)


class Forward:
    """The forward pass of one accelerated layer; a copy of the layer, or one sent to another process, has its own."""

    def __init__(self, layer: nn.Module):
        self.__setstate__(layer)

    def __call__(self, *args: Any, **how: Any) -> Any:
        """What the layer's own forward pass gives."""
        return self.run(self.layer, *args, **how)

    def __getstate__(self) -> nn.Module:
        return self.layer

    def __setstate__(self, layer: nn.Module) -> None:
        self.layer, self.run = layer, _rebound(type(layer)) or gated_norm


def _rebound(kind: type[nn.Module]) -> FunctionType | None:
    """A layer's own forward pass in which the names of the rule stand for ours; None for a layer that has none.

    The original, and the module that it is from, stay as they are: other models of the class are not changed.
    """
    own: Any = inspect.unwrap(kind.forward)
    used = own.__code__.co_names if isinstance(own, FunctionType) else ()
    names: dict[str, Any] = {name: gated_delta_rule for name in RULES if name in used}
    if not names:
        return None
    if CONVOLUTION in used:
        names[CONVOLUTION] = convolution
    scope = own.__globals__ | names
    scope.pop("__name__", None)  # by which torch.compile would look the names up where they stand for the original
    copy = FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Their function, by `fast_weight`: (output (B, T, H, V), state (B, H, K, V) where asked for, else None).

    query, key (B, T, H, K), or fewer heads that serve several each;  value (B, T, H, V);  g, their log decay, (B, T, H)
    or (B, T, H, K);  beta (B, T, H). Queries and keys become unit vectors where use_qk_l2norm_in_kernel says so, and
    queries are then divided by sqrt(K).  chunk_size: theirs; ours has its own.  cu_seqlens: offsets of packed rows,
    which Kimi Linear hands on under the name that models take them by, cu_seq_lens_q.
    """
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    wide = accumulation_dtype(value.dtype)
    q, k = query.to(wide), key.to(wide)
    scale = q.shape[-1] ** -0.5
    if not use_qk_l2norm_in_kernel:
        q = q * scale
    elif q.shape[1] == 1 and q.shape == k.shape:  # a step of generation: few operations count
        q, k = hand_gradients.unit(torch.stack((q, k)), NORM_EPS).unbind()
        q = q * scale
    else:
        q, k = hand_gradients.unit(q, NORM_EPS, scale), hand_gradients.unit(k, NORM_EPS)
    q, k = q.to(value.dtype), k.to(value.dtype)
    if q.shape[2] != value.shape[2]:
        q, k = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (q, k))
    state = None if initial_state is None else initial_state.to(wide)
    beta, g = beta.to(wide), g.to(wide)
    o, state = fast_weight(q, k, value, beta=beta, log_decay=g, state=state, cu_seqlens=cu_seqlens)
    return o, state if output_final_state else None


def convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Their causal convolution of every channel, (B, channels, T), token by token in memory as their layers hold it.

    weight: (channels, W);  cu_seq_lens_q: offsets of packed rows, which theirs lets leak into each other.
    """
    wide = accumulation_dtype(weight.dtype) if weight.is_cpu else weight.dtype  # a kernel sums in float32 itself
    x, taps = hidden_states.transpose(1, 2).to(wide), weight.to(wide).mT.contiguous()
    y, _ = convolve(OPS, taps, x, None, cu_seq_lens_q, None)
    y = y if bias is None else y + bias
    if activation is not None:
        y = _activation(activation)(y)
    return y.to(hidden_states.dtype).transpose(1, 2)


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return nn.functional.silu if name == "silu" else ACT2FN[name]


def _is_gated_norm(module: nn.Module) -> bool:
    """Whether it is their RMS norm with a gate, by what it is made of."""
    named = type(module).__name__.endswith("RMSNormGated")
    return named and getattr(module, "activation", None) in hand_gradients.ACTIVATIONS


def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """Their norm of a layer's output, times the activation of its gate."""
    x, z = (y.reshape(-1, y.shape[-1]) for y in (hidden_states, gate))
    y = hand_gradients.gated_norm(x, z, self.weight, self.variance_epsilon, self.activation)
    return y.view(hidden_states.shape)
