"""Training steps of small models, recorded once on a GPU and replayed: launching one costs more than running it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fastweights.lab.engine.replay import Replay


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
