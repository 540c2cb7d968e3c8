"""The program `fastweights`. A command is a function here: its arguments are the flags, its docstring is the help.

Frameworks are imported inside the commands, so that `fastweights --help` answers at once.
"""

import json as jsonlib
import sys
from importlib.util import find_spec
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import fastweights
from fastweights.cli.bench import bench as bench_group
from fastweights.cli.huggingface import COMMANDS as hf_commands
from fastweights.cli.language_model import COMMANDS as lm_commands
from fastweights.cli.reproduce import COMMANDS as lab_commands
from fastweights.core import FastWeightError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the program. Mistakes in what was asked for are one red line and exit code 2; bugs keep their traceback."""
    try:
        app(prog_name="fastweights")
    except ValueError as error:
        if not _ours(error):
            raise
        _fail(str(error), 2)


def _ours(error: ValueError) -> bool:
    """Whether this library raised it, with a message for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return isinstance(error, FastWeightError) or raised_in.partition(".")[0] == "fastweights"


def _fail(message: str, code: int) -> NoReturn:
    console = Console(stderr=True)
    console.print(f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _version(asked: bool) -> None:
    if asked:
        print(f"fastweights {fastweights.__version__}")
        raise typer.Exit


@app.callback()
def fastweights_(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Memories that a network writes while it reads.

    For example: `fastweights info`, then `fastweights bench --smoke`.
    """


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed here and what "auto" chooses.

    For example: `fastweights info --json > info.json`
    """
    from rich.table import Table

    from fastweights.bench import machine

    found: dict[str, object] = {
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "gpu": [],
        "auto": {},
    }
    if find_spec("torch"):
        found["gpu"], found["auto"] = machine.gpus(), _choices()
    if json:
        print(jsonlib.dumps(found, indent=1))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found.items():
        for part, text in (value if isinstance(value, dict) else {"": value}).items():
            label = f"{name}: {part}" if name == "auto" else part or name
            table.add_row(label, ", ".join(text) or "none" if isinstance(text, list) else str(text or "not installed"))
    Console().print(table)


def _choices() -> dict[str, str]:
    """The method "auto" stands for in PyTorch, per device and length."""
    import torch

    from fastweights.bench.case import Case, auto

    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    lengths = {"one token": 1, "a sequence": 2048}
    return {
        f"{what}, {device}": auto(Case("delta", (1, T, 4, 64, 64), device))
        for device in devices
        for what, T in lengths.items()
    }


app.add_typer(bench_group, name="bench")
for _name, _command in (lm_commands | hf_commands | lab_commands).items():
    app.command(_name)(_command)
