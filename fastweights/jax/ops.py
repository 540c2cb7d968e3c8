"""`fast_weight` in JAX: the memory of core.py as a scan over tokens or over chunks of them.

Shapes beyond those of core.py: M chunks (tokens, when recurrent: C = 1), N sequences packed into one row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fastweights import core
from fastweights.checks import check, check_method, check_offsets, log_method
from fastweights.core import ARRAYS, TOKENS, FastWeightError, Inputs, Spec
from fastweights.debugging import check_values, debugging
from fastweights.features import parse, parse_fixed
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.literals import Method, Norm, Read, Rule

METHODS = ("recurrent", "chunked")
CHUNK_SIZE = 64


def fast_weight(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    beta: ArrayLike | None = None,
    log_decay: ArrayLike | None = None,
    erase: ArrayLike | None = None,
    rule: Rule = "delta",
    read: Read = "after",
    state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    features: str | Callable[[Array], Array] = "identity",
    norm: Norm = "none",
    writes: int = 1,
    method: Method = "auto",
    chunk_size: int | None = None,
) -> tuple[Array, Array]:
    r"""Write keys and values into a fast-weight memory and read it with queries, causally.

    $$ S_t = a_t S_{t-1} + \beta_t k_t (v_t - d\, (a_t S_{t-1})^\top e_t)^\top, \qquad o_t = S_t^\top q_t $$

    It computes in float32 (float64 for float64 inputs) with matrix products at full precision, whatever the inputs
    and the device, and runs under `jit`, `grad` and `vmap`.

    Args:
        q, k: (B, T, H, K) queries and keys; already mapped and normalised unless `features` and `norm` say how.
        v: (B, T, H, V) values.
        beta: (B, T, H) write rates in [0, 1], up to 2 for negative eigenvalues; 1 when absent.
        log_decay: (B, T, H) log a_t, finite and <= 0, or (B, T, H, K), a decay per key channel; none when absent.
        erase: (B, T, H, K) e_t, the key that reads what will be corrected ("delta" alone); k when absent.
        rule: "delta" writes the error (d = 1); "sum" adds the value (d = 0, linear attention).
        read: "after" reads S_t; "before" reads S_{t-1}, which has not seen token t.
        state: (B, H, K, V) memory to start from; zeros when absent.
        cu_seqlens: (N + 1,) offsets 0, ..., T of N sequences packed into one row (B = 1); the states are then
            (N, H, K, V). A sequence may be empty. Under `jit` the offsets may be traced; they are then not checked.
        mask: (B, T) bool, False for padding: such a token writes nothing, decays nothing and reads 0, whatever its
            inputs hold.
        method: "recurrent" scans over tokens and saves a memory per token for the backward pass; "chunked" works on
            chunks at once and saves a memory per chunk; "auto" is recurrent for one token, else chunked.
        features, norm: map q, k and erase first, as `feature_map(q, features, norm=norm)` would, except FAVOR+; K of
            the state is then the width of the features.
        writes: n writes per token: k, v, beta and erase have n T tokens, write j of token t at t n + j. A token decays
            once, before its first write, and q reads after its last (or before its first).
        chunk_size: writes in a chunk, 64 when absent; any length of sequence goes with any chunk size.

    Returns:
        o (B, T, H, V) in the dtype of v, and the final state (B, H, K, V) in float32 or wider.

    Examples:
        >>> import jax.numpy as jnp
        >>> from fastweights.jax import fast_weight
        >>> q = k = jnp.eye(3).reshape(1, 3, 1, 3)
        >>> v = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
        >>> o, state = fast_weight(q, k, v)
        >>> o.ravel().tolist()
        [1.0, 2.0, 3.0]
        >>> again, _ = fast_weight(q[:, :1], k[:, :1], 5 * v[:, :1], state=state)  # the same key, another value
        >>> again.item()
        5.0
    """
    arrays = (q, k, v, beta, log_decay, erase, state, cu_seqlens, mask)
    inputs = Inputs(*(None if x is None else jnp.asarray(x) for x in arrays))
    phi = parse_fixed(features)
    spec = Spec.make(rule, read, features if callable(features) else phi.name, norm, writes, chunk_size)
    check_method(method, METHODS)
    check(inputs, spec, width=phi.width)
    if spec.maps:
        maps = lambda x: None if x is None else feature_map(x, phi, norm=norm)  # noqa: E731
        inputs = inputs._replace(q=maps(inputs.q), k=maps(inputs.k), erase=maps(inputs.erase))
        spec = spec.without_maps()
    T = inputs.q.shape[1]
    if cu_seqlens is not None and (offsets := _values(inputs.cu_seqlens)) is not None:
        check_offsets(offsets.tolist(), T)
    if debugging():
        _check_values(inputs)
    refused, why = core.refuses_chunks(spec), "asked for by name"
    if method == "auto":
        method = "recurrent" if T == 1 or refused else "chunked"
        why = "there is one token" if T == 1 else f"chunked {refused}" if refused else "there are several tokens"
    elif method == "chunked" and refused:
        raise FastWeightError(f"method='chunked' {refused}")
    log_method(method, why, inputs, spec)
    C = 1 if method == "recurrent" else min(chunk_size or CHUNK_SIZE, max(writes * T, 1))
    return _fast_weight(inputs, spec._replace(chunk_size=C), method == "recurrent")


def feature_map(
    x: ArrayLike, name: str | Callable[[Array], Array], *, norm: Norm = "none", projection: ArrayLike | None = None
) -> Array:
    """phi(x) for a feature map by name, normalised over the last axis, in the dtype of x; computed in float32 or wider.

    What a query reads of a key is phi(q) . phi(k), so the map decides which keys are alike and how many of them a
    memory
    holds apart: at most as many as phi(x) has entries.

    Args:
        x: (..., d) keys or queries.
        name: "identity", "relu", "silu", "elu+1", "dpfp-NU" (width 2 d NU), "favor-M" (width 2 M), or a function.
        norm: "none"; "l2", to length 1; "sum", to sum 1; "max", to a largest entry of 1; "hellinger", the root of
            "sum".
        projection: (M, d) for "favor-M" alone, from `fastweights.features.favor_projection(M, d, seed)`.

    Returns:
        (..., width).

    Examples:
        >>> import jax.numpy as jnp
        >>> from fastweights.jax import feature_map
        >>> feature_map(jnp.array([-1.0, 3.0], "float32"), "dpfp-1", norm="sum").tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    x = jnp.asarray(x)
    wide = accumulation_dtype(x)
    if projection is not None:
        projection = jnp.asarray(projection, wide)
    with jax.default_matmul_precision("highest"):
        phi = parse(name).apply(x.astype(wide), jnp, jax.nn, norm=norm, projection=projection)
    return phi.astype(x.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _fast_weight(inputs, spec, recurrent):
    """fast_weight after its checks; compiled once per shape, so that a call outside jit is fast too."""
    if spec.writes > 1:
        o, S = _fast_weight(*core.expand_writes(inputs, spec, jnp), recurrent)
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
        tokens = tokens.map_tokens(lambda x: _keep(mask, x))
    packing = None if cu_seqlens is None else _pack(cu_seqlens.astype(jnp.int32), T, C)
    tokens = tokens.map_tokens(lambda x: _chunks(x, C, packing))
    with jax.default_matmul_precision("highest"):
        if recurrent:
            move = lambda S, token: core.step(S, Inputs(*token), spec, jnp)  # noqa: E731
            S, o = _scan(move, state, tokens.map_tokens(lambda x: x[:, :, :, 0])[:TOKENS], packing)
            o = o[:, :, :, None]
        else:
            S, o = _scan(core.advance, state, core.prepare(tokens, spec, jnp, _inverse), packing)
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, -1, H, V)  # (M, B, H, C, V) -> (B, M * C, H, V)
    o = o[:, :T] if packing is None else o[:, packing.place]
    return o.astype(q.dtype), S


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(L, xp):
    """core.inverse with its own derivative, which needs none of its intermediate blocks."""
    return core.inverse(L, xp)


