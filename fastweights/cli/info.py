"""The command `fastweights info`. Light to import."""

import json as jsonlib
from importlib.util import find_spec
from typing import Annotated

import typer


def info(
    json: Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")] = False,
) -> None:
    """Say what is installed here and which method "auto" chooses.

    For example: `fastweights info --json > info.json`
    """
    from rich.console import Console
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
