"""The memory, once, for every framework: one write, one read, and the value that says which.

    S_t = a_t S_{t-1} + b_t k_t (v_t - d (a_t S_{t-1})^T k_t)^T          o_t = S_t^T q_t  (or S_{t-1}^T q_t)

Letters: S memory (..., K, V);  q, k queries and keys (..., K);  v values (..., V);  b = beta, a = exp(log_decay) (...).
Shapes: B batch, T tokens, H heads, K key width, V value width, C tokens in a chunk.

A call has two parts: its arrays, an `Inputs`, and what is computed from them, a `Spec`. Every method of every framework
takes these two. Everything here is written in operators and in functions that NumPy, torch, jax.numpy and keras.ops
spell alike; `xp` is the one in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

READS = ("after", "before")
PLAIN = ("identity", "none")  # features and norm that leave q and k as they are


class FastWeightError(ValueError):
    """An argument that cannot be right. The message says which, what was got, what was expected and why."""


class Inputs(NamedTuple):
    """The arrays of a call, None where absent. Gradients of a call are an Inputs too, None where there is none.

    q, k (B, T, H, K);  v (B, T, H, V);  beta, log_decay (B, T, H);  state (B, H, K, V);  cu_seqlens (N + 1,), the
    offsets of N sequences packed into one row;  mask (B, T), False for padding.
    """

    q: Any
    k: Any
    v: Any
    beta: Any = None
    log_decay: Any = None
    state: Any = None
    cu_seqlens: Any = None
    mask: Any = None

    def map_tokens(self, f: Callable) -> "Inputs":
        """f of every array that has an entry per token (q, k, v, beta, log_decay); the others stay."""
        tokens = (None if x is None else f(x) for x in self[:TOKENS])
        return Inputs(*tokens, *self[TOKENS:])


TOKENS = 5  # the first five fields of Inputs have an entry per token
ARRAYS = 6  # and the first six are differentiable


class Spec(NamedTuple):
    """What a call computes: hashable, one line as text. `Spec.make` checks its fields; an unknown one raises.

    rule: a name of `RULES`;  read: "after" or "before" the token's own write;  features, norm: how q and k are mapped
    first;  chunk_size: tokens per chunk of a chunked method, which changes speed alone.
    """

    rule: str = "delta"
    read: str = "after"
    features: Any = "identity"
    norm: str = "none"
    chunk_size: int | None = None

    @classmethod
    def make(cls, rule="delta", read="after", features="identity", norm="none", chunk_size=None) -> "Spec":
        """A Spec whose rule, read and chunk_size were checked; `features.parse` checks the map."""
        for name, got, allowed in (("rule", rule, RULES), ("read", read, READS)):
            if got not in allowed:
                raise FastWeightError(f"{name} is {got!r}; expected one of {', '.join(map(repr, allowed))}")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise FastWeightError(f"chunk_size is {chunk_size!r}; expected a positive whole number of tokens, or None")
        return cls(rule, read, features, norm, chunk_size)

    @property
    def text(self) -> str:
        """All fields in one line: what a registered operator takes instead of one argument per field."""
        return f"{self.rule} {self.read} {self.features} {self.norm} {self.chunk_size or 0}"

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """The Spec that `text` came from."""
        rule, read, features, norm, chunk_size = text.split(" ")
        return cls.make(rule, read, features, norm, int(chunk_size) or None)

    @property
    def maps(self) -> bool:
        """Whether q and k are mapped or normalised at all."""
        return (self.features, self.norm) != PLAIN

    def without_maps(self) -> "Spec":
        """The same, for q and k that were mapped already."""
        return self._replace(features=PLAIN[0], norm=PLAIN[1])

    @property
    def before(self) -> bool:
        """Whether a query reads the memory as it was before its own token's write."""
        return self.read == "before"

    @property
    def delta(self) -> bool:
        """Whether what a key retrieves is taken from its value, d = 1; raises for a rule without a chunked form."""
        return _chunk_form(self) == 1


class Rule(NamedTuple):
    """What a token writes.

    write(S, x): the value that goes in at key x.k, before beta, given the decayed memory S and the token x (an Inputs).
    d: the d of the equation above, 0 or 1, if the rule is an instance of it. None: the rule has no chunked form, and
    runs token by token (`method="recurrent"`).
    """

    write: Callable
    d: int | None = None


