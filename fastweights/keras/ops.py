"""`fast_weight` in keras.ops: the memory of core.py as a scan over tokens or over chunks of them.

Shapes beyond those of core.py: M chunks (tokens, when recurrent: C = 1), N sequences packed into one row. On
TensorFlow the lengths of B, T, N and so M may be unknown while a graph is built.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

from keras import ops

from fastweights import core
from fastweights.checks import check, check_method, check_offsets, log_method
from fastweights.core import ARRAYS, TOKENS, Chunk, FastWeightError, Inputs, Spec
from fastweights.debugging import check_values, debugging
from fastweights.features import parse, parse_fixed
from fastweights.keras.dtypes import accumulation_dtype
from fastweights.literals import Method, Norm, Read, Rule

METHODS = ("recurrent", "chunked")
CHUNK_SIZE = 64

Tensor = Any  # of the backend in use


def fast_weight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    rule: Rule = "delta",
    read: Read = "after",
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    features: str | Callable[[Tensor], Tensor] = "identity",
    norm: Norm = "none",
    writes: int = 1,
    method: Method = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Write keys and values into a fast-weight memory and read it with queries, causally.

    $$ S_t = a_t S_{t-1} + \beta_t k_t (v_t - d\, (a_t S_{t-1})^\top e_t)^\top, \qquad o_t = S_t^\top q_t $$

    It computes in float32 (float64 for float64 inputs), whatever the inputs. On a GPU, TensorFlow and JAX round the
    factors of float32 matrix products to TF32 unless told not to: `tf.config.experimental.
    enable_tensor_float_32_execution(False)`, `jax.config.update("jax_default_matmul_precision", "highest")`. XLA on
    TensorFlow runs it but cannot differentiate its loop: train there with `jit_compile=False` (a layer of your own
    says so with `supports_jit = False`).

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
            (N, H, K, V). A sequence may be empty. In a compiled function the offsets are not checked.
        mask: (B, T) bool, False for padding: such a token writes nothing, decays nothing and reads 0, whatever its
            inputs hold.
        method: "recurrent" scans over tokens and holds a memory per token; "chunked" works on chunks at once and
            holds a memory per chunk; "auto" is recurrent for one token, else chunked.
        features, norm: map q, k and erase first, as `feature_map(q, features, norm=norm)` would, except FAVOR+; K of
            the state is then the width of the features.
        writes: n writes per token: k, v, beta and erase have n T tokens, write j of token t at t n + j. A token decays
            once, before its first write, and q reads after its last (or before its first).
        chunk_size: writes in a chunk, 64 when absent; any length of sequence goes with any chunk size.

    Returns:
        o (B, T, H, V) in the dtype of v, and the final state (B, H, K, V) in float32 or wider.

    Examples:
        >>> from keras import ops
        >>> from fastweights.keras import fast_weight
        >>> q = k = ops.reshape(ops.eye(3), (1, 3, 1, 3))
        >>> v = ops.reshape(ops.array([1.0, 2.0, 3.0], "float32"), (1, 3, 1, 1))
        >>> o, state = fast_weight(q, k, v)
        >>> ops.convert_to_numpy(o).ravel().tolist()
        [1.0, 2.0, 3.0]
        >>> again, _ = fast_weight(q[:, :1], k[:, :1], 5 * v[:, :1], state=state)  # the same key, another value
        >>> ops.convert_to_numpy(again).item()
        5.0
    """
    arrays = (q, k, v, beta, log_decay, erase, state, cu_seqlens, mask)
    inputs = Inputs(*(None if x is None else ops.convert_to_tensor(x) for x in arrays))
    phi = parse_fixed(features)
    spec = Spec.make(rule, read, features if callable(features) else phi.name, norm, writes, chunk_size)
    check_method(method, METHODS)
    check(inputs, spec, width=phi.width)
    if spec.maps:
        maps = lambda x: None if x is None else feature_map(x, phi, norm=norm)  # noqa: E731
        inputs = inputs._replace(q=maps(inputs.q), k=maps(inputs.k), erase=maps(inputs.erase))
        spec = spec.without_maps()
    T = inputs.q.shape[1]
    T = T if isinstance(T, int) else None  # unknown while a graph is built
    offsets = None if cu_seqlens is None else _values(inputs.cu_seqlens)
    if offsets is not None and T is not None:
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
    C = chunk_size or CHUNK_SIZE
    C = 1 if method == "recurrent" else min(C, writes * T if T else C)
    return _fast_weight(inputs, spec._replace(chunk_size=C), recurrent=method == "recurrent")


