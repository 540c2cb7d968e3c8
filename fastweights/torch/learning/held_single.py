"""One document read by a held Fast Weight Layer on a CPU: the chunk step of held.py in as few operations as there are.

A chunk of one document is so little work that starting an operation costs as much as the operation. Each layer's
weights and bias are one matrix here, the norm's gradients come from one call, and the gradient at the features is
softmax(z) embedding less the label's row, for which nothing need be written into the probabilities.

Letters and stacks are those of held.py, with N = 1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import watching
from fastweights.torch.learning.layout import ChunkSlice

MAX_LOGITS = 2**24  # of a chunk, which are held at once
ONE_THREAD = 2**23  # multiplications of a product that one thread finishes before a second one would be awake


def can_read(config: FWLConfig, stacks: Sequence[Tensor], tokens: Sequence[Tensor], embedding: Tensor) -> bool:
    """Whether `read` applies: one document on a CPU, one dtype of 32 bits or more, gradients that are not clipped.

    Args:
        config: arguments of the layer.
        stacks: fast weights of every sequence, as in held.py.
        tokens: x (N, L, D), labels and shares (N, L).
        embedding: (V, size), the output embedding.
    """
    x = tokens[0]
    same_dtype = embedding.dtype == x.dtype == stacks[0].dtype and embedding.dtype.itemsize >= 4
    few_logits = (config.refresh or 0) * len(embedding) <= MAX_LOGITS
    return len(x) == 1 and x.device.type == "cpu" and same_dtype and few_logits and config.clip is None


def read(
    config: FWLConfig,
    trained_stacks: Sequence[Tensor],
    stacks: Sequence[Tensor],
    steps: Sequence[float],
    tokens: Sequence[Tensor],
    chunks: Sequence[ChunkSlice],
    embedding: Tensor,
    bias: Tensor,
    *,
    score: bool,
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Features (1, T, size) and losses (1, T) of each chunk; the weights in `stacks` learn in place.

    Args:
        config: arguments of the layer.
        trained_stacks, stacks: the trained weights, and those of the document: (1, D + 1, F), (1, F + 1, size) and
            (1, 1, 2 size).
        steps: the six step sizes.
        tokens, chunks, embedding, bias, score: as for `held.read`.
    """
    x, labels, shares = (y[0] for y in tokens)
    W1, W2, norm = (w[0] for w in stacks)
    dense1, bias1, dense2, bias2 = W1[:-1], W1[-1], W2[:-1], W2[-1]
    scale, shift = norm[0].chunk(2)
    norm_shape, labels, E = (config.size,), labels[:, None], embedding.mT
    # [x, 1] transposed and times the steps, (D + 1, L); the 2 belongs to the slope 2 r of r^2
    keys = torch.nn.functional.pad(x * (2.0 * steps[0]), (0, 1), value=2.0 * steps[1]).mT
    label_rows = embedding.index_select(0, labels[:, 0])
    ones = x.new_ones(len(x))
    shares_are_one = bool((shares == 1).all())
    # the share of what was learned that decay leaves after a chunk
    remaining = 1.0 if config.decay is None else config.decay ** (config.refresh or 1)
    layer_norm, layer_norm_backward = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward
    outputs: list[tuple[Tensor | None, Tensor | None]] = []
    largest = (config.refresh or 1) * max(dense1.numel(), dense2.numel(), embedding.numel())
    with _threads(1 if largest <= ONE_THREAD else torch.get_num_threads()):
        for chunk in chunks:
            part = slice(chunk.token_start, chunk.token_stop)
            r = torch.addmm(bias1, x[part], dense1).relu_()
            a = r * r
            y = torch.addmm(bias2, a, dense2)
            n, mean, rstd = layer_norm(y, norm_shape, scale, shift, config.eps)
            loss = None
            if chunk.close or score:
                log_p = torch.log_softmax(torch.addmm(bias, n, E), 1)
                loss = log_p.gather(1, labels[part]).neg_().mT
            outputs.append((n[None], loss))
            if not chunk.close:
                continue
            dn = torch.addmm(label_rows[part], log_p.exp_(), embedding, beta=-1)
            if not shares_are_one:
                dn *= shares[part, None]
            gradients = layer_norm_backward(dn, y, norm_shape, mean, rstd, scale, shift, (True, True, True))
            dy, dscale, dshift = gradients
            half_dh = torch.mm(dy, dense2.mT).mul_(r)  # half of the gradient before the squared ReLU
            if remaining != 1.0:
                for w, trained in zip(stacks, trained_stacks, strict=True):
                    w.lerp_(trained, 1.0 - remaining)
            before = [w.clone() for w in stacks] if watching.steps else []
            W1.addmm_(keys[:, part], half_dh, alpha=-1)
            dense2.addmm_(a.mT, dy, alpha=-steps[2])
            bias2.addmv_(dy.mT, ones[: len(dy)], alpha=-steps[3])
            scale.sub_(dscale, alpha=steps[4])
            shift.sub_(dshift, alpha=steps[5])
            if before:
                squares = [(w - b).square().sum() for w, b in zip(stacks, before, strict=True)]
                watching.steps[-1].append(torch.stack(squares).sum().sqrt()[None])
    return outputs


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """PyTorch computes on `count` threads inside."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
