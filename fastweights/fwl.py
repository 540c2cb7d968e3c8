"""Fast Weight Layers (Clark et al. 2022), once, for every framework.

A block of dense, squared ReLU, dense and layer norm sits between a causal body and the output embedding. A slow pass
scores every token and a hand-written backward gives each token's gradient at each layer; the fast pass then answers
token t with parameters minus step sizes times the summed gradients of the tokens before t, all t at once:

    dense    x~_t W - sum_{s<t} (x~_t . x_s) step g_s      a `fast_weight` memory: q = x~, k = x, v = -step g
    norm     scale - sum_{s<t} step g_s xhat_s, shift - sum_{s<t} step g_s      the same with the constant 1 as q and k

x is the slow input of a layer, x~ its fast input, g the slow gradient at its output. A bias is one more input that is
always 1. Shapes: B batch, T tokens, D width of the body, F hidden width, size, V vocabulary.
"""

import math
from typing import Any, NamedTuple

from fastweights.fwl_config import STEPS, FWLOutput, FWLState


class Slow(NamedTuple):
    """A slow pass: the input and output of each layer that its backward and the fast pass need."""

    h1: Any
    a: Any
    xhat: Any
    std: Any
    n: Any


def slow_pass(config, ops, p, x):
    h1 = ops.matmul(x, p["dense1"]) + p["bias1"]
    r = ops.nn.relu(h1)
    a = r * r
    xhat, std = _standardise(config, ops, ops.matmul(a, p["dense2"]) + p["bias2"])
    return Slow(h1, a, xhat, std, xhat * p["scale"] + p["shift"])


def slow_backward(config, ops, p, slow, dn):
    """Gradients at the outputs of both dense layers and of scale and shift, per token, from that of n (B, T, size).

    Args:
        config: arguments of the block.
        ops: what the framework brings.
        p: parameters by name.
        slow: what the slow pass returned.
        dn: (B, T, size), the gradient at its features.
    """
    dxhat = dn * p["scale"]
    mean = lambda y: ops.xp.sum(y, -1)[..., None] / config.size  # noqa: E731
    g2 = (dxhat - mean(dxhat) - slow.xhat * mean(dxhat * slow.xhat)) / slow.std
    g1 = ops.matmul(g2, ops.xp.swapaxes(p["dense2"], -1, -2)) * 2.0 * ops.nn.relu(slow.h1)
    return g1, g2, dn * slow.xhat, dn


def write(config, ops, p, x, slow, dn):
    """Keys and values of the three memories for the gradient dn of the slow features: ((k, v), (k, v), (k, v)).

    Args:
        config: arguments of the block.
        ops: what the framework brings.
        p: parameters by name.
        x: (B, T, D), inputs of the block.
        slow: what the slow pass returned.
        dn: (B, T, size), the gradient at its features.
    """
    xp = ops.xp
    gradients = slow_backward(config, ops, p, slow, dn)
    keys: Any = (x, slow.a)
    if config.first_order:
        gradients, keys = [ops.stop(g) for g in gradients], [ops.stop(k) for k in keys]
    if config.clip is not None:
        gradients = [_clipped(xp, g, config.clip) for g in gradients]
    g1, g2, gscale, gshift = gradients
    steps = xp.exp(p["steps"]) if config.log_steps else p["steps"]
    step = dict(zip(STEPS, [steps[i] for i in range(len(STEPS))], strict=True))
    if config.shared_norm_step:
        step["shift"] = step["scale"]
    k1 = _with_one(ops, keys[0] * step["dense1"], step["bias1"] if config.fast_bias else 0.0)
    k2 = _with_one(ops, keys[1] * step["dense2"], step["bias2"] if config.fast_bias else 0.0)
    one = xp.ones_like(x[..., :1])
    norm = xp.concatenate([gscale * step["scale"], gshift * step["shift"]], -1)
    return (k1, -g1), (k2, -g2), (one, -norm)


def read(config, ops, p, x, slow, memory):
    """The fast features (B, T, size).  memory(i, q) is what memory i of `write` answers to q, before each token."""
    h1 = slow.h1 + memory(0, _with_one(ops, x, 1.0))
    r = ops.nn.relu(h1)
    a = r * r
    h2 = ops.matmul(a, p["dense2"]) + p["bias2"] + memory(1, _with_one(ops, a, 1.0))
    xhat, _ = _standardise(config, ops, h2)
    change = memory(2, ops.xp.ones_like(x[..., :1]))
    scale, shift = p["scale"] + change[..., : config.size], p["shift"] + change[..., config.size :]
    return xhat * scale + shift


