"""Where a chunk's tokens are, for plain and for packed batches, and the decay between them.

Tokens of all sequences form one axis, (B * T, H, width). A row is one chunk of C tokens of one sequence; the rows of a
sequence follow each other. Without packing both are arithmetic; packed, two small tables say it.

What all kernels of the memory are given after their tensors, and which switches they are compiled for:

    of_sequence, of_row   tables of a packed batch, None otherwise;  T, per, tokens: see `Layout`
    H, K, V, C            heads, key width, value width, tokens of a chunk
    BK, BV                key and value features of a block: powers of two, at least as wide where all must fit
    DELTA, BEFORE         the rule; whether queries read before their own token's write
    BETA, DECAY, PACKED   whether there are write rates, decays, and packed sequences
    OUT, SAVE             whether outputs are wanted; rows of a span at whose start the memory is kept, 0 for none
    PRECISION             how products of float32 are made: exact, or one pass of TF32
    STAGES, TMA           loads that run ahead; whether the tensor memory accelerator makes them

In comments and docstrings of kernels [a, b] is the shape of a tile that a program holds, (a, b) that of a tensor in
the GPU's memory. Log decays: log_g from the chunk's start to a token, log_r to what its query reads, log_end of all.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from fastweights.torch.devices import copied
from fastweights.torch.kernels.plan import Slot
from fastweights.torch.packing import Sequences, cut_on_device, has_fixed_shapes, remember

C = 64  # tokens per chunk


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a call are.

    Either every sequence has T tokens in `per` rows, or the tables, slots of a plan, say where each begins. A span is
    `every` rows of one sequence, at whose ends the memory is kept for the backward pass.

    Attributes:
        sequences, rows, tokens: how many there are in all.
        room: rows that any packing of these shapes needs at most: what is allocated.
        whole: no row is cut short.
        T, per: tokens and rows of each sequence, 0 where packed.
        every: rows of a span.
        span_rows, span_room: as rows and room, for spans.
        of_sequence: (sequences, 4) first token, tokens, first row, first span.
        of_row: (rows, 2) first token, tokens of the sequence from there on.
        of_span: (spans, 2) the same.
    """

    sequences: int
    rows: int
    room: int  # rows that any packing of these shapes needs at most: what is allocated
    tokens: int
    whole: bool  # no row is cut short
    T: int
    per: int
    every: int = 1
    span_rows: int = 0  # the same two numbers for spans
    span_room: int = 0
    of_sequence: Slot | None = None  # (sequences, 4): first token, tokens, first row, first span
    of_row: Slot | None = None  # (rows, 2): first token, tokens of the sequence from there on
    of_span: Slot | None = None  # (spans, 2): the same

    @classmethod
    def plain(cls, B, T, every=1):
        """Of B sequences of T tokens each."""
        per = -(-T // C)
        spans = B * -(-per // every)
        return cls(B, B * per, B * per, B * T, T % C == 0, T, per, every, spans, spans)

    @classmethod
    def packed(cls, tables, whole, tokens, every):
        """Of sequences packed into one row.

        Args:
            tables: slots for `pack`'s tables.
            whole: whether every row is full.
            tokens: of all sequences.
            every: rows of a span.
        """
        sequences, rows, spans = (x.shape[0] for x in tables)
        rooms = tokens // C + sequences, tokens // (C * every) + sequences
        return cls(sequences, rows, rooms[0], tokens, whole, 0, 0, every, spans, rooms[1], *tables)

    @property
    def spans(self):
        """The same, with spans for rows."""
        return replace(self, rows=self.span_rows, room=self.span_room, per=-(-self.per // self.every), every=1,
                       of_row=self.of_span)  # fmt: skip

    def launch(self, plan, kernel, grid, slots, constants, **options):
        """kernel[grid](*slots, *where tokens are, *constants) in a plan."""
        numbers = self.T, self.per, self.tokens
        plan.launch(kernel, grid, (*slots, self.of_sequence, self.of_row), numbers, constants, **options)


def pack(cu_seqlens, T, every):
    """((of_sequence, of_row, of_span), whole): tables beside cu_seqlens, and whether every row is full.

    Under `fixed_shapes` they have room for the rows of any packing; those beyond the last hold no token.
    """

    def make():
        if has_fixed_shapes():
            N, offsets = len(cu_seqlens) - 1, cu_seqlens.long()
            first_row, of_row = cut_on_device(offsets, C, T // C + N)
            first_span, of_span = cut_on_device(offsets, C * every, T // (C * every) + N)
            return (torch.stack([offsets[:-1], offsets.diff(), first_row, first_span], 1), of_row, of_span), False
        sequences = Sequences.of(cu_seqlens, T)
        first_row, _, of_row = sequences.cut(C)
        first_span, _, of_span = sequences.cut(C * every)
        of_sequence = torch.stack([*sequences, first_row, first_span], 1)
        with torch.inference_mode(False):
            tables = tuple(copied(x, cu_seqlens.device) for x in (of_sequence, of_row, of_span))
        return tables, not (sequences.length % C).any().item()

    return remember(cu_seqlens, ("tables", T, every, has_fixed_shapes()), make)


@triton.jit
def find_sequence(of_sequence, T, per, n, EVERY: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens, first row and first span of EVERY rows of sequence n."""
    if PACKED:
        at = of_sequence + 4 * n
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return n * T, n * 0 + T, n * per, n * tl.cdiv(per, EVERY)


INTERPRETED = type(find_sequence).__name__ == "InterpretedFunction"  # Triton's own mode for a CPU


@triton.jit
def find_row(of_row, T, per, row, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a row, and how many tokens its sequence has from there on; C is then the tokens of a row or of
    a span.
    """
    if PACKED:
        return tl.load(of_row + 2 * row), tl.load(of_row + 2 * row + 1)
    else:
        within = row % per * C
        return row // per * T + within, T - within


@triton.jit
def describe(x, tokens, WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr):
    """x (tokens, WIDTH) for tiles of [C, B]: a TMA descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(x, [tokens, WIDTH], [WIDTH, 1], [C, B])
    else:
        return x


@triton.jit
def load_tile(x, token, head, first, left, H: tl.constexpr, D: tl.constexpr,
              C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr = False):  # fmt: skip
    """x[token : token + C, head, first : first + B] as a tile [C, B], zero past the sequence's end and past the width
    D.

    Args:
        x: pointer to (tokens, H, D), or its descriptor with TMA.
        token, head, first: the tile's first token, its head, and its first feature.
        left: tokens of the sequence from `token` on.
    """
    if TMA:
        return x.load([token.to(tl.int32), (head * D + first).to(tl.int32)])
    else:
        i = tl.arange(0, C)
        column = first + tl.arange(0, B)
        mask = (i < left)[:, None] & (column < D)[None, :]
        return tl.load(x + ((token + i) * H + head)[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, token, head, first, left, H: tl.constexpr, D: tl.constexpr,
               C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr = False):  # fmt: skip
    """value [C, B] to x[token : token + C, head, first : first + B], in its dtype, where `load_tile` would not give
    zero.
    """
    if TMA:
        x.store([token.to(tl.int32), (head * D + first).to(tl.int32)], value.to(x.dtype))
    else:
        i = tl.arange(0, C)
        column = first + tl.arange(0, B)
        mask = (i < left)[:, None] & (column < D)[None, :]
        at = ((token + i) * H + head)[:, None] * D + column[None, :]
        tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_block(x, at, row, column, K: tl.constexpr, V: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr = False):  # fmt: skip
    """x[at, row : row + BK, column : column + BV] as a tile [BK, BV], zero outside.

    x: pointer to matrices (..., K, V), or its descriptor with TMA;  at: which matrix.
    """
    if TMA:
        return x.load([(at * K + row).to(tl.int32), column])
    else:
        d = row + tl.arange(0, BK)
        e = column + tl.arange(0, BV)
        mask = (d < K)[:, None] & (e < V)[None, :]
        return tl.load(x + at * K * V + d[:, None] * V + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(x, value, at, row, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                wanted=None):  # fmt: skip
    """value [BK, BV] to x[at, row : row + BK, column : column + BV] of matrices (K, V), in its dtype, if wanted."""
    d = row + tl.arange(0, BK)
    e = column + tl.arange(0, BV)
    mask = (d < K)[:, None] & (e < V)[None, :]
    if wanted is not None:
        mask &= wanted
    tl.store(x + at * K * V + d[:, None] * V + e[None, :], value.to(x.dtype.element_ty), mask=mask)


@cache
def exact_products():
    """The most exact products of float32 that tensor cores make: six of bfloat16 where Triton knows how."""
    known = not INTERPRETED and "bf16x6" in CUDAOptions.allowed_dot_input_precisions
    return "bf16x6" if known else "tf32x3"


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """a @ b + c in float32. tf32 is rounded to nearest here: the tensor cores drop the bits that do not fit."""
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    if a.dtype == tl.float32 and c is not None:  # the tensor cores truncate what they add to
        return c + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def solve(a, b, PRECISION: tl.constexpr):
    """A product with the inverse. In TF32, too, it is made in three passes: the chain from chunk to chunk runs here."""
    return product(a, b, None, "tf32x3" if PRECISION == "tf32" else PRECISION)


@triton.jit
def round_to_tf32(x):
    """x rounded to the ten bits of TF32, to nearest: 4096 is half of the last bit that is kept."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def decay(log):
    """The factor of which this is the logarithm, or the difference of two, in float32.

    As a power of two: of tl.exp each costs three instructions more, for results below 1e-38.
    """
    return tl.exp2(log.to(tl.float32) * 1.4426950408889634)


@triton.jit
def read_decay(log_g, i, BEFORE: tl.constexpr):
    """log r: the decay of what token i reads, from log_g (C,) of its chunk."""
    if BEFORE:
        return tl.load(log_g + i - 1, mask=i > 0, other=0.0)
    else:
        return tl.load(log_g + i)


@triton.jit
def divisor(b):
    """A write rate of zero as one that writes nothing, and that one can divide by, twice."""
    return tl.where(tl.abs(b) < 1e-15, 1e-15, b)


@triton.jit
def _rates(beta, log_decay, beta_rows, log_g, factors, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
           BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """beta, the running sums of log_decay of one chunk and what follows from them (`Decays`), from (T, H) to (H, C).

    One program: one row (chunk) and BH heads, which lie side by side in the inputs. A rate of zero becomes one that can
    be divided by; sums are made in float64. Past the end of a sequence beta is 1e-15 and the decay 0: nothing is
    written.
    """
    row = tl.program_id(0).to(tl.int64)  # one program: the rates of one row and BH heads, from (T, H) to (H, C)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, C)
    token, left = find_row(of_row, T, per, row, C, PACKED)
    inside = (i < left)[:, None] & (head < H)[None, :]
    source = (token + i)[:, None] * H + head[None, :]
    target = (row * H + head)[None, :] * C + i[:, None]
    if BETA:
        b = tl.load(beta + source, mask=inside, other=0.0).to(tl.float32)
        b = divisor(b)
        tl.store(beta_rows + target, b, mask=(head < H)[None, :])
    if DECAY:
        # Past the end of a sequence log_decay counts as 0: the memory is kept as it is.
        a = tl.load(log_decay + source, mask=inside, other=0.0).to(tl.float32)
        sums = tl.cumsum(a.to(tl.float64), 0)
        tl.store(log_g + target, sums.to(log_g.dtype.element_ty), mask=(head < H)[None, :])
        to = (row * H + head)[None, :] * 3 * C + i[:, None]
        tl.store(factors + to, decay(sums), mask=(head < H)[None, :])
        tl.store(factors + to + C, decay(sums - a if BEFORE else sums), mask=(head < H)[None, :])
        end = tl.sum(a.to(tl.float64), 0)
        tl.store(factors + to + 2 * C, decay(end[None, :] - sums), mask=(head < H)[None, :])


class Decays(NamedTuple):
    """Slots of what chunks decay by, one decay per head.

    Attributes:
        log_g: (rows, H, C), the sum of log_decay from the chunk's start to each token. For float32 it is in float64: of
            two that are close, the difference would keep too few digits.
        factors: (rows, H, 3, C), the decay itself, to each token, to what its query reads, and from it to the chunk's
            end: walks take them as they are, since they have no time to compute them.
    """

    log_g: Slot
    factors: Slot


def shapes_of_rates(rows, H, beta, dtype, decay=True):
    """(shape, dtype) of what `rates` gives for keys of dtype: beta if there is any, then `Decays`."""
    sums = torch.float64 if dtype == torch.float32 else torch.float32
    wanted = [((rows, H, C), torch.float32)] if beta else []
    return [*wanted, ((rows, H, C), sums), ((rows, H, 3, C), torch.float32)] if decay else wanted


def rates(plan, beta, log_decay, layout, spec, k):
    """Plan the rates by chunks: a slot of beta, (rows, H, C), and `Decays`; None for what is not there.

    In the padding nothing is written and nothing decays.

    Args:
        plan: to add the launch to.
        beta, log_decay: slots (B, T, H), or None.
        layout: where tokens are.
        spec: which decay a query sees.
        k: slot of the keys, whose dtype decides that of the sums.
    """
    H = k.shape[2]
    if beta is None and log_decay is None:
        return None, None
    shapes = [plan.empty(*x) for x in shapes_of_rates(layout.room, H, beta is not None, k.dtype, log_decay is not None)]
    beta_rows = None if beta is None else shapes.pop(0)
    decays = None if log_decay is None else Decays(*shapes)
    if layout.rows:
        BH = min(16, 1 << (H - 1).bit_length())
        layout.launch(
            plan, _rates, (layout.rows, -(-H // BH)), (beta, log_decay, beta_rows, *(decays or (None, None))),
            (H, C, BH, spec.before, beta is not None, log_decay is not None, layout.of_row is not None))  # fmt: skip
    return beta_rows, decays
