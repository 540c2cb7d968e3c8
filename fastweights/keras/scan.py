"""The memory of core.py in keras.ops, as a scan over tokens or over chunks of them.

Shapes beyond those of core.py: M chunks (tokens, when recurrent: C = 1), N sequences packed into one row. On
TensorFlow the lengths of B, T, N and so M may be unknown while a graph is built.
"""

from functools import partial
from math import prod

from keras import ops

from fastweights import chunk_form, core
from fastweights.chunk_form import Chunk
from fastweights.core import TOKENS, Inputs
from fastweights.keras.dtypes import accumulation_dtype
from fastweights.keras.packing import keep_real, pack, to_chunks


def run(inputs, spec, *, recurrent):
    """fast_weight after its checks."""
    if spec.writes > 1:
        o, S = run(*core.expand_writes(inputs, spec, ops, ops.shape), recurrent=recurrent)
        return core.gather_reads(o, spec), S
    q, _, v, beta, log_decay, _, state, cu_seqlens, mask = inputs
    B, T, H, K = ops.shape(q)
    V, wide, C = v.shape[-1], accumulation_dtype(q), spec.chunk_size
    if state is None:
        state = ops.zeros((B if cu_seqlens is None else ops.shape(cu_seqlens)[0] - 1, H, K, V), wide)
    if isinstance(T, int) and T == 0:
        return v, state
    if beta is None:
        inputs = inputs._replace(beta=ops.ones((B, T, H), wide))
    if log_decay is None:
        inputs = inputs._replace(log_decay=ops.zeros((B, T, H), wide))
    tokens = inputs.map_tokens(lambda x: ops.cast(x, wide))
    if mask is not None:
        tokens = tokens.map_tokens(lambda x: keep_real(mask, x))
    packing = None if cu_seqlens is None else pack(ops.cast(cu_seqlens, "int32"), T, C)
    tokens = tokens.map_tokens(lambda x: to_chunks(x, C, packing))
    if recurrent:
        token = tokens.map_tokens(lambda x: x[:, :, :, 0])[:TOKENS]
        parts = [x for x in token if x is not None]
        move = partial(_step, spec, [x is not None for x in token])
    else:
        prepared = chunk_form.prepare(tokens, spec, ops)
        parts = [x for x in prepared if x is not None]
        move = partial(_advance, [x is not None for x in prepared])
    S, o = _scan(move, state, parts, C, packing)
    o = ops.reshape(ops.moveaxis(o, (0, 2), (1, 3)), (B, -1, H, V))  # (M, B, H, C, V) -> (B, M * C, H, V)
    o = o[:, :T] if packing is None else ops.take(o, packing.place, axis=1)
    return ops.cast(o, v.dtype), S


def _step(spec, present, S, *token):
    """core.step of an Inputs of which only the parts that are present travelled through the scan."""
    S, o = core.step(S, Inputs(*_with_absent(present, token)), spec, ops)
    return S, o[..., None, :]


def _advance(present, S, *parts):
    """`advance` of a Chunk, likewise."""
    return chunk_form.advance(S, Chunk(*_with_absent(present, parts)))


def _with_absent(present, parts):
    """parts, with None in the places that are not present."""
    parts = iter(parts)
    return [next(parts) if there else None for there in present]


def _scan(move, state, parts, C, packing):
    """S, o = move(S, *parts) along the first axis; a packed sequence starts from its own state and leaves its own.

    TensorFlow's ops.scan puts out nothing but its carry, so the C output rows ride below the memory; and it takes
    one tensor when its length is unknown, so the parts of a chunk are laid side by side.
    """
    K = state.shape[-2]
    S = state
    if packing is None and parts[0].shape[0] == 1:  # one token or chunk: nothing to compile
        S, o = move(S, *(x[0] for x in parts))
        return S, o[None]
    if packing is not None:
        starts = ops.take(state, packing.sequence, axis=0)[:, None]
        first = ops.zeros_like(starts[..., :1, 0]) + ops.cast(packing.first, state.dtype)[:, None, None, None]
        parts = [*parts, starts, first]
        S = ops.zeros_like(starts[0])
    shapes = [tuple(x.shape[3:]) for x in parts]
    ends = [sum(prod(shape) for shape in shapes[: i + 1]) for i in range(len(shapes) - 1)]
    lead = ops.shape(parts[0])[:3]
    rows = ops.concatenate([ops.reshape(x, (*lead, prod(s))) for x, s in zip(parts, shapes, strict=True)], -1)

    def body(carry, row):
        x = [ops.reshape(x, (*lead[1:], *s)) for x, s in zip(ops.split(row, ends, axis=-1), shapes, strict=True)]
        S = carry[..., :K, :]
        if packing is not None:
            *x, starts, first = x
            S = ops.where(first[..., None] > 0, starts, S)
        carry = ops.concatenate(move(S, *x), -2)
        return carry, carry

    init = ops.concatenate([S, ops.zeros_like(S[..., :1, :]) + ops.zeros((C, 1), S.dtype)], -2)
    final, carries = ops.scan(body, init, rows)
    S, o = final[..., :K, :], carries[..., K:, :]
    if packing is not None:
        S = ops.take(carries[:, 0, :, :K], packing.last, axis=0)
        S = ops.where(packing.empty[:, None, None, None], state, S)
    return S, o
