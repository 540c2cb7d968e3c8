"""The command `fastweights reproduce`: its options, help, and what it prints. Light to import."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, On, need, say, wait_without_spinning
from fastweights.core import FastWeightError
from fastweights.lab import EXPERIMENTS

SHOWN_ROWS = 60
STYLES = dict(reproduced="green", partly="yellow", opposite="red") | {"not": "red"}


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Names of experiments, or `all`; a list of them when absent.",
            show_default=False,
            autocompletion=lambda: [*EXPERIMENTS, "all"],
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Print every experiment, its claims, and what the results here say of them.")
    ] = False,
    scoreboard: Annotated[
        bool,
        typer.Option("--scoreboard", help="Run nothing; write all verdicts to README.md of the folder of results."),
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

    Without a NAME it lists the experiments: what each paper claims, and what the results that are there say of it. An
    experiment consists of arms, one for each model, size and seed. Results are kept as they come: an interrupted run
    goes on where it stopped. NAME.csv and NAME.png are the result; the exit code is 1 when a claim of the paper is not
    reproduced. Most experiments want a GPU; `--smoke` takes seconds anywhere.

    For example: `fastweights reproduce overwrite --smoke`
    """
    # Neither writing the page nor listing needs PyTorch: both read the results that are there.
    if scoreboard:
        _write_scoreboard(out)
        return
    if list_ or not names:
        _list(out)
        return
    need("reproduce", "lab", "torch", "matplotlib")
    wait_without_spinning()
    chosen = list(EXPERIMENTS) if names == ["all"] else list(dict.fromkeys(names))
    for name in chosen:
        if name not in EXPERIMENTS:
            raise FastWeightError(f"experiment is {name!r}; expected one of {', '.join(EXPERIMENTS)}, or all")
    # Several experiments share the processes: their arms are one pool of work.
    how = dict(smoke=smoke, out=out, seeds=seeds, only=only, part=part)
    sys.exit(_reproduce(chosen, device, data, jobs, minutes, how))


def _reproduce(names: list[str], device: str, data: Path | None, jobs: int, minutes: float | None, how: dict) -> int:
    """Run the experiments of these names, show what came of them, and return the exit code.

    how: smoke, out, seeds, only and part, as `plan` takes them.

    Args:
        names: of experiments.
        device: "auto", "cpu" or "cuda".
        data: folder of corpora, or None.
        jobs: processes side by side.
        minutes: after which to stop, or None.
    """
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
    # Tables and verdicts come once all has run, experiment by experiment.
    for planned in plans:
        outcome = finish(planned)
        failed |= bool(outcome.failed)
        _show(outcome, planned, console)
    for text in broken:
        console.print(text, style="red", markup=False, highlight=False)
    return int(failed)


def _show(outcome: Any, plan: Any, console: Any) -> None:
    """Print an experiment's table, what it confirmed and what it did not, and where its files are.

    Args:
        outcome: rows, what was confirmed and what not, arms that are missing, files.
        plan: of the experiment.
        console: of rich.
    """
    from fastweights.lab.engine.experiment import docstring

    # An experiment's own table, ours beside the paper's; the raw rows where it has none.
    rows = plan.module.table(outcome.rows) if hasattr(plan.module, "table") and outcome.rows else outcome.rows
    if rows:
        console.print(_table(docstring(plan.name).splitlines()[0], rows[:SHOWN_ROWS]))
    if len(rows) > SHOWN_ROWS:
        say(f"{len(rows) - SHOWN_ROWS} more rows in the CSV", "dim")
    for line in outcome.confirmed:
        say(line, "green")
    for line in outcome.failed:
        say(line, "red")
    if outcome.missing:
        left = f"{outcome.missing} of {len(plan.arms)} arms are still to run"
        say(f"{left}, so nothing was checked; the same command goes on", "yellow")
    for file in outcome.files:
        say(f"Written to {file}")


def _table(heading: str, rows: list[dict]) -> Any:
    """Rows as a table of the terminal: numbers to the right, text to the left.

    Args:
        heading: above the table.
        rows: from column to value; a value that a row lacks is left blank.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=heading, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    # Rows may have different fields; a column is there if any row has it.
    columns = list(dict.fromkeys(c for row in rows for c in row))
    for c in columns:
        text = any(isinstance(row.get(c), str) for row in rows)
        table.add_column(c, justify="left" if text else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(c)) for c in columns))
    return table


def _cell(value: Any) -> str:
    """A value in four figures; nothing for None.

    Examples:
        >>> _cell(0.123456), _cell(None), _cell(12)
        ('0.1235', '', '12')
    """
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_scoreboard(out: Path | None) -> None:
    """Write the page of all verdicts into the folder of results.

    Args:
        out: folder of results; docs/results when absent.
    """
    from fastweights import files
    from fastweights.lab.engine import scoreboard

    folder = scoreboard.folder_of_results(out)
    if not folder.is_dir():
        raise FastWeightError(f"--out is {folder}; expected a folder of results: there is none")
    files.write_text(folder / scoreboard.PAGE, scoreboard.page(folder))
    print(f"Written to {folder / scoreboard.PAGE}")


def _list(out: Path | None) -> None:
    """Print every experiment, claim by claim: the verdict, ours beside the published, seeds and size.

    All of it is computed from the results that are there.
    """
    from fastweights.lab.engine import scoreboard
    from fastweights.lab.engine.experiment import about, docstring

    folder = scoreboard.folder_of_results(out)
    found = scoreboard.entries(folder)
    # Experiment by experiment, claim by claim.
    for entry in found:
        say(f"{entry.name}  {entry.title}", "bold")
        say(f"  Paper: {entry.paper}", "dim")
        say(f"  Cost: {about(docstring(entry.name), 'Cost')}", "dim")
        if entry.reason:
            say(f"  Not judged: {entry.reason}", "yellow")
        for j in entry.judged:
            say(f"  {j.verdict}: {j.claim.says}", STYLES[j.verdict])
            say(f"      ours: {j.ours}; {j.seeds} seed{'s' * (j.seeds > 1)}; {j.size}")
            say(f"      published: {j.claim.published} ({j.claim.source})", "dim")
    say(f"\nOf the papers' claims: {scoreboard.counts(found)}. Computed from the results in {folder}.")
    say("For example: fastweights reproduce overwrite --smoke")
