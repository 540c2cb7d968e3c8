"""What commands share: options of several of them, what they need installed, and how they print a line."""

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fastweights.core import FastWeightError


class Device(StrEnum):
    """Devices, as choices of an option; auto is a GPU where PyTorch finds one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Run = Annotated[
    Path, typer.Argument(help="Folder of a run that `fastweights train` made.", metavar="RUN", show_default=False)
]
On = Annotated[Device, typer.Option(help="Device to run on; auto is a GPU where PyTorch finds one.")]
FromMemory = Annotated[
    Path | None, typer.Option(help="Memory file of `fastweights read` to start from.", show_default=False)
]

PACKAGES = {"torch": "PyTorch", "transformers": "transformers", "matplotlib": "matplotlib", "plotly": "Plotly"}


def need(command: str, extra: str, *packages: str) -> None:
    """Refuse a command whose packages are not installed; says which extra of this package brings them.

    Args:
        command: as the user typed it, for the message.
        extra: of `pip install 'fastweights[EXTRA]'`.
        packages: names to import.
    """
    for package in packages:
        if not find_spec(package):
            raise FastWeightError(
                f"{command} needs {PACKAGES[package]}, which is not installed; pip install 'fastweights[{extra}]'"
            )


def wait_without_spinning() -> None:
    """Threads that wait by spinning slow each other down 16-fold on a busy machine; read when torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def say(text: str, style: str = "") -> None:
    """Print a line as it is: nothing in it is markup, and the terminal alone wraps it."""
    from rich.console import Console

    Console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def prepare_torch(command: str) -> None:
    """What the commands of the language model do before they import PyTorch."""
    need(command, "lm", "torch")
    wait_without_spinning()
