"""Properties of `fast_weight` in three frameworks: a random call equals the float64 oracle, or raises FastWeightError.

    cd tests && python -m reliability.properties --cases 10000

A case is a function of its number: shapes (also of nothing), dtype, rule, read, decay, rates, erase key, writes per
token, packing or padding, a cut into pieces, method and chunk size. One in six is spoiled on purpose, and must be
refused.
"""

import argparse
import itertools
import os
import time
from collections import Counter

import numpy as np
from oracle import oracle, problem

from fastweights.core import FastWeightError
from reliability.record import record

SHARES = dict(torch=0.84, keras=0.15, jax=0.01)  # JAX compiles every shape
EPS = dict(float64=2.0**-52, float32=2.0**-23, bfloat16=2.0**-7, float16=2.0**-10)
FEATURES = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "elu+1": lambda x: np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))),
}
SPOILS = ("rule", "read", "method", "shape", "rank", "dtype", "offsets", "chunk_size", "writes", "features", "mask")


class Torch:
    dtypes = ("float64", "float32", "bfloat16", "float16")

    def __init__(self):
        import torch

        import fastweights.torch as fw

        self.torch, self.call = torch, fw.fast_weight

    def array(self, x, dtype=None):
        return self.torch.tensor(x, dtype=dtype and getattr(self.torch, dtype))

    def numpy(self, x):
        return x.detach().double().numpy()


class Jax:
    dtypes = ("float64", "float32")

    def __init__(self):
        import jax

        import fastweights.jax as fw

        jax.config.update("jax_enable_x64", True)
        self.jnp, self.call = jax.numpy, fw.fast_weight

    def array(self, x, dtype=None):
        return self.jnp.asarray(x, dtype)

    def numpy(self, x):
        return np.asarray(x, np.float64)


class Keras:
    dtypes = ("float64", "float32")

    def __init__(self):
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras

        import fastweights.keras as fw

        self.keras, self.call = keras, fw.fast_weight

    def array(self, x, dtype=None):
        return self.keras.ops.convert_to_tensor(x, dtype=dtype or str(np.asarray(x).dtype))

    def numpy(self, x):
        return self.keras.ops.convert_to_numpy(x).astype(np.float64)


FRAMEWORKS = dict(torch=Torch, jax=Jax, keras=Keras)


def make(rng, dtypes):
    """(arrays, switches, dtype) of a call that must be right."""
    one = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    dtype, how = one(*dtypes), dict(rule=one("delta", "sum"), read=one("after", "before"), writes=one(1, 1, 1, 2, 3))
    B, T, H, K, V = (int(rng.integers(a, b)) for a, b in ((1, 4), (0, 41), (1, 4), (1, 9), (1, 9)))
    how["features"] = one("identity", "identity", *FEATURES)
    packed, offsets = not rng.integers(4), None
    if packed:
        B, N = 1, int(rng.integers(1, 5))
        offsets = np.r_[0, np.sort(rng.integers(0, T + 1, N - 1)), T].astype(np.int64)
        how["cu_seqlens"] = offsets
    args = problem(rng, B=B, T=T, H=H, K=K, V=V, decay=one(False, True, "channel", "hard" if K > 1 else True),
                   sequences=len(offsets) - 1 if packed else None, writes=how["writes"],
                   erase=how["rule"] == "delta" and not rng.integers(3))  # fmt: skip
    if how["features"] != "identity":  # keys of elu+1 are long, and long keys with rates near 2 diverge
        args["beta"] = args["beta"] / 16
    elif not rng.integers(3):
        args["beta"] = args["beta"] * 2
    for name in ("beta", "state"):
        if not rng.integers(4):
            del args[name]
    if how["features"] != "identity" and "beta" not in args:
        args["beta"] = np.full(args["k"].shape[:3], 1 / 16)
    if not packed and not rng.integers(3):
        how["mask"] = rng.random((B, T)) < 0.7
    how["method"], how["chunk_size"] = one("auto", "recurrent", "chunked"), one(None, None, int(rng.integers(1, 20)))
    return args, how, dtype


def expected(args, how):
    """The oracle's answer: features by hand, every packed sequence by itself, padding left out."""
    phi, writes = FEATURES[how["features"]], how["writes"]
    args = {n: phi(x) if n in ("q", "k", "erase") else x for n, x in args.items()}
    known = dict(rule=how["rule"], read=how["read"], writes=writes)
    tokens = [n for n in args if n != "state"]
    state = args.get("state")
    span = lambda n: 1 if n in ("q", "log_decay") else writes  # noqa: E731

    def run(row, keep, start):
        part = {n: args[n][row : row + 1][:, np.repeat(keep, span(n))] for n in tokens}
        return oracle(**part, state=start, **known)

    B, T, H, K = args["q"].shape
    V = args["v"].shape[-1]
    if "cu_seqlens" in how:
        at = how["cu_seqlens"]
        o, states = np.zeros((1, T, H, V)), []
        for i, (a, b) in enumerate(itertools.pairwise(at)):
            keep = (np.arange(T) >= a) & (np.arange(T) < b)
            start = np.zeros((1, H, K, V)) if state is None else state[i : i + 1]
            if b > a:
                o[:, a:b], start = run(0, keep, start)
            states.append(start)
        return o, np.concatenate(states)
    mask = how.get("mask", np.ones((B, T), bool))
    o, states = np.zeros((B, T, H, V)), []
    for i in range(B):
        start = np.zeros((1, H, K, V)) if state is None else state[i : i + 1]
        if mask[i].any():
            got, start = run(i, mask[i], start)
            o[i, mask[i]] = got[0]
        states.append(start)
    return o, np.concatenate(states)


