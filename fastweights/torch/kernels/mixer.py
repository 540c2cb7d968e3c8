"""A layer between its two projections as one plan: few launches, one allocation each, one step of autograd.

A `FastWeightAttention` in plain operators launches the convolution, an activation, a cast and a sigmoid, two feature
maps, the memory, a norm and a gate, and autograd keeps what each of them was given. Here all of it is one plan forward
and one backward (mixer_plan.py). Of the inputs only the projection is kept: the backward pass prepares q, k, v and the
rates again. Texts that are packed into one row are served too, each with its own state.

torch/hand_gradients.py calls `mix` where `takes` allows it. The plan of a call is run by the autograd function `Mix`,
by the operators of mixer_operators.py while torch.compile traces the layer, or by `forward` alone without gradients.
"""

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs
from fastweights.torch.kernels import blocks, dpfp, packed_convolution
from fastweights.torch.kernels.features import KINDS, NORMS, WIDEST
from fastweights.torch.kernels.layout import C, chunk_tables
from fastweights.torch.kernels.mixer_plan import (
    BT,
    N_DIFFERENTIABLE,
    LayerTensors,
    Tables,
    plan_backward,
    plan_forward,
    spec_of,
)
from fastweights.torch.kernels.plan import Plan, aligned, keep

PLAIN = (Tensor, torch.nn.Parameter)  # types of tensors that nothing else looks at
OFFSET_DTYPES = (torch.int32, torch.int64)
_plans: dict[tuple, Plan] = {}


def suits(config: AttentionConfig) -> bool:
    """Whether layers of this config are computed here; the others run in plain operators around the memory's kernels.

    Left out are several writes per token, erase keys, shared key heads, attention norm, FAVOR+, NLMS, decays per
    channel, and heads wider than 256.
    """
    one_write = config.writes == 1 and not config.erase
    own_keys = config.groups == config.heads
    norm = not config.attention_norm and config.norm != "nlms"
    maps = config.phi.kind in KINDS and config.feature_norm in NORMS
    if config.phi.kind == "dpfp":
        maps = maps and config.feature_width <= WIDEST and config.key_width <= dpfp.WIDEST
    decay = config.decay in (None, "learned") or config.fixed_decay is not None
    rates = config.beta in (None, True, False)
    fits = max(config.key_width, config.value_width) <= 256 and config.heads <= 1024 and config.conv <= BT
    named = config.text is not None and config.rule in ("delta", "sum")  # operators are given the config as text
    return one_write and own_keys and norm and maps and decay and rates and fits and named


_suits = cache(suits)


def takes(config: AttentionConfig, tensors: LayerTensors) -> bool:
    """Whether `mix` computes this call; else it runs in plain operators, which raise what errors there are."""
    p = tensors.p
    suitable = suits(config) if torch.compiler.is_compiling() else _suits(config)  # compilers warn of caches
    if not suitable or p.dtype not in blocks.ON_CHIP or not p.numel():
        return False
    if any(x is not None and (type(x) not in PLAIN or x.device != p.device) for x in tensors):
        return False
    cu = tensors.cu_seqlens
    if cu is not None and (len(p) != 1 or cu.dim() != 1 or len(cu) < 2 or cu.dtype not in OFFSET_DTYPES):
        return False
    N, device = tensors.sequences, p.device.type
    memory, before = tensors.memory, tensors.before
    memory_shape = N, config.heads, config.feature_width, config.value_width
    if memory is not None and (memory.shape != memory_shape or memory.dtype != torch.float32):
        return False
    if before is not None and before.shape != (N, config.conv - 1, config.channels):
        return False
    if torch.is_autocast_enabled(device):
        return p.dtype == torch.get_autocast_dtype(device)
    weights = tensors[1:5]
    return all(x is None or x.dtype == p.dtype for x in weights)


def mix(config: AttentionConfig, tensors: LayerTensors, *, carried: bool = True) -> tuple[Tensor, AttentionState]:
    """(what all heads have read, normalised and gated, (B, T, H V);  the state after the last token).

    Args:
        config, tensors: of a call that `takes` accepts. Where gradients are wanted, it is one step of autograd.
        carried: whether the state may have gradients, which a compiler has to be told.
    """
    if torch.compiler.is_compiling():
        from fastweights.torch.kernels import mixer_operators

        return mixer_operators.mix(config, tensors, carried=carried)
    tensors = LayerTensors(*(None if x is None else aligned(x) for x in tensors))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        y, memory, last = _apply(config, *tensors)
    else:
        y, memory, last = forward(config, tensors, save=False)[:3]
    return y, AttentionState(memory, None, last)


def tables_of(config: AttentionConfig, tensors: LayerTensors) -> tuple[Tables, bool]:
    """(the tables of a call, whether every chunk of 64 tokens is full). They are kept beside the offsets."""
    p, cu = tensors.p, tensors.cu_seqlens
    T = p.shape[1]
    if cu is None:
        return Tables(), T % C == 0
    # Which arrays the memory will have decides how long its spans are; p stands for each of them.
    inputs = Inputs(p, p, p, p if config.has_beta else None, p if config.decay is not None else None)
    span = blocks.chunks_per_span(config.feature_width, config.value_width, p.dtype, inputs, spec_of(config))
    memory_tables, full_chunks = chunk_tables(cu, T, span)
    return Tables(*packed_convolution.token_places(cu, T, p.device), *memory_tables), full_chunks


