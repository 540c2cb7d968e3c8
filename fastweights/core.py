"""The memory, once, for every framework: one write, one read, and the value that says which.

    S_t = a_t S_{t-1} + b_t k_t (v_t - d (a_t S_{t-1})^T e_t)^T          o_t = S_t^T q_t  (or S_{t-1}^T q_t)

Letters: S memory (..., K, V);  q, k queries and keys (..., K);  v values (..., V);  b = beta (...);  e = erase
(..., K), k when absent;  a = exp(log_decay), one number (...) or one per key channel (..., K), a diagonal matrix.
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
    """An argument that cannot be right. The message says which, what was got, what was expected and why.

    Every check of this library raises it, in all frameworks. It is a ValueError, so code that catches those catches it.

        >>> raise FastWeightError("beta_max is 3.0; expected above 0 and at most 2: past it the memory grows")
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: beta_max is 3.0; expected above 0 and at most 2: past it the memory grows
    """


class FastWeightWarning(UserWarning):
    """Something was not as it should be, and how it went on: a damaged file, for one, and what was used instead."""


class Inputs(NamedTuple):
    """The arrays of a call, None where absent. Gradients of a call are an Inputs too, None where there is none.

    q, k, erase (B, T, H, K);  v (B, T, H, V);  beta (B, T, H);  log_decay (B, T, H) or (B, T, H, K);  state
    (B, H, K, V);  cu_seqlens (N + 1,), the offsets of N sequences packed into one row;  mask (B, T), False for padding.
    """

    q: Any
    k: Any
    v: Any
    beta: Any = None
    log_decay: Any = None
    erase: Any = None
    state: Any = None
    cu_seqlens: Any = None
    mask: Any = None

    def but(self, **changes: Any) -> "Inputs":
        """The same with some fields changed: `_replace`, which torch.compile of PyTorch 2.8 does not trace."""
        return Inputs(**{name: changes.get(name, getattr(self, name)) for name in Inputs._fields})

    def map_tokens(self, f: Callable) -> "Inputs":
        """f of every array that has an entry per token (q, k, v, beta, log_decay, erase); the others stay."""
        tokens = (None if x is None else f(x) for x in tuple(self)[:TOKENS])
        return Inputs(*tokens, *tuple(self)[TOKENS:])

    @property
    def eraser(self) -> Any:
        """The key that reads what will be corrected: erase, or k when absent."""
        return self.k if self.erase is None else self.erase

    @property
    def by_channel(self) -> bool:
        """Whether each key channel has a decay of its own."""
        return self.log_decay is not None and len(self.log_decay.shape) == len(self.k.shape)


TOKENS = 6  # the first six fields of Inputs have an entry per token
ARRAYS = 7  # and the first seven are differentiable


class Spec(NamedTuple):
    """What a call computes: hashable, one line as text. `Spec.make` checks its fields; an unknown one raises.

    rule: a name of `RULES`;  read: "after" or "before" the token's own write;  features, norm: how q and k are mapped
    first;  writes: how many for each token;  chunk_size: writes per chunk of a chunked method, which changes speed
    alone.
    """

    rule: str = "delta"
    read: str = "after"
    features: Any = "identity"
    norm: str = "none"
    writes: int = 1
    chunk_size: int | None = None

    @classmethod
    def make(cls, rule="delta", read="after", features="identity", norm="none", writes=1, chunk_size=None) -> "Spec":
        """A Spec whose rule, read, writes and chunk_size were checked; `features.parse` checks the map."""
        for name, got, allowed in (("rule", rule, RULES), ("read", read, READS)):
            if not isinstance(got, str) or got not in allowed:
                raise FastWeightError(f"{name} is {got!r}; expected one of {', '.join(map(repr, allowed))}")
        if not isinstance(writes, int) or writes < 1:
            raise FastWeightError(f"writes is {writes!r}; expected a positive whole number: how many for each token")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise FastWeightError(f"chunk_size is {chunk_size!r}; expected a positive whole number of tokens, or None")
        return cls(rule, read, features, norm, int(writes), chunk_size)

    def as_text(self) -> str:
        """All fields in one line: what a registered operator takes instead of one argument per field."""
        return f"{self.rule} {self.read} {self.features} {self.norm} {self.writes} {self.chunk_size or 0}"

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """The Spec that `as_text` wrote."""
        rule, read, features, norm, writes, chunk_size = text.split(" ")
        return cls.make(rule, read, features, norm, int(writes), int(chunk_size) or None)

    @property
    def maps(self) -> bool:
        """Whether q and k are mapped or normalised at all."""
        return (self.features, self.norm) != PLAIN

    def without_maps(self) -> "Spec":
        """The same, for q and k that were mapped already."""
        return self.but(features=PLAIN[0], norm=PLAIN[1])

    def but(self, **changes: Any) -> "Spec":
        """The same with some fields changed: `_replace`, which torch.compile of PyTorch 2.8 does not trace."""
        return Spec(**{name: changes.get(name, getattr(self, name)) for name in Spec._fields})

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
    erases: whether write reads the memory at x.eraser, so that a call may bring an erase key.
    """

    write: Callable
    d: int | None = None
    erases: bool = False


