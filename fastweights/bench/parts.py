"""Where the time of a training step or of a token that is written goes, by parts of the model, from PyTorch's profiler.

Modules mark their forward pass while the profiler looks on; what autograd does later is counted where the operation
that it differentiates was. A compiled block is one piece to the profiler: its products, its fused kernels and its
memory are told apart, its modules are not.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.autograd.profiler import record_function

from fastweights import attention
from fastweights.bench.report import new_table
from fastweights.models.blocks import FeedForward
from fastweights.models.language_model import LanguageModel
from fastweights.models.mixers import FastWeightMixer
from fastweights.torch import nn as layers

# names of the parts as the table shows them
PRODUCTS, MEMORY, NORMS, FF = "projections", "memory", "norms and gates", "feed-forward"
CONV = "convolution and features"
HEAD, OPTIMISER, HOST = "head and loss", "optimiser", "host"
FUSED, BOTH = "fused kernels (compiled)", "projections and feed-forward (compiled)"
PARTS = (PRODUCTS, MEMORY, CONV, NORMS, FF, BOTH, FUSED, HEAD, OPTIMISER, HOST)
MARK = "part: "
BACKWARD = "autograd::engine::evaluate_function"


@cache
def _of_kernels() -> dict[str, str]:
    """Part by the name of a GPU kernel of ours: a layer that is one plan launches all of them from one call."""
    if find_spec("triton") is None:
        return {}
    import triton

    from fastweights.torch.kernels import (
        backward_walk,
        convolution,
        dpfp,
        features,
        forward_walk,
        inverse,
        local,
        mixer_tiles,
        packed_convolution,
        packed_gradients,
        rates,
        spans,
        step,
        wide_keys,
    )

    memory = (rates, inverse, forward_walk, backward_walk, spans, local, wide_keys, step)
    maps = (convolution, packed_convolution, packed_gradients, features, dpfp)
    found: dict[str, str] = {}
    for part, modules in {CONV: maps, MEMORY: memory}.items():
        for module in modules:
            own = [x for x in vars(module).values() if isinstance(x, triton.runtime.KernelInterface)]
            found |= {x.__name__: part for x in own if x.__module__ == module.__name__}
    prepare, finish = ("prepare", "prepare_backward"), ("finish", "finish_backward")
    assert all(hasattr(mixer_tiles, name) for name in (*prepare, *finish))
    return found | dict.fromkeys(prepare, CONV) | dict.fromkeys(finish, NORMS) | {"_swiglu_gradient": FF}


def _named(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call under the name of its part."""

    def marked(*arguments: Any, **how: Any) -> Any:
        with record_function(MARK + part):
            return call(*arguments, **how)

    return marked


@contextmanager
def marked(model: LanguageModel) -> Iterator[None]:
    """While it lasts, the parts of the model say to the profiler which they are.

    Marks are hooks before and after a module's forward pass. The memory and the convolution are functions, which are
    wrapped for the time being. Marks may nest: the innermost counts. A compiled model is left as it is, since a hook
    would make torch.compile start again.
    """
    open_marks: list[record_function] = []
    handles: list[Any] = []

    def mark(module: nn.Module, part: str) -> None:
        def enter(*_: Any) -> None:
            open_marks.append(record_function(MARK + part))
            open_marks[-1].__enter__()

        def leave(*_: Any) -> None:
            open_marks.pop().__exit__(None, None, None)

        handles.extend([module.register_forward_pre_hook(enter), module.register_forward_hook(leave)])

    ops, convolve = layers.OPS, attention.convolve
    if model.compiled is None:
        for block in model.blocks:
            mark(block, NORMS)
            mark(block.mixer, NORMS if isinstance(block.mixer, FastWeightMixer) else MEMORY)
            for module in block.modules():
                if isinstance(module, FeedForward):
                    mark(module, FF)
                elif isinstance(module, nn.Linear) and module not in block.feed_forward.children():
                    mark(module, PRODUCTS)
        # The two that are functions and no modules.
        layers.OPS = ops._replace(fast_weight=_named(MEMORY, ops.fast_weight))
        attention.convolve = _named(CONV, convolve)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        layers.OPS, attention.convolve = ops, convolve


