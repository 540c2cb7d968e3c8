"""Reading with a held Fast Weight Layer on a GPU, 16-bit products: the update of the weights beside the next chunk.

A chunk needs all that the chunk before has taught, but not in the weights: with x0 the inputs of the chunk before and g
the gradients at its hidden layer, the first layer answers

    x (W - e x0^T g)  =  x W - e (x x0^T) g

where x W and x x0^T are ready early. So what a chunk waits for is a product with 64 tokens, and the weights of every
sequence, megabytes each, are brought up to date on a second stream while the logits of the next chunk are computed. The
second layer's are brought up to date beside the backward pass of the first.

Letters: N sequences, C tokens of a chunk, D inputs, F hidden, size outputs, V words.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.side_stream import SideStream

LOGITS = 2**26  # that are held at once
LONGEST = 128  # tokens of a chunk, which one program takes


def serves(config: FWLConfig, stacks: Sequence[Tensor], x: Tensor, words: Tensor) -> bool:
    """Whether `read` is made for these: 16-bit products on a GPU, weights in float32, no clip and no decay."""
    plain = config.clip is None and config.decay is None and (config.refresh or LONGEST + 1) <= LONGEST
    dtypes = stacks[0].dtype == torch.float32 and words.dtype.itemsize == 2
    return plain and dtypes and len(x) * (config.refresh or 0) * len(words) <= LOGITS and cross_entropy.on_gpu(x)


def read(
    config: FWLConfig,
    stacks: Sequence[Tensor],
    steps: Tensor,
    tokens: Sequence[Tensor],
    closed: int,
    words: Tensor,
    c: Tensor,
) -> Tensor:
    """Losses (N, L) of L tokens of each sequence; the weights in `stacks` learn from the first `closed` chunks.

    Args:
        config: of the layer.
        stacks: weights of each sequence: (N, D + 1, F), (N, F + 1, size) and (N, 1, 2 size), in float32.
        steps: (6,) in float32.
        tokens: x (N, L, D), labels and shares (N, L).
        closed: chunks that are learned from, all or all but the last one, which may be shorter.
        words, c: (V, size) and (V,), the output embedding in the dtype of the products.
    """
    from fastweights.torch.kernels import held as kernels

    W1, W2, norm = stacks
    C, size, dtype = config.refresh or 1, config.size, words.dtype
    x, labels, shares = filled(tokens, C)
    x, labels, shares = x.to(dtype).contiguous(), labels.contiguous(), shares.float().contiguous()
    N, L, _ = x.shape
    F, K = W1.shape[2], L // C
    chunks = x.unflatten(1, (K, C))
    flat = x.view(N * K, C, -1)
    grams = torch.bmm(flat[1:], flat[:-1].mT)  # of each chunk with the one before it, those of other sequences too
    low1, low2 = W1[:, :-1].to(dtype).contiguous(), [W2[:, :-1].to(dtype).contiguous(), x.new_empty(N, F, size)]
    # What the second stream reads or writes while the next chunk is under way is there twice.
    early, r, a, half = ([x.new_empty(N, C, F) for _ in range(2)] for _ in range(4))
    xhat, n, dn, dy = (x.new_empty(N, C, size) for _ in range(4))
    rstd, losses = shares.new_empty(N * C), shares.new_empty(N, L)
    z = x.new_empty(N * C, len(words))
    for m in range(min(2, K)):
        torch.bmm(chunks[:, m], low1, out=early[m])
    beside = SideStream(x)
    for m in range(K):
        i, part = m % 2, slice(m * C, (m + 1) * C)
        beside.join("first", m)
        before = (grams[m - 1 :: K], r[1 - i], half[1 - i]) if m else None
        kernels.hidden(early[i], W1, before, r[i], a[i], steps)
        beside.join("second", m)
        torch.bmm(a[i], low2[i], out=xhat)
        kernels.normalise(xhat, W2, norm, n, rstd, config.eps)
        torch.addmm(c, n.flatten(0, 1), words.mT, out=z)
        kernels.softmax(z, n, words, c, labels[:, part], losses[:, part])
        if m == closed:
            break
        torch.mm(z, words, out=dn.view(N * C, size))
        kernels.normalise_backward(dn, shares[:, part], xhat, norm, rstd, dy)
        with beside.fork("second", m + 1):
            kernels.learn_second(W2, low2[1 - i], norm, a[i], dy, xhat, dn, steps)
        torch.bmm(dy, low2[i].mT, out=half[i])
        with beside.fork("first", m + 2):
            kernels.learn_first(W1, low1, chunks[:, m], half[i], r[i], steps, bias=m + 1 == K)
            if m + 2 < K:
                torch.bmm(chunks[:, m + 2], low1, out=early[i])
    beside.join_all()
    return losses[:, : tokens[0].shape[1]]


def filled(tokens: Sequence[Tensor], C: int) -> list[Tensor]:
    """Tokens (N, L, ...) filled up with zeros to whole chunks of C."""
    missing = -tokens[0].shape[1] % C
    if not missing:
        return list(tokens)
    return [torch.cat([y, y.new_zeros(len(y), missing, *y.shape[2:])], 1) for y in tokens]
