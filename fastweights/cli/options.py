"""What commands share: options of several of them, what they need installed, and how they print a line."""

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

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
        found = find_spec(package)
        if not found:
            raise FastWeightError(
                f"{command} needs {PACKAGES[package]}, which is not installed; pip install 'fastweights[{extra}]'"
            )
        if found.submodule_search_locations is None:  # `python -m` looks for packages in the current folder first
            raise FastWeightError(
                f"{command} needs {PACKAGES[package]}, but Python finds {found.origin} under that name; expected a "
                "folder without such a file, or the program `fastweights` in place of `python -m fastweights`"
            )


def wait_without_spinning() -> None:
    """Threads that wait by spinning slow each other down 16-fold on a busy machine; read when torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def typed(*words: object) -> str:
    """A command as it can be typed: words with blanks or signs that a shell reads are quoted.

    Examples:
        >>> typed("fastweights", "eval", Path("my runs/first"))
        "fastweights eval 'my runs/first'"
    """
    return shlex.join(map(str, words))


def say(text: str, style: str = "") -> None:
    """Print a line as it is: nothing in it is markup, and the terminal alone wraps it."""
    from rich.console import Console

    Console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def reading(name: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A progress bar on a terminal, which is gone afterwards; gives the function that moves it by a number.

    Args:
        name: what is read.
        total: how much of it there is.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(name), total=total)
        yield lambda n: progress.advance(task, n)


def busy(what: str) -> AbstractContextManager:
    """Show on a terminal what is being done, for as long as the block lasts: for work whose length is not known."""
    from rich.console import Console
    from rich.markup import escape

    return Console().status(escape(what))


def prepare_torch(command: str) -> None:
    """What the commands of the language model do before they import PyTorch."""
    need(command, "lm", "torch")
    wait_without_spinning()
    with interrupted_later():
        import torch  # noqa: F401


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C ends the program when the block does: an import that is interrupted may abort it, or leave half a module.

    In a thread other than the first it does nothing: no signal arrives there.
    """
    asked: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
