"""Where a chunk's tokens are, for plain and for packed batches, and the decay between them.

Tokens of all sequences form one axis, (B * T, H, width). A row is one chunk of C tokens of one sequence; the rows of a
sequence follow each other. Without packing both are arithmetic; packed, two small tables say it.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from fastweights.core import check_offsets
from fastweights.torch.kernels.launch import start

C = 64  # tokens per chunk


@dataclass(frozen=True)
class Layout:
    """Either every sequence has T tokens in `per` rows, or the tables say where each begins."""

    sequences: int
    rows: int
    room: int  # rows that any packing of these shapes needs at most: what is allocated
    tokens: int
    whole: bool  # no row is cut short
    T: int
    per: int
    every: int = 1  # rows in a piece, at whose ends the memory is kept for the backward pass
    of_sequence: torch.Tensor | None = None  # (sequences, 4): first token, tokens, first row, first piece
    of_row: torch.Tensor | None = None  # (rows, 2): first token, tokens of the sequence from there on
    of_piece: torch.Tensor | None = None  # (pieces, 2): the same

    @classmethod
    def of(cls, q, cu_seqlens, every=1):
        B, T = q.shape[:2]
        if cu_seqlens is None:
            per = -(-T // C)
            return cls(B, B * per, B * per, B * T, T % C == 0, T, per, every)
        offsets = cu_seqlens.tolist()
        check_offsets(offsets, T)
        return cls.packed(offsets, q.device, every)

    @classmethod
    def packed(cls, offsets, device, every):
        start = torch.tensor(offsets[:-1])
        length = torch.tensor(offsets[1:]) - start
        first_row, of_row = _cut(start, length, C)
        first_piece, of_piece = _cut(start, length, C * every)
        of_sequence = torch.stack([start, length, first_row, first_piece], 1)
        room = offsets[-1] // C + len(start)
        whole = not (length % C).any().item()
        tables = (x.to(device) for x in (of_sequence, of_row, of_piece))
        return cls(len(start), len(of_row), room, offsets[-1], whole, 0, 0, every, *tables)

    @property
    def pieces(self):
        """The same, with pieces for rows."""
        per, T = -(-self.per // self.every), self.tokens
        rows, room = (self.sequences * per,) * 2
        if self.of_piece is not None:
            rows, room = len(self.of_piece), T // (C * self.every) + self.sequences
        return replace(self, rows=rows, room=room, per=per, every=1, of_row=self.of_piece)

    @property
    def arguments(self):
        """What every kernel takes, after its tensors, to find its tokens."""
        return self.of_sequence, self.of_row, self.T, self.per, self.tokens


def _cut(start, length, size):
    """(first part of each sequence, first token and tokens left of each part), parts of `size` tokens."""
    parts = (length + size - 1) // size
    first = parts.cumsum(0) - parts
    sequence = torch.repeat_interleave(torch.arange(len(start)), parts)
    token = (torch.arange(len(sequence)) - first[sequence]) * size
    return first, torch.stack([start[sequence] + token, length[sequence] - token], 1)


def launch(kernel, grid, layout, tensors, constants, **options):
    """kernel[grid](*tensors, *layout, *constants)."""
    start(kernel, grid, (*tensors, *layout.arguments[:2]), layout.arguments[2:], constants, **options)


@triton.jit
def find_sequence(of_sequence, T, per, n, EVERY: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens, first row and first piece of EVERY rows of sequence n."""
    if PACKED:
        at = of_sequence + 4 * n
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return n * T, n * 0 + T, n * per, n * tl.cdiv(per, EVERY)


INTERPRETED = type(find_sequence).__name__ == "InterpretedFunction"  # Triton's own mode for a CPU


@triton.jit
def find_row(of_row, T, per, row, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a row, and how many tokens its sequence has from there on."""
    if PACKED:
        return tl.load(of_row + 2 * row), tl.load(of_row + 2 * row + 1)
    else:
        within = row % per * C
        return row // per * T + within, T - within


@triton.jit
def describe(x, tokens, WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr):
    """x (tokens, WIDTH) for tiles of [C, B]: a descriptor for the copy engine, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(x, [tokens, WIDTH], [WIDTH, 1], [C, B])
    else:
        return x


@triton.jit
def load_tile(x, token, head, first, left, H: tl.constexpr, D: tl.constexpr,
              C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr = False):  # fmt: skip
    """x[token : token + C, head, first : first + B] [C, B], zero past the sequence's end and past the width D."""
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
    """The inverse of `load_tile`."""
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
    """x[at, row : row + BK, column : column + BV] of matrices (K, V), zero outside."""
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
    """The inverse of `load_block`, if wanted."""
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
        a, b = _round(a), _round(b)
    if a.dtype == tl.float32 and c is not None:  # the tensor cores truncate what they add to
        return c + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def solve(a, b, PRECISION: tl.constexpr):
    """A product with the inverse. In TF32, too, it is made in three passes: the chain from chunk to chunk runs here."""
    return product(a, b, None, "tf32x3" if PRECISION == "tf32" else PRECISION)


@triton.jit
def _round(x):
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def decay(log):
    """The factor of which this is the logarithm, or the difference of two, in float32."""
    return tl.exp(log.to(tl.float32))


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
def _rates(beta, log_decay, beta_rows, log_g, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
           BETA: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
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
        a = tl.load(log_decay + source, mask=inside, other=0.0).to(tl.float32)
        tl.store(log_g + target, tl.cumsum(a.to(tl.float64), 0).to(log_g.dtype.element_ty), mask=(head < H)[None, :])


def rates(beta, log_decay, layout, k):
    """beta and the running sum of log_decay within each row, as (rows, H, C), no rates in the padding.

    For float32 the sum is in float64: of two that are close, the difference would keep too few digits.
    """
    H = k.shape[2]
    given = [x for x in (beta, log_decay) if x is not None]
    if not given or not layout.rows:
        return None, None
    make = lambda x, dtype: None if x is None else torch.empty(layout.rows, H, C, dtype=dtype, device=x.device)  # noqa: E731
    sums = torch.float64 if k.dtype == torch.float32 else torch.float32
    beta_rows, log_g = make(beta, torch.float32), make(log_decay, sums)
    BH = min(16, 1 << (H - 1).bit_length())
    launch(
        _rates, (layout.rows, -(-H // BH)), layout, (beta, log_decay, beta_rows, log_g),
        (H, C, BH, beta is not None, log_decay is not None, layout.of_row is not None))  # fmt: skip
    return beta_rows, log_g
