"""The published Fast Weight Layer (Clark et al. 2022), written once for every framework.

`FWLBlock` of each framework checks its arguments and calls `forward` for whole sequences, `step` for one token of a
stream, or `objective` for training. (PyTorch trains most published layers by torch/learning/published_loss.py instead,
the same mathematics by hand.) The refreshed layer of refresh.py is made of the same passes.

The block is dense, squared ReLU, dense, layer norm; it sits between a causal body, whose output is x, and the output
embedding:

    h1 = x dense1 + bias1     a = relu(h1)^2     h2 = a dense2 + bias2     xhat = (h2 - mean h2) / std h2
    n = xhat scale + shift    logits = n unembed + unembed_bias

The slow pass computes all of this with the trained parameters, and a hand-written backward pass gives the gradient g
of each token's loss at the output of each layer. The fast pass then answers token t with parameters minus step sizes
times the summed gradients of the tokens before t, for all t at once:

    dense    x~_t W - sum_{s<t} (x~_t . x_s) step g_s      a `fast_weight` memory: q = x~, k = x, v = -step g
    norm     scale - sum_{s<t} step g_s xhat_s, shift - sum_{s<t} step g_s      the same with the constant 1 as q and k

Here x is the slow input of a layer and x~ its fast input. A bias is one more input that is always 1. So the block has
three memories: of the first layer (0), of the second (1) and of the norm (2).

Shapes: B batch, T tokens, D width of the body, F hidden width, size, V vocabulary. Arguments that most functions take:

    config     an `FWLConfig`, the arguments of the block
    ops        the framework's array functions, an `Ops` of framework.py
    params     the parameters by name, with the shapes of `FWLConfig.shapes`
"""

import math
from typing import Any, NamedTuple

from fastweights.fwl_config import STEPS, FWLOutput, FWLState


class SlowPass(NamedTuple):
    """What a slow pass computed, as far as its backward pass and the fast pass need it; letters as at the top.

    Attributes:
        h1: (B, T, F), output of the first layer.
        a: (B, T, F), its squared ReLU, the input of the second layer.
        xhat: (B, T, size), the standardised output of the second layer.
        std: (B, T, 1), its standard deviation.
        n: (B, T, size), the features.
    """

    h1: Any
    a: Any
    xhat: Any
    std: Any
    n: Any


def slow_pass(config, ops, params, x):
    """The `SlowPass` of x (B, T, D)."""
    h1 = ops.matmul(x, params["dense1"]) + params["bias1"]
    r = ops.nn.relu(h1)
    a = r * r
    xhat, std = _standardise(config, ops, ops.matmul(a, params["dense2"]) + params["bias2"])
    return SlowPass(h1, a, xhat, std, xhat * params["scale"] + params["shift"])


def slow_backward(config, ops, params, slow, dn):
    """The gradient of each token's loss at four places, from that at its features.

    Args:
        config, ops, params: as at the top of this file.
        slow: the `SlowPass` of the tokens.
        dn: (B, T, size), the gradient at the features n.

    Returns:
        The gradients at h1 (B, T, F), at h2, of scale and of shift (B, T, size).
    """
    dxhat = dn * params["scale"]
    mean = _row_mean(config, ops, dxhat)
    g2 = (dxhat - mean - slow.xhat * _row_mean(config, ops, dxhat * slow.xhat)) / slow.std
    g1 = ops.matmul(g2, ops.xp.swapaxes(params["dense2"], -1, -2)) * 2.0 * ops.nn.relu(slow.h1)
    return g1, g2, dn * slow.xhat, dn


