"""A layer between its two projections as one plan: few launches, one allocation each, one step of autograd.

A `FastWeightAttention` in plain operators launches the convolution, an activation, a cast and a sigmoid, two feature
maps, the memory, a norm and a gate, and autograd keeps what each of them was given. Here the same is `prepare`, the
memory's own launches and `finish`. The projection is all that is kept of the inputs: the backward pass prepares q, k, v
and the rates again.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.attention import NORM_EPS, AttentionState
from fastweights.attention_config import AttentionConfig
from fastweights.core import Inputs, Spec
from fastweights.features import EPS
from fastweights.torch import kernels
from fastweights.torch.kernels import blocks, convolution, dpfp, mixer_tiles
from fastweights.torch.kernels.features import KINDS, NORMS, WIDEST
from fastweights.torch.kernels.plan import Plan, aligned, keep

BT = 32  # tokens per program
GATES = {False: 0, True: 1, "sigmoid": 2}
PLAIN = (Tensor, torch.nn.Parameter)
GIVEN = 7  # tensors of a call: see Given
_plans: dict[tuple, Plan] = {}


class Given(NamedTuple):
    """The tensors of a call, None where the layer has none.

    Attributes:
        p: (B, T, columns), the input projection.
        conv: (W, channels), taps of the convolution.
        decay_log, decay_bias: (H,), of a learned decay.
        out_norm: (V,), weight of the norm of what is read.
        memory: (B, H, K, V), the state's memory.
        before: (B, W - 1, channels), the state's last inputs of the convolution.
    """

    p: Any
    conv: Any
    decay_log: Any
    decay_bias: Any
    out_norm: Any
    memory: Any
    before: Any


def suits(config: AttentionConfig) -> bool:
    """Whether layers of this config are computed here; the others run in plain operators around the memory's kernels.

    Left out are several writes per token, erase keys, shared key heads, attention norm, FAVOR+, NLMS, decays per
    channel or fixed, and heads wider than 256.
    """
    simple = config.writes == 1 and not config.erase and config.groups == config.heads and not config.attention_norm
    maps = config.phi.kind in KINDS and config.feature_norm in NORMS
    maps = maps and (config.phi.kind != "dpfp" or (config.feature_width <= WIDEST and config.key_width <= dpfp.WIDEST))
    rates = config.beta in (None, True, False) and config.decay in (None, "learned")
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
    B, device = p.shape[0], p.device.type
    memory, before = (B, config.heads, config.feature_width, config.value_width), (B, config.conv - 1, config.channels)
    if given.memory is not None and (given.memory.shape != memory or given.memory.dtype != torch.float32):
        return False  # the plain form says why
    if given.before is not None and given.before.shape != before:
        return False
    if torch.is_autocast_enabled(device):
        return p.dtype == torch.get_autocast_dtype(device)
    return all(x is None or x.dtype == p.dtype for x in given[1:5])


def mix(config: AttentionConfig, given: Given) -> tuple[Tensor, AttentionState]:
    """(what all heads read, normalised and gated, (B, T, H V);  the state after the last token).

    config, given: of a call that `takes` accepts. Where gradients are wanted, the whole of it is one step of autograd.
    """
    if torch.compiler.is_compiling():
        from fastweights.torch.kernels import mixer_operators

        return mixer_operators.mix(config, given)
    given = Given(*(None if x is None else aligned(x) for x in given))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        y, memory, last = _apply(config, *given)
    else:
        y, memory, last = forward(config, given, save=False)[:3]
    return y, AttentionState(memory, None, last)


def spec_of(config: AttentionConfig) -> Spec:
    """What the memory computes. DPFP, whose features are wider than its keys, is mapped by the memory's launches."""
    if config.phi.kind == "dpfp":
        return Spec(config.rule, features=config.phi.name, norm=config.feature_norm)
    return Spec(config.rule)