@_inverse.defjvp
def _inverse_jvp(xp, primals, tangents):
    """The derivative of (I + L)^{-1} is -(I + L)^{-1} dL (I + L)^{-1}: two products with what is known already."""
    with jax.default_matmul_precision("highest"):
        (L,), (dL,) = primals, tangents
        Y = core.inverse(L, xp)
        dL = dL + Y @ dL
        return Y, -(dL + dL @ Y)  # -(I + Y) dL (I + Y)


class _Packing(NamedTuple):
    """Where the tokens of N packed sequences lie in M chunks, none of which spans two sequences."""

    token: Array  # (M, C) the token in each place of each chunk; T where that place is padding
    sequence: Array  # (M,) whose chunk it is
    first: Array  # (M,) whether it is that sequence's first
    place: Array  # (T,) where each token went among the M * C places


def _pack(offsets, T, C):
    """The _Packing of cu_seqlens; M depends on shapes alone, so that offsets may be traced.

    A sequence of n tokens takes (n + C - 1) // C chunks, all of them at most (T + N (C - 1)) // C; those left over are
    the last sequence's, and all padding.

    Args:
        offsets: (N + 1,) cu_seqlens.
        T: tokens of the row.
        C: tokens of a chunk.
    """
    N = len(offsets) - 1
    start, stop = offsets[:-1], offsets[1:]
    bounds = jnp.cumsum((stop - start + C - 1) // C, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds])  # of the sequences, in chunks

    def owner(bounds, i):  # the sequence that i lies in; an empty one owns nothing
        return jnp.clip(jnp.searchsorted(bounds, i, side="right").astype(jnp.int32) - 1, 0, N - 1)

    chunk = jnp.arange((T + N * (C - 1)) // C, dtype=jnp.int32)
    sequence = owner(bounds, chunk)
    token = (start[sequence] + (chunk - bounds[sequence]) * C)[:, None] + jnp.arange(C, dtype=jnp.int32)
    t = jnp.arange(T, dtype=jnp.int32)
    n = owner(offsets, t)
    return _Packing(
        token=jnp.where(token < stop[sequence][:, None], token, T),
        sequence=sequence,
        first=chunk == bounds[sequence],
        place=bounds[n] * C + t - start[n],
    )


def _chunks(x, C, packing):
    """(B, T, H, ...) -> (M, B, H, C, ...), padded with zeros: tokens that neither write, decay nor read."""
    B, T = x.shape[:2]
    if packing is None:
        M = -(-T // C)
        x = jnp.pad(x, [(0, 0), (0, M * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, M, C, *x.shape[2:])
    else:
        x = x.at[:, packing.token].get(mode="fill", fill_value=0)
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _keep(mask, x):
    """x where mask, else 0: NaN does not get through, forwards or backwards."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0.0)


def _scan(move, state, xs, packing):
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


def _check_values(inputs):
    """check_values on what is real: padding may hold anything."""
    arrays = zip((*inputs._fields[:ARRAYS], "mask"), (*inputs[:ARRAYS], inputs.mask), strict=True)
    values = {name: _values(x) for name, x in arrays if x is not None}
    traced = [name for name, x in values.items() if x is None]
    if traced:
        raise FastWeightError(
            f"{', '.join(traced)}: got traced, expected values: fastweights.debug() cannot scan them under jax.jit or "
            "jax.vmap; leave those, or debug()"
        )
    check_values(values)


def _values(x):
    """x as NumPy, or None where it has no values yet: under jit or vmap."""
    x = lax.stop_gradient(x)  # under grad alone the values lie beneath the tracer
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)