def spoil(rng, args, how):
    """One thing that cannot be right; returns its name."""
    what = SPOILS[int(rng.integers(len(SPOILS)))]
    name = sorted(args)[int(rng.integers(len(args)))]
    if what in ("rule", "read", "method", "features"):
        how[what] = ("deltas", "", None, 3, ["sum"])[int(rng.integers(5))]
    elif what == "shape":
        args[name] = np.concatenate([args[name], args[name][-1:]]) if len(args[name]) else args[name][..., :0]
        if name == "q" or not len(args[name]):
            args["k"] = args["k"][..., :0]  # q says what is expected, so that k is wrong
    elif what == "rank":
        args[name] = args[name][..., None, None]
    elif what == "dtype":
        args["v"] = args["v"].astype(np.int32)
    elif what == "offsets":
        how.pop("mask", None)
        how["cu_seqlens"] = np.array([0, args["q"].shape[1] + 1])
    elif what == "mask":
        how.pop("cu_seqlens", None)
        how["mask"] = np.ones((args["q"].shape[0], args["q"].shape[1] + 1), bool)
    else:
        how[what] = (0, -1, 1.5, "2")[int(rng.integers(4))]
    return what


def scaled(part, n):
    """A slice of tokens as one of their writes."""
    return slice(*(None if i is None else i * n for i in (part.start, part.stop)))


def run(framework, args, how, dtype, cut):
    """Outputs and state; cut: where the call is made in two, each part a call."""
    wide = "float64" if dtype == "float64" else "float32"
    arrays = {n: framework.array(x, (wide if n == "state" else dtype) if x.dtype.kind == "f" else None)
              for n, x in args.items()}  # fmt: skip
    how = how | {n: framework.array(how[n]) for n in ("cu_seqlens", "mask") if isinstance(how.get(n), np.ndarray)}
    if cut is None:
        o, S = framework.call(**arrays, **how)
        return framework.numpy(o), framework.numpy(S)
    outputs, state = [], arrays.pop("state", None)
    for part in (slice(None, cut), slice(cut, None)):
        some = {n: x[:, scaled(part, 1 if n in ("q", "log_decay") else how["writes"])] for n, x in arrays.items()}
        own = how | ({"mask": how["mask"][:, part]} if "mask" in how else {})
        o, state = framework.call(**some, state=state, **own)
        outputs.append(framework.numpy(o))
    return np.concatenate(outputs, 1), framework.numpy(state)


def check(framework, number):
    """Try one case; returns what became of it, or raises AssertionError."""
    rng = np.random.default_rng([number])
    args, how, dtype = make(rng, framework.dtypes)
    if not rng.integers(6):
        what = spoil(rng, args, how)
        try:
            run(framework, args, how, dtype, None)
        except FastWeightError:
            return "refused"
        raise AssertionError(f"case {number}: {what} was spoiled and nothing was said: {how}")
    numpy = lambda x: framework.numpy(framework.array(x, dtype))  # noqa: E731 - as the framework rounds it
    args = {n: x if n == "state" and dtype != "float64" else numpy(x) for n, x in args.items()}
    if "state" in args and dtype != "float64":
        args["state"] = args["state"].astype(np.float32).astype(np.float64)
    T = args["q"].shape[1]
    cut = int(rng.integers(0, T + 1)) if "cu_seqlens" not in how and T and not rng.integers(3) else None
    wanted = expected(args, how)
    moved = {n: x * (1 + EPS[dtype] * rng.uniform(-1, 1, x.shape)) for n, x in args.items()}
    nearby = expected(moved, how)
    got = run(framework, args, how, dtype, cut)
    for name, g, w, m in zip(("output", "state"), got, wanted, nearby, strict=True):
        assert g.shape == w.shape, f"case {number}: {name} has shape {g.shape}, expected {w.shape}"
        scale = max(1.0, np.abs(w).max(initial=0.0))
        allowed = 16 * np.abs(m - w).max(initial=0.0) + 64 * EPS[dtype] * scale  # what a rounding of the inputs does
        error = np.abs(g - w).max(initial=0.0)
        assert error <= allowed, f"case {number}: {name} is {error:.3g} off, allowed {allowed:.3g}; {dtype} {how}"
    return dtype


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default="", help="torch, jax or keras")
    parser.add_argument("--out", default=None, help="JSON file")
    given = parser.parse_args()
    began, found, failures = time.monotonic(), {}, []
    for name, share in SHARES.items():
        if given.only not in ("", name):
            continue
        framework, counts = FRAMEWORKS[name](), Counter()
        for number in range(given.first, given.first + (given.cases if given.only else round(share * given.cases))):
            try:
                counts[check(framework, number)] += 1
            except Exception as error:
                counts["failed"] += 1
                failures.append(f"{name}: case {number}: {type(error).__name__}: {error}")
            if number % 500 == 499:
                print(name, number + 1, dict(counts), flush=True)
        found[name] = dict(counts)
    for line in failures[:10]:
        print(line)
    figures = dict(cases=sum(sum(c.values()) for c in found.values()), failed=len(failures), frameworks=found)
    print(figures)
    record("properties", figures | dict(seconds=round(time.monotonic() - began)), given.out)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
