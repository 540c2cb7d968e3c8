"""The plan of a whole layer between its two projections, forward and backward.

A `FastWeightAttention` is a projection in, what this file plans, and a projection out. Forward, the plan has

    mixer_tiles.prepare             q, k, v, beta and log_decay from the projection, and the convolution's last inputs
    memory_plan.add_forward         the launches of the memory: o, and the state
    mixer_tiles.finish              norm and gate, where the layer has them: y

and backward

    mixer_tiles.prepare             q, k, v and the rates again, which is cheaper than to save and load them
    mixer_tiles.finish_backward     the gradients of o and of the gate
    memory_plan.add_backward        those of q, k, v, the rates and the memory
    mixer_tiles.prepare_backward    those of what the convolution gave, of the rates' columns, and of a decay's weights
    convolution.plan_backward       (or packed_convolution.plan_backward) those of the convolution's inputs and weight

mixer.py runs these plans. Their inputs are the tensors of a call (`LayerTensors`) and the tables that say where packed
texts are (`Tables`).
"""

from typing import Any, NamedTuple

import torch

from fastweights.attention import NORM_EPS
from fastweights.attention.config import AttentionConfig
from fastweights.core import Inputs, Spec
from fastweights.features import EPS
from fastweights.torch.kernels import convolution, memory_plan, mixer_tiles, packed_convolution
from fastweights.torch.kernels.convolution import unit
from fastweights.torch.kernels.features import KINDS, NORMS

BT = 32  # tokens per program
GATES = {False: 0, True: 1, "sigmoid": 2}
N_DIFFERENTIABLE = 7  # the first tensors of a call, which may have gradients: all but cu_seqlens


class LayerTensors(NamedTuple):
    """The tensors of a call, None for each that the layer does not have. Their gradients are `LayerTensors` too.

    Attributes:
        p: (B, T, columns), the input projection.
        conv: (W, channels), weight of the convolution.
        decay_log, decay_bias: (H,), of a learned decay.
        out_norm: (V,), weight of the norm of what was read.
        memory: (B, H, K, V), the state's memory.
        before: (B, W - 1, channels), the state's last inputs of the convolution.
        cu_seqlens: (N + 1,), offsets of N texts packed into one row; B is then 1, and N in the tensors of the state.
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
    """Where packed texts are, on the device; all of it is None where every row has one text.

    Attributes:
        token_places: (T, 2), of every token its position in its text, and the number of the text.
        cu: (N + 1,), offsets of the texts.
        sequence_table, chunk_table, span_table: of the memory (layout.py).
    """

    token_places: Any = None
    cu: Any = None
    sequence_table: Any = None
    chunk_table: Any = None
    span_table: Any = None


N_TABLES = len(Tables._fields)


def spec_of(config: AttentionConfig) -> Spec:
    """What the memory of a layer computes. The memory's launches map DPFP, whose features are wider than its keys."""
    if config.phi.kind == "dpfp":
        return Spec(config.rule, features=config.phi.name, norm=config.feature_norm)
    return Spec(config.rule)


