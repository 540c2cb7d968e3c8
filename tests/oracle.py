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


def _step(S, q, k, v, beta, decay, rule, read):
    """One token; in operators and methods that torch's tensors understand too."""
    if rule not in RULES or read not in READS:
        raise ValueError(f"rule is {rule!r} and read is {read!r}; the oracle knows {list(RULES)} and {READS}")
    old, S = S, decay[..., None, None] * S
    S = S + k[..., :, None] * (beta[..., None] * RULES[rule](S, k, v))[..., None, :]
    return S, (q[..., :, None] * (old if read == "before" else S)).sum(-2)


def oracle(q, k, v, *, beta=None, log_decay=None, rule="delta", read="after", state=None):
    """What every framework, method and kernel must match: (o, state)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    S = np.zeros((B, H, K, v.shape[-1])) if state is None else state.astype(np.float64)
    beta = np.ones((B, T, H)) if beta is None else beta.astype(np.float64)
    decay = np.ones((B, T, H)) if log_decay is None else np.exp(log_decay.astype(np.float64))
    o = np.empty_like(v)
    for t in range(T):
        S, o[:, t] = _step(S, *(x[:, t] for x in (q, k, v, beta, decay)), rule, read)
    return o, S


def torch_loop(q, k, v, state, beta=None, log_decay=None, *, rule="delta", read="after"):
    """The same loop on torch tensors, in their dtype and through autograd: (o, state)."""
    import torch

    S, outputs = state.to(q.dtype), []
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    decay = torch.ones_like(q[..., 0]) if log_decay is None else log_decay.exp()
    for t in range(q.shape[1]):
        S, o = _step(S, *(x[:, t] for x in (q, k, v, beta, decay)), rule, read)
        outputs.append(o)
    return (torch.stack(outputs, 1) if outputs else v), S


def oracle_gradients(args, do, dS, *, rule="delta", read="after"):
    """Gradients of sum(o * do) + sum(state * dS): the same loop in torch float64, through autograd."""
    import torch

    x = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True) for name, a in args.items()}
    o, S = torch_loop(**x, rule=rule, read=read)
    loss = (o * torch.tensor(do)).sum() + (S * torch.tensor(dS)).sum()
    return {name: g.numpy() for name, g in zip(x, torch.autograd.grad(loss, list(x.values())), strict=True)}


def problem(rng, *, B=2, T=65, H=3, K=5, V=7, decay=True, sequences=None):
    """Arguments of fast_weight as float64 NumPy: unit keys, rates in (0, 1), a memory to start from."""
    q, k = rng.standard_normal((2, B, T, H, K))
    args = dict(
        q=q,
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=rng.standard_normal((B, T, H, V)),
        beta=rng.random((B, T, H)),
        state=rng.standard_normal((sequences or B, H, K, V)),
    )
    return args | ({"log_decay": -rng.random((B, T, H))} if decay else {})


def assert_close(got, want, tolerance=1e-9, name=""):
    """Raise unless equal to `tolerance`, relative to the largest number wanted."""
    scale = max(1.0, np.abs(want).max(initial=0.0))
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=name)
