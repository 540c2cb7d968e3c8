"""Properties of the layers in three frameworks: a random call equals each text read alone, or raises FastWeightError.

    cd tests && python -m reliability.layers --cases 10000 --processes 4

Two kinds of layers take turns: `FastWeightAttention` (attention_cases.py) and `FWLBlock` (fwl_cases.py).
"""

import argparse
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from reliability import attention_cases, fwl_cases
from reliability.record import record

KINDS = dict(attention=attention_cases, fwl=fwl_cases)
SHARES = dict(torch=0.84, keras=0.15, jax=0.01)  # JAX compiles every shape


def work(name, kind, first, count):
    """(outcomes, failures as text) of some cases."""
    module, outcomes, failures = KINDS[kind], Counter(), []
    framework = module.FRAMEWORKS[name]()
    for number in range(first, first + count):
        try:
            outcomes[name, kind, module.check(framework, number)] += 1
        except Exception as error:
            outcomes[name, kind, "failed"] += 1
            failures.append(f"{name}, {kind}: case {number}: {type(error).__name__}: {error}")
    return outcomes, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=1, help="that share the cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default="", help="torch, jax or keras")
    parser.add_argument("--out", default=None, help="JSON file")
    given = parser.parse_args()
    began, parts = time.monotonic(), []
    for name, share in SHARES.items():
        if given.only in ("", name):
            each = (given.cases if given.only else round(share * given.cases)) // len(KINDS)
            size = max(1, min(100, each // given.processes))
            parts += [(name, kind, given.first + at, min(size, each - at)) for kind in KINDS
                      for at in range(0, each, size)]  # fmt: skip
    outcomes, failures = Counter(), []
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        for number, (counts, failed) in enumerate(pool.map(work, *zip(*parts, strict=True))):
            outcomes += counts
            failures += failed
            print(f"part {number + 1} of {len(parts)}: {len(failures)} failed so far", flush=True)
    for line in failures[:10]:
        print(line)
    found = {}
    for (name, kind, what), n in sorted(outcomes.items()):
        found.setdefault(name, {}).setdefault(kind, {})[what] = n
    figures = dict(cases=sum(outcomes.values()), failed=len(failures), frameworks=found)
    print(figures)
    record("layers", figures | dict(seconds=round(time.monotonic() - began)), given.out)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
