"""The program `fastweights`. A command is a function here: its arguments are the flags, its docstring is the help.

Frameworks are imported inside the commands, so that `fastweights --help` answers at once.
"""

import json as jsonlib
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

import fastweights
from fastweights.core import FastWeightError
from fastweights.lm.cli import COMMANDS as lm_commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Rule(StrEnum):
    delta = "delta"
    sum = "sum"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


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


def _need_torch(command: str) -> None:
    if not find_spec("torch"):
        raise FastWeightError(f"{command} needs PyTorch, which is not installed; pip install 'fastweights[torch]'")


def _make_folder(folder: Path) -> None:
    """Before the work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastWeightError(f"cannot write to {folder}: {error.strerror}") from None


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


class _DefaultsToMemory(TyperGroup):
    """`bench --flags` is `bench memory --flags`."""

    def parse_args(self, ctx, args):
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["memory", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=_DefaultsToMemory)
app.add_typer(bench, name="bench")


@bench.callback()
def bench_() -> None:
    """Time this library against the others, after checking that all compute the same.

    `fastweights bench` alone is `fastweights bench memory`; its flags: `fastweights bench memory --help`.

    For example: `fastweights bench --shape 1,2048,4,64 --rule delta`
    """


@bench.command()
def memory(
    shape: Annotated[list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="A shape to time; repeatable.")] = None,
    rule: Annotated[Rule | None, typer.Option(help="Both when absent.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Our method to time; repeatable. All but the loop over tokens when absent.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the inputs; float32 on the CPU and bfloat16 on a GPU when absent.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Samples per contestant; 20 when absent (5 with --length-scaling).")
    ] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Time causal softmax attention too.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes and 2 samples: does it run?")] = False,
    length_scaling: Annotated[
        bool, typer.Option("--length-scaling", help="Instead: time and memory at (1, T, 4, 64) as T doubles.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Where to write all numbers.", show_default=False)
    ] = None,
) -> None:
    """Time the memory, forward and forward+backward.

    Contestants take turns. Outputs, states and gradients are first compared with float64; when one deviates, nothing
    is reported and the exit code is 1. All numbers go to `benchmarks/<machine>-<commit>.json`.

    For example: `fastweights bench memory --rule sum --softmax --repeats 50`
    """
    _need_torch("bench")
    import torch

    from fastweights.bench import lengths, report
    from fastweights.bench import memory as bench_memory
    from fastweights.bench.agree import Disagreement
    from fastweights.bench.case import parse_shape

    if device == Device.cuda and not torch.cuda.is_available():
        raise FastWeightError("--device is cuda; PyTorch finds no GPU here")
    if length_scaling and (shape or softmax):
        raise FastWeightError("--length-scaling has shapes and contestants of its own; drop --shape and --softmax")
    dtype = dtype or (Dtype.bfloat16 if device == Device.cuda else Dtype.float32)
    rules = [rule.value] if rule else [r.value for r in Rule]
    path = json or report.default_path(device, "-".join(["lengths"] * length_scaling + ["smoke"] * smoke))
    _make_folder(path.parent)
    console = Console()
    try:
        if length_scaling:
            tokens = lengths.SMOKE if smoke else lengths.LENGTHS
            asked = lengths.cases(tokens, rules, method or ["auto"], device, dtype)
            with report.progress(lengths.STEPS * len(asked)) as advance:
                scalings = [lengths.run(*a, repeats=repeats or (2 if smoke else 5), advance=advance) for a in asked]
            report.show_lengths(scalings, console)
            report.write(path, report.payload(device, scalings=scalings))
        else:
            shapes = [parse_shape(text) for text in shape or ()]
            shapes = shapes or list(bench_memory.SMOKE if smoke else bench_memory.SHAPES[device])
            cases = bench_memory.cases(shapes, rules, device, dtype)
            with report.progress(bench_memory.STEPS * len(cases)) as advance:
                results = bench_memory.run(
                    cases,
                    repeats=repeats or (2 if smoke else 20),
                    methods=method or (),
                    softmax=softmax,
                    advance=advance,
                )
            report.show(results, console)
            report.write(path, report.payload(device, results))
    except Disagreement as error:
        _fail(str(error), 1)
    console.print(f"Written to {path}", highlight=False, markup=False, soft_wrap=True)


@bench.command()
def layers(
    name: Annotated[list[str] | None, typer.Option(help="A preset, or 'default'; repeatable. All when absent.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples; 20 when absent.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes and 2 samples: does it run?")] = False,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Where to write all numbers.", show_default=False)
    ] = None,
) -> None:
    """Time layers beside their projections alone and their memory alone, forward+backward.

    For example: `fastweights bench layers --name default --name gated-deltanet`
    """
    _need_torch("bench layers")
    from fastweights.bench import layers as bench_layers
    from fastweights.bench import report
    from fastweights.bench.agree import Disagreement

    for each in name or ():
        if each not in bench_layers.NAMES:
            raise FastWeightError(f"--name is {each!r}; expected one of {', '.join(bench_layers.NAMES)}")
    names = name or bench_layers.NAMES
    sizes = bench_layers.SMOKE if smoke else bench_layers.DEFAULT
    path = json or report.default_path("cpu", "layers" + "-smoke" * smoke)
    _make_folder(path.parent)
    try:
        with report.progress(len(names)) as advance:
            results = bench_layers.run(names, **sizes, repeats=repeats or (2 if smoke else 20), advance=advance)
    except Disagreement as error:
        _fail(str(error), 1)
    bench_layers.show(results, Console(), **sizes)
    report.write(path, report.payload("cpu") | {"layers": bench_layers.payload(results, sizes)})
    Console().print(f"Written to {path}", highlight=False, markup=False, soft_wrap=True)


for _name, _command in lm_commands.items():
    app.command(_name)(_command)


@bench.command()
def fwl(
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples; 10 when absent.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes and 2 samples: does it run?")] = False,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Where to write all numbers.", show_default=False)
    ] = None,
) -> None:
    """Time a Fast Weight Layer: on a CPU a training step with and without it, on a GPU the block alone.

    For example: `fastweights bench fwl --device cuda`
    """
    _need_torch("bench fwl")
    from fastweights.bench import fwl as bench_fwl
    from fastweights.bench import report
    from fastweights.bench.agree import Disagreement

    shapes = bench_fwl.SMOKE if smoke else bench_fwl.SHAPES[device]
    precisions = ["float32", "tf32", "bfloat16"] if device == Device.cuda else ["float32"]
    path = json or report.default_path(device, "fwl" + "-smoke" * smoke)
    _make_folder(path.parent)
    try:
        with report.progress(len(shapes) * len(precisions)) as advance:
            results = bench_fwl.run(shapes, device, precisions, repeats or (2 if smoke else 10), advance)
    except Disagreement as error:
        _fail(str(error), 1)
    bench_fwl.show(results, device, Console())
    report.write(path, report.payload(device) | {"fwl": bench_fwl.payload(results)})
    Console().print(f"Written to {path}", highlight=False, markup=False, soft_wrap=True)