def _key(which_pass, config, full_chunks, tensors):
    """What a plan is looked up by, and made for; everything else about a call follows from it."""
    kinds = [None if x is None else (x.shape, x.dtype) for x in tensors]
    return which_pass, config, full_chunks, torch.get_float32_matmul_precision(), tensors[0].device, *kinds


def forward(config, tensors, save):
    """[y, memory, last inputs of the convolution or None, *what is saved for the backward pass].

    config: of the layer;  tensors: `LayerTensors`, aligned;  save: whether a backward pass will follow.
    """
    tables, full_chunks = tables_of(config, tensors)
    plan_inputs = [*tensors[:N_DIFFERENTIABLE], *tables]
    key = _key(save, config, full_chunks, plan_inputs)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(tensors.p.device, plan_inputs)
        y, *_, saved = plan_forward(plan, config, full_chunks, save)
        if save:  # compile the kernels of the backward pass beside these, instead of when it comes
            dy, *saved = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (y, *saved)]
            backward_plan = Plan(tensors.p.device, [dy, None, None, *plan_inputs, *saved])
            plan.finish(plan_backward(backward_plan, config, full_chunks))
        keep(_plans, key, plan)
    results = plan.run(*plan_inputs)
    return [None if place is None else results[place] for place in plan.results]


def backward(config, dy, dmemory, dlast, tensors, saved):
    """Gradients in the order of `LayerTensors`, None where there is none.

    Args:
        config, tensors: of the call.
        dy, dmemory, dlast: gradients of y, of the memory and of the last inputs; the last two may be None.
        saved: what `forward` saved: what the heads have read, where the layer needs it, and what the memory saves.
    """
    tables, full_chunks = tables_of(config, tensors)
    upstream = [aligned(dy), *(None if x is None else aligned(x) for x in (dmemory, dlast))]
    plan_inputs = [*upstream, *tensors[:N_DIFFERENTIABLE], *tables, *saved]
    key = _key("backward", config, full_chunks, plan_inputs)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(tensors.p.device, plan_inputs)
        plan_backward(plan, config, full_chunks)
        keep(_plans, key, plan)
    results = plan.run(*plan_inputs)
    return [None if place is None else results[place] for place in plan.results]


class Mix(torch.autograd.Function):
    """`forward` with its gradient: (y, memory, last inputs of the convolution or None)."""

    @staticmethod
    def forward(ctx, config, *tensors):
        """Run the plan of the forward pass, and keep what the backward pass needs."""
        y, memory, last, *saved = forward(config, LayerTensors(*tensors), save=True)
        ctx.config = config
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return y, memory, last

    @staticmethod
    def backward(ctx, dy, dmemory, dlast):
        """Run the plan of the backward pass; plain operators where a second derivative is asked for."""
        kept = ctx.saved_tensors
        tensors, saved = LayerTensors(*kept[: N_DIFFERENTIABLE + 1]), kept[N_DIFFERENTIABLE + 1 :]
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(ctx.config, tensors, (dy, dmemory, dlast)), None
        if dy is None:
            dy = tensors.p.new_zeros((*tensors.p.shape[:2], ctx.config.heads * ctx.config.value_width))
        return None, *backward(ctx.config, dy, dmemory, dlast, tensors, saved), None


# `Function.apply` binds arguments to defaults for the sake of transforms, which never come here: its base will do.
_apply = super(torch.autograd.Function, Mix).apply


def _differentiable_gradients(config, tensors, upstream):
    """Gradients as of `backward`, in plain operators, so that they can be differentiated again.

    upstream: (dy, dmemory, dlast), None for any that is absent.
    """
    from fastweights.attention import between_projections
    from fastweights.torch.framework import OPS

    def as_leaf(x):
        return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()

    with torch.enable_grad():
        copies = LayerTensors(*(None if x is None else as_leaf(x) for x in tensors[:N_DIFFERENTIABLE]))
        memory = None if copies.memory is None else AttentionState(copies.memory, None, copies.before)
        layer = SimpleNamespace(**copies._asdict(), projection=None)
        y, state = between_projections(
            config, OPS, layer, copies.p, memory, cu_seqlens=tensors.cu_seqlens, method="chunked"
        )
        pairs = [(o, up) for o, up in zip((y, state.memory, state.conv), upstream, strict=True) if up is not None]
        leaves = [x for x in copies if x is not None]
        grads = torch.autograd.grad([o for o, _ in pairs], leaves, [up for _, up in pairs], create_graph=True,
                                    allow_unused=True, materialize_grads=True)  # fmt: skip
    remaining = iter(grads)
    return [None if x is None else next(remaining) for x in copies[:N_DIFFERENTIABLE]]
