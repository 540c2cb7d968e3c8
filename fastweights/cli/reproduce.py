"""The command `fastweights reproduce`: its options, help, and what it prints. Light to import."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.options import Device, On, need, wait_without_spinning
from fastweights.cli.reproduce_tables import list_experiments, show_result
from fastweights.core import FastWeightError
from fastweights.lab import EXPERIMENTS


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
        list_experiments(out)
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

    from fastweights.lab.engine.plans import check_data, plan
    from fastweights.lab.engine.reproduce import finish
    from fastweights.lab.engine.runner import run_all
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
        show_result(outcome, planned, console)
    for text in broken:
        console.print(text, style="red", markup=False, highlight=False)
    return int(failed)


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
