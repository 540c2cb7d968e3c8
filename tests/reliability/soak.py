"""Soak: one text of ten million tokens through a small model with a Fast Weight Layer, its state carried all the way.

    cd tests && python -m reliability.soak --tokens 10000000

Resident memory of the last tenth must be within 1 % of the second tenth's, and every number of the state must be
finite. Speed is tokens per second of this thread's CPU time, the median over segments, which other programs disturb
least; it must stay within 5 %, as the machine is (a fresh state reads beside it all the time).
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.text import corpus
from fastweights.torch.tree import flatten
from reliability.record import FOLDER, record

SEGMENT = 512
SMALL = dict(dim=32, heads=2, depth=1, length=128, batch=8, warmup=20, eval_every=1000, device="cpu")
PICTURE = FOLDER.parents[1] / "docs" / "images" / "soak.png"


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trained(steps, data="stdlib"):
    """A small model, trained for so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(Config(data=data, steps=steps, **SMALL), Path(folder) / "run", cache=Path(folder) / "cache")
        return run_folder.load(run, device="cpu")


@torch.no_grad()
def soak(model, text, tokens, points=100, advance=lambda point: None):
    """Read `tokens` bytes of text, again from its start where it ends; one point per `tokens / points` of them."""
    rows = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64).copy())
    state, read, found = model.init_state(1), 0, []
    losses, seconds, fresh = [], [], []
    while read < tokens:
        at = (read + torch.arange(SEGMENT + 1)) % len(rows)
        segment = rows[at][None]
        began = time.thread_time()
        scores = model.score(segment[:, :-1], segment[:, 1:], state, slow=False)
        seconds.append(time.thread_time() - began)
        if len(seconds) % 8 == 1:  # what the machine gives at all just now
            began = time.thread_time()
            model.score(segment[:, :-1], segment[:, 1:], model.init_state(1), slow=False)
            fresh.append(time.thread_time() - began)
        state, read = scores.state, read + SEGMENT
        losses.append(float(scores.loss.mean()))
        if read * points // tokens > len(found):
            finite = all(bool(torch.isfinite(x).all()) for _, x in flatten(state))
            largest = max(float(x.abs().max()) for _, x in flatten(state) if x.is_floating_point() and x.numel())
            point = dict(tokens=read, resident=resident())
            point |= dict(tokens_per_second=SEGMENT / statistics.median(seconds))
            point |= dict(fresh_tokens_per_second=SEGMENT / statistics.median(fresh))
            point |= dict(bits_per_byte=statistics.mean(losses) / math.log(2), finite=finite, largest=largest)
            found.append(point)
            advance(point)
            losses, seconds, fresh = [], [], []
    return found


def summary(found):
    """The promise in numbers: last tenth against second tenth."""
    n = max(1, len(found) // 10)
    mean = lambda name, part: statistics.mean(p[name] for p in part)  # noqa: E731
    second, last = found[n : 2 * n], found[-n:]
    beside = [mean("tokens_per_second", p) / mean("fresh_tokens_per_second", p) for p in (second, last)]
    return dict(
        tokens=found[-1]["tokens"],
        resident_growth=mean("resident", last) / mean("resident", second) - 1,
        speed_change=mean("tokens_per_second", last) / mean("tokens_per_second", second) - 1,
        speed_change_beside_fresh=beside[1] / beside[0] - 1,
        finite=all(p["finite"] for p in found),
        largest=max(p["largest"] for p in found),
    )


def plot(found, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, sharex=True, figsize=(7, 8), layout="constrained")
    x = [p["tokens"] / 1e6 for p in found]
    speeds = [[p[name] / 1e3 for p in found] for name in ("tokens_per_second", "fresh_tokens_per_second")]
    for axis, lines, label in (
        (axes[0], [[p["resident"] / 2**20 for p in found]], "memory, MiB"),
        (axes[1], speeds, "1000 tokens / CPU s"),
        (axes[2], [[a / b for a, b in zip(*speeds, strict=True)]], "speed / a fresh state's"),
        (axes[3], [[p["bits_per_byte"] for p in found]], "bits per byte"),
    ):
        for line, name in zip(lines, ("the text so far", "a fresh state, at the same moment"), strict=False):
            axis.plot(x, line, label=name)
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.2 * max(map(max, lines)))
    axes[1].legend(loc="lower right")
    axes[-1].set_xlabel("million tokens read")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300, help="of training before")
    parser.add_argument("--out", default=None, help="JSON file")
    parser.add_argument("--plot", default=PICTURE, type=Path, help="PNG file")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = trained(given.steps)
    text = b"".join(d.data for d in corpus.documents("stdlib"))
    found = soak(model, text, given.tokens, advance=lambda p: print(p, flush=True))
    figures = summary(found)
    print(figures)
    record("soak", figures | dict(points=found), given.out)
    plot(found, given.plot)
    assert abs(figures["resident_growth"]) < 0.01
    assert abs(figures["speed_change_beside_fresh"]) < 0.05
    assert figures["finite"]


if __name__ == "__main__":
    main()