def parts(model: LanguageModel, step: Callable[[], Any], device: str, steps: int = 3) -> dict[str, float]:
    """Milliseconds of a step by part. On a GPU by its own clock, "host" is the time in which it had nothing to do.

    Args:
        model: whose modules are marked.
        step: makes one training step, or writes one token.
        device: "cpu" or "cuda".
        steps: to profile, and to time without the profiler.

    Returns:
        {part: milliseconds}; on a CPU the parts add up to the time of a step without the profiler.
    """
    gpu = device == "cuda"
    wait = torch.cuda.synchronize if gpu else lambda: None
    kinds = torch.profiler.ProfilerActivity
    kept = [kinds.CPU, *([kinds.CUDA] if gpu else [])]
    step()
    with marked(model), torch.profiler.profile(activities=kept, acc_events=True) as profile:
        for _ in range(steps):
            step()
        wait()
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    whole = 1e3 * (time.perf_counter() - started) / steps
    events = [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CPU]
    total = _added(events, gpu)
    found = {part: total[part] / 1e3 / steps for part in PARTS if total[part]}
    busy = sum(found.values())
    if gpu:
        found[HOST] = max(0.0, whole - busy)
    else:  # the profiler itself takes time: shares of what it saw, of a step without it
        found = {part: ms * whole / busy for part, ms in found.items()}
    return found


def show(title: str, columns: Sequence[tuple[str, dict[str, float], float]], whole: str, console: Console) -> None:
    """Print milliseconds by part as a table.  columns: (heading, by part, in all);  whole: name of the last row."""
    table = new_table(title)
    table.add_column("")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for part in PARTS:
        if any(part in found for _, found, _ in columns):
            table.add_row(part, *[f"{found.get(part, 0.0):.2f}" for _, found, _ in columns])
    table.add_row(whole, *[f"{total:.2f}" for _, _, total in columns])
    console.print(table)


def _added(events: list[Any], gpu: bool) -> Any:
    """Microseconds by part.

    Every operation of the forward pass has a number by which autograd finds its gradient. So the number that an
    operation of the backward pass carries says which part made it.

    Args:
        events: of the profiler, those on the CPU.
        gpu: count kernels that the events launched, instead of the events' own time.
    """
    forward: dict[int, str] = {}  # autograd's number of an operation -> its part
    for e in sorted(events, key=lambda e: e.time_range.start):
        part = _mark_above(e)
        if part is not None and e.sequence_nr >= 0 and not e.name.startswith((BACKWARD, MARK)):
            forward[e.sequence_nr] = part
    total: Counter[str] = Counter()
    for e in events:
        if gpu:
            for kernel in e.kernels:
                total[_part(e, forward, kernel.name)] += kernel.duration
        else:
            python = e.name.startswith((MARK, BACKWARD)) or not e.name.startswith("aten::")
            total[HOST if python else _part(e, forward, e.name)] += e.self_cpu_time_total
    return total


def _above(e: Any) -> Iterator[Any]:
    """An event and the events that it happened inside of, innermost first."""
    while e is not None:
        yield e
        e = e.cpu_parent


def _mark_above(e: Any) -> str | None:
    """The part of the innermost mark around an event; None outside of all."""
    return next((a.name.removeprefix(MARK) for a in _above(e) if a.name.startswith(MARK)), None)


def _part(e: Any, forward: dict[int, str], kernel: str) -> str:
    """The part that an operation or kernel belongs to: by its mark, by the name of what encloses it, or by its forward
    pass.

    Args:
        e: event of the profiler.
        forward: autograd's number of an operation -> its part.
        kernel: name of the GPU kernel, or of the operation.
    """
    if kernel in _of_kernels():
        return _of_kernels()[kernel]
    if "flex_attention" in kernel:  # a transformer's, in compiled blocks
        return MEMORY
    names = [a.name for a in _above(e)]
    if any(name.startswith("Optimizer.") or "_foreach_" in name or "clip_grad" in name for name in names):
        return OPTIMISER
    marked = _mark_above(e)
    if marked is not None:
        return marked
    if any(name.startswith(("CompiledFunction", "## Call CompiledFxGraph", "Torch-Compiled Region")) for name in names):
        if any(name.startswith("fastweights::packed_convolution") for name in names):
            return CONV
        if any(name.startswith(("fastweights::", "aten::_scaled_dot")) for name in names):
            return MEMORY
        if any(name.startswith(("aten::mm", "aten::addmm", "aten::bmm")) for name in names):
            return BOTH
        return FUSED
    for a in _above(e):
        if a.name.startswith(BACKWARD):
            return forward.get(a.sequence_nr, HEAD)
    return HEAD
