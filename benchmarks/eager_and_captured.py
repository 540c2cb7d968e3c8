"""Whether training runs eager, compiled and as a CUDA graph learn the same, beside runs of another seed:

    python -m benchmarks.eager_and_captured FOLDER --steps 150 --depth 8 --dim 512 --heads 8 --length 1024 --batch 16

Every way trains in a run of `fastweights train` of its own, all at once, with all further arguments: as the program
does by default (on a GPU compiled, and captured where it can be) and with `--no-compile`, each with two seeds.
Printed are the validation losses, and kept with --json. Rounding in bfloat16 moves a loss; the ways agree if they
differ by less than the seeds do.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from fastweights.bench.report import new_table
from fastweights.files import write_json

WAYS = {"default": [], "eager": ["--no-compile"]}
SEEDS = (0, 1)


def train(folder, way, seed, steps, arguments):
    """Start a run and return its folder and its process, whose output goes into a file beside the folder."""
    run = folder / f"{way}-{seed}"
    command = [sys.executable, "-m", "fastweights", "train", str(run), "--steps", str(steps), "--seed", str(seed)]
    command += ["--eval-every", str(steps), *WAYS[way], *arguments]
    with open(f"{run}.log", "w") as log:
        return run, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def last_line(run):
    """What a run reported at its last validation."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def show(found, path):
    """Print loss and way of every run, and how far ways and seeds lie apart; path: a file for the numbers, or None."""
    table = new_table("validation loss, bits per byte")
    for heading in ("way", "seed", "loss", "what ran"):
        table.add_column(heading)
    for (way, seed), line in found.items():
        table.add_row(way, str(seed), f"{line['valid_bits_per_byte']:.4f}", line["ran"])
    Console().print(table)
    loss = {key: line["valid_bits_per_byte"] for key, line in found.items()}
    ways = max(abs(loss["default", seed] - loss["eager", seed]) for seed in SEEDS)
    seeds = max(abs(loss[way, SEEDS[0]] - loss[way, SEEDS[1]]) for way in WAYS)
    print(f"the ways differ by {ways:.4f}, the seeds by {seeds:.4f}")
    if path:
        runs = [dict(way=way, seed=seed, loss=loss[way, seed], ran=line["ran"]) for (way, seed), line in found.items()]
        write_json(path, dict(ways=ways, seeds=seeds, runs=runs))


def main():
    """Train all runs side by side and print their losses; raise SystemExit where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="All other arguments are those of `fastweights train`.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="a new folder for the runs")
    parser.add_argument("--steps", type=int, default=150, help="of the optimiser")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options, arguments = parser.parse_known_args()
    folder = options.folder
    folder.mkdir(parents=True)
    started = {key: train(folder, *key, options.steps, arguments) for key in itertools.product(WAYS, SEEDS)}
    failed = [key for key, (_, process) in started.items() if process.wait()]
    if failed:
        raise SystemExit(f"failed: {failed}; see the logs in {folder}")
    show({key: last_line(run) for key, (run, _) in started.items()}, options.json)


if __name__ == "__main__":
    main()
