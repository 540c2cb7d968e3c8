"""Sum of gradients or gradients at the current weights: one trained layer, read in every way.

    python benchmarks/sum_and_delta.py runs/demo --picture docs/images/learning-while-reading.png

Takes a run of `fastweights train`, reads its held-out documents once with the body, and then the Fast Weight Layer
alone, with the weights and steps that were trained, in each way: bits per byte, CPU seconds, and a picture of the loss
by position.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fastweights.models.evaluation import row_of
from fastweights.models.run_documents import corpus_of, held_out
from fastweights.models.run_folder import load
from fastweights.torch import FWLBlock

PIECE = 4096  # tokens per call
WAYS = {
    "sum, no decay": dict(),
    "sum, no decay, steps / 4": dict(factor=1 / 4),
    "sum, no decay, steps / 16": dict(factor=1 / 16),
    "sum, decay 0.999": dict(decay=0.999),
    "sum, decay 0.999, steps / 4": dict(decay=0.999, factor=1 / 4),
    "sum, decay 0.999, steps / 16": dict(decay=0.999, factor=1 / 16),
    "held, every 256": dict(refresh=256),
    "held, every 64": dict(refresh=64),
    "held, every 64, decay 0.999": dict(refresh=64, decay=0.999),
    "held, every 32": dict(refresh=32),
    "held, every 16": dict(refresh=16),
    "held, every 4": dict(refresh=4),
    "cumulative, every 256": dict(refresh=256, within="cumulative"),
    "cumulative, every 64": dict(refresh=64, within="cumulative"),
    "cumulative, every 16": dict(refresh=16, within="cumulative"),
}
SHOWN = {
    "not learning": "#8c8c8c", "sum, no decay, steps / 4": "#d1495b", "sum, decay 0.999, steps / 4": "#e0a030",
    "held, every 64": "#1f6fb4", "held, every 16": "#2a9d4e",
}  # fmt: skip


@torch.no_grad()
def features(model, row):
    parts, state = [], None
    for at in range(0, row.shape[1] - 1, PIECE):
        x, blocks = model(row[:, at : min(at + PIECE, row.shape[1] - 1)], state)
        parts.append(x)
        state = model.init_state(1)._replace(blocks=blocks)
    return torch.cat(parts, 1)


@torch.no_grad()
def losses(block, x, labels):
    parts, state = [], None
    for at in range(0, x.shape[1], PIECE):
        y = labels[:, at : at + PIECE]
        out = block.run(x[:, at : at + PIECE], y, torch.ones(y.shape), state, logits=False, slow=False)
        parts.append(out.loss[0])
        state = out.state
    return torch.cat(parts).double().numpy()


def layer(model, factor=1.0, **how):
    """The trained layer and steps in another way; what is not said is as published."""
    own = replace(model.fast.config, refresh=None, decay=None, clip=None, within="held")
    block = FWLBlock(own.size, own.vocab_size, inputs=own.size, hidden=own.hidden, normalizer=own.normalizer,
                     log_steps=own.log_steps, unembed=model.embedding.weight, **how)  # fmt: skip
    block.load_state_dict(model.fast.state_dict())
    block.steps.data += math.log(factor)
    return block


def draw(found, at, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    edges = np.unique(np.geomspace(256, at.max() + 1, 16).astype(int))
    place = np.searchsorted(edges, at, side="right")
    for name, colour in SHOWN.items():
        mean = np.bincount(place, found[name], len(edges) + 1) / np.maximum(
            1, np.bincount(place, minlength=len(edges) + 1)
        )
        axes.plot(np.r_[128, edges[:-1] * 1.1], mean[: len(edges)] / math.log(2), label=name, color=colour, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0.8, 4.0)
    axes.set_xlabel("position in the document (bytes)")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bytes", type=int, default=65_536)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    model = load(given.run, device="cpu")
    texts = held_out(corpus_of(given.run), model, 8192, given.bytes)
    rows = [row_of(model, text) for text in texts]
    read = [(features(model, row), row[:, 1:]) for row in rows]
    total = sum(len(text.data) for text in texts)
    with torch.no_grad():
        found = {"not learning": np.concatenate([model.fast.slow_loss(x, y)[0].double().numpy() for x, y in read])}
    for name, how in WAYS.items():
        block, start = layer(model, **how), time.process_time()
        found[name] = np.concatenate([losses(block, x, y) for x, y in read])
        print(f"{name:32} {found[name].sum() / math.log(2) / total:.4f} bits/byte   "
              f"{time.process_time() - start:.1f} s", flush=True)  # fmt: skip
    print(f"{'not learning':32} {found['not learning'].sum() / math.log(2) / total:.4f} bits/byte")
    if given.picture:
        draw(found, np.concatenate([np.arange(y.shape[1]) for _, y in read]), given.picture)


if __name__ == "__main__":
    main()
