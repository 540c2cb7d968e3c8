"""How benchmarks are shown and kept: a progress bar, tables, and one JSON file per machine and commit."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastweights.bench import machine
from fastweights.bench.case import Case
from fastweights.bench.lengths import Scaling
from fastweights.bench.memory import PASSES, Result
from fastweights.bench.timing import Advance, Timing


@contextmanager
def progress(steps: float) -> Iterator[Advance]:
    """A bar on standard error and the function that moves it: `advance(what, steps)`.

    It draws when told to, between samples, and never from a thread that would disturb them.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=steps)
        drawn = 0.0

        def advance(what: str, steps: float) -> None:
            nonlocal drawn
            bar.update(task, advance=steps, description=what)
            if time.monotonic() - drawn > 0.2:
                bar.refresh()
                drawn = time.monotonic()

        yield advance


NOISY = "~        noisy: a quarter of the samples lie over 15% from the median"
NOTES = f"""\
x peer   how many times as fast as the fastest peer
MiB      peak memory of forward+backward above the inputs
error    largest deviation of outputs, states and gradients from float64,
         over the largest number; "other": not the same function
{NOISY}"""


def show(results: Sequence[Result], console: Console) -> None:
    """One table per rule, then who was left out and why, then what the columns mean.

    The method that "auto" stands for is in bold.

    Args:
        results: of `bench memory`, one per case.
        console: of rich, to print on.
    """
    for rule in dict.fromkeys(result.case.rule for result in results):
        chosen = [result for result in results if result.case.rule == rule]
        table = new_table(f"{rule} rule, {chosen[0].case.dtype} on {chosen[0].case.device}, milliseconds")
        table.add_column("B,T,H,K[,V]", no_wrap=True)
        table.add_column("", min_width=14)  # alone gives way in a narrow terminal
        extra = any(result.extra_bytes for result in chosen)
        for heading in ("forward", "x peer", "forward+\nbackward", "x peer", *["MiB"] * extra, "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        for result in chosen:
            _rows(table, result, extra)
        console.print(table)
    # Who did not take part, and why; once where the reason is the same for all rules and decays.
    for name in dict.fromkeys(name for result in results for name in result.left_out):
        whys = {_kind(result.case): result.left_out[name] for result in results if name in result.left_out}
        reasons = dict.fromkeys(whys.values())
        text = next(iter(reasons)) if len(reasons) == 1 else "; ".join(f"{kind}: {why}" for kind, why in whys.items())
        console.print(f"left out: {name}: {text}", style="dim", highlight=False, markup=False)
    console.print(NOTES, style="dim", highlight=False, markup=False)


def new_table(title: str) -> Table:
    """An empty table with this title, without vertical lines."""
    return Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False, collapse_padding=True)


def _kind(case: Case) -> str:
    """The rule of a case, and its decay where there is one."""
    return case.rule if case.decay == "none" else f"{case.rule}, decay per {case.decay}"


def _rows(table: Table, result: Result, extra: bool) -> None:
    """Add a case to a table, a row for each contestant, the method that "auto" stands for in bold.

    Args:
        table: of one rule.
        result: a case.
        extra: whether the table has a column for memory.
    """
    *shape, K, V = result.case.shape
    place = ",".join(map(str, (*shape, K) if V == K else (*shape, K, V)))
    if result.case.mapped:
        place += f"\n{result.case.features}, {result.case.norm}"
    if result.case.decay != "none":
        place += f"\ndecay per {result.case.decay}"
    # One line per contestant; the shape stands in the first alone.
    for name in result.passes["forward"]:
        cells = []
        for which in PASSES:
            timings, ratio = result.passes[which], result.speedup(name, which)
            mark = "~" if any(timings[n].noisy for n in (name, *result.peers) if n in timings) else ""
            cells += [milliseconds(timings[name]) if name in timings else ""]
            cells += ["" if ratio is None else f"{mark}{ratio:.2f}"]
        error = f"{max(result.errors[name].values()):.0e}" if name in result.errors else "other"
        if extra:
            cells.append(f"{result.extra_bytes[name] / 2**20:.0f}" if name in result.extra_bytes else "")
        chosen = name == result.auto
        table.add_row(place, f"{name} (auto)" if chosen else name, *cells, error, style="bold" if chosen else None)
        place = ""
    table.add_section()


def milliseconds(timing: Timing) -> str:
    """Three figures, with a mark when they are not to be trusted.

    Examples:
        >>> milliseconds(Timing(12.34, 12.0, 13.0, 20)), milliseconds(Timing(0.1234, 0.12, 0.2, 20))
        ('12.3', '~0.123')
    """
    value = timing.median
    return f"{'~' if timing.noisy else ''}{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def explain_noise(timings: Iterable[Timing], console: Console) -> None:
    """Say what the mark of `milliseconds` means where one of these has it."""
    if any(timing.noisy for timing in timings):
        console.print(NOISY, highlight=False, soft_wrap=True)


def show_lengths(scalings: Sequence[Scaling], console: Console) -> None:
    """One table per rule and method: time, and how it grew, for every length.

    Linear cost shows as ratios near 2 and a constant last column.
    """
    for s in scalings:
        title = f"{s.case.rule} rule, {s.method}, {s.case.dtype} on {s.case.device}, (1, T, 4, 64) forward+backward"
        table = new_table(title)
        for heading in ("T", "ms", "x half of T", "extra MiB", "KiB per token"):
            table.add_column(heading, justify="right")
        ratios = ["", *(f"{ratio:.2f}" for ratio in s.ratios())]
        for T, timing, ratio, extra in zip(s.lengths, s.timings, ratios, s.peak_bytes, strict=True):
            table.add_row(str(T), milliseconds(timing), ratio, f"{extra / 2**20:.1f}", f"{extra / 2**10 / T:.2f}")
        console.print(table)
    explain_noise((timing for s in scalings for timing in s.timings), console)


def default_path(device: str, kind: str = "") -> Path:
    """benchmarks/<machine>-<commit>[-kind].json, under the current folder."""
    return Path("benchmarks") / ("-".join(filter(None, (machine.name(device), machine.commit(), kind))) + ".json")


def payload(device: str, results: Sequence[Result] = (), scalings: Sequence[Scaling] = ()) -> dict[str, object]:
    """Everything that was measured and where, for JSON. Times are in milliseconds.

    Args:
        device: that was timed on.
        results: of `bench memory`.
        scalings: of `bench lengths`.

    Returns:
        Date, commit and machine, versions of the peers, and the numbers themselves: a file that can be read without us.
    """
    from fastweights.bench.peers import PEERS

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.describe(device),
        "versions": machine.versions(machine.PACKAGES + tuple(peer.package for peer in PEERS)),
        "results": [
            {
                **result.case.asdict(),
                "auto": result.auto,
                **{which: {n: timing_dict(t) for n, t in result.passes[which].items()} for which in PASSES},
                "speedup": {which: {n: result.speedup(n, which) for n in result.passes[which]} for which in PASSES},
                "errors": result.errors,
                "left_out": result.left_out,
                "extra_bytes": result.extra_bytes,
            }
            for result in results
        ],
        "lengths": [
            {
                **s.case.asdict(),
                "method": s.method,
                "tokens": s.lengths,
                "forward_backward": [timing_dict(t) for t in s.timings],
                "doubling": s.ratios(),
                "extra_bytes_per_token": s.bytes_per_token(),
            }
            for s in scalings
        ],
    }


def timing_dict(timing: Timing) -> dict[str, float]:
    """A timing by name, for JSON."""
    return timing._asdict()
