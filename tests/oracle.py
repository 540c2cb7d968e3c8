"""The one oracle: the equation of core.py in a float64 NumPy loop, and problems to try it on."""

import numpy as np

from fastweights import core


def oracle(q, k, v, *, beta=None, log_decay=None, rule="delta", read="after", state=None):
    """What every framework, method and kernel must match: (o, state)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    S = np.zeros((B, H, K, v.shape[-1])) if state is None else state.astype(np.float64)
    beta = np.ones((B, T, H)) if beta is None else beta.astype(np.float64)
    decay = np.ones((B, T, H)) if log_decay is None else np.exp(log_decay.astype(np.float64))
    o = np.empty_like(v)
    for t in range(T):
        token = (x[:, t] for x in (q, k, v, beta, decay))
        S, o[:, t] = core.step(S, *token, delta=rule == "delta", before=read == "before")
    return o, S


def oracle_gradients(args, do, dS, *, rule="delta", read="after"):
    """Gradients of sum(o * do) + sum(state * dS): the same loop in torch float64, through autograd."""
    import torch

    x = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True) for name, a in args.items()}
    S = x["state"]
    outputs = []
    for t in range(x["q"].shape[1]):
        decay = x["log_decay"][:, t].exp() if "log_decay" in x else torch.ones_like(x["q"][:, t, :, 0])
        beta = x["beta"][:, t] if "beta" in x else torch.ones_like(x["q"][:, t, :, 0])
        S, o = core.step(S, x["q"][:, t], x["k"][:, t], x["v"][:, t], beta, decay,
                         delta=rule == "delta", before=read == "before")  # fmt: skip
        outputs.append(o)
    loss = (torch.stack(outputs, 1) * torch.tensor(do)).sum() + (S * torch.tensor(dS)).sum()
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