class _Sizes(NamedTuple):
    """What every part of a plan needs: the numbers of the config, worked out once.

    Attributes:
        config: of the layer.
        B, T: rows and tokens of the call.
    """

    config: AttentionConfig
    B: int
    T: int

    @property
    def spec(self):
        """What the memory computes in this layer."""
        return spec_of(self.config)

    @property
    def whole(self):
        """Whether every chunk of 64 tokens is full."""
        return self.T % 64 == 0

    @property
    def columns(self):
        """Where the sections of the projection start, by name."""
        starts, at = {}, 0
        for name, width in self.config.sections.items():
            starts[name], at = at, at + width
        return starts

    def grid(self, heads):
        """Programs of a launch: blocks of BT tokens, heads, rows."""
        return -(-self.T // BT), heads, self.B

    def tile(self):
        """The constants of `prepare` and of its gradient."""
        c, at = self.config, self.columns
        widest = 1 << (max(c.key_width, c.value_width, 16) - 1).bit_length()
        heads = max(16, 1 << (c.heads - 1).bit_length())
        maps = (0, 0) if self.spec.maps else (KINDS[c.phi.kind], NORMS[c.feature_norm])
        return (c.heads, c.key_width, c.value_width, c.conv, BT, widest, heads, at.get("beta", 0), at.get("decay", 0),
                float(c.beta_max), *maps, EPS)  # fmt: skip

    def heads(self):
        """Heads of q, k and v, and one program more for the rates."""
        return 3 * self.config.heads + (self.config.has_beta or self.config.decay is not None)

    def finishing(self):
        """The constants of `finish`, None where nothing follows the read."""
        c = self.config
        if not (c.out_norm or c.gate):
            return None
        return (c.heads, c.value_width, BT, 1 << (max(c.value_width, 16) - 1).bit_length(),
                self.columns.get("gate", 0), GATES[c.gate], NORM_EPS)  # fmt: skip

    def prepare(self, plan, x):
        """Plan what comes before the memory: q, k, v and the rates from the projection, in one launch.

        Args:
            plan: to add the launch to.
            x: a `Given` of slots.

        Returns:
            An Inputs of slots; the same slots as `kernels.ready` would give them, for the memory's own plan; and the
            slot of the last inputs of the convolution, or None.
        """
        c, (B, T) = self.config, x.p.shape[:2]
        empty = lambda width: plan.empty((B, T, c.heads, width), x.p.dtype)  # noqa: E731
        rates = lambda there: plan.empty((B, T, c.heads), torch.float32) if there else None  # noqa: E731
        q, k, v = empty(c.key_width), empty(c.key_width), empty(c.value_width)
        beta, log_decay = rates(c.has_beta), rates(c.decay is not None)
        kept = x.p.dtype if x.before is None else x.before.dtype
        last = plan.empty((B, c.conv - 1, c.channels), kept) if c.conv else None
        plan.launch(
            mixer_tiles.prepare, self.grid(self.heads()),
            (x.p, x.conv, x.before, x.decay_log, x.decay_bias, q, k, v, beta, log_decay, last),
            (T, x.p.shape[2], T * x.p.shape[2]), self.tile(), num_warps=4)  # fmt: skip
        inputs = Inputs(q, k, v, beta, log_decay, None, x.memory)
        if self.spec.maps:
            shape = (B * T, c.heads, c.key_width)
            q, k = (slot._replace(shape=shape, strides=(shape[1] * shape[2], shape[2], 1)) for slot in (q, k))
        return inputs, [q, k, v, beta, log_decay, None, x.memory, None, None, None], last


def _key(which, config, tensors):
    """What a plan is made for: pass, config, precision, device, shapes and dtypes."""
    found = [None if x is None else (x.shape, x.dtype) for x in tensors]
    return which, config, torch.get_float32_matmul_precision(), tensors[0].device, *found


def forward(config, given, save):
    """[y, memory, last inputs or None, *what the backward pass needs]."""
    key = _key(save, config, given)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(given.p.device, list(given))
        y, *_, saved = _plan_forward(plan, config, save)
        if save:  # the backward pass will follow: its kernels are compiled beside these
            like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (y, *saved)]
            plan.finish(_plan_backward(Plan(given.p.device, [like[0], None, None, *given, *like[1:]]), config))
        keep(_plans, key, plan)
    tensors = plan.run(*given)
    return [None if i is None else tensors[i] for i in plan.results]


def _plan_forward(plan, config, save):
    """Plan `prepare`, the memory's launches and `finish`; returns the slots of y, memory, last inputs and what is
    saved.
    """
    x = Given(*plan.inputs)
    how = _Sizes(config, *x.p.shape[:2])
    inputs, slots, last = how.prepare(plan, x)
    o, memory, saved = kernels.add_forward(plan, slots, inputs, how.spec, how.whole, save)
    flat = (*x.p.shape[:2], config.heads * config.value_width)
    if finishing := how.finishing():
        y = plan.empty(flat, o.dtype)
        numbers = x.p.shape[1], x.p.shape[2], x.p.shape[1] * x.p.shape[2]
        slots = o, x.p, x.out_norm, y
        plan.launch(mixer_tiles.finish, how.grid(config.heads), slots, numbers, finishing, num_warps=4)
        saved = [o, *saved] if save else []
    else:
        y = plan.compute(lambda o: o.view(flat), (o,), flat, o.dtype)
    plan.results = [None if s is None else s.place for s in (y, memory, last, *saved)]
    return y, memory, last, saved


