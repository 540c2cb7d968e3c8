"""Seconds of the first call of a new shape, forward and backward, whose kernels are compiled with an empty cache:

    python -m benchmarks.first_calls --json first.json      (on a GPU)

Every kind of call has a process and an empty cache of its own. The processes import, draw inputs and call PyTorch's own
autograd side by side; then each makes its call alone, one after the other. With --json the numbers are kept after each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fastweights.files import write_json

SHAPE, FEATURES = (4, 2048, 16, 128, 128), (4, 2048, 8, 32, 32)
SMALL = (1, 96, 2, 8, 8)
KINDS = {  # what a case is, by name; the shape is FEATURES where there are features
    "delta rule, bfloat16": dict(dtype="bfloat16"),
    "one decay per channel, bfloat16": dict(dtype="bfloat16", decay="channel"),
    "one decay per head, float32": dict(dtype="float32", decay="head"),
    "one decay per channel, float32": dict(dtype="float32", decay="channel"),
    "one decay per head, bfloat16": dict(dtype="bfloat16", decay="head"),
    "sum rule, bfloat16": dict(rule="sum", dtype="bfloat16"),
    "DPFP-3, bfloat16": dict(dtype="bfloat16", features="dpfp-3", norm="sum"),
    "delta rule, float32": dict(dtype="float32"),
}


def call(kind, device, small):
    """One process: say "ready", wait for a line, make the first call, and print its seconds."""
    import torch

    from fastweights.bench.agree import results
    from fastweights.bench.case import Case, our_method

    how = dict(KINDS[kind])
    shape = SMALL if small else FEATURES if "features" in how else SHAPE
    case = Case(how.pop("rule", "delta"), shape, device, **how)
    x, wait = case.tensors(), torch.cuda.synchronize if device == "cuda" else lambda: None
    leaf = torch.ones(8, device=device, requires_grad=True)
    torch.autograd.grad(leaf * leaf, leaf, torch.ones(8, device=device))  # what PyTorch itself does once
    contestant = our_method("auto", case)
    wait()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    results(contestant, x)
    wait()
    print(json.dumps(time.perf_counter() - start), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="take a tiny shape, to see whether it runs")
    parser.add_argument("--kind", choices=list(KINDS), help="make this call in this process, as main does by itself")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    if given.kind:
        call(given.kind, given.device, given.small)
        return
    more, found = ["--device", given.device, *["--small"] * given.small], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for i, kind in enumerate(KINDS):
            command = [sys.executable, "-m", "benchmarks.first_calls", "--kind", kind, *more]
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started[kind] = subprocess.Popen(command, env=os.environ | {"TRITON_CACHE_DIR": f"{folder}/{i}"}, **pipes)
        for process in started.values():
            process.stdout.readline()
        for kind, process in started.items():
            try:
                found[kind] = float(process.communicate("go\n")[0])
            except ValueError:
                print(f"{kind}: failed, exit code {process.returncode}", flush=True)
            if given.json:
                write_json(given.json, dict(shape=SHAPE, features=FEATURES, device=given.device, seconds=found))
    table = Table(title=f"seconds of a first call, forward and backward, on {given.device}")
    for heading in ("", "seconds"):
        table.add_column(heading)
    for kind, seconds in found.items():
        table.add_row(kind, f"{seconds:.1f}")
    Console().print(table)
    sys.exit(len(found) < len(KINDS))


if __name__ == "__main__":
    main()
