"""What every framework checks of a call before it computes: shapes, dtypes and offsets."""

import logging
import warnings
from itertools import pairwise
from numbers import Integral

from fastweights.core import RULES, FastWeightError, Inputs, dtype_name

LOG = logging.getLogger("fastweights")


def log_method(method, why, inputs, spec):
    """Say at level DEBUG which method computes a call, and why: `logging.getLogger("fastweights").setLevel("DEBUG")`.

    The line comes with every call, or whenever it is traced where a framework compiles it.

    Args:
        method: "recurrent", "chunked" or "kernel".
        why: it was taken.
        inputs, spec: of the call.
    """
    if LOG.isEnabledFor(logging.DEBUG):
        others = ("beta", "log_decay", "erase", "state", "cu_seqlens", "mask")
        given = [f"{name} {tuple(x.shape)}" for name in others if (x := getattr(inputs, name)) is not None]
        shapes = f"q {tuple(inputs.q.shape)} v {tuple(inputs.v.shape)} {dtype_name(inputs.q)}"
        LOG.debug("fast_weight: %s, %s; %s; %s", method, why, ", ".join([shapes, *given]), spec)


def check_method(method, methods):
    """Raise FastWeightError unless `method` is "auto" or one of `methods`."""
    if method != "auto" and method not in methods:
        raise FastWeightError(f"method is {method!r}; expected one of {', '.join(map(repr, ('auto', *methods)))}")


def check(inputs, spec, *, width=None):
    """Raise FastWeightError unless the arrays of a call fit together, and fit the Spec.

    Only shapes and dtypes are looked at, which are known without waiting for a GPU and under a compiler. An axis of
    unknown length (Keras's None) fits any. Each message says which array, what it is, what was expected and why.

    Args:
        inputs: an `Inputs`; q and v decide the sizes that the others are held to.
        spec: a `Spec`.
        width: a function, what a feature map makes of the width of q: the memory's K. The same width when absent.

    Examples:
        >>> import numpy as np
        >>> from fastweights.core import Inputs, Spec
        >>> x = np.zeros((1, 5, 2, 4), "float32")
        >>> check(Inputs(x, x, x, beta=np.zeros((1, 2, 5), "float32")), Spec())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: beta has shape (1, 2, 5); expected (1, 5, 2): one write rate per token and ...
    """
    if inputs.erase is not None and not RULES[spec.rule].erases:
        raise FastWeightError(
            f"erase is given with rule={spec.rule!r}; expected None: this rule does not read what it could correct"
        )
    arrays = {name: x for name, x in zip(Inputs._fields, inputs, strict=True) if x is not None}
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    dtypes = {name: dtype_name(x) for name, x in arrays.items()}
    for name in ("q", "v"):
        if len(shapes[name]) != 4:
            raise FastWeightError(
                f"{name} has shape {shapes[name]}; expected four axes (B, T, H, {'K' if name == 'q' else 'V'}): "
                "batch, tokens, heads, width"
            )
    (B, T, H, K), V, n = shapes["q"], shapes["v"][-1], spec.writes
    W = None if T is None else n * T
    each = "token" if n == 1 else f"write, {n} for each token of q,"
    width = (lambda K: K) if width is None else width
    states = _check_packed(shapes, dtypes, B) if "cu_seqlens" in shapes else B
    expected = {
        "k": (((B, W, H, K),), "the shape of q" if n == 1 else f"one key per {each}"),
        "v": (((B, W, H, V),), "q's batch, tokens and heads, any width" if n == 1 else f"one value per {each}"),
        "beta": (((B, W, H),), f"one write rate per {each} and head"),
        "log_decay": (((B, T, H), (B, T, H, width(K))), "one log decay per token and head, or per key channel"),
        "erase": (((B, W, H, K),), f"one key per {each} to read what is corrected"),
        "mask": (((B, T),), "True for a real token, False for padding"),
        "state": (((states, H, width(K), V),), "a (K, V) memory per head of each sequence"),
    }
    for name, (allowed, why) in expected.items():
        if name in shapes and not any(_fits(shapes[name], shape) for shape in allowed):
            raise FastWeightError(
                f"{name} has shape {shapes[name]}; expected {' or '.join(map(str, allowed))}: {why}, "
                f"q is {shapes['q']} and v is {shapes['v']}"
            )
    wide = "float64" if dtypes["q"] == "float64" else "float32"
    rates = ((dtypes["q"], wide), "the dtype of q, or the one the memory accumulates in")
    kinds = {
        "q": (("float64", "float32", "bfloat16", "float16"), "a floating dtype"),
        **dict.fromkeys(("k", "v", "erase"), ((dtypes["q"],), "the dtype of q")),
        "beta": rates,
        "log_decay": rates,
        "state": ((wide,), f"the memory of {dtypes['q']} inputs accumulates in {wide}"),
        "mask": (("bool",), "True for a real token, False for padding"),
    }
    for name, (names, why) in kinds.items():
        if name in dtypes and dtypes[name] not in names:
            raise FastWeightError(
                f"{name} has dtype {dtypes[name]}; expected {' or '.join(dict.fromkeys(names))}: {why}"
            )


