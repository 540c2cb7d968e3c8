"""`fast_weight` and `feature_map` in JAX: arguments become an Inputs and a Spec, which scan.py computes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fastweights import core
from fastweights.checks import check, check_method, check_offsets, log_method
from fastweights.core import ARRAYS, FastWeightError, Inputs, Spec
from fastweights.debugging import check_values, debugging
from fastweights.features import parse, parse_fixed
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.scan import run
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
    return run(inputs, spec._replace(chunk_size=C), method == "recurrent")


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
