"""The program `fastweights`: one table of commands.

A command is a function: its arguments are the flags, its docstring is the help. Frameworks are imported inside the
functions, so that `fastweights --help` answers at once.
"""

import errno
import io
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from inspect import getdoc
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import fastweights
from fastweights.cli import (
    bench,
    bench_layers,
    bench_models,
    demo,
    evaluate,
    generate,
    hf_adapt,
    hf_eval,
    huggingface,
    info,
    microscope,
    reproduce,
    train,
)
from fastweights.core import FastWeightError, FastWeightWarning

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "train": train.train,
    "eval": evaluate.evaluate,
    "generate": generate.generate,
    "read": generate.read,
    "inspect": microscope.inspect,
    "hf eval": hf_eval.evaluate,
    "hf adapt": hf_adapt.adapt,
    "hf export": huggingface.export,
    "reproduce": reproduce.reproduce,
    "bench memory": bench.memory,
    "bench lengths": bench.lengths,
    "bench layers": bench_layers.layers,
    "bench host": bench_layers.host,
    "bench fwl": bench_layers.fwl,
    "bench lm": bench_models.lm,
    "bench train": bench_models.train,
    "bench decode": bench_models.decode,
    "bench hf": bench_models.hf,
    "bench lab": bench_layers.lab,
    "info": info.info,
}

GROUPS = {
    "hf": huggingface.__doc__,
    "bench": bench.__doc__,
}

NEXT = """\
fastweights {version}: memories that a network writes while it reads.

What to do next:
  fastweights demo                         train, evaluate and generate here, in minutes, and say what was shown
  fastweights train runs/first             train a language model here, in minutes, without any download
  fastweights eval runs/first              score text it has not seen, with and without memory
  fastweights generate runs/first          write text with it
  fastweights inspect runs/first FILE      show what its memory did with a text, as a page
  fastweights hf eval MODEL FILE           score a text with a Hugging Face model, and let it learn as it reads
  fastweights reproduce                    list the papers' figures and tables that can be run again
  fastweights bench memory --smoke         time this library on this machine
  fastweights info                         say what is installed here

`fastweights --help` lists all commands, `fastweights train --help` the options of one, and
`fastweights --install-completion` lets the Tab key complete them."""


FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))  # errors of a disk that has no room


def main() -> None:
    """Run the program. Mistakes in what was asked for are one red line and exit code 2; bugs keep their traceback.

    Exit codes: 0 where all went well, 1 where something was found to disagree (`bench`) or is not reproduced
    (`reproduce`), 2 where what was asked for cannot be.
    """
    warnings.showwarning = _warn  # type: ignore[assignment]
    for stream in (sys.stdout, sys.stderr):  # models write any character, and terminals and files know some alone
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # What this library raises is for the user to read. Any other error is a bug, whose traceback is worth more.
    try:
        app(prog_name="fastweights")
    except ValueError as error:
        if not _ours(error):
            raise
        _fail(str(error), 2)
    except OSError as error:  # files that cannot be read or written are said where they are opened
        if error.errno not in FULL or error.filename is not None:
            raise
        sys.stdout = io.StringIO()  # or what is left to write fails once more at the end
        _fail(f"cannot write the output: {error.strerror}", 2)


def _ours(error: ValueError) -> bool:
    """Whether this library raised it, with a message for the user.

    A ValueError of PyTorch or of the standard library is a bug of ours instead, and keeps its traceback.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return isinstance(error, FastWeightError) or raised_in.partition(".")[0] == "fastweights"


_plainly = warnings.showwarning


def _warn(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Our own warnings are one yellow line.

    Warnings of other libraries are shown as Python shows them.
    """
    if not issubclass(category, FastWeightWarning):
        _plainly(message, category, *where)
        return
    console = Console(stderr=True)
    console.print(f"Warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _fail(message: str, code: int) -> NoReturn:
    """Print an error in red on standard error, and end the program with this code."""
    console = Console(stderr=True)
    console.print(f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _version(asked: bool) -> None:
    """Print the version and end, where --version asks for it."""
    if asked:
        print(f"fastweights {fastweights.__version__}")
        raise typer.Exit


def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of fastweights.")
    ] = False,
) -> None:
    """Memories that a network writes while it reads.

    For example: `fastweights train runs/first`, then `fastweights eval runs/first`
    """
    if ctx.invoked_subcommand is None:
        print(NEXT.format(version=fastweights.__version__))
        if not find_spec("torch"):
            print("\nPyTorch is not installed, which most commands need: pip install 'fastweights[lm]'")


def _help(text: str | None) -> dict[str, Any]:
    """A docstring as help and, in its last place, the example.

    Every command's docstring ends with "For example: ", which becomes the last line of its help.
    """
    assert text is not None
    text, _, example = text.strip().rpartition("\n\nFor example: ")
    return dict(help=text, epilog=f"For example: {example}")


def _build() -> typer.Typer:
    """The program: a command for each entry of COMMANDS, two words of which are a command of a group.

    Functions are commands as they are: Typer makes options of their arguments, and help of their docstrings.
    """
    how: dict[str, Any] = dict(rich_markup_mode="markdown", context_settings={"help_option_names": ["-h", "--help"]})
    app = typer.Typer(pretty_exceptions_enable=False, **how)
    app.callback(invoke_without_command=True, **_help(getdoc(start)))(start)
    groups = {name: typer.Typer(no_args_is_help=True, **how) for name in GROUPS}
    for words, function in COMMANDS.items():
        # "bench memory" is the command memory of the group bench
        *group, name = words.split()
        (groups[group[0]] if group else app).command(name, **_help(getdoc(function)))(function)
    for name, group_app in groups.items():
        app.add_typer(group_app, name=name, **_help(GROUPS[name]))
    return app


app = _build()
