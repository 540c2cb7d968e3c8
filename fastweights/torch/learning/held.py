"""Reading with a held Fast Weight Layer where nothing is to be differentiated: the chunk step by hand, in place.

The mathematics is that of fastweights/refresh.py with within="held", in some 25 operations per chunk: the fast weights
W + S of every sequence are kept as they are, and each chunk that is learned changes them in place. Nothing here waits
for a device, and shapes depend on the layout alone, so that a CUDA graph can capture it. Autograd could not follow
changes in place: with gradients, learning/refresh.py goes through fastweights/refresh.py itself.

`read` reads chunks, `losses` does so as CUDA graphs where losses alone are wanted, `step` reads one token of a stream.
Two special cases have faster forms: one document on a CPU (held_single.py), 16-bit products on a GPU
(held_overlapped.py).

N sequences (rows), L tokens, C = `refresh` tokens of a chunk, D inputs, F hidden, size outputs, V words. A stack is
what learns in one layer, as one tensor: (N, D + 1, F) and (N, F + 1, size) with the biases as last rows, and (N, 1,
2 size) with scale and shift of the norm. Arguments that several functions take:

    config             an `FWLConfig`
    params             the layer's trained parameters by name
    learned            S, the first three fields of a RefreshState
    tokens             x (N, L, D), labels (N, L) and shares (N, L): a token's weight over the normaliser
    chunks             `ChunkSlice`s in the order in which they are read; full ones (`close`) are learned from
    embedding, bias    (V, size) and (V,), the output embedding as `cross_entropy.embedding_rows`
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.refresh import RefreshState
from fastweights.torch import cross_entropy, graphs, private, watching
from fastweights.torch.dtypes import accumulation_dtype, wide
from fastweights.torch.learning import held_overlapped, held_single
from fastweights.torch.learning.layout import ChunkSlice
from fastweights.torch.learning.steps import used_steps

CHUNKS_PER_GRAPH = 16  # learned chunks of one CUDA graph
MAX_LOGITS = 2**24  # held at once on a CPU; more are computed in blocks of the vocabulary


class FastWeights(NamedTuple):
    """The six tensors that learn, one of each per sequence: matrices (N, in, out), vectors (N, 1, out)."""

    dense1: Tensor
    bias1: Tensor
    dense2: Tensor
    bias2: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def views(cls, stacks: Sequence[Tensor]) -> "FastWeights":
        """Views of the three stacks: what is written into them is written there."""
        dense1, dense2, norm = stacks
        scale, shift = norm.chunk(2, 2)
        return cls(dense1[:, :-1], dense1[:, -1:], dense2[:, :-1], dense2[:, -1:], scale, shift)

    def of_rows(self, start: int, stop: int) -> "FastWeights":
        """Views of those of sequences start to stop."""
        return FastWeights(*(w[start:stop] for w in self))


class Activations(NamedTuple):
    """What the slow pass of a chunk at the fast weights of each sequence computed; widths F, then size.

    Attributes:
        r, a: (N, T, F), relu(h) of the first layer's output h, and a = r^2.
        y: (N, T, size), output of the second layer.
        xhat, mean, rstd: the layer norm of y without scale and shift, and its statistics.
        n: (N, T, size), the features.
    """

    r: Tensor
    a: Tensor
    y: Tensor
    xhat: Tensor
    mean: Tensor
    rstd: Tensor
    n: Tensor


def read(
    config: FWLConfig,
    params: dict[str, Tensor],
    learned: Sequence[Tensor],
    tokens: Sequence[Tensor],
    chunks: Sequence[ChunkSlice],
    embedding: Tensor,
    bias: Tensor,
    *,
    score: bool,
    features: bool = True,
) -> tuple[list[tuple[Tensor | None, Tensor | None]], Sequence[Tensor]]:
    """Read chunks.

    Args:
        config, params, learned, tokens, chunks, embedding, bias: as at the top of this file.
        score: whether chunks that are not full get losses too.
        features: False promises that losses alone are wanted and that every chunk has all rows; a single pair of (None,
            losses of all chunks) may then be returned.

    Returns:
        Features and losses of each chunk, and what each row has learned before its last chunk.
    """
    x = tokens[0]
    assert config.refresh is not None
    trained_stacks = _trained_stacks(params)
    stacks = [w + S[:, 0] for w, S in zip(trained_stacks, learned, strict=True)]
    if held_single.can_read(config, stacks, tokens, embedding):
        steps = used_steps(config, params["steps"]).tolist()
        outputs = held_single.read(config, trained_stacks, stacks, steps, tokens, chunks, embedding, bias, score=score)
        return outputs, _differences(stacks, trained_stacks)
    with torch.autocast(x.device.type, enabled=False):
        if not features and not watching.steps and held_overlapped.can_read(config, stacks, x, embedding):
            wide_steps = used_steps(config, params["steps"]).float()
            closed = sum(part.close for part in chunks)
            losses = held_overlapped.read(config, stacks, wide_steps, tokens, closed, embedding, bias)
            return [(None, losses)], _differences(stacks, trained_stacks)
        outputs = _read_general(config, params, trained_stacks, stacks, tokens, chunks, embedding, bias, score)
    return outputs, _differences(stacks, trained_stacks)


def _read_general(config, params, trained_stacks, stacks, tokens, chunks, embedding, bias, score):
    """Features and losses of each chunk; the stacks change in place.  trained_stacks: those of W, (1, ...)."""
    x, labels, shares = tokens
    C, dtype = config.refresh, embedding.dtype
    trained, weights = FastWeights.views(trained_stacks), FastWeights.views(stacks)
    x, shares = x.to(dtype), shares.to(dtype)[..., None]
    steps = used_steps(config, params["steps"]).to(dtype)
    keys = x * (2.0 * steps[0])
    doubled = torch.stack([steps[0], 2.0 * steps[1], *steps[2:]])  # the slope 2 relu(h) of relu(h)^2: its 2 is here
    token_steps = doubled[:, None, None, None].expand(-1, len(x), 1, C)  # (6, N, 1, C): the steps of every token
    low_weights = weights
    if weights.dense1.dtype != dtype:  # copies in the dtype of the products
        low_weights = FastWeights(*(torch.empty_like(w, dtype=dtype) for w in weights))
    outputs: list[tuple[Tensor | None, Tensor | None]] = []
    for part in chunks:
        W, low_W = weights.of_rows(*part[:2]), low_weights.of_rows(*part[:2])
        if low_W.dense1.dtype != W.dense1.dtype:
            private.copy_all(list(low_W), list(W))
        activations = _forward(config, low_W, x[part.slices])
        n, loss = activations.n, None
        if part.close:
            loss, dn = _score(n, embedding, bias, labels[part.slices])
            gradients = _backward(config, low_W, activations, dn * shares[part.slices])
            if config.decay is not None:
                for w, trained_w in zip(W, trained, strict=True):
                    w.lerp_(trained_w.expand_as(w).to(w.dtype), 1.0 - config.decay**C)
            before = [w.clone() for w in W] if watching.steps else []
            _learn(W, keys[part.slices], activations.a, steps, token_steps[:, : len(n)], *gradients)
            if before:
                squares = [(w - b).square().flatten(1).sum(1) for w, b in zip(W, before, strict=True)]
                watching.steps[-1].append(torch.stack(squares).sum(0).sqrt())
        elif score:
            loss, _ = _score(n, embedding, bias, labels[part.slices], gradient=False)
        outputs.append((n, loss))
    return outputs


def losses(
    config: FWLConfig,
    params: dict[str, Tensor],
    learned: Sequence[Tensor],
    tokens: Sequence[Tensor],
    chunks: Sequence[ChunkSlice],
    embedding: Tensor,
    bias: Tensor,
    read: Callable[..., Any] = read,
) -> tuple[Tensor, Sequence[Tensor]]:
    """The losses (N, L) of all tokens, and what has been learned, where every chunk has all rows.

    On a GPU up to CHUNKS_PER_GRAPH learned chunks at a time are one CUDA graph, the last one together with the chunk
    that is not full. A graph reads the trained weights at their addresses. Tokens are filled up to whole chunks there,
    so that texts of many lengths share few graphs.

    Args:
        config, params, learned, tokens, embedding, bias: as at the top of this file.
        chunks: those that are learned first, then the one that is not full, if there is one.
        read: the function that reads chunks, with the arguments and results of `read`.
    """
    C, parts = config.refresh, []
    assert C is not None
    if not chunks:
        return tokens[2][:, :0], learned
    closed = [part for part in chunks if part.close]
    addresses = tuple(params[name].data_ptr() for name in (*FastWeights._fields, "steps"))
    groups = [closed[i : i + CHUNKS_PER_GRAPH] for i in range(0, len(closed), CHUNKS_PER_GRAPH)] or [[]]
    groups[-1].extend(chunks[len(closed) :])
    for group in groups:
        first, count = group[0].token_start, group[-1].token_stop - group[0].token_start
        shifted = [
            part._replace(token_start=part.token_start - first, token_stop=part.token_stop - first) for part in group
        ]
        group_tokens = [y[:, first : first + count] for y in tokens]
        if embedding.is_cuda:
            group_tokens = held_overlapped.padded_to_chunks(group_tokens, C)
            shifted[-1] = shifted[-1]._replace(token_stop=group_tokens[0].shape[1])

        def read_group(*inputs: Tensor, shifted: Any = shifted) -> tuple[Tensor, ...]:
            learned, tokens, output_embedding = inputs[:3], inputs[3:6], inputs[6:]
            outputs, after = read(
                config, params, learned, tokens, shifted, *output_embedding, score=True, features=False
            )
            return torch.cat([loss for _, loss in outputs if loss is not None], 1), *after

        key = "chunks", config, addresses, tuple(shifted), torch.is_autocast_enabled(embedding.device.type)
        inputs = (*learned, *group_tokens, embedding, bias)
        loss, *learned = read_group(*inputs) if watching.steps else graphs.call(key, read_group, inputs)
        parts.append(loss[:, :count])
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0], learned


def step(
    config: FWLConfig, params: dict[str, Tensor], x: Tensor, state: RefreshState, *, full: bool
) -> tuple[Tensor, RefreshState]:
    """Features (N, size) of one new token of each sequence, and the state after it.

    The place that the new token takes in its chunk is read from the state on the device, so that two CUDA graphs, one
    for either value of `full`, serve a whole stream.

    Args:
        config, params: as at the top of this file.
        x: (N, D), input of the new token.
        state: the RefreshState before it.
        full: whether C tokens wait in every sequence, which are then learned first; else fewer wait in each.
    """
    C = config.refresh
    assert C is not None
    learned: Sequence[Tensor] = state[:3]
    waiting_tokens: Sequence[Tensor] = state[3:6]
    if full:
        embedding, bias = cross_entropy.embedding_rows(params["unembed"], params["unembed_bias"], x.dtype)
        chunk = ChunkSlice(0, len(x), 0, C, True)
        _, learned = read(config, params, learned, waiting_tokens, [chunk], embedding, bias, score=False)
        waiting_tokens = tuple(torch.zeros_like(y) for y in waiting_tokens)
    W = FastWeights(*(params[name] for name in FastWeights._fields))
    S1, S2, S_norm = (y[:, 0] for y in learned)
    one = torch.ones_like(x[:, :1])
    h = torch.addmm(W.bias1, x, W.dense1) + torch.bmm(torch.cat([x, one], 1)[:, None], S1.to(x.dtype))[:, 0]
    a = h.relu_().square_()
    y = torch.addmm(W.bias2, a, W.dense2) + torch.bmm(torch.cat([a, one], 1)[:, None], S2.to(x.dtype))[:, 0]
    scale, shift = S_norm[:, 0].to(x.dtype).chunk(2, 1)
    xhat = torch.nn.functional.layer_norm(y, (config.size,), eps=config.eps)
    n = torch.addcmul(W.shift + shift, xhat, W.scale + scale)
    count = 0 * state.waiting if full else state.waiting
    is_new_place = torch.arange(C, device=x.device) == count[:, None]
    old_x, labels, shares = waiting_tokens
    pending = torch.where(is_new_place[..., None], x[:, None].to(old_x.dtype), old_x)
    return n, RefreshState(learned[0], learned[1], learned[2], pending, labels, shares, count + 1)


def _forward(config, W, x):
    """The `Activations` of tokens x (N, T, D) at the fast weights W of each sequence."""
    r = torch.baddbmm(W.bias1, x, W.dense1).relu_()
    a = r * r
    y = torch.baddbmm(W.bias2, a, W.dense2)
    xhat, mean, rstd = torch.native_layer_norm(y, (config.size,), None, None, config.eps)
    return Activations(r, a, y, xhat, mean, rstd, torch.addcmul(W.shift, xhat, W.scale))


def _backward(config, W, activations, dn):
    """Gradients of each token's loss at four places, from dn (N, T, size), that at its features.

    Returns half of the gradient at h (the slope of relu(h)^2 is 2 relu(h)), that at y, of scale and of shift; each
    token's vector cut to a length of config.clip where that is set.
    """
    _, _, y, xhat, mean, rstd, _ = activations
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward
    dy = layer_norm_backward(dn * W.scale, y, (config.size,), mean, rstd, None, None, (True, False, False))[0]
    half_dh = torch.bmm(dy, W.dense2.mT).mul_(activations.r)
    dscale = dn * xhat
    if config.clip is not None:
        half_dh = _clipped(half_dh, config.clip / 2)
        dy, dscale, dn = (_clipped(g, config.clip) for g in (dy, dscale, dn))
    return half_dh, dy, dscale, dn


def _learn(W, keys, a, steps, token_steps, half_dh, dy, dscale, dn):
    """Subtract steps times the summed gradients of a chunk from the fast weights W, in place.

    Args:
        W: `FastWeights` of the sequences.
        keys: (N, C, D), x times twice its step.
        a: (N, C, F), input of the second layer.
        steps: (6,).
        token_steps: (6, N, 1, C), the steps, that of bias1 doubled.
        half_dh, dy, dscale, dn: what `_backward` returned.
    """
    _subtract_product(W.dense1, keys.mT, half_dh)
    _subtract_product(W.bias1, token_steps[1], half_dh)
    _subtract_product(W.dense2, a.mT, dy * steps[2])
    _subtract_product(W.bias2, token_steps[3], dy)
    _subtract_product(W.scale, token_steps[4], dscale)
    _subtract_product(W.shift, token_steps[5], dn)


def _subtract_product(w, keys, gradients):
    """w -= keys gradients, batches of matrices; w may have a wider dtype than they have."""
    if w.dtype == keys.dtype:
        w.baddbmm_(keys, gradients, alpha=-1)
    else:
        w -= torch.bmm(keys, gradients)


def _score(n, embedding, bias, labels, *, gradient=True):
    """The loss (N, T) of each label, in float32 or wider, and its gradient at the features n (N, T, size), or None."""
    flat_n, flat_labels = n.flatten(0, 1), labels.flatten()
    if n.is_cuda or len(flat_n) * len(embedding) > MAX_LOGITS:
        ones = torch.ones(flat_labels.shape, dtype=accumulation_dtype(n), device=n.device)
        log_sum, dn, _, _ = cross_entropy.score(
            flat_n, embedding, bias, flat_labels, ones, want_dn=gradient, want_dembedding=False
        )
        loss = cross_entropy.losses(flat_n, embedding, bias, flat_labels, log_sum)
        return loss.view(labels.shape), None if dn is None else dn.view(n.shape)
    logits = torch.addmm(bias, flat_n, embedding.mT)
    log_p = torch.log_softmax(wide(logits), 1)
    loss = log_p.gather(1, flat_labels[:, None]).neg_()
    if not gradient:
        return loss.view(labels.shape), None
    residual = log_p.exp_()
    residual.scatter_add_(1, flat_labels[:, None], torch.full_like(loss, -1.0))
    return loss.view(labels.shape), torch.mm(residual.to(embedding.dtype), embedding).view(n.shape)


def _trained_stacks(params):
    """The trained parameters as stacks: (1, D + 1, F), (1, F + 1, size) and (1, 1, 2 size)."""
    pairs = (("dense1", "bias1", 0), ("dense2", "bias2", 0), ("scale", "shift", 1))
    return [torch.cat([torch.atleast_2d(params[a]), torch.atleast_2d(params[b])], dim)[None] for a, b, dim in pairs]


def _differences(stacks, trained_stacks):
    """What was learned, as a state has it: the stacks as they are now less the trained ones."""
    return tuple((w - trained)[:, None] for w, trained in zip(stacks, trained_stacks, strict=True))


def _clipped(g, limit):
    """Gradients g with each token's vector cut to the length `limit`."""
    length = g.square().sum(-1, keepdim=True).add_(1e-24).sqrt_()
    return g * (limit / length).clamp_(max=1.0)