def write(config, ops, params, x, slow, dn):
    """What each token writes into the three memories: ((k, v), (k, v), (k, v)).

    Args:
        config, ops, params: as at the top of this file.
        x: (B, T, D), inputs of the block.
        slow: their `SlowPass`.
        dn: (B, T, size), the gradient at the features of each token's loss times its share (its weight over the
            normaliser).

    Returns:
        Keys and values: (B, T, D + 1) and (B, T, F) of the first layer, (B, T, F + 1) and (B, T, size) of the second,
        (B, T, 1) and (B, T, 2 size) of the norm. Step sizes are in the keys of the layers and in the norm's values.
    """
    xp = ops.xp
    gradients = slow_backward(config, ops, params, slow, dn)
    keys: Any = (x, slow.a)
    if config.first_order:
        gradients, keys = [ops.stop(g) for g in gradients], [ops.stop(k) for k in keys]
    if config.clip is not None:
        gradients = [_clipped(xp, g, config.clip) for g in gradients]
    g1, g2, gscale, gshift = gradients
    steps = xp.exp(params["steps"]) if config.log_steps else params["steps"]
    step = dict(zip(STEPS, [steps[i] for i in range(len(STEPS))], strict=True))
    if config.shared_norm_step:
        step["shift"] = step["scale"]
    k1 = _with_bias_input(ops, keys[0] * step["dense1"], step["bias1"] if config.fast_bias else 0.0)
    k2 = _with_bias_input(ops, keys[1] * step["dense2"], step["bias2"] if config.fast_bias else 0.0)
    one = xp.ones_like(x[..., :1])
    norm = xp.concatenate([gscale * step["scale"], gshift * step["shift"]], -1)
    return (k1, -g1), (k2, -g2), (one, -norm)


def read(config, ops, params, x, slow, memory):
    """The fast features (B, T, size): the block's output with the parameters as the memories have changed them.

    Args:
        config, ops, params: as at the top of this file.
        x: (B, T, D), inputs of the block.
        slow: their `SlowPass`.
        memory: memory(i, q) is what memory i (0, 1 or 2) answers to the queries q of all tokens.
    """
    h1 = slow.h1 + memory(0, _with_bias_input(ops, x, 1.0))
    r = ops.nn.relu(h1)
    a = r * r
    h2 = ops.matmul(a, params["dense2"]) + params["bias2"] + memory(1, _with_bias_input(ops, a, 1.0))
    xhat, _ = _standardise(config, ops, h2)
    change = memory(2, ops.xp.ones_like(x[..., :1]))
    scale, shift = params["scale"] + change[..., : config.size], params["shift"] + change[..., config.size :]
    return xhat * scale + shift


def forward(config, ops, params, x, labels, weights, state=None, *, previous_label=None, cu_seqlens=None, logits=True):
    """The `FWLOutput` of whole sequences.

    Args:
        config, ops, params: as at the top of this file.
        x: (B, T, D), output of a causal body.
        labels: (B, T), what each token's loss is measured against: the next token.
        weights: (B, T), how much each label counts; 0 where there is none.
        state: the FWLState of an earlier call, or None.
        previous_label: (B,), label of the token that waits in the state, or None.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.
        logits: False leaves the logits None and never holds them whole.
    """
    if previous_label is not None:
        state = learn_waiting(config, ops, params, previous_label, state)
    if x.shape[1] == 0:
        return empty_output(config, ops, x, state, logits)
    n, embedding, slow_loss, state = _fast_features(config, ops, params, x, labels, weights, state, cu_seqlens)
    fast_logits = ops.matmul(n, params["unembed"]) + params["unembed_bias"] if logits else None
    loss = ops.cross_entropy(fast_logits, labels) if logits else ops.loss(n, *embedding, labels)
    return FWLOutput(fast_logits, loss, slow_loss, state)


def objective(config, ops, params, x, labels, weights, cu_seqlens=None):
    """The training loss: the mean of the fast losses over tokens, weighted with `weights`.

    `ops.summed` computes the gradients together with the value. Arguments are those of `forward`.
    """
    total = _at_least(ops.xp, ops.xp.sum(weights), 1e-8)
    if x.shape[1] == 0:
        return ops.xp.sum(x[:, :, 0] * ops.cast(weights, x)) / total
    n, embedding, _, _ = _fast_features(config, ops, params, x, labels, weights, None, cu_seqlens)
    return ops.summed(n, *embedding, labels, weights) / total


