"""A layer between its two projections as one plan: few launches, one allocation each, one step of autograd.

A `FastWeightAttention` in plain operators launches the convolution, an activation, a cast and a sigmoid, two feature
maps, the memory, a norm and a gate, and autograd keeps what each of them was given. Here the same is `prepare`, the
memory's own launches and `finish` (mixer_plan.py). The projection is all that is kept of the inputs: the backward pass
prepares q, k, v and the rates again. Texts that are packed into one row are served too, each with its own state.
"""

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs
from fastweights.torch.kernels import blocks, dpfp, packed_convolution, tiles
from fastweights.torch.kernels.features import KINDS, NORMS, WIDEST
from fastweights.torch.kernels.mixer_plan import BT, GIVEN, Given, Tables, plan_backward, plan_forward, spec_of
from fastweights.torch.kernels.plan import Plan, aligned, keep

PLAIN = (Tensor, torch.nn.Parameter)
OFFSETS = (torch.int32, torch.int64)
_plans: dict[tuple, Plan] = {}


def suits(config: AttentionConfig) -> bool:
    """Whether layers of this config are computed here; the others run in plain operators around the memory's kernels.

    Left out are several writes per token, erase keys, shared key heads, attention norm, FAVOR+, NLMS, decays per
    channel, and heads wider than 256.
    """
    simple = config.writes == 1 and not config.erase and config.groups == config.heads and not config.attention_norm
    maps = config.phi.kind in KINDS and config.feature_norm in NORMS
    maps = maps and (config.phi.kind != "dpfp" or (config.feature_width <= WIDEST and config.key_width <= dpfp.WIDEST))
    decays = config.decay in (None, "learned") or config.fixed_decay is not None
    rates = config.beta in (None, True, False) and decays
    fits = max(config.key_width, config.value_width) <= 256 and config.heads <= 1024 and config.conv <= BT
    named = config.text is not None and config.rule in ("delta", "sum") and config.norm != "nlms"
    return simple and maps and rates and fits and named


_suits = cache(suits)


def takes(config: AttentionConfig, given: Given) -> bool:
    """Whether `mix` computes this call; a single token without gradients has a launch of its own instead."""
    p = given.p
    suitable = suits(config) if torch.compiler.is_compiling() else _suits(config)  # compilers warn of caches
    if not suitable or p.dtype not in blocks.ON_CHIP or not p.numel():
        return False
    if any(x is not None and (type(x) not in PLAIN or x.device != p.device) for x in given):
        return False
    cu = given.cu_seqlens
    if cu is not None and (len(p) != 1 or cu.dim() != 1 or len(cu) < 2 or cu.dtype not in OFFSETS):
        return False
    N, device = given.sequences, p.device.type
    memory, before = (N, config.heads, config.feature_width, config.value_width), (N, config.conv - 1, config.channels)
    if given.memory is not None and (given.memory.shape != memory or given.memory.dtype != torch.float32):
        return False  # the plain form says why
    if given.before is not None and given.before.shape != before:
        return False
    if torch.is_autocast_enabled(device):
        return p.dtype == torch.get_autocast_dtype(device)
    return all(x is None or x.dtype == p.dtype for x in given[1:5])


def mix(config: AttentionConfig, given: Given, *, carried: bool = True) -> tuple[Tensor, AttentionState]:
    """(what all heads read, normalised and gated, (B, T, H V);  the state after the last token).

    config, given: of a call that `takes` accepts. Where gradients are wanted, the whole of it is one step of autograd.
    carried: whether the state may have gradients, which a compiler has to be told.
    """
    if torch.compiler.is_compiling():
        from fastweights.torch.kernels import mixer_operators

        return mixer_operators.mix(config, given, carried=carried)
    given = Given(*(None if x is None else aligned(x) for x in given))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        y, memory, last = _apply(config, *given)
    else:
        y, memory, last = forward(config, given, save=False)[:3]
    return y, AttentionState(memory, None, last)


def tables_of(config: AttentionConfig, given: Given) -> tuple[Tables, bool]:
    """The tables of a call, and whether every chunk of 64 tokens is full. They are kept with the offsets."""
    T, cu = given.p.shape[1], given.cu_seqlens
    if cu is None:
        return Tables(), T % tiles.C == 0
    rates = [given.p if there else None for there in (config.has_beta, config.decay is not None)]
    widths = config.feature_width, config.value_width
    every = blocks.every(*widths, given.p.dtype, Inputs(given.p, given.p, given.p, *rates), spec_of(config))
    found, whole = tiles.pack(cu, T, every)
    return Tables(*packed_convolution.places(cu, T, given.p.device), *found), whole


