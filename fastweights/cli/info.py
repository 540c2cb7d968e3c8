"""The command `fastweights info`. Light to import."""

import json as jsonlib
from importlib.util import find_spec
from typing import Annotated

import typer

from fastweights.cli.options import need


def info(
    json: Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")] = False,
) -> None:
    """Say what is installed here, which method "auto" chooses, and why.

    It prints the versions of this package, Python and the frameworks, the processor and GPUs, and for each device and
    length of text the way in which `fast_weight(..., method="auto")` would compute the memory: recurrent, chunked or
    kernel.

    To learn the same of every call in a program of yours, turn on Python's own logging:
    `logging.basicConfig(level="DEBUG")`.

    For example: `fastweights info --json > info.json`
    """
    from rich.console import Console
    from rich.table import Table

    from fastweights.bench import machine

    # One dict for both outputs: the table shows what the JSON holds.
    found: dict[str, object] = {
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "gpu": [],
        "auto": {},
        "why": {},
        "speed": {},
    }
    if find_spec("torch"):
        need("info", "torch", "torch")
        choices = _choices()
        found["gpu"] = machine.gpus()
        found["auto"] = {call: method for call, (method, _) in choices.items()}
        found["why"] = {call: why for call, (_, why) in choices.items()}
        found["speed"] = _speed()
    if json:
        print(jsonlib.dumps(found, indent=1))
        return
    # A row per fact; a choice stands with its reason.
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    reasons: dict = found.pop("why")  # type: ignore[assignment]
    for name, value in found.items():
        for part, text in (value if isinstance(value, dict) else {"": value}).items():
            label = f"{name}: {part}" if name in ("auto", "speed") else part or name
            shown = ", ".join(text) or "none" if isinstance(text, list) else str(text or "not installed")
            table.add_row(label, f"{shown}: {reasons[part]}" if name == "auto" else shown)
    Console().print(table)


def _speed() -> dict[str, str]:
    """How training steps and generated tokens run here, and why.

    The default configuration on the device that `train` would choose; nothing is compiled or run for it.
    """
    import torch

    from fastweights.models.compiled import decide
    from fastweights.models.config import Config
    from fastweights.torch import graphs
    from fastweights.training import gradients

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = graphs.refuses(torch.empty(1, device=device))
    how = decide(Config(), device)
    return {
        "train": f"blocks are {how}, steps {gradients.said(gradients.refuses(Config(), None, how, device))}",
        "generate": "captured (a step is a CUDA graph)" if reason is None else f"eager ({reason})",
    }


def _choices() -> dict[str, tuple[str, str]]:
    """(the method "auto" stands for in PyTorch, why) per device and kind of call.

    Small empty tensors stand for the calls: a choice looks at shapes, types and devices alone.
    """
    import torch

    from fastweights.core import Inputs, Spec
    from fastweights.torch.ops import choice

    found: dict[str, tuple[str, str]] = {}
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        token, x, wide = (
            torch.empty(1, T, 4, 64, device=device, dtype=dtype)
            for T, dtype in ((1, torch.float32), (128, torch.float32), (128, torch.float64))
        )
        calls = {
            "one token": Inputs(token, token, token),
            "a sequence": Inputs(x, x, x),
            "decay per channel": Inputs(x, x, x, log_decay=x),
            "erase key": Inputs(x, x, x, erase=x),
            "float64": Inputs(wide, wide, wide),
        }
        for what, inputs in calls.items():
            found[f"{what}, {device}"] = choice(inputs, Spec(), learning=inputs.q is not token)
    return found
