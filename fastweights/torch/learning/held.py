"""Reading with a held Fast Weight Layer where nothing is to be differentiated: the chunk step by hand, in place.

The mathematics is that of fastweights/refresh.py, in some 25 operations per chunk: the fast weights of every sequence
are kept as they are, W + S, and each closed chunk changes them in place. Nothing here waits for a device, and shapes
depend on the layout alone, so that a CUDA graph can capture it. Autograd could not follow changes in place, so training
goes through refresh.py itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.refresh import RefreshState
from fastweights.torch import cross_entropy, graphs, private, watching
from fastweights.torch.dtypes import accumulation_dtype, wide
from fastweights.torch.learning import held_overlapped as overlapped
from fastweights.torch.learning import held_single as single

GROUP = 16  # chunks of one CUDA graph
DIRECT = 2**24  # logits that are held at once where the vocabulary is not cut into blocks


class Weights(NamedTuple):
    """The six tensors that learn, one of each per sequence: matrices (N, in, out), vectors (N, 1, out)."""

    dense1: Tensor
    bias1: Tensor
    dense2: Tensor
    bias2: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, stacks: Sequence[Tensor]) -> "Weights":
        """Views of both layers with their biases as last rows, and of scale and shift side by side."""
        dense1, dense2, norm = stacks
        scale, shift = norm.chunk(2, 2)
        return cls(dense1[:, :-1], dense1[:, -1:], dense2[:, :-1], dense2[:, -1:], scale, shift)

    def rows(self, a: int, b: int) -> "Weights":
        """Those of sequences a to b, as views: what is written into them is written here."""
        return Weights(*(w[a:b] for w in self))


def read(
    config: FWLConfig,
    p: dict[str, Tensor],
    learned: Sequence[Tensor],
    tokens: Sequence[Tensor],
    calls: Sequence[Any],
    words: Tensor,
    c: Tensor,
    *,
    score: bool,
    features: bool = True,
) -> tuple[list[tuple[Tensor | None, Tensor | None]], Sequence[Tensor]]:
    """The features and losses of each call, and what each row has learned before its last chunk.

    learned: the first three of a RefreshState;  tokens: x (N, L, D), labels and shares (N, L);  words (V, size) and
    c (V,): the output embedding, in the dtype of the products.

    Args:
        config: of the layer.
        p: its parameters by name.
        calls: chunks in order: rows a to b, tokens c to d, and whether the chunk is full (`close`), in which case it is
            learned from.
        score: whether the tokens of a chunk that is not full get losses too.
        features: False where losses alone are wanted, and every call has all rows; one output may then stand for all.
    """
    x, labels, shares = tokens
    C = config.refresh
    assert C is not None
    start = _stacked(p)
    stacks = [w + S[:, 0] for w, S in zip(start, learned, strict=True)]
    if single.serves(config, stacks, tokens, words):
        steps = _steps(config, p["steps"])
        found = single.read(config, start, stacks, steps.tolist(), tokens, calls, words, c, score)
        return found, tuple((w - t)[:, None] for w, t in zip(stacks, start, strict=True))
    outputs: list[tuple[Tensor | None, Tensor | None]] = []
    loss: Tensor | None
    with torch.autocast(x.device.type, enabled=False):
        if not features and not watching.steps and overlapped.serves(config, stacks, x, words):
            closed = sum(call.close for call in calls)
            loss = overlapped.read(config, stacks, _steps(config, p["steps"]).float(), tokens, closed, words, c)
            return [(None, loss)], tuple((w - t)[:, None] for w, t in zip(stacks, start, strict=True))
        trained, weights = Weights.of(start), Weights.of(stacks)
        x, shares = x.to(words.dtype), shares.to(words.dtype)[..., None]
        steps = _steps(config, p["steps"]).to(words.dtype)
        keys = x * (2.0 * steps[0])
        twice = torch.stack([steps[0], 2.0 * steps[1], *steps[2:]])  # the slope of the squared ReLU is in the step
        sums = twice[:, None, None, None].expand(-1, len(x), 1, C)  # a step for each token of a chunk
        low = weights
        if weights.dense1.dtype != words.dtype:  # a copy to compute with
            low = Weights(*(torch.empty_like(w, dtype=words.dtype) for w in weights))
        # One chunk of every sequence that has one: answer, score, and where the chunk is full take the step.
        for call in calls:
            part = slice(call.a, call.b), slice(call.c, call.d)
            W, now = weights.rows(call.a, call.b), low.rows(call.a, call.b)
            if now.dense1.dtype != W.dense1.dtype:
                private.copy_all(list(now), list(W))
            r, a, y, xhat, mean, rstd, n = _forward(config, now, x[part])
            loss = None
            if call.close:
                loss, dn = _score(n, words, c, labels[part])
                gradients = _backward(config, now, r, y, xhat, mean, rstd, dn * shares[part])
                if config.decay is not None:
                    for w, t in zip(W, trained, strict=True):
                        w.lerp_(t.expand_as(w).to(w.dtype), 1.0 - config.decay**C)
                before = [w.clone() for w in W] if watching.steps else []
                _learn(W, keys[part], a, steps, sums[:, : len(a)], *gradients)
                if before:
                    square = [(w - b).square().flatten(1).sum(1) for w, b in zip(W, before, strict=True)]
                    watching.steps[-1].append(torch.stack(square).sum(0).sqrt())
            elif score:
                loss, _ = _score(n, words, c, labels[part], gradient=False)
            outputs.append((n, loss))
    # What was learned is what the weights have become less what they were.
    return outputs, tuple((w - t)[:, None] for w, t in zip(stacks, start, strict=True))


def step(
    config: FWLConfig, p: dict[str, Tensor], x: Tensor, state: RefreshState, *, full: bool
) -> tuple[Tensor, RefreshState]:
    """Features (B, size) of one new token x (B, D) of each sequence, and the state.

    full: whether C tokens wait in every sequence, which are then learned first; else fewer do. Which place the new
    token takes is read from the state on the device, so that two CUDA graphs, one of each kind, make any stream.

    Args:
        config: of the layer.
        p: its parameters by name.
        x: the new token's input.
        state: with the tokens that wait to be learned from.
    """
    C = config.refresh
    assert C is not None
    learned: Sequence[Tensor] = state[:3]
    rest: Sequence[Tensor] = state[3:6]
    if full:
        dtype = x.dtype
        words, c = cross_entropy.embedding_rows(p["unembed"], p["unembed_bias"], dtype)
        whole = Whole(0, len(x), 0, C, True)
        _, learned = read(config, p, learned, rest, [whole], words, c, score=False)
        rest = tuple(torch.zeros_like(y) for y in rest)
    W = Weights(*(p[name] for name in Weights._fields))
    S = [y[:, 0] for y in learned]
    one = torch.ones_like(x[:, :1])
    h = torch.addmm(W.bias1, x, W.dense1) + torch.bmm(torch.cat([x, one], 1)[:, None], S[0].to(x.dtype))[:, 0]
    a = h.relu_().square_()
    y = torch.addmm(W.bias2, a, W.dense2) + torch.bmm(torch.cat([a, one], 1)[:, None], S[1].to(x.dtype))[:, 0]
    scale, shift = S[2][:, 0].to(x.dtype).chunk(2, 1)
    xhat = torch.nn.functional.layer_norm(y, (config.size,), eps=config.eps)
    n = torch.addcmul(W.shift + shift, xhat, W.scale + scale)
    held = 0 * state.waiting if full else state.waiting
    new = torch.arange(C, device=x.device) == held[:, None]
    pending = torch.where(new[..., None], x[:, None].to(rest[0].dtype), rest[0])
    return n, RefreshState(learned[0], learned[1], learned[2], pending, rest[1], rest[2], held + 1)


class Whole(NamedTuple):
    """A chunk that is read by `read`: rows a to b, tokens c to d."""

    a: int
    b: int
    c: int
    d: int
    close: bool


def losses(
    config: FWLConfig,
    p: dict[str, Tensor],
    learned: Sequence[Tensor],
    tokens: Sequence[Tensor],
    calls: Sequence[Any],
    words: Tensor,
    c: Tensor,
    read: Any = read,
) -> tuple[Tensor, Sequence[Tensor]]:
    """`read` where every call has all rows: losses (N, L) of all tokens that are read, and what has been learned.

    On a GPU up to GROUP closed chunks at a time, with what follows the last one, are one CUDA graph, which reads the
    trained weights where they are. Tokens are filled up to whole chunks there: texts of many lengths share few graphs.
    read: another function of the same arguments and results, for another way to read a chunk.

    Args:
        config, p, learned, tokens, words, c: as `read` takes them.
        calls: closed chunks first, then what is left over.
    """
    C, parts = config.refresh, []
    assert C is not None
    if not calls:
        return tokens[2][:, :0], learned
    closed = [call for call in calls if call.close]
    weights = tuple(p[name].data_ptr() for name in (*Weights._fields, "steps"))
    groups = [closed[at : at + GROUP] for at in range(0, len(closed), GROUP)] or [[]]
    groups[-1].extend(calls[len(closed) :])
    for some in groups:
        first, count = some[0].c, some[-1].d - some[0].c
        here = [call._replace(c=call.c - first, d=call.d - first) for call in some]
        part = [y[:, first : first + count] for y in tokens]
        if words.is_cuda:
            part = overlapped.filled(part, C)
            here[-1] = here[-1]._replace(d=part[0].shape[1])

        def group(*given: Tensor, here: Any = here) -> tuple[Tensor, ...]:
            outputs, after = read(config, p, given[:3], given[3:6], here, *given[6:], score=True, features=False)
            return torch.cat([loss for _, loss in outputs if loss is not None], 1), *after

        key = "chunks", config, weights, tuple(here), torch.is_autocast_enabled(words.device.type)
        given = (*learned, *part, words, c)
        loss, *learned = group(*given) if watching.steps else graphs.call(key, group, given)
        parts.append(loss[:, :count])
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0], learned


def _forward(config, W, x):
    """Slow pass of tokens x (N, T, D) at the weights W of each sequence: (r, a, y, xhat, mean, rstd, n).

    r = relu(h) and a = r^2 of the first layer, y the second layer's output, xhat, mean and rstd of its norm, n the
    features.
    """
    r = torch.baddbmm(W.bias1, x, W.dense1).relu_()
    a = r * r
    y = torch.baddbmm(W.bias2, a, W.dense2)
    xhat, mean, rstd = torch.native_layer_norm(y, (config.size,), None, None, config.eps)
    return r, a, y, xhat, mean, rstd, torch.addcmul(W.shift, xhat, W.scale)


def _backward(config, W, r, y, xhat, mean, rstd, dn):
    """Per token: half of the gradient at h, whose square has the slope 2 relu(h); those at y, of scale and of shift.

    Each token's gradient is cut to a length of config.clip at every layer, where that is set.
    """
    layer_norm = torch.ops.aten.native_layer_norm_backward
    dy = layer_norm(dn * W.scale, y, (config.size,), mean, rstd, None, None, (True, False, False))[0]
    dh = torch.bmm(dy, W.dense2.mT).mul_(r)
    dscale = dn * xhat
    if config.clip is not None:
        dh = _clipped(dh, config.clip / 2)
        dy, dscale, dn = (_clipped(g, config.clip) for g in (dy, dscale, dn))
    return dh, dy, dscale, dn


def _learn(W, keys, a, steps, sums, dh, dy, dscale, dn):
    """W minus steps times summed gradients, in place.  keys: x times twice its step;  sums (6, N, 1, C): the steps."""
    _subtract(W.dense1, keys.mT, dh)
    _subtract(W.bias1, sums[1], dh)
    _subtract(W.dense2, a.mT, dy * steps[2])
    _subtract(W.bias2, sums[3], dy)
    _subtract(W.scale, sums[4], dscale)
    _subtract(W.shift, sums[5], dn)


def _subtract(w, keys, gradients):
    """w -= keys gradients, where w may be wider than they are."""
    if w.dtype == keys.dtype:
        w.baddbmm_(keys, gradients, alpha=-1)
    else:
        w -= torch.bmm(keys, gradients)


def _score(n, words, c, labels, *, gradient=True):
    """Loss (N, T) of each label, in float32 or wider, and its gradient at n (N, T, size)."""
    flat, y = n.flatten(0, 1), labels.flatten()
    if flat.is_cuda or len(flat) * len(words) > DIRECT:
        ones = torch.ones(y.shape, dtype=accumulation_dtype(n), device=n.device)
        log_sum, dn, _, _ = cross_entropy.score(flat, words, c, y, ones, want_dn=gradient, want_dembedding=False)
        loss = cross_entropy.losses(flat, words, c, y, log_sum)
        return loss.view(labels.shape), None if dn is None else dn.view(n.shape)
    logits = torch.addmm(c, flat, words.mT)
    log_p = torch.log_softmax(wide(logits), 1)
    loss = log_p.gather(1, y[:, None]).neg_()
    if not gradient:
        return loss.view(labels.shape), None
    p = log_p.exp_()
    p.scatter_add_(1, y[:, None], torch.full_like(loss, -1.0))
    return loss.view(labels.shape), torch.mm(p.to(words.dtype), words).view(n.shape)


def _stacked(p):
    """The six tensors that learn, as a state has them: (1, D + 1, F), (1, F + 1, size) and (1, 1, 2 size)."""
    pairs = (("dense1", "bias1", 0), ("dense2", "bias2", 0), ("scale", "shift", 1))
    return [torch.cat([torch.atleast_2d(p[a]), torch.atleast_2d(p[b])], dim)[None] for a, b, dim in pairs]


def _steps(config, steps):
    """The six steps as they are used: out of their logarithms, 0 for biases that do not learn, one for both of the
    norm.
    """
    steps = steps.exp() if config.log_steps else steps
    keep = torch.ones_like(steps)
    if not config.fast_bias:
        keep[1] = keep[3] = 0
    steps = steps * keep
    return torch.cat([steps[:5], steps[4:5]]) if config.shared_norm_step else steps


def _clipped(g, most):
    """g with every token's vector at most `most` long."""
    length = g.square().sum(-1, keepdim=True).add_(1e-24).sqrt_()
    return g * (most / length).clamp_(max=1.0)
