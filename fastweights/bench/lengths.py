"""`fastweights bench lengths`: what twice as many tokens cost, in time and in memory."""

import ctypes
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from fastweights.bench import agree
from fastweights.bench.case import Case, Contestant, our_method
from fastweights.bench.memory import forward_backward
from fastweights.bench.timing import Advance, Call, Timing, interleave

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
SMOKE = (64, 128)
M_MMAP_THRESHOLD = -3  # malloc.h
STEPS = 3  # per rule and method: check, memory, time


@dataclass(frozen=True)
class Scaling:
    """Forward+backward of one of our methods at growing lengths.

    Attributes:
        case: at the first length.
        method: of ours.
        lengths: T of each.
        timings: of each, in milliseconds.
        peak_bytes: the most that each held at once, beyond the inputs.
    """

    case: Case  # at the first length
    method: str
    lengths: tuple[int, ...]
    timings: tuple[Timing, ...]
    peak_bytes: tuple[int, ...]  # beyond the inputs

    def ratios(self) -> list[float]:
        """Time of each length over the time of the one before: 2 when the cost is linear."""
        return [b.median / a.median for a, b in pairwise(self.timings)]

    def bytes_per_token(self) -> list[float]:
        """Extra bytes over the length: constant when memory is linear."""
        return [peak / T for peak, T in zip(self.peak_bytes, self.lengths, strict=True)]


def cases(
    lengths: Sequence[int], rules: Sequence[str], methods: Sequence[str], device: str, dtype: str
) -> list[tuple[str, list[Case]]]:
    """The arguments of `run` for each rule and method.

    Args:
        lengths: numbers of tokens.
        rules: of the memory.
        methods: of ours.
        device, dtype: of the inputs.
    """
    return [
        (method, [Case(rule, (1, T, 4, 64, 64), device, dtype) for T in lengths])
        for rule in rules
        for method in methods
    ]


def run(method: str, cases: Sequence[Case], *, repeats: int, advance: Advance = lambda what, steps: None) -> Scaling:
    """Check the first case, measure the memory of each, time all in turns.

    Args:
        method: of ours.
        cases: the same but for their length.
        repeats: samples per length.
        advance: moves the progress bar, by three steps.
    """
    contestant = our_method(method, cases[0])
    advance(f"checking {cases[0]}", 0)
    agree.check(cases[0], [contestant], cases[0].tensors())
    advance(f"checking {cases[0]}", 1)
    # Memory is measured in a process of its own on a CPU: what a process once held, it may keep.
    peaks = []
    for case in cases:
        peaks.append(peak_bytes(case, method))
        advance(f"memory of {case}", 1 / len(cases))
    calls = {str(case): forward_backward(contestant, case.tensors()) for case in cases}
    tick = partial(advance, f"timing the {cases[0].rule} rule", 1 / (repeats * len(calls)))
    timings = interleave(calls, repeats=repeats, device=cases[0].device, tick=tick)
    tokens = tuple(case.shape[1] for case in cases)
    return Scaling(cases[0], method, tokens, tuple(timings.values()), tuple(peaks))


def peak_bytes(case: Case, method: str) -> int:
    """The most memory that forward+backward holds at once, beyond its inputs."""
    if case.device == "cuda":
        return _cuda_peak(case, method)
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # a process whose peak is this call's
        return fresh.apply(_cpu_peak, (case, method, torch.get_num_threads()))


def _cuda_peak(case: Case, method: str) -> int:
    """Bytes of tensors at the peak of a call, less those before it."""
    call = _warm(case, our_method(method, case))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(case: Case, method: str, threads: int) -> int:
    """Bytes of the process at the peak of a call, less those before it, in a process of its own.

    Args:
        case: the call.
        method: of ours that computes it.
        threads: of PyTorch.
    """
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        with suppress(AttributeError):  # glibc only: blocks of 64 KiB and more go back to the system when freed
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    call = _warm(case, our_method(method, case))
    before, _ = _resident()
    call()
    return _resident()[1] - before


def _warm(case: Case, contestant: Contestant) -> Call:
    """Forward+backward, ready to run, after a short one has loaded the code and the buffers that are kept for good."""
    B, T, H, K, V = case.shape
    forward_backward(contestant, replace(case, shape=(B, min(T, 512), H, K, V)).tensors())()
    return forward_backward(contestant, case.tensors())


def _resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most so far."""
    if sys.platform == "linux":  # ru_maxrss would start at the parent's size
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, peak
