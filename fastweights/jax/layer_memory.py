"""The memories of a Fast Weight Layer in JAX: `fast_weight` for keys and values that are wide.

Their products are most of the layer's work beside the vocabulary, so they are made as
`jax.default_matmul_precision` says, like all others of the layer, where `fast_weight` always makes them in full
precision; and those of all chunks are made at once. Letters and shapes are those of scan.py and chunk_form.py.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastweights import chunk_form
from fastweights.core import Inputs, Spec
from fastweights.debugging import debugging
from fastweights.jax.devices import here
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.ops import _check_values, fast_weight
from fastweights.jax.packing import pack, to_chunks
from fastweights.jax.scan import scan_chunks
from fastweights.literals import Read, Rule

ALIGNED = {"cpu": 1, "gpu": 8}  # keys are filled up with zeros to a multiple of it: matrix units want aligned rows
WIDER = 4  # memories of all chunks are held at once unless they are so many times as large as the tokens of a chunk


def missing_keys(width: int) -> int:
    """How many zeros a key of this width wants; none if it is one number."""
    return -width % here(ALIGNED) if width > 1 else 0


def layer_memory(
    q: Array, k: Array, v: Array, *, state: Any, rule: Rule, read: Read, chunk_size: int, cu_seqlens: Any, **gates: Any
) -> tuple[Array, Array]:
    """`fast_weight` of q, k (B, T, 1, K) and v (B, T, 1, V), whose arguments are right: (o, final state).

    Args:
        q, k, v: queries, keys and values.
        state: (N, 1, K, V), or None for zeros.
        rule: "sum"; "delta" goes to `fast_weight`, as its inverses want full precision, and so does a single token.
        read: "before" or "after" a token's write.
        chunk_size: tokens in a chunk.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
        gates: beta and log_decay, (B, T, 1) or None.
    """
    spec = Spec.make(rule, read, chunk_size=chunk_size)
    if q.shape[1] <= 1 or rule != "sum":
        how = dict(rule=rule, read=read, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
        return fast_weight(q, k, v, state=state, **how, **gates)
    width = q.shape[-1]
    missing = missing_keys(width)
    if missing:
        q, k = (jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) for x in (q, k))
        state = None if state is None else jnp.pad(state, [(0, 0), (0, 0), (0, missing), (0, 0)])
    inputs = Inputs(q, k, v, log_decay=gates["log_decay"], state=state, cu_seqlens=cu_seqlens)
    if debugging():
        _check_values(inputs)
    o, state = _sums(inputs, spec.but(chunk_size=min(chunk_size, q.shape[1])))
    return o, state[:, :, :width]


@partial(jax.jit, static_argnums=1)
def _sums(inputs, spec):
    """The sum rule over all chunks: their writes first, then the memory before each, then what all of them read."""
    q, k, v, _, log_decay, _, state, cu_seqlens, _ = inputs
    (B, T, H, K), V, wide, C = q.shape, v.shape[-1], accumulation_dtype(q), spec.chunk_size
    if state is None:
        state = jnp.zeros((B if cu_seqlens is None else len(cu_seqlens) - 1, H, K, V), wide)
    packing = None if cu_seqlens is None else pack(cu_seqlens.astype(jnp.int32), T, C)
    beta = None if log_decay is None else jnp.ones((B, T, H), wide)
    tokens = Inputs(q, k, v, beta, log_decay).map_tokens(lambda x: to_chunks(x.astype(wide), C, packing))
    # The sums of the layer norm have keys of one number: next to nothing, so that they may as well be exact.
    with jax.default_matmul_precision("highest") if K == 1 else nullcontext():
        chunk = _undecayed(tokens, spec) if log_decay is None else chunk_form.prepare(tokens, spec, jnp)
        if K * V > WIDER * C * (K + V):
            S, o = scan_chunks(chunk_form.advance, state, chunk, packing)
        else:
            S, before = scan_chunks(_add, state, (chunk.kT @ chunk.U, chunk.g), packing)
            o = chunk.q @ before + chunk.A @ chunk.U
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, -1, H, V)  # (M, B, H, C, V) -> (B, M * C, H, V)
    o = o[:, :T] if packing is None else o[:, packing.place]
    return o.astype(q.dtype), S


def _undecayed(x, spec):
    """`chunk_form.prepare` for the sum rule without decay."""
    kT = jnp.swapaxes(x.k, -1, -2)
    A = jnp.tril(x.q @ kT, -1 if spec.before else 0)
    return chunk_form.Chunk(x.q, A, x.v, None, kT, jnp.ones((*x.k.shape[:3], 1, 1), kT.dtype))


def _add(S, written):
    """(the memory after a chunk, the memory before it) for what the chunk wrote and how much it keeps."""
    new, kept = written
    return kept * S + new, S