def _check_packed(shapes, dtypes, B):
    """The number N of sequences that cu_seqlens packs into the one row of q; None where it is not known yet.

    Raises where the offsets have the wrong shape or dtype, where q has more than one row, or where a mask is given too.
    """
    if "mask" in shapes:
        raise FastWeightError("mask is given together with cu_seqlens; expected one: a packed row has no padding")
    return check_packing(shapes["cu_seqlens"], dtypes["cu_seqlens"], B, "q")


def check_packing(shape, dtype, B, name):
    """The number N of sequences that cu_seqlens of this shape and dtype bounds; None where it is not known yet.

    Raises where shape or dtype cannot be those of offsets, or where `name`, which is packed, has B rows and not one.
    """
    if len(shape) != 1 or (shape[0] is not None and shape[0] < 2):
        raise FastWeightError(
            f"cu_seqlens has shape {shape}; expected (N + 1,) with N >= 1: the offsets 0, ..., T that bound N sequences"
        )
    if not dtype.startswith(("int", "uint")):
        raise FastWeightError(f"cu_seqlens has dtype {dtype}; expected int32 or int64: token offsets")
    if B not in (1, None):
        raise FastWeightError(f"{name} has batch {B} with cu_seqlens; expected 1: packed sequences lie in one row")
    return None if shape[0] is None else shape[0] - 1


def check_mask(x, mask):
    """Raise FastWeightError unless mask is bool (B, T), for x (B, T, ...)."""
    if dtype_name(mask) != "bool" or not _fits(tuple(mask.shape), tuple(x.shape[:2])):
        raise FastWeightError(
            f"mask is {dtype_name(mask)} {tuple(mask.shape)}; expected bool {tuple(x.shape[:2])}: "
            "True for a real token, False for padding"
        )


def check_offsets(offsets, T):
    """Raise unless cu_seqlens, as a list of ints, starts at 0, never falls and ends at T.

    Examples:
        >>> check_offsets([0, 3, 3, 5], T=5)  # the second of the three sequences is empty
    """
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


def _fits(shape, expected):
    """Equal, where an axis of unknown length (None) fits any."""
    return len(shape) == len(expected) and all(
        a == b or a is None or b is None for a, b in zip(shape, expected, strict=True)
    )


def check_whole(least=1, /, **named):
    """Raise FastWeightError unless each of these is a whole number of at least `least`, or None.

    Examples:
        >>> check_whole(heads=0)
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: heads is 0; expected a whole number of at least 1
    """
    for name, n in named.items():
        if n is not None and (isinstance(n, bool) or not isinstance(n, Integral) or n < least):
            raise FastWeightError(f"{name} is {n!r}; expected a whole number of at least {least}")


def check_parameters(arrays, shapes):
    """Raise FastWeightError unless `arrays` are the parameters of a layer, by name, in these shapes."""
    if set(arrays) != set(shapes):
        missing, extra = sorted(set(shapes) - set(arrays)), sorted(set(arrays) - set(shapes))
        raise FastWeightError(
            f"parameters: {', '.join(missing) or 'none'} missing, {', '.join(extra) or 'none'} unknown; expected "
            f"{', '.join(shapes)}: the names that export_parameters of the same layer gives in every framework"
        )
    for name, shape in shapes.items():
        if tuple(arrays[name].shape) != tuple(shape):
            raise FastWeightError(
                f"parameter {name} has shape {tuple(arrays[name].shape)}; expected {tuple(shape)}: "
                "the layer that it came from has other arguments than this one"
            )


_warned: set[str] = set()


def warn_once(message):
    """Warn with this message the first time in this process: a model of 24 layers says it once."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=6)
