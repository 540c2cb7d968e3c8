"""What a layer launches between its two projections, forward and backward: the plans of mixer.py.

A plan's inputs are slots of the tensors of a call (`Given`) and of the tables that say where packed texts are
(`Tables`).
"""

from typing import Any, NamedTuple

import torch

from fastweights.attention import NORM_EPS
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs, Spec
from fastweights.features import EPS
from fastweights.torch import kernels
from fastweights.torch.kernels import convolution, mixer_tiles, packed_convolution
from fastweights.torch.kernels.convolution import unit
from fastweights.torch.kernels.features import KINDS, NORMS

BT = 32  # tokens per program
GATES = {False: 0, True: 1, "sigmoid": 2}
GIVEN = 7  # tensors of a call that may have gradients: see Given


class Given(NamedTuple):
    """The tensors of a call, None where the layer has none.

    Attributes:
        p: (B, T, columns), the input projection.
        conv: (W, channels), taps of the convolution.
        decay_log, decay_bias: (H,), of a learned decay.
        out_norm: (V,), weight of the norm of what is read.
        memory: (B, H, K, V), the state's memory.
        before: (B, W - 1, channels), the state's last inputs of the convolution.
        cu_seqlens: (N + 1,), offsets of N texts packed into one row; B is then 1, but N in the state's tensors.
    """

    p: Any
    conv: Any
    decay_log: Any
    decay_bias: Any
    out_norm: Any
    memory: Any
    before: Any
    cu_seqlens: Any = None

    @property
    def sequences(self) -> int:
        """Texts of the call, each with a state of its own."""
        return self.p.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


class Tables(NamedTuple):
    """Where packed texts are, on the device; None, all of them, for rows of one text each.

    Attributes:
        place: (T, 2), of the convolution: every token's position in its text, and the text's number.
        cu: (N + 1,), offsets of the texts.
        of_sequence, of_row, of_span: of the memory, as in tiles.py.
    """

    place: Any = None
    cu: Any = None
    of_sequence: Any = None
    of_row: Any = None
    of_span: Any = None


TABLES = len(Tables._fields)


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
        whole: whether every chunk of 64 tokens is full.
    """

    config: AttentionConfig
    B: int
    T: int
    whole: bool

    @property
    def spec(self):
        """What the memory computes in this layer."""
        return spec_of(self.config)

    @property
    def columns(self):
        """Where the sections of the projection start, by name."""
        starts, at = {}, 0
        for name, width in self.config.sections.items():
            starts[name], at = at, at + width
        return starts

    @property
    def unit(self):
        """The largest power of two up to 16 that divides the columns of a token."""
        return unit(sum(self.config.sections.values()))

    def numbers(self):
        """Tokens, columns of a token over their unit, and columns of a row: what the kernels are given as numbers."""
        columns = sum(self.config.sections.values())
        return self.T, columns // self.unit, self.T * columns

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
                float(c.beta_max), *maps, EPS, self.unit)  # fmt: skip

    def heads(self):
        """Heads of q, k and v, and one program more for the rates."""
        return 3 * self.config.heads + (self.config.has_beta or self.config.decay is not None)

    def finishing(self):
        """The constants of `finish`, None where nothing follows the read."""
        c = self.config
        if not (c.out_norm or c.gate):
            return None
        return (c.heads, c.value_width, BT, 1 << (max(c.value_width, 16) - 1).bit_length(),
                self.columns.get("gate", 0), GATES[c.gate], NORM_EPS, self.unit)  # fmt: skip

    def prepare(self, plan, x, tables, ends=True):
        """Plan what comes before the memory: q, k, v and the rates from the projection, in one launch.

        Args:
            plan: to add the launch to.
            x: a `Given` of slots.
            tables: `Tables` of slots.
            ends: whether the last inputs of the convolution are wanted.

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
        packed = tables.cu is not None
        N = tables.cu.shape[0] - 1 if packed else B
        last = plan.empty((N, c.conv - 1, c.channels), kept) if c.conv else None
        fixed = None if c.fixed_decay is None else plan.constant(_on(plan.device, c.fixed_decay))
        plan.launch(
            mixer_tiles.prepare, self.grid(self.heads()),
            (x.p, x.conv, x.before, tables.place, fixed or x.decay_log, x.decay_bias, q, k, v, beta, log_decay,
             None if packed else last), self.numbers(), self.tile(), num_warps=4)  # fmt: skip
        if packed and last is not None and ends:
            packed_convolution.plan_ends(plan, x.p, x.before, tables.cu, last)
        inputs = Inputs(q, k, v, beta, log_decay, None, x.memory, cu_seqlens=tables.cu)
        if self.spec.maps:
            shape = (B * T, c.heads, c.key_width)
            q, k = (slot._replace(shape=shape, strides=(shape[1] * shape[2], shape[2], 1)) for slot in (q, k))
        return inputs, [q, k, v, beta, log_decay, None, x.memory, *tables[2:]], last