def _fast_features(config, ops, params, x, labels, weights, state, cu_seqlens):
    """Slow pass, its backward pass and fast pass, with the arguments of `forward`.

    Returns:
        The fast features (B, T, size); the output embedding and its bias, aligned as the device wants them; the losses
        of the slow pass (B, T); the FWLState after x.
    """
    slow, embedding = slow_pass(config, ops, params, x), ops.aligned(params["unembed"], params["unembed_bias"])
    slow_loss, dn = ops.head(slow.n, *embedding, labels)
    share = weights / normalization(config, ops, weights, cu_seqlens)
    written = write(config, ops, params, x, slow, dn * ops.cast(share, dn)[..., None])
    before = (None, None, None) if state is None else state[:3]
    after = [None, None, None]
    pending, waiting, waits = find_waiting(ops, x, weights, cu_seqlens)

    def memory(i, q):
        k, v = written[i]
        answer, after[i] = write_and_read(
            config, ops, q, k, v, before[i], writes=weights > 0, ages=1 - waits, cu_seqlens=cu_seqlens
        )
        return answer

    n = read(config, ops, params, x, slow, memory)
    return n, embedding, slow_loss, FWLState(*[*after, pending, waiting])


def empty_output(config, ops, x, state, logits):
    """The FWLOutput of no tokens, x (B, 0, D): the state stays as it was.  logits: whether to return (B, 0, V) logits.

    All results are made from x, so that a gradient can be asked for.
    """
    loss = x[:, :, 0]
    no_logits = ops.xp.broadcast_to(x[..., :1], (x.shape[0], 0, config.vocab_size)) if logits else None
    return FWLOutput(no_logits, loss, loss, state)


def step(config, ops, params, x, label, weight, state):
    """Logits (B, V) of one new token of each sequence, and the FWLState after it.

    The token that waits in the state is learned first; then the new token is answered, and waits.

    Args:
        config, ops, params: as at the top of this file.
        x: (B, D), the body's output for the new token.
        label, weight: (B,), of the token that waits in the state.
        state: the FWLState after the token before.
    """
    written, writes, ages = _writes_of_waiting(config, ops, params, label, weight, state)
    after = [None, None, None]

    def memory(i, q):
        k, v = written[i]
        answer, after[i] = write_and_read(config, ops, q, k, v, state[i], writes=writes, ages=ages, read="after")
        return answer

    x = x[:, None]
    n = read(config, ops, params, x, slow_pass(config, ops, params, x), memory)
    logits = ops.matmul(n, params["unembed"]) + params["unembed_bias"]
    return logits[:, 0], FWLState(*[*after, x[:, 0], ops.xp.ones_like(state.waiting)])


def learn_waiting(config, ops, params, label, state):
    """The FWLState after the token that waits in each sequence was learned with its label (B,); none waits then."""
    one = ops.xp.ones_like(state.waiting)
    written, writes, ages = _writes_of_waiting(config, ops, params, label, one, state)
    after = [
        write_and_read(config, ops, k, k, v, S, writes=writes, ages=ages)[1]
        for (k, v), S in zip(written, state[:3], strict=True)
    ]
    return FWLState(*[*after, state.pending, ops.xp.zeros_like(state.waiting)])


def _writes_of_waiting(config, ops, params, label, weight, state):
    """What the token that waits in each sequence writes, once its label and weight (B,) are known.

    Returns:
        Keys and values of the three memories as `write` has them, for T = 1; and `writes` and `ages` (B, 1) as
        `write_and_read` takes them: neither where no token waits.
    """
    pending, share = state.pending[:, None], (weight * state.waiting / config.normalizer)[:, None]
    slow = slow_pass(config, ops, params, pending)
    _, dn = ops.head(slow.n, params["unembed"], params["unembed_bias"], label[:, None])
    written = write(config, ops, params, pending, slow, dn * ops.cast(share, dn)[..., None])
    return written, share > 0, state.waiting[:, None]