def feature_map(
    x: Tensor, name: str | Callable[[Tensor], Tensor], *, norm: Norm = "none", projection: Tensor | None = None
) -> Tensor:
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
        >>> from keras import ops
        >>> from fastweights.keras import feature_map
        >>> ops.convert_to_numpy(feature_map(ops.array([-1.0, 3.0], "float32"), "dpfp-1", norm="sum")).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    x = ops.convert_to_tensor(x)
    if projection is not None:
        projection = ops.convert_to_tensor(projection, accumulation_dtype(x))
    phi = parse(name).apply(ops.cast(x, accumulation_dtype(x)), ops, ops, norm=norm, projection=projection)
    return ops.cast(phi, x.dtype)


def _fast_weight(inputs, spec, *, recurrent):
    """fast_weight after its checks."""
    if spec.writes > 1:
        o, S = _fast_weight(*core.expand_writes(inputs, spec, ops, ops.shape), recurrent=recurrent)
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
        tokens = tokens.map_tokens(lambda x: _keep(mask, x))
    packing = None if cu_seqlens is None else _pack(ops.cast(cu_seqlens, "int32"), T, C)
    tokens = tokens.map_tokens(lambda x: _chunks(x, C, packing))
    if recurrent:
        token = tokens.map_tokens(lambda x: x[:, :, :, 0])[:TOKENS]
        parts = [x for x in token if x is not None]
        move = partial(_step, spec, [x is not None for x in token])
    else:
        prepared = core.prepare(tokens, spec, ops)
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
    """core.advance of a Chunk, likewise."""
    return core.advance(S, Chunk(*_with_absent(present, parts)))


def _with_absent(present, parts):
    """parts, with None in the places that are not present."""
    parts = iter(parts)
    return [next(parts) if there else None for there in present]


class _Packing(NamedTuple):
    """Where the tokens of N packed sequences lie in M chunks, none of which spans two sequences."""

    token: Tensor  # (M, C) the token in each place of each chunk; T where that place is padding
    sequence: Tensor  # (M,) whose chunk it is
    first: Tensor  # (M,) whether it is that sequence's first
    last: Tensor  # (N,) each sequence's last chunk
    empty: Tensor  # (N,) whether it has none
    place: Tensor  # (T,) where each token went among the M * C places


def _pack(offsets, T, C):
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


def _chunks(x, C, packing):
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


def _keep(mask, x):
    """x where mask, else 0: NaN does not get through, forwards or backwards."""
    for _ in range(len(x.shape) - len(mask.shape)):
        mask = mask[..., None]
    return ops.where(mask, x, ops.zeros_like(x))


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


def _check_values(inputs):
    """check_values on what is real: padding may hold anything."""
    arrays = zip((*inputs._fields[:ARRAYS], "mask"), (*inputs[:ARRAYS], inputs.mask), strict=True)
    values = {name: _values(x) for name, x in arrays if x is not None}
    traced = [name for name, x in values.items() if x is None]
    if traced:
        raise FastWeightError(
            f"{', '.join(traced)}: got traced, expected values: fastweights.debug() cannot scan them under jax.jit or "
            "tf.function; compile(run_eagerly=True), or leave debug()"
        )
    check_values(values)


def _values(x):
    """x as NumPy, or None where it has no values yet: under jax.jit or tf.function."""
    try:
        return ops.convert_to_numpy(ops.stop_gradient(x))
    except (TypeError, NotImplementedError):
        return None