def forward(config, ops, p, x, labels, weights, state=None, *, previous_label=None, cu_seqlens=None, logits=True):
    """FWLOutput for x (B, T, D), labels (B, T) and weights (B, T); without logits, only losses.

    Args:
        config: arguments of the block.
        ops: what the framework brings.
        p: parameters by name.
        x: (B, T, D), output of a causal body.
        labels, weights: (B, T).
        state: of an earlier call, or None.
        previous_label: (B,), label of the token that waits in the state, or None.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
        logits: whether they are wanted.
    """
    if previous_label is not None:
        state = learn_waiting(config, ops, p, previous_label, state)
    if x.shape[1] == 0:
        return nothing(config, ops, x, state, logits)
    n, words, slow_loss, state = _features(config, ops, p, x, labels, weights, state, cu_seqlens)
    fast = ops.matmul(n, p["unembed"]) + p["unembed_bias"] if logits else None
    loss = ops.cross_entropy(fast, labels) if logits else ops.loss(n, *words, labels)
    return FWLOutput(fast, loss, slow_loss, state)


def objective(config, ops, p, x, labels, weights, cu_seqlens=None):
    """The weighted mean of the fast losses over tokens, to be trained: its gradients are made with it.

    Args:
        config, ops, p: arguments of the block, what the framework brings, and parameters by name.
        x: (B, T, D), output of a causal body.
        labels, weights: (B, T).
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
    """
    total = _at_least(ops.xp, ops.xp.sum(weights), 1e-8)
    if x.shape[1] == 0:
        return ops.xp.sum(x[:, :, 0] * ops.cast(weights, x)) / total
    n, words, _, _ = _features(config, ops, p, x, labels, weights, None, cu_seqlens)
    return ops.summed(n, *words, labels, weights) / total


def _features(config, ops, p, x, labels, weights, state, cu_seqlens):
    """(fast features (B, T, size), output embedding and bias for a loss, slow losses (B, T), state after x).

    Args:
        config, ops, p: arguments of the block, what the framework brings, and parameters by name.
        x: (B, T, D), output of a causal body.
        labels, weights: (B, T).
        state: of an earlier call, or None.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
    """
    slow, words = slow_pass(config, ops, p, x), ops.aligned(p["unembed"], p["unembed_bias"])
    slow_loss, dn = ops.head(slow.n, *words, labels)
    share = weights / normalization(config, ops, weights, cu_seqlens)
    written = write(config, ops, p, x, slow, dn * ops.cast(share, dn)[..., None])
    before = (None, None, None) if state is None else state[:3]
    after = [None, None, None]
    pending, waiting, waits = unlearned(ops, x, weights, cu_seqlens)

    def memory(i, q):
        (k, v), how = written[i], dict(writes=weights > 0, ages=1 - waits, cu_seqlens=cu_seqlens)
        answer, after[i] = remember(config, ops, q, k, v, before[i], **how)
        return answer

    n = read(config, ops, p, x, slow, memory)
    return n, words, slow_loss, FWLState(*[*after, pending, waiting])


def nothing(config, ops, x, state, logits):
    """FWLOutput for x (B, 0, D), no tokens: the state stays as it was."""
    loss = x[:, :, 0]
    return FWLOutput(
        ops.xp.broadcast_to(x[..., :1], (x.shape[0], 0, config.vocab_size)) if logits else None, loss, loss, state
    )


def step(config, ops, p, x, label, weight, state):
    """(logits (B, V), state) for one token of each sequence.

    Args:
        config: arguments of the block.
        ops: what the framework brings.
        p: parameters by name.
        x: (B, D), features of one token of each sequence.
        label, weight: (B,), of the token before it.
        state: what the last call returned.
    """
    written, how = waiting(config, ops, p, label, weight, state)
    after = [None, None, None]

    def memory(i, q):
        k, v = written[i]
        answer, after[i] = remember(config, ops, q, k, v, state[i], read="after", **how)
        return answer

    x = x[:, None]
    n = read(config, ops, p, x, slow_pass(config, ops, p, x), memory)
    logits = ops.matmul(n, p["unembed"]) + p["unembed_bias"]
    return logits[:, 0], FWLState(*[*after, x[:, 0], ops.xp.ones_like(state.waiting)])


def learn_waiting(config, ops, p, label, state):
    """The state once the tokens that wait in it have been learned.  label (B,): theirs."""
    written, how = waiting(config, ops, p, label, ops.xp.ones_like(state.waiting), state)
    after = [remember(config, ops, k, k, v, S, **how)[1] for (k, v), S in zip(written, state[:3], strict=True)]
    return FWLState(*[*after, state.pending, ops.xp.zeros_like(state.waiting)])


def waiting(config, ops, p, label, weight, state):
    """What the tokens that wait in the state write, and `writes` and `ages` of `remember`.  label, weight (B,)."""
    old, share = state.pending[:, None], (weight * state.waiting / config.normalizer)[:, None]
    slow = slow_pass(config, ops, p, old)
    _, dn = ops.head(slow.n, p["unembed"], p["unembed_bias"], label[:, None])
    written = write(config, ops, p, old, slow, dn * ops.cast(share, dn)[..., None])
    return written, dict(writes=share > 0, ages=state.waiting[:, None])