def write_and_read(config, ops, q, k, v, state, *, writes, ages, read="before", cu_seqlens=None):
    """One memory: every token writes its value v under its key k and reads with its query q.

    Args:
        config, ops: as at the top of this file.
        q, k: (B, T, K), queries and keys.
        v: (B, T, V), values.
        state: (B, 1, K, V), the memory before the first token; zeros when None.
        writes: (B, T), whether a token counts for the delta rule, which then replaces what its key retrieves.
        ages: (B, T), 1 where the memory decays with the token, else 0.
        read: "before" or "after" the token's own write.
        cu_seqlens: (N + 1,) offsets of packed documents, or None.

    Returns:
        The answers (B, T, V) and the memory after the last token.
    """
    xp = ops.xp
    rule, beta, log_decay = config.rule if k.shape[-1] > 1 else "sum", None, None
    if rule == "delta":  # the same outer product of a key of length 1, so that a write can replace what it retrieves
        length = xp.sqrt(xp.sum(k * k, -1) + 1e-12)[..., None]
        k, v = k / length, v * length
        beta = ops.wide(ops.cast(writes, q))[..., None]
    if config.decay is not None:
        log_decay = ops.wide(ops.cast(ages, q))[..., None] * math.log(config.decay)
    chunk_size = config.chunk_size(q.shape[1] or 1, k.shape[-1], v.shape[-1])
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
        chunk_size=chunk_size,
    )
    return o[:, :, 0], state


def find_waiting(ops, x, weights, cu_seqlens):
    """The last token of each sequence; it waits for its label where its weight is 0, and may be learned later.

    Args:
        ops: as at the top of this file.
        x: (B, T, D), inputs of the block.
        weights: (B, T).
        cu_seqlens: (N + 1,) offsets of N packed documents, or None; then N = B.

    Returns:
        The inputs of the last tokens (N, D); 1 where such a token waits, else 0 (N,); the same for every token (B, T).
        A token that waits has not aged the memory yet.
    """
    xp = ops.xp
    t = ops.arange(weights.shape[1], weights)
    if cu_seqlens is None:
        waits = ops.cast((t == t[-1:]) & (weights == 0), weights)
        return x[:, -1], waits[:, -1], waits
    offsets = ops.cast(cu_seqlens, t)
    ends = xp.where(offsets[1:] > offsets[:-1], offsets[1:] - 1, -1)  # an empty sequence has no last token
    is_last = ops.cast(ends[:, None] == t[None, :], weights)  # (N, T)
    waits = xp.sum(is_last, 0)[None, :] * ops.cast(weights == 0, weights)
    return ops.cast(is_last, x) @ x[0], xp.sum(is_last * waits, -1), waits


def normalization(config, ops, weights, cu_seqlens):
    """What the summed losses are divided by before their gradient is taken: a number, or an array like weights (B, T).

    A token's weight divided by this is called its share. cu_seqlens: (N + 1,) offsets of packed documents, or None.
    """
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


def _standardise(config, ops, x):
    """x with mean 0 and variance 1 along its last axis, and its standard deviation before."""
    centred = x - _row_mean(config, ops, x)
    std = ops.xp.sqrt(_row_mean(config, ops, centred * centred) + config.eps)
    return centred / std, std


def _row_mean(config, ops, x):
    """The mean of x (..., size) along its last axis, which is kept."""
    return ops.xp.sum(x, -1)[..., None] / config.size


def _clipped(xp, g, limit):
    """Gradients g with the vector of each token cut to the length `limit`."""
    length = xp.sqrt(xp.sum(g * g, -1) + 1e-24)[..., None]
    return g * xp.where(length > limit, limit / length, xp.ones_like(length))


def _with_bias_input(ops, x, value):
    """x and one more input, which is `value` for every token, for the bias."""
    return ops.xp.concatenate([x, ops.xp.zeros_like(x[..., :1]) + value], -1)


def _at_least(xp, x, least):
    return xp.where(x > least, x, least)
