"""Training steps with a Fast Weight Layer that learns every 64 and every 32 tokens, beside none, in turns:

    python -m benchmarks.fwl_training --device cuda      (12 blocks of 768, 32 rows of 1,024 bytes)

All are the application's gated-delta model, trained as `fastweights train` does, in one process. Every round times a
few steps of each, beginning with another. With --json the numbers are kept after each round.
"""

import argparse
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from fastweights.bench import report, train
from fastweights.files import write_json
from fastweights.models.config import Config

WAYS = {"no layer": 0, "every 64": 64, "every 32": 32}  # tokens between updates of the layer; 0: a linear head


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="12 x 768", choices=list(train.SIZES | train.SMOKE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each in a round")
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    size = (train.SIZES | train.SMOKE)[given.size]
    on_gpu, most = given.device == "cuda", train.WARM + 6 + given.rounds * given.steps
    steps = {}
    for name, refresh in WAYS.items():
        head = dict(head="fwl", refresh=refresh, train_refresh=refresh) if refresh else dict(head="linear")
        config = Config.of("laptop", **size, **head, model="gated-delta", compile=on_gpu)
        steps[name] = train.Steps(config, given.vocab, given.device, most)
        ready = steps[name].seconds(train.WARM)
        print(f"{name}: ready after {ready:.1f} s, {steps[name].trainer.ran}", flush=True)
        steps[name].seconds(3)
    milliseconds, names = {name: [] for name in WAYS}, list(WAYS)
    for turn in range(given.rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            milliseconds[name].append(1e3 * steps[name].seconds(given.steps) / given.steps)
        found = dict(size=given.size, milliseconds=milliseconds, ratio=ratios(milliseconds))
        found |= dict(losses={name: float(s.losses[-1]) for name, s in steps.items()})
        found |= dict(ran={name: s.trainer.ran + s.trainer.fast_form() for name, s in steps.items()})
        if on_gpu:
            found |= dict(peak_bytes=torch.cuda.max_memory_allocated())
        if given.json:
            write_json(given.json, report.payload(given.device) | found)
    table = report.new_table(f"ms of a training step, {given.size}, gated-delta, on {given.device}, in turns")
    for heading in ("", "rounds", "median", "of no layer", "last loss"):
        table.add_column(heading)
    for name, ms in milliseconds.items():
        rounds = ", ".join(f"{x:.1f}" for x in ms)
        table.add_row(name, rounds, f"{median(ms):.1f}", f"{found['ratio'][name]:.3f}", f"{found['losses'][name]:.4f}")
    Console().print(table)


def ratios(milliseconds):
    """How many times as long as without a layer each takes: the median over rounds."""
    alone = milliseconds["no layer"]
    return {name: median(a / b for a, b in zip(ms, alone, strict=True)) for name, ms in milliseconds.items()}


if __name__ == "__main__":
    main()
