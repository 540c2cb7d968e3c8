"""The memory of core.py in JAX, as a scan over tokens or over chunks of them.

Shapes beyond those of core.py: M chunks (tokens, when recurrent: C = 1), N sequences packed into one row.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fastweights import chunk_form, core
from fastweights.core import TOKENS, Inputs
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.packing import keep_real, pack, to_chunks


@partial(jax.jit, static_argnums=(1, 2))
def run(inputs, spec, recurrent):
    """fast_weight after its checks; compiled once per shape, so that a call outside jit is fast too."""
    if spec.writes > 1:
        o, S = run(*core.expand_writes(inputs, spec, jnp), recurrent)
        return core.gather_reads(o, spec), S
    q, _, v, beta, log_decay, _, state, cu_seqlens, mask = inputs
    B, T, H, K = q.shape
    V, wide, C = v.shape[-1], accumulation_dtype(q), spec.chunk_size
    if state is None:
        state = jnp.zeros((B if cu_seqlens is None else len(cu_seqlens) - 1, H, K, V), wide)
    if T == 0:
        return v, state
    if beta is None:
        inputs = inputs._replace(beta=jnp.ones((B, T, H), wide))
    if log_decay is None:
        inputs = inputs._replace(log_decay=jnp.zeros((B, T, H), wide))
    tokens = inputs.map_tokens(lambda x: x.astype(wide))
    if mask is not None:
        tokens = tokens.map_tokens(lambda x: keep_real(mask, x))
    packing = None if cu_seqlens is None else pack(cu_seqlens.astype(jnp.int32), T, C)
    tokens = tokens.map_tokens(lambda x: to_chunks(x, C, packing))
    with jax.default_matmul_precision("highest"):
        if recurrent:
            move = lambda S, token: core.step(S, Inputs(*token), spec, jnp)  # noqa: E731
            S, o = scan_chunks(move, state, tokens.map_tokens(lambda x: x[:, :, :, 0])[:TOKENS], packing)
            o = o[:, :, :, None]
        else:
            S, o = scan_chunks(chunk_form.advance, state, chunk_form.prepare(tokens, spec, jnp, _inverse), packing)
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, -1, H, V)  # (M, B, H, C, V) -> (B, M * C, H, V)
    o = o[:, :T] if packing is None else o[:, packing.place]
    return o.astype(q.dtype), S


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(L, xp):
    """`chunk_form.inverse` with its own derivative, which needs none of its intermediate blocks."""
    return chunk_form.inverse(L, xp)


@_inverse.defjvp
def _inverse_jvp(xp, primals, tangents):
    """The derivative of (I + L)^{-1} is -(I + L)^{-1} dL (I + L)^{-1}: two products with what is known already."""
    with jax.default_matmul_precision("highest"):
        (L,), (dL,) = primals, tangents
        Y = chunk_form.inverse(L, xp)
        dL = dL + Y @ dL
        return Y, -(dL + dL @ Y)  # -(I + Y) dL (I + Y)


def scan_chunks(move, state, xs, packing):
    """S, o = move(S, x) along the first axis of xs; a packed sequence starts from its own state and leaves its own.

    Args:
        move: (S, x) -> (S, o).
        state: before the first chunk.
        xs: what is read, the chunks along the first axis.
        packing: where packed sequences start and end, or None.
    """
    if packing is None:
        return lax.scan(move, state, xs)

    def body(carry, x):
        S, states = carry
        n, first, x = x
        S, o = move(jnp.where(first, state[n], S), x)
        return (S, states.at[n].set(S[0])), o

    init = jnp.zeros_like(state[:1]), state
    (_, states), o = lax.scan(body, init, (packing.sequence, packing.first, xs))
    return states, o
