"""A training step of a model on a batch that is handed over: AdamW, its learning rate, and mixed precision."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fastweights.lab.engine.cuda_graphs import GraphedFunction


def cosine_schedule(step: float, steps: float, warmup: float = 0, final: float = 0.05) -> float:
    """The learning rate as a share of its peak: linear warm-up, then a cosine down to `final`.

    Args:
        step: steps done, so 0 at the first.
        steps: of the whole training.
        warmup: steps in which the rate rises.
        final: share of the peak that is left at the end.

    Examples:
        >>> [cosine_schedule(step, 100, warmup=10) for step in (0, 9, 100)]
        [0.1, 1.0, 0.05]
    """
    if step < warmup:
        return (step + 1) / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def autocast(device: str) -> AbstractContextManager:
    """A context in which matrix products are in bfloat16 on a GPU, and in float32 as usual on a CPU."""
    return torch.autocast("cuda" if device.startswith("cuda") else "cpu", torch.bfloat16, device.startswith("cuda"))


class TrainingStep:
    """One step of AdamW on `objective(*tensors) -> loss` per call; returns the loss before the step, a tensor.

    On a GPU the step is captured as a CUDA graph, so the objective must never wait for a number.

    Args:
        model: whose parameters are trained; only matrices have weight decay.
        objective: from the tensors of a batch to the loss; runs under `autocast`.
        device: "cpu" or "cuda".
        lr: the peak learning rate.
        weight_decay: of AdamW.
        clip: the largest norm of the gradient of all parameters together.
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
        optimizer = self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=torch.tensor(lr, device=device) if on_gpu else lr,  # a CUDA graph reads the rate from a tensor
            betas=(0.9, 0.98),
            fused=True,
            capturable=on_gpu,
        )

        def step(*tensors: Tensor) -> Tensor:  # has no reference to self, as `GraphedFunction` asks
            optimizer.zero_grad(set_to_none=True)
            with autocast(device):
                loss = objective(*tensors)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            return loss.detach()

        self.step = GraphedFunction(step, device)

    def __call__(self, share: float, *tensors: Tensor) -> Tensor:
        """Take a step.

        Args:
            share: of the peak learning rate, such as `cosine_schedule` gives.
            tensors: of the batch, as `objective` takes them.
        """
        self.model.train()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.lr * share)
            else:
                group["lr"] = self.lr * share
        return self.step(*tensors)