def _on(device, numbers):
    """These numbers as float32 on the device."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def plan_forward(plan, config, whole, save):
    """Plan `prepare`, the memory's launches and `finish`; returns the slots of y, memory, last inputs and what is
    saved.
    """
    x, tables = Given(*plan.inputs[:GIVEN]), Tables(*plan.inputs[GIVEN:])
    how = _Sizes(config, x.p.shape[0], x.p.shape[1], whole)
    inputs, slots, last = how.prepare(plan, x, tables)
    o, memory, saved = kernels.add_forward(plan, slots, inputs, how.spec, how.whole, save)
    flat = (*x.p.shape[:2], config.heads * config.value_width)
    if finishing := how.finishing():
        y = plan.empty(flat, o.dtype)
        slots = o, x.p, x.out_norm, y
        plan.launch(mixer_tiles.finish, how.grid(config.heads), slots, how.numbers(), finishing, num_warps=4)
        saved = [o, *saved] if save else []
    else:
        y = plan.compute(lambda o: o.view(flat), (o,), flat, o.dtype)
    plan.results = [None if s is None else s.place for s in (y, memory, last, *saved)]
    return y, memory, last, saved


def plan_backward(plan, config, whole):
    """Plan the gradients: back through `finish`, the memory, `prepare` and the convolution, into the projection's
    columns.

    q, k, v and the rates are not kept: they are prepared again from the projection, which is cheaper than reading them.
    """
    dy, dmemory, dlast, *rest = plan.inputs
    x, tables, saved = Given(*rest[:GIVEN]), Tables(*rest[GIVEN : GIVEN + TABLES]), rest[GIVEN + TABLES :]
    B, T, _ = x.p.shape
    how = _Sizes(config, B, T, whole)
    numbers, rows = how.numbers(), B * -(-T // BT)
    # One array takes the gradients of all sections of the projection, each launch its own columns.
    dp, do = plan.empty(x.p.shape, x.p.dtype), dy._replace(shape=(B, T, config.heads, config.value_width))
    inputs, slots, _ = how.prepare(plan, x, tables, ends=False)
    dnorm = None
    if finishing := how.finishing():
        o, *saved = saved
        dread = plan.empty(o.shape, o.dtype)
        dnorm = None if x.out_norm is None else plan.empty(x.out_norm.shape, x.out_norm.dtype)
        parts: Any = None if dnorm is None else plan.empty((rows, config.heads, config.value_width), torch.float32)
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
    weights = (x.decay_log, x.decay_bias) if config.decay == "learned" else (None, None)
    changes: list[Any] = [None if w is None else plan.empty(w.shape, w.dtype) for w in weights]
    dlog, dbias = changes
    parts = [None if dlog is None else plan.empty((rows, config.heads), torch.float32) for _ in range(2)]
    plan.launch(
        mixer_tiles.prepare_backward, how.grid(how.heads()),
        (x.p, x.conv, x.before, tables.place, *weights, dq, dk, dv, dbeta, None if dlog is None else dlog_decay, dz,
         dp, *parts), (*numbers, dz.shape[2] // unit(dz.shape[2])), (*how.tile(), unit(dz.shape[2])),
        num_warps=4)  # fmt: skip
    dbefore = dconv = None
    if config.conv and tables.cu is None:
        dbefore, dconv = convolution.plan_backward(plan, dz, dlast, x.p, x.conv, x.before, dp)
    elif config.conv:
        where = tables.place, tables.cu
        dbefore, dconv = packed_convolution.plan_backward(plan, dz, dlast, x.p, x.conv, x.before, *where, dp)
    if dlog is not None:
        convolution.sum_rows(plan, parts[0], dlog)
        convolution.sum_rows(plan, parts[1], dbias)
    grads = Given(dp, dconv, dlog, dbias, dnorm, dstate, dbefore)[:GIVEN]
    plan.results = [None if g is None or a is None else g.place for g, a in zip(grads, x[:GIVEN], strict=True)]
    return plan
