"""Random calls of `FastWeightAttention` in three frameworks: as each text alone in float64, token by token, or refused.

A case is a function of its number: a preset or a free choice of the layer's arguments, shapes (also of no tokens),
dtype, padding (which may hold NaN), packing, a state to go on from, a cut into two calls, method and chunk size. One in
six is spoiled on purpose.
"""

import itertools
import os
import warnings

import numpy as np
import torch

from fastweights.attention.arguments import NORMS
from fastweights.attention.presets import PRESETS
from fastweights.core import FastWeightError
from fastweights.torch import AttentionState, FastWeightAttention, export_parameters, import_parameters
from reliability.properties import EPS

KIND = "FastWeightAttention"
FEATURES = ("identity", "relu", "silu", "elu+1", "dpfp-2", "favor-4")
ARGUMENTS = dict(
    rule="deltas",
    norm="layer",
    features="cos",
    conv=1,
    beta_max=3.0,
    writes=0,
    beta="maybe",
    gate="open",
    erase="all",
    decay=1.5,
    key_heads=7,
    method="fast",
    chunk_size=0,
)  # fmt: skip - none can be right
CALLS = ("width", "rank", "mask", "mask of numbers", "offsets", "state")


class Torch:
    dtypes = ("float64", "float32", "bfloat16", "float16")

    def make(self, arguments, dtype, weights):
        """call(x, state, **how) -> [y, memory, z, conv] in NumPy; state is such a list without y, or None."""
        to = getattr(torch, dtype)
        layer = FastWeightAttention(**arguments, dtype=to)
        import_parameters(layer, weights)
        wide = torch.float64 if dtype == "float64" else torch.float32

        def call(x, state=None, **how):
            tensor = lambda a, to=None: None if a is None else torch.tensor(a, dtype=to)  # noqa: E731
            if state is not None:
                state = AttentionState(*map(tensor, state, (wide, wide, to)))
            with torch.no_grad():
                y, new = layer(tensor(x, to), state, **{n: tensor(a) for n, a in how.items()})
            return [None if a is None else a.double().numpy() for a in (y, *new)]

        return call


class Other:
    """Flax or Keras, as the tests of the layers reach them."""

    dtypes = ("float64", "float32")

    def __init__(self, name):
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import layer_backends

        self.inner = dict(jax=layer_backends.Flax, keras=layer_backends.Keras)[name]()

    def make(self, arguments, dtype, weights):
        call = self.inner.make(KIND, arguments, dtype, weights)
        cast = lambda a: None if a is None else a.astype(dtype)  # noqa: E731
        return lambda x, state=None, **how: call(cast(x), None if state is None else [cast(a) for a in state], **how)


FRAMEWORKS = dict(torch=Torch, jax=lambda: Other("jax"), keras=lambda: Other("keras"))


def choose(rng):
    """Arguments of a layer; not all can be had together, and the layer says so."""
    one = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    heads = one(1, 2, 3)
    sizes = dict(dim=heads * one(2, 3, 4), heads=heads)
    how = dict(method=one("auto", "recurrent", "chunked"), chunk_size=one(None, None, int(rng.integers(1, 20))))
    if rng.integers(2):
        preset = PRESETS[one(*PRESETS)]
        return sizes | preset | how | ({} if rng.integers(3) else dict(conv=one(0, 3), out_norm=one(True, False)))
    if not rng.integers(3):
        sizes |= dict(key_dim=one(1, 3), value_dim=one(2, 5))
    return sizes | how | dict(
        rule=one("delta", "delta", "sum"), features=one(*FEATURES), norm=one("l2", "l2", *NORMS),
        writes=one(1, 1, 1, 2), beta=one(None, None, True, False, "value", "step"), beta_max=one(1.0, 2.0),
        decay=one(None, None, "learned", "channel", "gla", "rwkv-7", "retnet", 0.9, tuple(rng.uniform(0.1, 1, heads))),
        erase=one(False, False, True, "removal", "feedback"), conv=one(0, 0, 2, 4), gate=one(False, True, "sigmoid"),
        out_norm=one(True, False), key_heads=one(None, None, 1),
    )  # fmt: skip


def documents(B, T, how):
    """(row, positions) of the texts of a call, in the order of their states."""
    if "cu_seqlens" in how:
        return [(0, np.arange(a, b)) for a, b in itertools.pairwise(how["cu_seqlens"])]
    mask = how.get("mask", np.ones((B, T), bool))
    return [(i, np.flatnonzero(mask[i])) for i in range(B)]


@torch.no_grad()
def expected(layer, x, state, how):
    """Every text by itself and token by token: [y, memory, z, conv], 0 where there is padding."""
    y, states = np.zeros(x.shape), []
    for n, (row, at) in enumerate(documents(*x.shape[:2], how)):
        own = layer.init_state(1)
        if state is not None:
            own = AttentionState(*(None if a is None else torch.tensor(a[n : n + 1]) for a in state))
        for t in at:
            out, own = layer.step(torch.tensor(x[row : row + 1, t]), own)
            y[row, t] = out[0].numpy()
        states.append(own)
    return [y, *(None if a[0] is None else torch.cat(a).numpy() for a in zip(*states, strict=True))]