def remember(config, ops, q, k, v, state, *, writes, ages, read="before", cu_seqlens=None):
    """One memory: write (k, v) token by token and answer q.

    Args:
        config, ops: arguments of the block, and what the framework brings.
        q, k, v: (B, T, .), what is asked, and the keys and values to write.
        state: the memory before the first token.
        writes, ages: (B, T), whether a token writes, and whether the memory decays with it.
        read: "before" or "after" the write.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
    """
    xp = ops.xp
    rule, beta, log_decay = config.rule if k.shape[-1] > 1 else "sum", None, None
    if rule == "delta":  # the same outer product of a key of length 1, so that a write can replace what it retrieves
        length = xp.sqrt(xp.sum(k * k, -1) + 1e-12)[..., None]
        k, v = k / length, v * length
        beta = ops.wide(ops.cast(writes, q))[..., None]
    if config.decay is not None:
        log_decay = ops.wide(ops.cast(ages, q))[..., None] * math.log(config.decay)
    size = config.chunk_size(q.shape[1] or 1, k.shape[-1], v.shape[-1])
    q, k, v = (ops.cast(x, q)[:, :, None, :] for x in (q, k, v))
    o, state = ops.layer_memory(
        q,
        k,
        v,
        beta=beta,
        log_decay=log_decay,
        rule=rule,
        read=read,
        state=state,
        cu_seqlens=cu_seqlens,
        chunk_size=size,
    )
    return o[:, :, 0], state


def unlearned(ops, x, weights, cu_seqlens):
    """The last token of each sequence, if its weight is 0 because its label is not known yet: it may be learned later.

    Returns it (N, D), whether there is one (N,), and the same for every token (B, T): such a token has not aged the
    memory either.
    """
    xp = ops.xp
    t = ops.arange(weights.shape[1], weights)
    if cu_seqlens is None:
        waits = ops.cast((t == t[-1:]) & (weights == 0), weights)
        return x[:, -1], waits[:, -1], waits
    cu = ops.cast(cu_seqlens, t)
    ends = xp.where(cu[1:] > cu[:-1], cu[1:] - 1, -1)  # an empty sequence has no last token
    hit = ops.cast(ends[:, None] == t[None, :], weights)  # (N, T)
    waits = xp.sum(hit, 0)[None, :] * ops.cast(weights == 0, weights)
    return ops.cast(hit, x) @ x[0], xp.sum(hit * waits, -1), waits


def normalization(config, ops, weights, cu_seqlens):
    """What the summed losses are divided by: broadcasts with weights (B, T)."""
    xp = ops.xp
    if config.normalizer == "batch":
        return _at_least(xp, xp.sum(weights), 1e-8)
    if config.normalizer == "sequence" and cu_seqlens is None:
        return _at_least(xp, xp.sum(weights, -1), 1e-8)[..., None]
    if config.normalizer == "sequence":
        t = ops.arange(weights.shape[1], weights)
        inside = (t[None, :] >= cu_seqlens[:-1, None]) & (t[None, :] < cu_seqlens[1:, None])  # (N, T)
        inside = ops.cast(inside, weights)
        totals = xp.sum(inside * weights, -1)
        return _at_least(xp, xp.sum(inside * totals[:, None], 0), 1e-8)[None, :]
    return config.normalizer


def plain_head(ops, n, unembed, bias, labels):
    """(loss, its gradient at n) per token, with the whole vocabulary at once.

    Args:
        ops: what the framework brings.
        n: (B, T, size), features.
        unembed, bias: output embedding.
        labels: (B, T), or one-hot.
    """
    xp = ops.xp
    logits = ops.wide(n @ unembed + bias)
    logits = logits - xp.amax(logits, -1)[..., None]
    total = xp.sum(xp.exp(logits), -1)
    hot = ops.cast(labels[..., None] == ops.arange(unembed.shape[-1], labels), logits)
    loss = xp.log(total) - xp.sum(hot * logits, -1)
    residual = xp.exp(logits) / total[..., None] - hot
    return loss, ops.cast(residual, n) @ xp.swapaxes(unembed, -1, -2)


def _standardise(config, ops, x):
    mean = ops.xp.sum(x, -1)[..., None] / config.size
    centred = x - mean
    std = ops.xp.sqrt(ops.xp.sum(centred * centred, -1)[..., None] / config.size + config.eps)
    return centred / std, std


def _clipped(xp, g, most):
    length = xp.sqrt(xp.sum(g * g, -1) + 1e-24)[..., None]
    return g * xp.where(length > most, most / length, xp.ones_like(length))


def _with_one(ops, x, one):
    """x and one more input, `one`, for the bias."""
    return ops.xp.concatenate([x, ops.xp.zeros_like(x[..., :1]) + one], -1)


def _at_least(xp, x, least):
    return xp.where(x > least, x, least)