def read(S, q):
    """S^T q:  (..., K, V), (..., K) -> (..., V).

    What the memory answers to a query: the sum of all that was written, each weighted by how well its key matches q.
    """
    return (q[..., None, :] @ S)[..., 0, :]


RULES: dict[str, Rule] = {
    "delta": Rule(lambda S, x: x.v - read(S, x.eraser), d=1, erases=True),
    "sum": Rule(lambda S, x: x.v, d=0),
}


def step(S, x, spec, xp):
    """One token: decay, write, and read after it (or before it): (S, o).

    This is the definition. Every other method, kernel and framework computes the same, and is tested against it.

    Args:
        S: (..., K, V), the memory before the token.
        x: an Inputs of one token, q, k, erase (..., K);  v (..., V);  beta (...);  log_decay (...) or (..., K);  None
            where absent.
        spec: a `Spec`, for the rule and when to read.
        xp: the array namespace.

    Examples:
        >>> import numpy as np
        >>> key = np.array([1.0, 0.0])
        >>> S = np.zeros((2, 1))
        >>> for value in (5.0, 7.0):  # the same key twice: the delta rule replaces, it does not add
        ...     S, o = step(S, Inputs(key, key, np.array([value])), Spec(rule="delta"), np)
        >>> o
        array([7.])
    """
    old = S
    if x.log_decay is not None:
        a = xp.exp(x.log_decay)[..., None]
        S = (a if x.by_channel else a[..., None]) * S
    u = RULES[spec.rule].write(S, x)
    if x.beta is not None:
        u = x.beta[..., None] * u
    S = S + x.k[..., :, None] * u[..., None, :]
    return S, read(old if spec.read == "before" else S, x.q)


def expand_writes(x, spec, xp, shape=lambda x: x.shape):
    """The call of one write per token that computes several: (Inputs, Spec), x with spec.writes = n.

    A token becomes n. The first of them decays; the last reads, or the first where queries read before; the others
    have log_decay 0 and q 0.  shape: of an array, where a framework has its own way to ask.
    """
    n = spec.writes

    def spread(y, place):  # y at one of n places, zeros at the others; place None: at all of them
        if y is None:
            return None
        B, T, *rest = shape(y)
        y = y[:, :, None]
        parts = [y if place in (None, i) else xp.zeros_like(y) for i in range(n)]
        return xp.reshape(xp.concatenate(parts, 2), (B, -1 if T is None else n * T, *rest))

    x = x.but(
        q=spread(x.q, 0 if spec.read == "before" else n - 1),
        log_decay=spread(x.log_decay, 0),
        mask=spread(x.mask, None),
        cu_seqlens=None if x.cu_seqlens is None else n * x.cu_seqlens,
    )
    return x, spec.but(writes=1)


def gather_reads(o, spec):
    """The outputs (B, T, ...) of a call, from those (B, n T, ...) of its `expand_writes`."""
    return o[:, 0 if spec.read == "before" else spec.writes - 1 :: spec.writes]


def refuses_chunks(spec) -> str | None:
    """Why a chunked method cannot run this rule, as the end of a sentence, or None if it can."""
    if RULES[spec.rule].d is None:
        return f'has no chunked form of rule={spec.rule!r}; use method="recurrent"'
    return None


def _chunk_form(spec):
    """The d of the rule's equation, 0 or 1; raises for a rule without a chunked form."""
    if reason := refuses_chunks(spec):
        raise FastWeightError(f"a chunk {reason}")
    return RULES[spec.rule].d


def dtype_name(x) -> str:
    """'float32', whatever the framework calls it: torch.float32, jnp.dtype("float32") and "float32" all come to
    that.
    """
    return getattr(x.dtype, "name", str(x.dtype)).removeprefix("torch.")
