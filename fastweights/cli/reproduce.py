"""The command `fastweights reproduce`: its options, help, and what it prints. Light to import."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, On, need, say, wait_without_spinning
from fastweights.core import FastWeightError
from fastweights.lab import EXPERIMENTS

SHOWN_ROWS = 60


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Names of experiments, or `all`; a list of them when absent.", show_default=False
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments, what each claims and what it costs.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Take tiny sizes, for seconds on one core, to see whether it runs.")
    ] = False,
    device: On = Device.auto,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results; docs/results, or runs/lab with --smoke, when absent.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the corpora that an experiment reads: wikitext-2/, enwik8, babi/en/, multi30k/.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds to average over, instead of the experiment's own number.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes side by side, also on one GPU: small models leave it idle.")
    ] = 1,
    only: Annotated[str, typer.Option(metavar="FIELD=VALUE,...", help="Values that an arm must have to be run.")] = "",
    part: Annotated[str, typer.Option(metavar="I/N", help="Part of the arms to run: every N-th, from the I-th.")] = "",
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Minutes after which to stop; what is done is kept.", show_default=False),
    ] = None,
) -> None:
    """Run a figure or table of the papers again, with the paper's numbers beside ours.

    Results are kept as they come: an interrupted run goes on where it stopped. NAME.csv and NAME.png are the result;
    the exit code is 1 when the paper's claim did not hold here.

    For example: `fastweights reproduce overwrite --smoke`
    """
    if list_ or not names:
        _list()
        return
    need("reproduce", "lab", "torch", "matplotlib")
    wait_without_spinning()
    chosen = list(EXPERIMENTS) if names == ["all"] else list(dict.fromkeys(names))
    for name in chosen:
        if name not in EXPERIMENTS:
            raise FastWeightError(f"experiment is {name!r}; expected one of {', '.join(EXPERIMENTS)}, or all")
    how = dict(smoke=smoke, out=out, seeds=seeds, only=only, part=part)
    sys.exit(_reproduce(chosen, device, data, jobs, minutes, how))


def _reproduce(names: list[str], device: str, data: Path | None, jobs: int, minutes: float | None, how: dict) -> int:
    from rich.console import Console

    from fastweights.lab.engine.experiment import check_data, plan
    from fastweights.lab.engine.pool import run_all
    from fastweights.lab.engine.reproduce import finish
    from fastweights.torch.devices import pick_device

    device = pick_device(device)
    console = Console()
    plans = [plan(name, **how) for name in names]
    check_data(plans, data)
    broken = run_all(plans, device=device, data=data, jobs=jobs, minutes=minutes, console=Console(stderr=True))
    failed = bool(broken)
    for planned in plans:
        outcome = finish(planned)
        failed |= bool(outcome.failed)
        _show(outcome, planned, console)
    for text in broken:
        console.print(text, style="red", markup=False, highlight=False)
    return int(failed)


def _show(outcome: Any, plan: Any, console: Any) -> None:
    from fastweights.lab.engine.experiment import docstring

    rows = plan.module.table(outcome.rows) if hasattr(plan.module, "table") and outcome.rows else outcome.rows
    if rows:
        console.print(_table(docstring(plan.name).splitlines()[0], rows[:SHOWN_ROWS]))
    if len(rows) > SHOWN_ROWS:
        say(f"{len(rows) - SHOWN_ROWS} more rows in the CSV", "dim")
    for line in outcome.confirmed:
        say(f"holds: {line}", "green")
    for line in outcome.failed:
        say(f"does not hold: {line}", "red")
    if outcome.missing:
        left = f"{outcome.missing} of {len(plan.arms)} arms are still to run"
        say(f"{left}, so nothing was checked; the same command goes on", "yellow")
    for file in outcome.files:
        say(f"Written to {file}")


def _table(heading: str, rows: list[dict]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=heading, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    columns = list(dict.fromkeys(c for row in rows for c in row))
    for c in columns:
        text = any(isinstance(row.get(c), str) for row in rows)
        table.add_column(c, justify="left" if text else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(c)) for c in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _list() -> None:
    from rich.console import Console

    from fastweights.lab.engine import experiment

    console = Console()
    for name in EXPERIMENTS:
        if text := experiment.docstring(name):
            console.print(f"[bold]{name}[/bold]  {text.splitlines()[0]}", highlight=False)
            for heading in ("Paper", "Claim", "Cost"):
                line = f"  {heading}: {experiment.about(text, heading)}"
                console.print(line, style="dim", markup=False, highlight=False)
    console.print("\nFor example: fastweights reproduce overwrite --smoke", highlight=False)
