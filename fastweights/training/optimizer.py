"""The optimiser of a training run, and the share of its learning rate at every step."""

import math

import torch
from torch import nn

from fastweights.models.config import Config


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, and the logarithms of a Fast Weight Layer's steps have a rate of their own.

    Parameters that a run started `--from` keeps frozen are left out.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    steps = [p for n, p in named.items() if n.endswith("fast.steps") and config.fast_options.get("log_steps")]
    rest = [p for p in named.values() if all(p is not q for q in steps)]
    matrices, others = [p for p in rest if p.dim() >= 2], [p for p in rest if p.dim() < 2]
    groups = [
        dict(params=matrices, weight_decay=config.weight_decay, peak=config.lr),
        dict(params=others, weight_decay=0.0, peak=config.lr),
        dict(params=steps, weight_decay=0.0, peak=config.step_lr),
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def share_of_rate(config: Config, step: int, done: float) -> float:
    """The share of the peak learning rate: linear warm-up, then a cosine down to final_lr.

    Args:
        config: has warmup and final_lr.
        step: counted from 0.
        done: the share of the run behind us.

    Examples:
        >>> config = Config(warmup=4, final_lr=0.1)
        >>> [share_of_rate(config, 0, 0.0), share_of_rate(config, 4, 0.0), round(share_of_rate(config, 99, 1.0), 3)]
        [0.25, 1.0, 0.1]
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