def spoil(rng, arguments, x, how):
    """One thing that cannot be right: (its name, arguments, x, state, how)."""
    names = [*ARGUMENTS, *CALLS]
    what = names[int(rng.integers(len(names)))]
    state = None
    if what in ARGUMENTS:
        arguments = arguments | {what: ARGUMENTS[what]}
    elif what == "width":
        x = np.concatenate([x, x[..., :1]], -1)
    elif what == "rank":
        x = x[0]
    elif what.startswith("mask"):
        mask = np.ones((x.shape[0], x.shape[1] + (what == "mask")))
        how = dict(mask=mask if what == "mask of numbers" else mask.astype(bool))
    elif what == "offsets":
        x, how = x[:1], dict(cu_seqlens=np.array([0, x.shape[1] + 1]))
    else:
        state, how = x.shape[0] + 1, {}
    return what, arguments, x, state, how


def relative(rng, a, dtype):
    """a, each number moved by as much as a rounding in this dtype."""
    return a if a is None or a.dtype.kind != "f" else a * (1 + EPS[dtype] * rng.uniform(-1, 1, a.shape))


def check(framework, number):
    """Try one case; returns what became of it, or raises AssertionError."""
    rng = np.random.default_rng([number, 1])
    one = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    arguments, dtype = choose(rng), one(*framework.dtypes)
    B, T = int(rng.integers(1, 4)), int(rng.integers(0, 25))
    how = {}
    if not rng.integers(3):
        B, N = 1, int(rng.integers(1, 5))
        how["cu_seqlens"] = np.r_[0, np.sort(rng.integers(0, T + 1, N - 1)), T].astype(np.int64)
    elif not rng.integers(3):
        how["mask"] = rng.random((B, T)) < 0.7
    x = rng.standard_normal((B, T, arguments["dim"]))
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not rng.integers(6):
            return _refused(framework, number, dtype, *spoil(rng, arguments, x, how))
        return _equal(framework, number, rng, arguments, dtype, x, how)


def _refused(framework, number, dtype, what, arguments, x, state, how):
    try:
        right = {n: a for n, a in arguments.items() if n not in ARGUMENTS or a != ARGUMENTS[n]}
        weights = export_parameters(FastWeightAttention(**right))
        empty = FastWeightAttention(**right, dtype=torch.float64).init_state(state) if state else None
        state = None if empty is None else [None if a is None else a.numpy() for a in empty]
        framework.make(arguments, dtype, weights)(x, state, **how)
    except FastWeightError:
        return "refused"
    raise AssertionError(f"case {number}: {what} was spoiled and nothing was said: {arguments} {how}")


def _equal(framework, number, rng, arguments, dtype, x, how):
    try:
        layer = FastWeightAttention(**arguments | dict(method="recurrent")).to(getattr(torch, dtype)).double()
    except FastWeightError:  # then by everyone
        return _refused(framework, number, dtype, "a combination", arguments, x, None, how)
    weights = {n: np.asarray(a) for n, a in export_parameters(layer).items()}
    rounded = lambda a, to: a if a is None else torch.tensor(a).to(getattr(torch, to)).double().numpy()  # noqa: E731
    x, state, texts = rounded(x, dtype), None, documents(*x.shape[:2], how)
    if rng.integers(2):
        before = rng.standard_normal((len(texts), 3, arguments["dim"]))
        wide = "float64" if dtype == "float64" else "float32"
        state = expected(layer, before, None, {})[1:]
        state = [rounded(a, to) for a, to in zip(state, (wide, wide, dtype), strict=True)]
    wanted = expected(layer, x, state, how)
    far = [np.zeros(())] * 4
    other = FastWeightAttention(**arguments | dict(method="recurrent"), dtype=torch.float64)
    for _ in range(2):
        import_parameters(other, {n: relative(rng, a, dtype) for n, a in weights.items()})
        start = None if state is None else [relative(rng, a, dtype) for a in state]
        moved = expected(other, relative(rng, x, dtype), start, how)
        far = [f if w is None else np.maximum(f, np.abs(m - w).max(initial=0.0))
               for f, m, w in zip(far, moved, wanted, strict=True)]  # fmt: skip
    call, given = framework.make(arguments, dtype, weights), x
    if "mask" in how and rng.integers(2):
        given = np.where(how["mask"][..., None], x, np.nan)
    cut = int(rng.integers(0, x.shape[1] + 1)) if "cu_seqlens" not in how and not rng.integers(3) else None
    if cut is None:
        got = call(given, state, **how)
    else:
        part = lambda a, b: {n: m[:, a:b] for n, m in how.items()}  # noqa: E731
        first, *between = call(given[:, :cut], state, **part(None, cut))
        rest, *after = call(given[:, cut:], between, **part(cut, None))
        got = [np.concatenate([first, rest], 1), *after]
    # Rates of 2 and long keys make a memory grow; where it is beyond the dtype, what is read from it is infinite.
    beyond = bool(np.abs(wanted[1]).max(initial=0.0) > torch.finfo(getattr(torch, dtype)).max)
    for name, g, w, f in list(zip(("output", "memory", "z", "conv"), got, wanted, far, strict=True))[beyond:]:
        assert (g is None) == (w is None), f"case {number}: {name} is {g}"
        if w is None:
            continue
        assert g.shape == w.shape, f"case {number}: {name} has shape {g.shape}, expected {w.shape}"
        allowed = 16 * f + 64 * EPS[dtype] * max(1.0, np.abs(w).max(initial=0.0))
        error = np.abs(g - w).max(initial=0.0)
        assert error <= allowed, f"case {number}: {name} is {error:.3g} off, allowed {allowed:.3g}; {dtype} {arguments}"
    return "beyond its dtype" if beyond else dtype
