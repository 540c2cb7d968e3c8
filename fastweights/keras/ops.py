"""`fast_weight` and `feature_map` in keras.ops: arguments become an Inputs and a Spec, which scan.py computes."""

from collections.abc import Callable

from keras import ops

from fastweights import core
from fastweights.checks import check, check_method, check_offsets, log_method
from fastweights.core import ARRAYS, FastWeightError, Inputs, Spec
from fastweights.debugging import check_values, debugging
from fastweights.features import parse, parse_fixed
from fastweights.keras.dtypes import Tensor, accumulation_dtype
from fastweights.keras.scan import run
from fastweights.literals import Method, Norm, Read, Rule

METHODS = ("recurrent", "chunked")
CHUNK_SIZE = 64


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
    return run(inputs, spec._replace(chunk_size=C), recurrent=method == "recurrent")


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
