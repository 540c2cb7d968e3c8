"""All stages of one body, side by side where they can be: what a GPU that is at hand for minutes is asked for."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from model import folder

from fastweights.files import write_json

SHARES = dict(body=0.4, tune=0.2)  # of the minutes; scoring has what is left
UNTRAINED = ("static", "memory", "cache", "refresh-64", "refresh-16")
TRAINED = ("refresh-64-trained*", "refresh-16-trained-at-64", "cache-refresh-*-trained*")
DYNAMIC = ("dynamic-all-rms", "dynamic-all-sgd")


def run(given):
    """Train a body, train its layer, score all pages and some by dynamic evaluation, and write the tables.

    Once the body is trained, the layer is trained at every 64 tokens while pages are scored by the arms that do not
    need it. Tables, of the arms that have all pages, are in --out/BODY/PAGES, as `gather_long` reads them, and with
    --json in one file too. A second call with more minutes goes on where this one stopped.
    """
    began, work = time.perf_counter(), folder(given)
    log = open(work / "run.log", "a")  # noqa: SIM115

    def stage(name, minutes, *more):
        """Start a stage with the flags of this call; those in `more` come last and count."""
        flags = [x for name, x in _flags(given).items() for x in (name, *map(str, x if isinstance(x, list) else [x]))]
        command = [sys.executable, str(Path(__file__).parent), name, *flags, "--minutes", f"{minutes:.3f}", *more]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def left():
        return given.minutes - (time.perf_counter() - began) / 60

    _ended(stage("body", SHARES["body"] * given.minutes))
    tuning = stage("tune", SHARES["tune"] * given.minutes, "--refresh", "64")
    few = str(given.dynamic_pages)
    scoring = [
        stage("score", left(), "--arms", *UNTRAINED),
        stage("score", left(), "--pages", few, "--arms", *DYNAMIC),
        stage("score", left(), "--wait", "64", "--arms", *TRAINED),
    ]
    try:
        _ended(tuning)
        _ended(*scoring, until=began + 60 * given.minutes)
    finally:
        for process in scoring:
            process.kill()  # without the trained layer one of them would wait for ever
    name = given.body if given.seed == 0 else f"{given.body}-seed{given.seed}"
    tables = dict[str, dict[str, str]]()
    for pages in dict.fromkeys((str(given.pages), few)):
        _ended(stage("table", 1, "--pages", pages, "--out", str(given.out / name / pages)))
        written = sorted((given.out / name / pages / work.name).glob("*.csv"))
        tables[pages] = {file.name: file.read_text() for file in written}
        print(tables[pages]["summary.csv"])
    if given.json:
        write_json(given.json, dict(body=name, tables=tables))
    print(f"{time.perf_counter() - began:.0f} s; what the stages printed is in {work / 'run.log'}")


def _flags(given):
    """The flags of a call but for those that `run` sets for each stage."""
    own = ("stage", "minutes", "out", "arms", "wait", "refresh", "text", "worker", "workers", "dynamic_pages", "json")
    return {f"--{n.replace('_', '-')}": x for n, x in vars(given).items() if n not in own}


def _ended(*processes, until=None):
    """Wait for processes, at most until that time; raises SystemExit where one failed."""
    failed = []
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            if process.wait(None if until is None else max(0.0, until - time.perf_counter())):
                failed.append(" ".join(process.args[2:4]))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the last lines of run.log in the body's folder say why")
