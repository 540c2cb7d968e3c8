"""The stage `run`: all stages of one body, side by side where they can be, within the minutes of the command line."""

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
# Arguments of the command line that `run` sets for each stage, or that no stage needs
OWN = ("stage", "minutes", "out", "arms", "wait", "refresh", "text", "worker", "workers", "dynamic_pages", "json")


def run(args):
    """Train a body, train its layer, score all pages and some by dynamic evaluation, and write the tables.

    Once the body is trained, the layer is trained at every 64 tokens while pages are scored by the arms that do not
    need it. Tables, of the arms that have all pages, are in --out/BODY/PAGES, as `gather_long` reads them, and with
    --json in one file too. A second call with more minutes goes on where this one stopped.
    """
    start, work = time.perf_counter(), folder(args)
    with open(work / "run.log", "a") as log:

        def start_stage(name, minutes, *more):
            """Start a stage with the flags of this call; of a flag that is in `more` too the last one counts."""
            main = [sys.executable, str(Path(__file__).parent), name]
            command = [*main, *_flags(args), "--minutes", f"{minutes:.3f}", *more]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

        def minutes_left():
            return args.minutes - (time.perf_counter() - start) / 60

        _wait_for(start_stage("body", SHARES["body"] * args.minutes))
        tuning = start_stage("tune", SHARES["tune"] * args.minutes, "--refresh", "64")
        few = str(args.dynamic_pages)
        scoring = [
            start_stage("score", minutes_left(), "--arms", *UNTRAINED),
            start_stage("score", minutes_left(), "--pages", few, "--arms", *DYNAMIC),
            start_stage("score", minutes_left(), "--wait", "64", "--arms", *TRAINED),
        ]
        try:
            _wait_for(tuning)
            _wait_for(*scoring, until=start + 60 * args.minutes)
        finally:
            for process in scoring:
                process.kill()  # without the trained layer one of them would wait for ever
        name = args.body if args.seed == 0 else f"{args.body}-seed{args.seed}"
        tables: dict[str, dict[str, str]] = {}  # by number of pages and name of the file
        for pages in dict.fromkeys((str(args.pages), few)):
            _wait_for(start_stage("table", 1, "--pages", pages, "--out", str(args.out / name / pages)))
            files = sorted((args.out / name / pages / work.name).glob("*.csv"))
            tables[pages] = {file.name: file.read_text() for file in files}
            print(tables[pages]["summary.csv"])
    if args.json:
        write_json(args.json, dict(body=name, tables=tables))
    print(f"{time.perf_counter() - start:.0f} s; what the stages printed is in {work / 'run.log'}")


def _flags(args):
    """The command line's flags and their values, but for those of OWN."""
    flags = []
    for name, value in vars(args).items():
        if name not in OWN:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


def _wait_for(*processes, until=None):
    """Wait for processes; raises SystemExit where one failed.

    Args:
        processes: that were started.
        until: time.perf_counter() at which waiting ends, whether they have ended or not.
    """
    failed = []
    for process in processes:
        seconds = None if until is None else max(0.0, until - time.perf_counter())
        with suppress(subprocess.TimeoutExpired):
            if process.wait(seconds):
                failed.append(" ".join(process.args[2:4]))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the last lines of run.log in the body's folder say why")
