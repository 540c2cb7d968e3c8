"""Where the chunks of a call are: plain batches and sequences packed into one row.

The tokens of all sequences form one axis, so that a tensor (B, T, H, width) is read as (tokens, H, width) with tokens =
B * T. Every sequence is cut into chunks of C tokens, its last chunk may be shorter, and no chunk has tokens of two
sequences. Chunks are numbered through all sequences, the chunks of one sequence after each other; a tensor
(chunks, ...) has one entry per chunk. A span is a run of chunks of one sequence, at whose two ends the backward pass
knows the memory and its gradient.

In a plain batch all sequences are equally long, and first tokens and chunks are a matter of arithmetic. In a packed one
they are read from small tables on the device. Kernels ask `find_sequence` and `find_chunk`, which do either.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fastweights.torch.devices import copied
from fastweights.torch.kernels.plan import Slot
from fastweights.torch.packing import Sequences, cut_on_device, has_fixed_shapes, remember

C = 64  # tokens per chunk


@dataclass(frozen=True)
class Layout:
    """How the tokens of a call are cut into chunks and spans.

    Attributes:
        sequences, chunks, tokens: how many there are in all.
        max_chunks: the most chunks that any packing of these shapes could need; tensors are allocated for so many.
        full_chunks: whether every chunk has all of its C tokens.
        T, chunks_per_sequence: tokens and chunks of each sequence of a plain batch; 0 where packed.
        chunks_per_span: how many chunks a span has, but for the last span of a sequence.
        spans, max_spans: the numbers `chunks` and `max_chunks` of spans.
        sequence_table: slot of (sequences, 4), of each its first token, tokens, first chunk and first span; None for a
            plain batch, as are the other two.
        chunk_table: slot of (chunks, 2), of each its first token, and tokens of its sequence from there on.
        span_table: slot of (spans, 2), the same two numbers of each span.
    """

    sequences: int
    chunks: int
    max_chunks: int
    tokens: int
    full_chunks: bool
    T: int
    chunks_per_sequence: int
    chunks_per_span: int = 1
    spans: int = 0
    max_spans: int = 0
    sequence_table: Slot | None = None
    chunk_table: Slot | None = None
    span_table: Slot | None = None

    @classmethod
    def plain(cls, B, T, chunks_per_span=1):
        """The layout of B sequences of T tokens each."""
        per_sequence = -(-T // C)
        spans = B * -(-per_sequence // chunks_per_span)
        chunks = B * per_sequence
        return cls(B, chunks, chunks, B * T, T % C == 0, T, per_sequence, chunks_per_span, spans, spans)

    @classmethod
    def packed(cls, tables, full_chunks, tokens, chunks_per_span):
        """The layout of sequences that are packed into one row of `tokens` tokens.

        Args:
            tables: slots of the three tables of `chunk_tables`.
            full_chunks: whether every chunk has C tokens, as `chunk_tables` says.
            tokens: of all sequences.
            chunks_per_span: chunks of a span.
        """
        sequences, chunks, spans = (table.shape[0] for table in tables)
        max_chunks, max_spans = tokens // C + sequences, tokens // (C * chunks_per_span) + sequences
        return cls(sequences, chunks, max_chunks, tokens, full_chunks, 0, 0, chunks_per_span, spans, max_spans, *tables)

    @property
    def is_packed(self):
        """Whether sequences are packed into one row, so that kernels read the tables."""
        return self.chunk_table is not None

    @property
    def of_spans(self):
        """The layout whose chunks are the spans of this one, for kernels that take a span where others take a chunk."""
        per_sequence = -(-self.chunks_per_sequence // self.chunks_per_span)
        return replace(self, chunks=self.spans, max_chunks=self.max_spans, chunks_per_sequence=per_sequence,
                       chunks_per_span=1, chunk_table=self.span_table)  # fmt: skip

    def launch(self, plan, kernel, grid, slots, constants, **options):
        """Add kernel[grid](*slots, tables, numbers of this layout, *constants) to a plan.

        The tables are `sequence_table` and `chunk_table`; the numbers are T, chunks_per_sequence and tokens.
        """
        numbers = self.T, self.chunks_per_sequence, self.tokens
        plan.launch(kernel, grid, (*slots, self.sequence_table, self.chunk_table), numbers, constants, **options)


def chunk_tables(cu_seqlens, T, chunks_per_span):
    """((sequence_table, chunk_table, span_table), full_chunks) of a packed row, as `Layout` describes them.

    They are int64 and on the device of cu_seqlens. They are made once for a tensor of offsets and kept beside it. Under
    `fixed_shapes` they have entries for the chunks of any packing of these shapes; entries beyond the last chunk say
    that there are no tokens.

    Args:
        cu_seqlens: (N + 1,) offsets of N sequences.
        T: tokens of the row.
        chunks_per_span: chunks of a span.
    """

    def make():
        if has_fixed_shapes():
            N, offsets = len(cu_seqlens) - 1, cu_seqlens.long()
            first_chunk, chunk_table = cut_on_device(offsets, C, T // C + N)
            first_span, span_table = cut_on_device(offsets, C * chunks_per_span, T // (C * chunks_per_span) + N)
            sequence_table = torch.stack([offsets[:-1], offsets.diff(), first_chunk, first_span], 1)
            return (sequence_table, chunk_table, span_table), False
        sequences = Sequences.of(cu_seqlens, T)
        first_chunk, _, chunk_table = sequences.cut(C)
        first_span, _, span_table = sequences.cut(C * chunks_per_span)
        sequence_table = torch.stack([*sequences, first_chunk, first_span], 1)
        with torch.inference_mode(False):
            tables = tuple(copied(x, cu_seqlens.device) for x in (sequence_table, chunk_table, span_table))
        return tables, not (sequences.length % C).any().item()

    return remember(cu_seqlens, ("tables", T, chunks_per_span, has_fixed_shapes()), make)


@triton.jit
def find_sequence(sequence_table, T, chunks_per_sequence, sequence, SPAN: tl.constexpr, PACKED: tl.constexpr):
    """(first token, number of tokens, first chunk, first span) of a sequence, for spans of SPAN chunks."""
    if PACKED:
        entry = sequence_table + 4 * sequence
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    else:
        return (
            sequence * T,
            sequence * 0 + T,  # in the dtype of the others
            sequence * chunks_per_sequence,
            sequence * tl.cdiv(chunks_per_sequence, SPAN),
        )


@triton.jit
def find_chunk(chunk_table, T, chunks_per_sequence, chunk, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token of a chunk, how many tokens its sequence has from there on, which may be more than C).

    The same finds spans: chunk is then the number of a span, C its tokens, and the other arguments those of spans.
    """
    if PACKED:
        return tl.load(chunk_table + 2 * chunk), tl.load(chunk_table + 2 * chunk + 1)
    else:
        within = chunk % chunks_per_sequence * C
        return chunk // chunks_per_sequence * T + within, T - within
