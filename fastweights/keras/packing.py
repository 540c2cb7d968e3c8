"""How tokens become chunks in keras.ops, for plain and for packed batches; a chunk never spans two sequences."""

from typing import NamedTuple

from keras import ops

from fastweights.keras.dtypes import Tensor


class _Packing(NamedTuple):
    """Where the tokens of N packed sequences lie in M chunks, none of which spans two sequences."""

    token: Tensor  # (M, C) the token in each place of each chunk; T where that place is padding
    sequence: Tensor  # (M,) whose chunk it is
    first: Tensor  # (M,) whether it is that sequence's first
    last: Tensor  # (N,) each sequence's last chunk
    empty: Tensor  # (N,) whether it has none
    place: Tensor  # (T,) where each token went among the M * C places


def pack(offsets, T, C):
    """The _Packing of cu_seqlens; M depends on shapes alone, so that offsets may be traced.

    A sequence of n tokens takes (n + C - 1) // C chunks, all of them at most (T + N (C - 1)) // C; those left over are
    the last sequence's, and all padding.

    Args:
        offsets: (N + 1,) cu_seqlens.
        T: tokens of the row.
        C: tokens of a chunk.
    """
    N = ops.shape(offsets)[0] - 1
    start, stop = offsets[:-1], offsets[1:]
    bounds = ops.cumsum((stop - start + C - 1) // C)
    bounds = ops.concatenate([ops.zeros((1,), "int32"), ops.cast(bounds, "int32")], 0)  # of the sequences, in chunks

    def owner(bounds, i):  # the sequence that i lies in; an empty one owns nothing
        return ops.clip(ops.cast(ops.searchsorted(bounds, i, side="right"), "int32") - 1, 0, N - 1)

    def at(x, i):
        return ops.take(x, i, axis=0)

    chunk = ops.arange(_at_least_one((T + N * (C - 1)) // C), dtype="int32")
    sequence = owner(bounds, chunk)
    token = (at(start, sequence) + (chunk - at(bounds, sequence)) * C)[:, None] + ops.arange(C, dtype="int32")[None]
    t = ops.arange(T, dtype="int32")
    n = owner(offsets, t)
    return _Packing(
        token=ops.where(token < at(stop, sequence)[:, None], token, T),
        sequence=sequence,
        first=chunk == at(bounds, sequence),
        last=ops.maximum(bounds[1:] - 1, 0),
        empty=stop == start,
        place=at(bounds, n) * C + t - at(start, n),
    )


def to_chunks(x, C, packing):
    """(B, T, H, ...) -> (M, B, H, C, ...), padded with zeros: tokens that neither write, decay nor read."""
    B, T, *rest = ops.shape(x)
    if packing is None:
        M = _at_least_one((T + C - 1) // C)
        x = ops.pad(x, [(0, 0), (0, M * C - T)] + [(0, 0) for _ in rest])
        x = ops.reshape(x, (B, M, C, *rest))
    else:
        x = ops.pad(x[0], [(0, 1)] + [(0, 0) for _ in rest])
        x = ops.take(x, packing.token, axis=0)[None]
    return ops.moveaxis(x, (1, 3), (0, 2))


def _at_least_one(M):
    """M chunks, or one where an unknown T turns out to be 0: TensorFlow cannot stack the outputs of none."""
    return ops.maximum(M, 1) if ops.is_tensor(M) else M


def keep_real(mask, x):
    """x where mask, else 0: NaN does not get through, forwards or backwards."""
    for _ in range(len(x.shape) - len(mask.shape)):
        mask = mask[..., None]
    return ops.where(mask, x, ops.zeros_like(x))
