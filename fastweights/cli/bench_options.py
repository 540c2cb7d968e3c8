"""What the commands of `fastweights bench` share: options, checks before the work, and where the numbers go."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastweights.cli.options import need, say
from fastweights.core import FastWeightError
from fastweights.files import write_json


class Rule(StrEnum):
    """Rules that can be timed, as choices of an option."""

    delta = "delta"
    sum = "sum"


class Device(StrEnum):
    """Devices that can be timed on."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Dtypes of the inputs."""

    float32 = "float32"
    bfloat16 = "bfloat16"


On = Annotated[Device, typer.Option(help="Device to time on.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Samples per contestant; 10 when absent.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Take tiny sizes and 2 samples, to see whether it runs.")]
Json = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        help="JSON file for all numbers; one in benchmarks/ when absent.",
        show_default=False,
    ),
]
Rules = Annotated[Rule | None, typer.Option(help="Rule of the memory to time; both when absent.")]
Decays = Annotated[
    list[str] | None,
    typer.Option("--decay", help="Decay: none, head (one per head) or channel; repeatable. none when absent."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="Method of ours to time; repeatable. All but the loop over tokens when absent."),
]
Inputs = Annotated[
    Dtype | None, typer.Option(help="Dtype of the inputs; float32 on a CPU and bfloat16 on a GPU when absent.")
]


def start(command: str, device: str, name: str, smoke: bool, json: Path | None) -> Path:
    """Where the numbers will go, once everything that could stop the work has been checked.

    Args:
        command: for messages.
        device: that will be timed on.
        name: of the benchmark, in the file's name.
        smoke: also a part of that name, so that tiny runs never replace real ones.
        json: the user's own path.
    """
    need(command, "torch", "torch")
    import torch

    from fastweights.bench import report

    if device == Device.cuda and not torch.cuda.is_available():
        raise FastWeightError("--device is cuda; PyTorch finds no GPU here")
    path = json or report.default_path(device, "-".join(part for part in (name, "smoke" * smoke) if part))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastWeightError(f"cannot write to {path.parent}: {error.strerror}") from None
    return path


@contextmanager
def agreeing(steps: float) -> Iterator[Any]:
    """A progress bar; outputs that disagree end the program with code 1, and nothing is reported."""
    from fastweights.bench import report
    from fastweights.bench.agree import Disagreement

    try:
        with report.progress(steps) as advance:
            yield advance
    except Disagreement as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def write(path: Path, payload: dict[str, Any]) -> None:
    """Write the numbers as JSON, and say where."""
    write_json(path, payload)
    say(f"Written to {path}")


def rules_of(rule: Rule | None) -> list[str]:
    """The rule that was asked for, or both."""
    return [rule.value] if rule else [r.value for r in Rule]


def dtype_of(dtype: Dtype | None, device: Device) -> Dtype:
    """The dtype that was asked for, or the usual one of the device."""
    return dtype or (Dtype.bfloat16 if device == Device.cuda else Dtype.float32)
