"""One document read by a held Fast Weight Layer on a CPU: the chunk step of held.py in as few operations as there are.

A chunk of one document is so little work that starting an operation costs as much as the operation. Each layer's
weights and bias are one matrix here, the norm's gradients come from one call, and the gradient at the features is
softmax(z) words less the label's word, for which nothing need be written into the probabilities.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import watching

MOST = 2**24  # logits of a chunk that are held at once
SMALL = 2**23  # multiplications of a product that one thread makes sooner than two that must first be woken


def serves(config: FWLConfig, stacks: Sequence[Tensor], tokens: Sequence[Tensor], words: Tensor) -> bool:
    """Whether `read` is made for these: one document on a CPU, in one dtype, whose gradients are not clipped."""
    x, few = tokens[0], (config.refresh or 0) * len(words) <= MOST
    alike = words.dtype == x.dtype == stacks[0].dtype and words.dtype.itemsize >= 4
    return len(x) == 1 and x.device.type == "cpu" and alike and few and config.clip is None


def read(
    config: FWLConfig,
    start: Sequence[Tensor],
    stacks: Sequence[Tensor],
    steps: Sequence[float],
    tokens: Sequence[Tensor],
    calls: Sequence[Any],
    words: Tensor,
    c: Tensor,
    score: bool,
) -> list[tuple[Tensor | None, Tensor | None]]:
    """The features and losses of each call; the weights in `stacks` learn in place.

    Args:
        config: of the layer.
        start, stacks: trained weights and those of the document: (1, D + 1, F), (1, F + 1, size) and (1, 1, 2 size).
        steps: six.
        tokens, calls, words, c, score: as held.py's `read` takes them.
    """
    x, labels, shares = (y[0] for y in tokens)
    W1, W2, norm = (w[0] for w in stacks)
    dense1, bias1, dense2, bias2 = W1[:-1], W1[-1], W2[:-1], W2[-1]
    scale, shift = norm[0].chunk(2)
    shape, labels, E = (config.size,), labels[:, None], words.mT
    keys = torch.nn.functional.pad(x * (2.0 * steps[0]), (0, 1), value=2.0 * steps[1]).mT  # the slope of r^2 is 2 r
    mine = words.index_select(0, labels[:, 0])
    ones = x.new_ones(len(x))
    even = bool((shares == 1).all())
    kept = 1.0 if config.decay is None else config.decay ** (config.refresh or 1)
    forward, backward = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward
    outputs: list[tuple[Tensor | None, Tensor | None]] = []
    largest = (config.refresh or 1) * max(dense1.numel(), dense2.numel(), words.numel())
    with _one_thread(largest <= SMALL):
        for call in calls:
            part = slice(call.c, call.d)
            r = torch.addmm(bias1, x[part], dense1).relu_()
            a = r * r
            y = torch.addmm(bias2, a, dense2)
            n, mean, rstd = forward(y, shape, scale, shift, config.eps)
            loss = None
            if call.close or score:
                log_p = torch.log_softmax(torch.addmm(c, n, E), 1)
                loss = log_p.gather(1, labels[part]).neg_().mT
            outputs.append((n[None], loss))
            if not call.close:
                continue
            dn = torch.addmm(mine[part], log_p.exp_(), words, beta=-1)
            if not even:
                dn *= shares[part, None]
            dy, dscale, dshift = backward(dn, y, shape, mean, rstd, scale, shift, (True, True, True))
            half = torch.mm(dy, dense2.mT).mul_(r)  # of the gradient before the squared ReLU
            if kept != 1.0:
                for w, t in zip(stacks, start, strict=True):
                    w.lerp_(t, 1.0 - kept)
            before = [w.clone() for w in stacks] if watching.steps else []
            W1.addmm_(keys[:, part], half, alpha=-1)
            dense2.addmm_(a.mT, dy, alpha=-steps[2])
            bias2.addmv_(dy.mT, ones[: len(dy)], alpha=-steps[3])
            scale.sub_(dscale, alpha=steps[4])
            shift.sub_(dshift, alpha=steps[5])
            if before:
                square = [(w - b).square().sum() for w, b in zip(stacks, before, strict=True)]
                watching.steps[-1].append(torch.stack(square).sum().sqrt()[None])
    return outputs


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Whether PyTorch computes on one thread inside."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if wanted else threads)
        yield
    finally:
        torch.set_num_threads(threads)
