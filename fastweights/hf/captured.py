"""One token through the blocks as a CUDA graph: what `generate` of transformers does again and again.

From the second token on, the launches of all blocks are replayed as one. Anything that could change what a block does
without changing where its weights are (adapters, hooks, a probe) keeps the blocks as they are.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.torch import graphs, watching
from fastweights.torch.tree import flatten, unflatten


def refuses(blocks: nn.ModuleList, norm: nn.Module, x: Tensor, states: list[Any]) -> str | None:
    """Why these blocks are not replayed on one token x (B, 1, D) after these states, or None."""
    if torch.is_grad_enabled() or x.shape[1] != 1 or states[0] is None or torch.compiler.is_compiling():
        return "only single tokens after others, without gradients, are replayed"
    reason = graphs.refuses(x)
    if reason is not None:
        return reason
    return looked_at((*blocks.modules(), norm))


def looked_at(modules: Iterable[nn.Module]) -> str | None:
    """Which of these modules is not ours alone, so that a recording may miss what others do there; None if none is."""
    if watching.watchers or watching.steps:
        return "a probe looks on"
    for module in modules:
        name = type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"a hook looks at {name}"
        if not type(module).__module__.startswith(("torch.nn.", "fastweights.")):
            return f"{type(module).__module__}.{name} is not of this package"
    return None


def step(blocks: nn.ModuleList, norm: nn.Module, x: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
    """Features (B, 1, D) and states of the blocks after one token x (B, 1, D)."""
    named = flatten(states)

    def run(x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        given, after = unflatten(states, dict(zip((name for name, _ in named), leaves, strict=True))), []
        for block, state in zip(blocks, given, strict=True):
            x, state = block(x, state, None, None)
            after.append(state)
        return norm(x), *(leaf for _, leaf in flatten(after))

    weights = tuple(p.data_ptr() for p in blocks.parameters())
    training = blocks.training
    y, *leaves = graphs.call(("blocks", weights, training), run, (x, *(leaf for _, leaf in named)))
    return y, unflatten(states, dict(zip((name for name, _ in named), leaves, strict=True)))
