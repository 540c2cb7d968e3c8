"""The device to run on, and how much of its memory is in use."""

import ctypes
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError

PROCESS = Path("/proc/self")  # Linux: what the system knows of this process


def pick_device(name: str) -> str:
    """The device that "auto", "cpu" or "cuda" stands for: "auto" is a GPU where there is one."""
    name = str(name)
    if name not in ("auto", "cpu", "cuda"):
        raise FastWeightError(f"device is {name!r}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise FastWeightError("device is 'cuda'; PyTorch finds no GPU here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def copied(x: torch.Tensor, device: Any) -> torch.Tensor:
    """x, which is on the CPU, on a device; the host does not wait for the copy."""
    if device is None or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@cache
def matrix_peak(device: str, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product here: the most that training could reach."""
    size, repeats = (8192, 10) if device.startswith("cuda") else (768, 3)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    best = math.inf
    for _ in range(3):
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        wait()
        best = min(best, (time.perf_counter() - started) / repeats)
    return 2 * size**3 / best


def watch_memory(device: torch.device) -> Callable[[], int | None]:
    """Start to watch; what is returned tells the most bytes held at once since then, beyond those held now.

    On a GPU those of tensors; on Linux those of the whole process; elsewhere None.

        >>> peak = watch_memory(torch.device("cpu"))
        >>> _ = torch.ones(2**18)
        >>> peak() is None or peak() >= 0
        True
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        now = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - now
    try:
        with suppress(AttributeError, TypeError):  # glibc: what others freed goes back, or its use would not show
            ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")  # the highest mark falls to where we are
        held = _resident("VmRSS")
    except OSError:
        return lambda: None
    return lambda: max(0, _resident("VmHWM") - held)


def _resident(name: str) -> int:
    """A line of /proc/self/status, in bytes: VmRSS is what the process holds now, VmHWM the most since the mark was
    reset.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", (PROCESS / "status").read_text())
    assert found is not None
    return 1024 * int(found[1])
