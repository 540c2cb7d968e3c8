"""Ten million steps of the recurrence in float32 beside float64, and how the difference grows.

    cd tests && python -m reliability.steps --steps 10000000

Both read the same numbers: made in float32, then widened.
"""

import argparse
import math

import torch

import fastweights.torch as fw
from reliability.record import record

SEGMENT = 8192
CASES = {
    "delta": dict(rule="delta"),
    "delta, decay": dict(rule="delta", decay=0.01),
    "delta, beta up to 2": dict(rule="delta", beta=2.0),
    "sum, decay": dict(rule="sum", decay=0.01),
    "sum": dict(rule="sum"),
}


def growth(steps, rule, decay=0.0, beta=1.0, K=16, V=16, H=2, seed=0, segment=SEGMENT):
    """[(steps, error relative to the largest entry of the state, largest entry)] at 1, 2, 5, 10, ... thousand steps.

    Keys are unit vectors, rates uniform up to `beta`, log decays uniform down to -decay.
    """
    random = torch.Generator().manual_seed(seed)
    states = {torch.float32: None, torch.float64: None}
    found, done, due = [], 0, segment
    while done < steps:
        q, k, v = (torch.randn(1, segment, H, n, generator=random) for n in (K, K, V))
        k = torch.nn.functional.normalize(k, dim=-1)
        rate = beta * torch.rand(1, segment, H, generator=random)
        log_decay = -decay * torch.rand(1, segment, H, generator=random) if decay else None
        for dtype in states:
            wide = lambda x, to=dtype: None if x is None else x.to(to)  # noqa: E731
            _, states[dtype] = fw.fast_weight(wide(q), wide(k), wide(v), beta=wide(rate), log_decay=wide(log_decay),
                                              rule=rule, state=states[dtype])  # fmt: skip
        done += segment
        if done >= min(due, steps):
            exact = states[torch.float64]
            scale = float(exact.abs().max())
            found.append((done, float((states[torch.float32] - exact).abs().max()) / scale, scale))
            due *= 2
    return found


def slope(found):
    """The exponent p of error ~ steps^p, by least squares on logarithms: 0 when it does not grow."""
    x, y = ([math.log(f[i]) for f in found] for i in (0, 1))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--out", default=None, help="JSON file")
    given = parser.parse_args()
    figures = {}
    for name, how in CASES.items():
        found = growth(given.steps, **how)
        figures[name] = dict(slope=slope(found), worst=max(f[1] for f in found), last=found[-1][1], points=found)
        print(name, {n: x for n, x in figures[name].items() if n != "points"}, flush=True)
    record("steps", dict(steps=given.steps, cases=figures), given.out)


if __name__ == "__main__":
    main()
