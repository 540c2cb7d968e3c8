"""The memory, once, for every framework: one write, one read.

    S_t = a_t S_{t-1} + b_t k_t (v_t - d (a_t S_{t-1})^T k_t)^T          o_t = S_t^T q_t  (or S_{t-1}^T q_t)

Letters: S memory (..., K, V);  q, k queries and keys (..., K);  v values (..., V);  b = beta, a = decay (...).
Shapes: B batch, T tokens, H heads, K key width, V value width, C tokens in a chunk.
Everything here is written in operators and in functions that NumPy, torch, jax.numpy and keras.ops spell alike;
`xp` is the one in use.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

RULES = ("delta", "sum")
READS = ("after", "before")


class FastWeightError(ValueError):
    """An argument that cannot be right. The message says which, what was got, what was expected and why."""


def read(S, q):
    """S^T q:  (..., K, V), (..., K) -> (..., V)."""
    return (q[..., None, :] @ S)[..., 0, :]


def step(S, q, k, v, beta, decay, *, delta, before=False):
    """One token: write, and read after it (or before it).  q, k (..., K);  v (..., V);  beta, decay (...)."""
    old = S
    S = decay[..., None, None] * S
    u = beta[..., None] * (v - read(S, k) if delta else v)
    S = S + k[..., :, None] * u[..., None, :]
    return S, read(old if before else S, q)


def inverse(L, xp):
    """Y with I + Y = (I + L)^{-1}, for L (..., C, C) strictly lower triangular.

    Blocks of 1, 2, 4, ... rows are merged in pairs. If X inverts the diagonal blocks and N is what lies below them
    inside the pairs, X - X N X inverts the pairs. This is substitution by blocks: no powers of L, which would
    overflow when keys repeat.
    """
    C = L.shape[-1]
    row = xp.arange(C)[:, None]
    column = xp.arange(C)[None, :]
    Y, size = xp.zeros_like(L), 1
    while size < C:
        pair = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        N = xp.where(pair, L, xp.zeros_like(L))
        M = N + Y @ N
        Y = Y - M - M @ Y
        size *= 2
    return Y


def prepare(q, k, v, beta, log_decay, *, delta, before, xp, inverse=inverse):
    """All of a chunk that does not need its incoming memory.  q, k (..., C, K);  v (..., C, V);  rates (..., C).

    With g_i = a_1 ... a_i, the values u that are really written solve a unit lower triangular system,
    (I + L) u = b (v - g k S)  with  L_ij = b_i (k_i . k_j) g_i / g_j  for j < i,
    so u = U - W S, and U, W need no memory. Returns what `advance` takes; docs/maths.md derives it.
    """
    C = k.shape[-2]
    past = xp.arange(C)[:, None] >= xp.arange(C)[None, :]
    log_g = xp.sum(xp.where(past, log_decay[..., None, :], 0.0), -1)  # keras.ops.cumsum loses float64 on torch
    log_r = log_g - log_decay if before else log_g  # decay of the memory that is read
    offset = -1 if before else 0
    G_read = xp.exp(xp.tril(log_r[..., :, None] - log_g[..., None, :], offset))
    kT = xp.swapaxes(k, -1, -2)
    A = xp.tril(q @ kT * G_read, offset)
    b, g = beta[..., None], xp.exp(log_g)[..., None]
    U, W = b * v, None
    if delta:
        G = xp.exp(xp.tril(log_g[..., :, None] - log_g[..., None, :], -1))
        Y = inverse(xp.tril(b * (k @ kT) * G, -1), xp)
        bk = b * g * k
        U, W = U + Y @ U, bk + Y @ bk
    last = log_g[..., C - 1 :]
    return q * xp.exp(log_r)[..., None], A, U, W, kT * xp.exp(last - log_g)[..., None, :], xp.exp(last)[..., None]


def advance(S, q, A, U, W, kT, g):
    """A prepared chunk meets the memory: (S after it, its outputs)."""
    u = U if W is None else U - W @ S
    return g * S + kT @ u, q @ S + A @ u


def chunk(S, q, k, v, beta, log_decay, *, delta, before=False, xp):
    """`step` over C tokens at once, with the same meaning."""
    return advance(S, *prepare(q, k, v, beta, log_decay, delta=delta, before=before, xp=xp))


def check(arrays, *, rule, read, method, methods, chunk_size=None, width=None):
    """Raise FastWeightError unless the arguments of `fast_weight` fit together.

    arrays: the array arguments by name (q, k, v, beta, log_decay, state, cu_seqlens, mask), None when absent.
    width: what a feature map makes of the width of q, the memory's K; the same when absent.
    """
    for name, got, allowed in (("rule", rule, RULES), ("read", read, READS), ("method", method, ("auto", *methods))):
        if got not in allowed:
            raise FastWeightError(f"{name} is {got!r}; expected one of {', '.join(map(repr, allowed))}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise FastWeightError(f"chunk_size is {chunk_size!r}; expected a positive whole number of tokens, or None")
    shapes = {name: tuple(x.shape) for name, x in arrays.items() if x is not None}
    dtypes = {name: dtype_name(x) for name, x in arrays.items() if x is not None}
    for name in ("q", "v"):
        if len(shapes[name]) != 4:
            raise FastWeightError(
                f"{name} has shape {shapes[name]}; expected four axes (B, T, H, {'K' if name == 'q' else 'V'}): "
                "batch, tokens, heads, width"
            )
    (B, T, H, K), V = shapes["q"], shapes["v"][-1]
    states = B
    if "cu_seqlens" in shapes:
        states = _check_packed(shapes, dtypes, B)
    expected = {
        "k": ((B, T, H, K), "the shape of q"),
        "v": ((B, T, H, V), "q's batch, tokens and heads, any width"),
        "beta": ((B, T, H), "one write rate per token and head"),
        "log_decay": ((B, T, H), "one log decay per token and head"),
        "mask": ((B, T), "True for a real token, False for padding"),
        "state": ((states, H, K if width is None else width(K), V), "a (K, V) memory per head of each sequence"),
    }
    for name, (shape, why) in expected.items():
        if name in shapes and not _fits(shapes[name], shape):
            raise FastWeightError(
                f"{name} has shape {shapes[name]}; expected {shape}: {why}, q is {shapes['q']} and v is {shapes['v']}"
            )
    wide = "float64" if dtypes["q"] == "float64" else "float32"
    allowed = {
        "q": (("float64", "float32", "bfloat16", "float16"), "a floating dtype"),
        "k": ((dtypes["q"],), "the dtype of q"),
        "v": ((dtypes["q"],), "the dtype of q"),
        "beta": ((dtypes["q"], wide), "the dtype of q, or the one the memory accumulates in"),
        "log_decay": ((dtypes["q"], wide), "the dtype of q, or the one the memory accumulates in"),
        "state": ((wide,), f"the memory of {dtypes['q']} inputs accumulates in {wide}"),
        "mask": (("bool",), "True for a real token, False for padding"),
    }
    for name, (names, why) in allowed.items():
        if name in dtypes and dtypes[name] not in names:
            raise FastWeightError(
                f"{name} has dtype {dtypes[name]}; expected {' or '.join(dict.fromkeys(names))}: {why}"
            )


def _check_packed(shapes, dtypes, B):
    """The number of sequences that cu_seqlens packs into the one row of q."""
    shape = shapes["cu_seqlens"]
    if len(shape) != 1 or (shape[0] is not None and shape[0] < 2):
        raise FastWeightError(
            f"cu_seqlens has shape {shape}; expected (N + 1,) with N >= 1: the offsets 0, ..., T that bound N sequences"
        )
    if not dtypes["cu_seqlens"].startswith(("int", "uint")):
        raise FastWeightError(f"cu_seqlens has dtype {dtypes['cu_seqlens']}; expected int32 or int64: token offsets")
    if B not in (1, None):
        raise FastWeightError(f"q has batch {B} with cu_seqlens given; expected 1: packed sequences lie in one row")
    if "mask" in shapes:
        raise FastWeightError("mask is given together with cu_seqlens; expected one: a packed row has no padding")
    return None if shape[0] is None else shape[0] - 1


def check_offsets(offsets, T):
    """Raise unless cu_seqlens, as a list of ints, starts at 0, never falls and ends at T."""
    if offsets[0] != 0:
        raise FastWeightError(f"cu_seqlens starts at {offsets[0]}; expected 0: the first sequence starts the row")
    for n, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise FastWeightError(
                f"cu_seqlens falls from {start} to {stop} at index {n + 1}; expected sorted offsets: "
                "sequence n is the tokens from cu_seqlens[n] up to cu_seqlens[n + 1]"
            )
    if offsets[-1] != T:
        raise FastWeightError(f"cu_seqlens ends at {offsets[-1]}; expected T = {T}: the sequences cover the row")


def dtype_name(x):
    """'float32', whatever the framework calls it."""
    return getattr(x.dtype, "name", str(x.dtype)).removeprefix("torch.")


def _fits(shape, expected):
    """Equal, where an axis of unknown length (None) fits any."""
    return len(shape) == len(expected) and all(
        a == b or a is None or b is None for a, b in zip(shape, expected, strict=True)
    )


_debugging = ContextVar("fastweights_debug", default=False)


@contextmanager
def debug():
    """Inside this block every `fast_weight` call scans its inputs and raises on values that cannot be right.

    The scan costs a pass over the inputs and, on a GPU, a wait for them, so it is off otherwise.

        >>> import fastweights
        >>> with fastweights.debug():
        ...     pass  # train a few steps
    """
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)


def debugging():
    """Whether `debug` is on here."""
    return _debugging.get()


def check_values(arrays):
    """Raise on NaN or infinity anywhere, beta outside [0, 2], or log_decay above 0.  arrays: NumPy, by name."""
    import numpy as np

    for name, x in arrays.items():
        bad = ~np.isfinite(x)
        if name == "beta":
            bad |= (x < 0) | (x > 2)
        if name == "log_decay":
            bad |= x > 0
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            expected = {"beta": "rates in [0, 2]", "log_decay": "finite logarithms <= 0"}.get(name, "finite numbers")
            raise FastWeightError(f"{name} has {x[at]} at {at}; expected {expected} ({int(bad.sum())} such values)")