def backward(config, dy, dmemory, dlast, given, saved):
    """Gradients in the order of Given, from those of y, of the memory and of the last inputs.

    saved: what the forward pass kept beyond its inputs: what the heads read, and what the memory's backward needs.
    """
    tensors = [aligned(dy), *(None if x is None else aligned(x) for x in (dmemory, dlast)), *given, *saved]
    key = _key("backward", config, tensors)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(given.p.device, tensors)
        _plan_backward(plan, config)
        keep(_plans, key, plan)
    found = plan.run(*tensors)
    return [None if i is None else found[i] for i in plan.results]


def _plan_backward(plan, config):
    """Plan the gradients: back through `finish`, the memory, `prepare` and the convolution, into the projection's
    columns.

    q, k, v and the rates are not kept: they are prepared again from the projection, which is cheaper than reading them.
    """
    dy, dmemory, dlast, *rest = plan.inputs
    x, saved = Given(*rest[:GIVEN]), rest[GIVEN:]
    (B, T, columns), how = x.p.shape, _Sizes(config, *x.p.shape[:2])
    numbers, rows = (T, columns, T * columns), B * -(-T // BT)
    # One array takes the gradients of all sections of the projection, each launch its own columns.
    dp, do = plan.empty(x.p.shape, x.p.dtype), dy._replace(shape=(B, T, config.heads, config.value_width))
    inputs, slots, _ = how.prepare(plan, x)
    dnorm = None
    if finishing := how.finishing():
        o, *saved = saved
        dread = plan.empty(o.shape, o.dtype)
        dnorm = None if x.out_norm is None else plan.empty(x.out_norm.shape, x.out_norm.dtype)
        parts = None if dnorm is None else plan.empty((rows, config.heads, config.value_width), torch.float32)
        plan.launch(
            mixer_tiles.finish_backward, how.grid(config.heads), (o, x.p, x.out_norm, do, dread, dp, parts), numbers,
            finishing, num_warps=4)  # fmt: skip
        if dnorm is not None:
            convolution.sum_rows(plan, parts, dnorm)
        do = dread
    dq, dk, dv, dbeta, dlog_decay, _, dstate = kernels.add_backward(
        plan, do, dmemory, slots, saved, inputs, how.spec, how.whole
    )
    # With a convolution the gradient of q, k and v stops before it; without, it goes into dp at once.
    dz = plan.empty((B, T, config.channels), x.p.dtype) if config.conv else dp
    dlog, dbias = (None if dlog_decay is None else plan.empty(w.shape, w.dtype) for w in (x.decay_log, x.decay_bias))
    parts = [None if dlog is None else plan.empty((rows, config.heads), torch.float32) for _ in range(2)]
    plan.launch(
        mixer_tiles.prepare_backward, how.grid(how.heads()),
        (x.p, x.conv, x.before, x.decay_log, x.decay_bias, dq, dk, dv, dbeta, dlog_decay, dz, dp, *parts),
        (*numbers, dz.shape[2]), how.tile(), num_warps=4)  # fmt: skip
    dbefore = dconv = None
    if config.conv:
        dbefore, dconv = convolution.plan_backward(plan, dz, dlast, x.p, x.conv, x.before, dp)
    if dlog is not None:
        convolution.sum_rows(plan, parts[0], dlog)
        convolution.sum_rows(plan, parts[1], dbias)
    grads = Given(dp, dconv, dlog, dbias, dnorm, dstate, dbefore)
    plan.results = [None if g is None or a is None else g.place for g, a in zip(grads, x, strict=True)]
    return plan


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
        given, saved = Given(*tensors[:GIVEN]), tensors[GIVEN:]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.config, given, (dy, dmemory, dlast))
        if dy is None:
            dy = given.p.new_zeros((*given.p.shape[:2], ctx.config.heads * ctx.config.value_width))
        return None, *backward(ctx.config, dy, dmemory, dlast, given, saved)


# `Function.apply` binds arguments to defaults for the sake of transforms, which never come here: its base will do.
_apply = super(torch.autograd.Function, Mix).apply


def _differentiable(config, given, ups):
    """Gradients that can be differentiated again: those of the layer in plain operators."""
    from fastweights.attention import between_projections
    from fastweights.torch.framework import OPS

    with torch.enable_grad():
        copies = Given(*(None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                         for x in given))  # fmt: skip
        memory = None if copies.memory is None else AttentionState(copies.memory, None, copies.before)
        layer = SimpleNamespace(**copies._asdict(), projection=None)
        y, state = between_projections(config, OPS, layer, copies.p, memory, method="chunked")
        outputs = [(o, up) for o, up in zip((y, state.memory, state.conv), ups, strict=True) if up is not None]
        leaves = [x for x in copies if x is not None]
        found = iter(torch.autograd.grad([o for o, _ in outputs], leaves, [up for _, up in outputs], create_graph=True,
                                         allow_unused=True, materialize_grads=True))  # fmt: skip
    return [None if x is None else next(found) for x in copies]
