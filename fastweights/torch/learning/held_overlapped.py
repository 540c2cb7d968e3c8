"""Reading with a held Fast Weight Layer on a GPU with 16-bit products: weights are updated during the next chunk.

A chunk needs what the chunk before has taught, but not inside the weights: with x0 the inputs of the chunk before and
g the gradients at its hidden layer, the first layer answers

    x (W - e x0^T g)  =  x W - e (x x0^T) g

where x W and x x0^T can be computed before g is known. So a chunk waits only for a product with the C tokens of the
chunk before. The weights of every sequence, megabytes each, are brought up to date on a side stream: those of the first
layer while the logits of the next chunk are computed, those of the second during the backward pass of the first.

The kernels between the products are kernels/held.py. N sequences, L tokens, C = `refresh` tokens of a chunk, D inputs,
F hidden, size outputs, V words. Stacks are those of held.py; tokens are x (N, L, D), labels and shares (N, L).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.side_stream import SideStream

MAX_LOGITS = 2**26  # held at once
MAX_CHUNK = 128  # tokens of a chunk, all of which one program takes


def can_read(config: FWLConfig, stacks: Sequence[Tensor], x: Tensor, embedding: Tensor) -> bool:
    """Whether `read` applies: 16-bit products on a GPU, weights in float32, no clipping, no decay, chunks not too long.

    Arguments are those of `read`.
    """
    chunk_fits = (config.refresh or MAX_CHUNK + 1) <= MAX_CHUNK
    plain_update = config.clip is None and config.decay is None
    dtypes_fit = stacks[0].dtype == torch.float32 and embedding.dtype.itemsize == 2
    logits_fit = len(x) * (config.refresh or 0) * len(embedding) <= MAX_LOGITS
    return chunk_fits and plain_update and dtypes_fit and logits_fit and cross_entropy.on_gpu(x)


def read(
    config: FWLConfig,
    stacks: Sequence[Tensor],
    steps: Tensor,
    tokens: Sequence[Tensor],
    closed: int,
    embedding: Tensor,
    bias: Tensor,
) -> Tensor:
    """Losses (N, L) of L tokens of each sequence; the weights in `stacks` learn from the first `closed` chunks.

    Args:
        config: arguments of the layer.
        stacks: weights of each sequence: (N, D + 1, F), (N, F + 1, size) and (N, 1, 2 size), in float32.
        steps: (6,), the step sizes, in float32.
        tokens: x, labels and shares.
        closed: number of chunks that are learned from: all, or all but the last one, which may be shorter.
        embedding, bias: (V, size) and (V,), the output embedding in the dtype of the products.
    """
    from fastweights.torch.kernels import held as kernels

    W1, W2, norm = stacks
    C, size, dtype = config.refresh or 1, config.size, embedding.dtype
    x, labels, shares = padded_to_chunks(tokens, C)
    x, labels, shares = x.to(dtype).contiguous(), labels.contiguous(), shares.float().contiguous()
    N, L, _ = x.shape
    F, K = W1.shape[2], L // C  # K chunks
    chunks = x.unflatten(1, (K, C))
    flat_chunks = x.view(N * K, C, -1)
    # x x0^T of each chunk with the one before it; where a sequence begins, with the last one of another sequence
    grams = torch.bmm(flat_chunks[1:], flat_chunks[:-1].mT)
    low1, low2 = W1[:, :-1].to(dtype).contiguous(), [W2[:, :-1].to(dtype).contiguous(), x.new_empty(N, F, size)]
    # What the side stream reads or writes while the next chunk is computed exists twice, used in turn.
    early_h, r, a, half = ([x.new_empty(N, C, F) for _ in range(2)] for _ in range(4))
    xhat, n, dn, dy = (x.new_empty(N, C, size) for _ in range(4))
    rstd, losses = shares.new_empty(N * C), shares.new_empty(N, L)
    logits = x.new_empty(N * C, len(embedding))
    for m in range(min(2, K)):
        torch.bmm(chunks[:, m], low1, out=early_h[m])
    side_stream = SideStream(x)
    for m in range(K):
        i, part = m % 2, slice(m * C, (m + 1) * C)
        # early_h[i] is x W with what all chunks up to m - 2 have taught; what chunk m - 1 taught is added here.
        side_stream.join("first", m)
        last_update = (grams[m - 1 :: K], r[1 - i], half[1 - i]) if m else None
        kernels.hidden(early_h[i], W1, last_update, r[i], a[i], steps)
        side_stream.join("second", m)
        torch.bmm(a[i], low2[i], out=xhat)
        kernels.normalise(xhat, W2, norm, n, rstd, config.eps)
        torch.addmm(bias, n.flatten(0, 1), embedding.mT, out=logits)
        kernels.softmax(logits, n, embedding, bias, labels[:, part], losses[:, part])
        if m == closed:
            break
        torch.mm(logits, embedding, out=dn.view(N * C, size))
        kernels.normalise_backward(dn, shares[:, part], xhat, norm, rstd, dy)
        with side_stream.fork("second", m + 1):
            kernels.learn_second(W2, low2[1 - i], norm, a[i], dy, xhat, dn, steps)
        torch.bmm(dy, low2[i].mT, out=half[i])
        with side_stream.fork("first", m + 2):
            kernels.learn_first(W1, low1, chunks[:, m], half[i], r[i], steps, bias=m + 1 == K)
            if m + 2 < K:
                torch.bmm(chunks[:, m + 2], low1, out=early_h[i])
    side_stream.join_all()
    return losses[:, : tokens[0].shape[1]]


def padded_to_chunks(tokens: Sequence[Tensor], C: int) -> list[Tensor]:
    """Tokens (N, L, ...) filled up with zeros at their ends to whole chunks of C."""
    missing = -tokens[0].shape[1] % C
    if not missing:
        return list(tokens)
    return [torch.cat([y, y.new_zeros(len(y), missing, *y.shape[2:])], 1) for y in tokens]