def _key(which, config, whole, tensors):
    """What a plan is made for: pass, config, precision, device, shapes and dtypes."""
    found = [None if x is None else (x.shape, x.dtype) for x in tensors]
    return which, config, whole, torch.get_float32_matmul_precision(), tensors[0].device, *found


def forward(config, given, save):
    """[y, memory, last inputs or None, *what the backward pass needs]."""
    tables, whole = tables_of(config, given)
    tensors = [*given[:GIVEN], *tables]
    key = _key(save, config, whole, tensors)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(given.p.device, tensors)
        y, *_, saved = plan_forward(plan, config, whole, save)
        if save:  # the backward pass will follow: its kernels are compiled beside these
            like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (y, *saved)]
            following = Plan(given.p.device, [like[0], None, None, *tensors, *like[1:]])
            plan.finish(plan_backward(following, config, whole))
        keep(_plans, key, plan)
    found = plan.run(*tensors)
    return [None if i is None else found[i] for i in plan.results]


def backward(config, dy, dmemory, dlast, given, saved):
    """Gradients in the order of Given, from those of y, of the memory and of the last inputs.

    saved: what the forward pass kept beyond its inputs: what the heads read, and what the memory's backward needs.
    """
    tables, whole = tables_of(config, given)
    ups = [aligned(dy), *(None if x is None else aligned(x) for x in (dmemory, dlast))]
    tensors = [*ups, *given[:GIVEN], *tables, *saved]
    key = _key("backward", config, whole, tensors)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(given.p.device, tensors)
        plan_backward(plan, config, whole)
        keep(_plans, key, plan)
    found = plan.run(*tensors)
    return [None if i is None else found[i] for i in plan.results]


class Mix(torch.autograd.Function):
    """`forward` with its gradient: (y, memory, last inputs of the convolution or None)."""

    @staticmethod
    def forward(ctx, config, *given):
        """Run the plan of the forward pass and keep what its backward pass needs."""
        y, memory, last, *saved = forward(config, Given(*given), save=True)
        ctx.config = config
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, *saved)
        return y, memory, last

    @staticmethod
    def backward(ctx, dy, dmemory, dlast):
        """Run the plan of the backward pass; by plain operators where a second derivative is asked for."""
        tensors = ctx.saved_tensors
        given, saved = Given(*tensors[: GIVEN + 1]), tensors[GIVEN + 1 :]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.config, given, (dy, dmemory, dlast)), None
        if dy is None:
            dy = given.p.new_zeros((*given.p.shape[:2], ctx.config.heads * ctx.config.value_width))
        return None, *backward(ctx.config, dy, dmemory, dlast, given, saved), None


# `Function.apply` binds arguments to defaults for the sake of transforms, which never come here: its base will do.
_apply = super(torch.autograd.Function, Mix).apply


def _differentiable(config, given, ups):
    """Gradients that can be differentiated again: those of the layer in plain operators."""
    from fastweights.attention import between_projections
    from fastweights.torch.framework import OPS

    with torch.enable_grad():
        leaf = lambda x: x.view_as(x) if x.requires_grad else x.detach().requires_grad_()  # noqa: E731
        copies = Given(*(None if x is None else leaf(x) for x in given[:GIVEN]))
        memory = None if copies.memory is None else AttentionState(copies.memory, None, copies.before)
        layer = SimpleNamespace(**copies._asdict(), projection=None)
        how = dict(cu_seqlens=given.cu_seqlens, method="chunked")
        y, state = between_projections(config, OPS, layer, copies.p, memory, **how)
        outputs = [(o, up) for o, up in zip((y, state.memory, state.conv), ups, strict=True) if up is not None]
        leaves = [x for x in copies if x is not None]
        how = dict(create_graph=True, allow_unused=True, materialize_grads=True)
        found = iter(torch.autograd.grad([o for o, _ in outputs], leaves, [up for _, up in outputs], **how))
    return [None if x is None else next(found) for x in copies[:GIVEN]]
