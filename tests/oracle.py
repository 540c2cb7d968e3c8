"""The one oracle: the equation in a float64 NumPy loop, and problems to try it on.

It imports nothing of the package, so that a mistake in the core cannot agree with itself.
"""

import numpy as np

# What a token writes at its key, given the decayed memory S (B, H, K, V): value(S, k, v), before the write rate.
RULES = {
    "delta": lambda S, k, v: v - (k[..., None] * S).sum(-2),
    "sum": lambda S, k, v: v,
}
READS = ("after", "before")


def _write(S, k, v, beta, erase, rule):
    """One write; in operators and methods that torch's tensors understand too."""
    return S + k[..., :, None] * (beta[..., None] * RULES[rule](S, erase, v))[..., None, :]


def _token(S, q, decay, writes, rule, read):
    """One token: its decay (B, H) or (B, H, K), its writes (k, v, beta, erase) in order, its read."""
    if rule not in RULES or read not in READS:
        raise ValueError(f"rule is {rule!r} and read is {read!r}; the oracle knows {list(RULES)} and {READS}")
    old = S
    S = (decay[..., None] if decay.shape == q.shape else decay[..., None, None]) * S
    for write in writes:
        S = _write(S, *write, rule)
    return S, (q[..., :, None] * (old if read == "before" else S)).sum(-2)


def _loop(S, q, k, v, beta, decay, erase, rule, read, writes):
    """The equation: (outputs of the tokens, S)."""
    outputs = []
    for t in range(q.shape[1]):
        own = [[x[:, t * writes + j] for x in (k, v, beta, erase)] for j in range(writes)]
        S, o = _token(S, q[:, t], decay[:, t], own, rule, read)
        outputs.append(o)
    return outputs, S


def oracle(
    q, k, v, *, beta=None, log_decay=None, erase=None, rule="delta", read="after", state=None, writes=1
):  # fmt: skip
    """What every framework, method and kernel must match: (o, state)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    S = np.zeros((B, H, K, v.shape[-1])) if state is None else state.astype(np.float64)
    beta = np.ones(k.shape[:3]) if beta is None else beta.astype(np.float64)
    decay = np.ones((B, T, H)) if log_decay is None else np.exp(log_decay.astype(np.float64))
    erase = k if erase is None else erase.astype(np.float64)
    outputs, S = _loop(S, q, k, v, beta, decay, erase, rule, read, writes)
    return (np.stack(outputs, 1) if outputs else v), S


def torch_loop(q, k, v, state, beta=None, log_decay=None, erase=None, *, rule="delta", read="after", writes=1):
    """The same loop on torch tensors, in their dtype and through autograd: (o, state)."""
    import torch

    beta = torch.ones_like(k[..., 0]) if beta is None else beta
    decay = torch.ones_like(q[..., 0]) if log_decay is None else log_decay.exp()
    erase = k if erase is None else erase
    outputs, S = _loop(state.to(q.dtype), q, k, v, beta, decay, erase, rule, read, writes)
    return (torch.stack(outputs, 1) if outputs else v), S


def oracle_gradients(args, do, dS, *, rule="delta", read="after", writes=1):
    """Gradients of sum(o * do) + sum(state * dS): the same loop in torch float64, through autograd."""
    import torch

    x = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True) for name, a in args.items()}
    o, S = torch_loop(**x, rule=rule, read=read, writes=writes)
    loss = (o * torch.tensor(do)).sum() + (S * torch.tensor(dS)).sum()
    return {name: g.numpy() for name, g in zip(x, torch.autograd.grad(loss, list(x.values())), strict=True)}


def problem(rng, *, B=2, T=65, H=3, K=5, V=7, decay=True, sequences=None, erase=False, writes=1):
    """Arguments of fast_weight as float64 NumPy: unit keys, rates in (0, 1), a memory to start from.

    decay: True, one per head;  "channel", one per key channel;  "hard", these from none to exp(-400) per token, some
    channels kept for good;  False, none.
    """
    q = rng.standard_normal((B, T, H, K))
    k = _unit(rng.standard_normal((B, writes * T, H, K)))
    args = dict(
        q=q,
        k=k,
        v=rng.standard_normal((B, writes * T, H, V)),
        beta=rng.random((B, writes * T, H)),
        state=rng.standard_normal((sequences or B, H, K, V)),
    )
    if erase:
        args["erase"] = _unit(k + 0.2 * rng.standard_normal(k.shape))
    if decay == "hard":
        args["log_decay"] = rng.choice([0.0, -1e-3, -0.5, -30.0, -400.0], (B, T, H, K))
        args["log_decay"][..., 0] = 0.0
        args["log_decay"][..., 1] = -1e-3
    elif decay:
        args["log_decay"] = -rng.random((B, T, H, K) if decay == "channel" else (B, T, H))
    return args


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def assert_close(got, want, tolerance=1e-9, name=""):
    """Raise unless equal to `tolerance`, relative to the largest number wanted."""
    scale = max(1.0, np.abs(want).max(initial=0.0))
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=name)