class _LayerPlan(NamedTuple):
    """A layer and the size of a call, and what its launches are given for these.

    Attributes:
        config: of the layer.
        B, T: rows and tokens of the call.
        full_chunks: whether every chunk of 64 tokens is full.
    """

    config: AttentionConfig
    B: int
    T: int
    full_chunks: bool

    @property
    def spec(self):
        """What the memory computes in this layer."""
        return spec_of(self.config)

    @property
    def first_columns(self):
        """The first column of each section of the projection, by name."""
        first_columns, column = {}, 0
        for name, width in self.config.sections.items():
            first_columns[name] = column
            column += width
        return first_columns

    @property
    def unit(self):
        """UNIT of the kernels: the largest power of two up to 16 that divides the columns of a token."""
        return unit(sum(self.config.sections.values()))

    def numbers(self):
        """The numbers that kernels take: T, the columns of a token over UNIT, and the columns of a row of the batch."""
        columns = sum(self.config.sections.values())
        return self.T, columns // self.unit, self.T * columns

    def grid(self, programs_per_block):
        """The grid of a launch: blocks of BT tokens, programs for each of them, rows of the batch."""
        return -(-self.T // BT), programs_per_block, self.B

    def prepare_programs(self):
        """Programs of `prepare` for each block of tokens: one for each head of q, k and v, and one for the rates."""
        return 3 * self.config.heads + (self.config.has_beta or self.config.decay is not None)

    def prepare_constants(self):
        """The constants of `prepare` and of `prepare_backward`."""
        c, first = self.config, self.first_columns
        BD = 1 << (max(c.key_width, c.value_width, 16) - 1).bit_length()
        BH = max(16, 1 << (c.heads - 1).bit_length())
        kind, norm = (0, 0) if self.spec.maps else (KINDS[c.phi.kind], NORMS[c.feature_norm])
        return (c.heads, c.key_width, c.value_width, c.conv, BT, BD, BH, first.get("beta", 0), first.get("decay", 0),
                float(c.beta_max), kind, norm, EPS, self.unit)  # fmt: skip

    def finish_constants(self):
        """The constants of `finish` and of `finish_backward`; None where the layer has neither norm nor gate."""
        c = self.config
        if not (c.out_norm or c.gate):
            return None
        BV = 1 << (max(c.value_width, 16) - 1).bit_length()
        return (c.heads, c.value_width, BT, BV, self.first_columns.get("gate", 0), GATES[c.gate], NORM_EPS,
                self.unit)  # fmt: skip

    def prepare(self, plan, x, tables, last_inputs=True):
        """Plan what comes before the memory: q, k, v and the rates from the projection, in one launch.

        Args:
            plan: the plan to add the launch to.
            x: `LayerTensors` of slots.
            tables: `Tables` of slots.
            last_inputs: whether the last inputs of the convolution are wanted, where texts are packed.

        Returns:
            An Inputs of slots; these slots and the tables' in the order that `memory_plan.add_forward` takes; and the
            slot of the last inputs of the convolution, or None.
        """
        c, (B, T) = self.config, x.p.shape[:2]

        def empty_heads(width):
            return plan.empty((B, T, c.heads, width), x.p.dtype)

        def empty_rates_if(condition):
            return plan.empty((B, T, c.heads), torch.float32) if condition else None

        q, k, v = empty_heads(c.key_width), empty_heads(c.key_width), empty_heads(c.value_width)
        beta, log_decay = empty_rates_if(c.has_beta), empty_rates_if(c.decay is not None)
        packed = tables.cu is not None
        N = tables.cu.shape[0] - 1 if packed else B
        last = None
        if c.conv:
            last = plan.empty((N, c.conv - 1, c.channels), x.p.dtype if x.before is None else x.before.dtype)
        decay_log = x.decay_log
        if c.fixed_decay is not None:
            decay_log = plan.constant(torch.tensor(c.fixed_decay, dtype=torch.float32, device=plan.device))
        plan.launch(
            mixer_tiles.prepare, self.grid(self.prepare_programs()),
            (x.p, x.conv, x.before, tables.token_places, decay_log, x.decay_bias, q, k, v, beta, log_decay,
             None if packed else last), self.numbers(), self.prepare_constants(), num_warps=4)  # fmt: skip
        if packed and last is not None and last_inputs:
            packed_convolution.plan_last_inputs(plan, x.p, x.before, tables.cu, last)
        inputs = Inputs(q, k, v, beta, log_decay, None, x.memory, cu_seqlens=tables.cu)
        if self.spec.maps:  # the memory's launches take q and k that they map as (tokens, H, K): `features.as_rows`
            shape = (B * T, c.heads, c.key_width)
            q, k = (slot._replace(shape=shape, strides=(shape[1] * shape[2], shape[2], 1)) for slot in (q, k))
        return inputs, [q, k, v, beta, log_decay, None, x.memory, *tables[2:]], last


def plan_forward(plan, config, full_chunks, save):
    """Plan the forward pass: slots of (y, memory, last inputs or None, [what is saved]).

    plan: its inputs are `LayerTensors` but for cu_seqlens, then `Tables`; its results become all of these slots.
    save: whether a backward pass will follow. Then o, where `finish` needs it, and what the memory saves are saved.
    """
    x, tables = LayerTensors(*plan.inputs[:N_DIFFERENTIABLE]), Tables(*plan.inputs[N_DIFFERENTIABLE:])
    layer = _LayerPlan(config, x.p.shape[0], x.p.shape[1], full_chunks)
    inputs, slots, last = layer.prepare(plan, x, tables)
    o, memory, saved = memory_plan.add_forward(plan, slots, inputs, layer.spec, full_chunks, save)
    y_shape = (*x.p.shape[:2], config.heads * config.value_width)
    constants = layer.finish_constants()
    if constants is None:
        y = plan.compute(lambda o: o.view(y_shape), (o,), y_shape, o.dtype)
    else:
        y = plan.empty(y_shape, o.dtype)
        plan.launch(
            mixer_tiles.finish, layer.grid(config.heads), (o, x.p, x.out_norm, y), layer.numbers(), constants,
            num_warps=4)  # fmt: skip
        saved = [o, *saved] if save else []
    plan.results = [None if slot is None else slot.place for slot in (y, memory, last, *saved)]
    return y, memory, last, saved


def plan_backward(plan, config, full_chunks):
    """Plan the backward pass; its results are the places of the gradients, in the order of `LayerTensors`.

    plan: its inputs are the gradients of y, of the memory and of the last inputs, the inputs of the forward plan, and
    what that has saved.
    """
    dy, dmemory, dlast, *others = plan.inputs
    x, others = LayerTensors(*others[:N_DIFFERENTIABLE]), others[N_DIFFERENTIABLE:]
    tables, saved = Tables(*others[:N_TABLES]), others[N_TABLES:]
    B, T, _ = x.p.shape
    H, V = config.heads, config.value_width
    layer = _LayerPlan(config, B, T, full_chunks)
    numbers, token_blocks = layer.numbers(), B * -(-T // BT)
    # One tensor takes the gradients of all sections of the projection; each launch writes its own columns.
    dp, do = plan.empty(x.p.shape, x.p.dtype), dy._replace(shape=(B, T, H, V))
    inputs, slots, _ = layer.prepare(plan, x, tables, last_inputs=False)
    dnorm, constants = None, layer.finish_constants()
    if constants is not None:
        o, *saved = saved
        dfinished, do = do, plan.empty(o.shape, o.dtype)
        dnorm = None if x.out_norm is None else plan.empty(x.out_norm.shape, x.out_norm.dtype)
        norm_parts: Any = None if dnorm is None else plan.empty((token_blocks, H, V), torch.float32)
        plan.launch(
            mixer_tiles.finish_backward, layer.grid(H), (o, x.p, x.out_norm, dfinished, do, dp, norm_parts), numbers,
            constants, num_warps=4)  # fmt: skip
        if dnorm is not None:
            convolution.sum_rows(plan, norm_parts, dnorm)
    dq, dk, dv, dbeta, dlog_decay, _, dmemory_before = memory_plan.add_backward(
        plan, do, dmemory, slots, saved, inputs, layer.spec, full_chunks
    )
    # With a convolution, z is what it gave, and dz is not yet the gradient of p; without one it is, and goes there.
    dz = plan.empty((B, T, config.channels), x.p.dtype) if config.conv else dp
    learned = config.decay == "learned"
    decay_log, decay_bias = (x.decay_log, x.decay_bias) if learned else (None, None)
    ddecay_log: Any = None if decay_log is None else plan.empty(decay_log.shape, decay_log.dtype)
    ddecay_bias: Any = None if decay_bias is None else plan.empty(decay_bias.shape, decay_bias.dtype)
    log_parts: Any = None if ddecay_log is None else plan.empty((token_blocks, H), torch.float32)
    bias_parts: Any = None if ddecay_log is None else plan.empty((token_blocks, H), torch.float32)
    dz_unit = unit(dz.shape[2])
    plan.launch(
        mixer_tiles.prepare_backward, layer.grid(layer.prepare_programs()),
        (x.p, x.conv, x.before, tables.token_places, decay_log, decay_bias, dq, dk, dv, dbeta,
         None if ddecay_log is None else dlog_decay, dz, dp, log_parts, bias_parts),
        (*numbers, dz.shape[2] // dz_unit), (*layer.prepare_constants(), dz_unit), num_warps=4)  # fmt: skip
    dbefore = dconv = None
    if config.conv and tables.cu is None:
        dbefore, dconv = convolution.plan_backward(plan, dz, dlast, x.p, x.conv, x.before, dp)
    elif config.conv:
        dbefore, dconv = packed_convolution.plan_backward(
            plan, dz, dlast, x.p, x.conv, x.before, tables.token_places, tables.cu, dp
        )
    if ddecay_log is not None:
        convolution.sum_rows(plan, log_parts, ddecay_log)
        convolution.sum_rows(plan, bias_parts, ddecay_bias)
    grads = dp, dconv, ddecay_log, ddecay_bias, dnorm, dmemory_before, dbefore
    wanted = zip(grads, x[:N_DIFFERENTIABLE], strict=True)
    plan.results = [None if grad is None or tensor is None else grad.place for grad, tensor in wanted]
    return plan
