"""Training steps of small models, recorded once on a GPU and replayed: launching one costs more than running it."""

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

WARM = 3  # steps run as they are before one is recorded: the optimiser's state and the kernels' binaries come to be
recording = True  # False: all steps are run as they are


def rate(step: int, steps: int, warmup: int = 0, final: float = 0.05) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to `final`.

    Args:
        step: counted from 0.
        steps: of the whole run.
        warmup: steps in which the rate rises.
        final: share of the peak that is left at the end.

    Examples:
        >>> [rate(step, 100, warmup=10) for step in (0, 9, 100)]
        [0.1, 1.0, 0.05]
    """
    if step < warmup:
        return (step + 1) / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def autocast(device: str) -> AbstractContextManager:
    """bfloat16 products on a GPU, float32 elsewhere."""
    return torch.autocast("cuda" if device.startswith("cuda") else "cpu", torch.bfloat16, device.startswith("cuda"))


def free() -> None:
    """Give back the memory of recordings that are no more: other processes may want it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def record(function: Callable[[], Any]) -> tuple[Any, Any] | None:
    """(CUDA graph, what function returned), or None with a warning: something in it waits for the CPU, for example.

    Once None has been returned, the caller runs its steps as they are: slower, with the same numbers.
    """
    if not recording:
        return None
    free()
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # a recording of old that is freed meanwhile would spoil this one
    try:
        with torch.cuda.graph(graph):
            output = function()
    except Exception as error:
        torch.cuda.set_stream(here)
        generator = torch.cuda.default_generators[here.device_index]
        generator.graphsafe_set_state(generator.clone_state())  # the old one believes that it is being recorded
        said = str(error).strip().partition("\n")[0]
        warnings.warn(f"steps could not be recorded and run as they are, slower: {said}", stacklevel=2)
        return None
    finally:
        gc.enable()
    return graph, output


class Replay:
    """A function of tensors, recorded as a CUDA graph once per shape; elsewhere the function itself.

    The first calls of a shape run as they are, on another stream, as recording wants it; later ones copy their inputs
    into the graph's own and replay it. Its tensors may be reused by the next call: clone what shall last.
    """

    def __init__(self, function: Callable[..., Any], device: str):
        self.function, self.records = function, device.startswith("cuda")
        self.calls: dict[tuple, int] = {}
        self.recorded: dict[tuple, tuple] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.records:
            return self.function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes in self.recorded:
            graph, held, output = self.recorded[shapes]
            for place, x in zip(held, inputs, strict=True):
                place.copy_(x)
            graph.replay()
            return output
        # The first calls of a shape run as they are, on a stream of their own, which recording asks for.
        seen = self.calls[shapes] = self.calls.get(shapes, 0) + 1
        if seen > WARM:
            return self._record(shapes, inputs)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        return output

    def _record(self, shapes: tuple, inputs: tuple) -> Any:
        """Record the function on copies of these inputs, and run the recording once; as it is where that fails."""
        held = [x.clone() for x in inputs]
        found = record(lambda: self.function(*held))
        if found is None:
            self.records = False
            return self.function(*inputs)
        graph, output = found
        self.recorded[shapes] = graph, held, output
        graph.replay()
        return output


class Steps:
    """AdamW on `objective(*tensors) -> loss`; each call is one step and returns the loss before it, a tensor.

    Args:
        model: whose parameters train; weight decay is for matrices alone.
        objective: of the tensors of a batch. On a GPU it runs with bfloat16 products and is recorded, so it must never
            wait for a number.
        device: "cpu" or "cuda".
        lr: the peak learning rate.
        weight_decay, clip: of AdamW, and the largest norm of a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[..., Tensor],
        device: str,
        *,
        lr: float,
        weight_decay: float = 0.1,
        clip: float = 1.0,
    ):
        on_gpu = device.startswith("cuda")
        self.model, self.lr = model, lr
        parameters = list(model.parameters())
        matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
        at = torch.tensor(lr, device=device) if on_gpu else lr
        optimizer = self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=at, betas=(0.9, 0.98), fused=True, capturable=on_gpu
        )

        def step(*tensors: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with autocast(device):
                loss = objective(*tensors)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            return loss.detach()

        self.replay = Replay(step, device)  # which knows nothing of self: a circle would keep the recordings alive

    def __call__(self, share: float, *tensors: Tensor) -> Tensor:
        """One step on a batch.  share: of the peak learning rate."""
        self.model.train()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.lr * share)
            else:
                group["lr"] = self.lr * share
        return self.replay(*tensors)