def read(S, q):
    """S^T q:  (..., K, V), (..., K) -> (..., V)."""
    return (q[..., None, :] @ S)[..., 0, :]


RULES: dict[str, Rule] = {
    "delta": Rule(lambda S, x: x.v - read(S, x.k), d=1),
    "sum": Rule(lambda S, x: x.v, d=0),
}


def step(S, x, spec, xp):
    """One token: decay, write, and read after it (or before it): (S, o).

    x: an Inputs of one token, q, k (..., K);  v (..., V);  beta, log_decay (...), None where absent.
    """
    old = S
    if x.log_decay is not None:
        S = xp.exp(x.log_decay)[..., None, None] * S
    u = RULES[spec.rule].write(S, x)
    if x.beta is not None:
        u = x.beta[..., None] * u
    S = S + x.k[..., :, None] * u[..., None, :]
    return S, read(old if spec.read == "before" else S, x.q)


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


class Chunk(NamedTuple):
    """All of a chunk that does not need its incoming memory; `advance` says how it meets one.

    q (..., C, K), queries times the decay of what they read;  A (..., C, C), what each query reads of each write;
    U (..., C, V), W (..., C, K) with u = U - W S the values that are really written, W None for the sum rule;
    kT (..., K, C), keys times the decay to the chunk's end;  g (..., 1, 1), the decay of the whole chunk.
    """

    q: Any
    A: Any
    U: Any
    W: Any
    kT: Any
    g: Any


def prepare(x, spec, xp, inverse=inverse):
    """The Chunk of x, an Inputs of C tokens: q, k (..., C, K);  v (..., C, V);  beta, log_decay (..., C).

    With g_i = a_1 ... a_i, the values u that are really written solve a unit lower triangular system,
    (I + L) u = b (v - g k S)  with  L_ij = b_i (k_i . k_j) g_i / g_j  for j < i,
    so u = U - W S, and U, W need no memory. docs/maths.md derives it.
    """
    C = x.k.shape[-2]
    past = xp.arange(C)[:, None] >= xp.arange(C)[None, :]
    log_g = xp.sum(xp.where(past, x.log_decay[..., None, :], 0.0), -1)  # keras.ops.cumsum loses float64 on torch
    log_r = log_g - x.log_decay if spec.before else log_g  # decay of the memory that is read
    offset = -1 if spec.before else 0
    G_read = xp.exp(xp.tril(log_r[..., :, None] - log_g[..., None, :], offset))
    kT = xp.swapaxes(x.k, -1, -2)
    A = xp.tril(x.q @ kT * G_read, offset)
    b, g = x.beta[..., None], xp.exp(log_g)[..., None]
    U, W = b * x.v, None
    if spec.delta:
        G = xp.exp(xp.tril(log_g[..., :, None] - log_g[..., None, :], -1))
        Y = inverse(xp.tril(b * (x.k @ kT) * G, -1), xp)
        bk = b * g * x.k
        U, W = U + Y @ U, bk + Y @ bk
    last = log_g[..., C - 1 :]
    to_end = xp.exp(last - log_g)[..., None, :]
    return Chunk(x.q * xp.exp(log_r)[..., None], A, U, W, kT * to_end, xp.exp(last)[..., None])


def advance(S, c):
    """A prepared chunk c meets the memory: (S after it, its outputs)."""
    u = c.U if c.W is None else c.U - c.W @ S
    return c.g * S + c.kT @ u, c.q @ S + c.A @ u


def chunk(S, x, spec, xp):
    """`step` over the C tokens of x at once, with the same meaning."""
    return advance(S, prepare(x, spec, xp))


def refuses_chunks(spec) -> str | None:
    """Why a chunked method cannot run this rule, or None."""
    if RULES[spec.rule].d is None:
        return f'has no chunked form of rule={spec.rule!r}; use method="recurrent"'
    return None


def _chunk_form(spec):
    if reason := refuses_chunks(spec):
        raise FastWeightError(f"a chunk {reason}")
    return RULES[spec.rule].d


def dtype_name(x) -> str:
    """'float32', whatever the framework calls it."""
    return getattr(x.dtype, "name", str(x.dtype)).removeprefix("torch.")
