"""`fast_weight` for PyTorch: argument checks, the choice of method, and the loop that is the equation itself."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from fastweights import core
from fastweights.core import FastWeightError
from fastweights.features import parse, parse_fixed
from fastweights.torch import hand_gradients

HAS_TRITON = find_spec("triton") is not None
CHUNK_SIZE = {"cpu": 32}  # tokens; 64 elsewhere. Measured with `fastweights bench`

Rule = Literal["delta", "sum"]
Read = Literal["after", "before"]
Method = Literal["auto", "recurrent", "chunked", "kernel"]


def fast_weight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    rule: Rule = "delta",
    read: Read = "after",
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    features: str = "identity",
    norm: str = "none",
    method: Method = "auto",
    chunk_size: int | None = None,
    out_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Write keys and values into a fast-weight memory and read it with queries, causally.

    $$ S_t = a_t S_{t-1} + \beta_t k_t (v_t - d\, (a_t S_{t-1})^\top k_t)^\top, \qquad o_t = S_t^\top q_t $$

    Args:
        q, k: (B, T, H, K) queries and keys; already mapped and normalised unless `features` and `norm` say how.
        v: (B, T, H, V) values.
        beta: (B, T, H) write rates in [0, 1], up to 2 for negative eigenvalues; 1 when absent.
        log_decay: (B, T, H) log a_t, finite and <= 0; no decay when absent.
        rule: "delta" writes the error (d = 1); "sum" adds the value (d = 0, linear attention).
        read: "after" reads S_t; "before" reads S_{t-1}, which token t has not touched.
        state: (B, H, K, V) memory to start from, in float32 (float64 for float64 inputs); zeros when absent.
        cu_seqlens: (N + 1,) offsets of N sequences packed into one row (B = 1); state is then (N, H, K, V).
        mask: (B, T) bool, False for padding on any side: it neither writes, decays nor reads (its output is 0).
        method: "recurrent", a loop over tokens; "chunked", parallel in chunks with a hand-written backward;
            "kernel", the same in Triton (CUDA; no float64), one launch for one token without gradients; "auto", kernel
            where it can run, else recurrent for one token, else chunked. One token with gradients is recurrent.
        features, norm: map q and k first, as `feature_map(q, features, norm=norm)` would, except FAVOR+; K of the state
            is then the width of the features. Kernels then keep q and k alone for the backward
            pass, which makes the features anew.
        chunk_size: tokens per chunk of "chunked" (a kernel has its own); 32 on a CPU and 64 elsewhere when absent.
            It changes speed alone.
        out_state: where to write the state after the last token, without gradients: `state` itself to overwrite it.

    Returns:
        o (B, T, H, V) in the dtype of v, and the state after the last token, in float32 or wider.

    Under autocast q, k and v are cast to its dtype, as a matrix product would; accumulation stays in float32.

    Example:
        >>> q = k = torch.eye(3).reshape(1, 3, 1, 3)
        >>> v = torch.tensor([[1.0], [2.0], [3.0]]).reshape(1, 3, 1, 1)
        >>> fast_weight(q, k, v)[0].flatten().tolist()
        [1.0, 2.0, 3.0]
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    arrays = dict(q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state, cu_seqlens=cu_seqlens, mask=mask)
    phi = parse_fixed(features)
    core.check(arrays, rule=rule, read=read, method=method, methods=METHODS, chunk_size=chunk_size, width=phi.width)
    _check_devices(arrays)
    K = phi.width(q.shape[-1])
    _check_out_state(out_state, K, arrays)
    chosen = method
    if method == "auto":
        inputs = (q, k, v, beta, log_decay, state)
        learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        chosen = choose(q, learning=learning)
    inside = chosen == "kernel" and mask is None and _maps_inside(phi, norm, q)
    if not inside and (features, norm) != ("identity", "none"):
        q, k = (feature_map(x, features, norm=norm) for x in (q, k))
    if mask is not None:
        q, k, v, beta, log_decay = _masked(mask, q, k, v, beta, log_decay)
    if not torch.compiler.is_compiling() and core.debugging():
        scanned = dict(q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state)
        core.check_values({n: x.detach().double().cpu().numpy() for n, x in scanned.items() if x is not None})
    if state is None:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        state = q.new_zeros(sequences, q.shape[2], K, v.shape[-1], dtype=wide)
    chunk_size = chunk_size or CHUNK_SIZE.get(q.device.type, 64)
    how: dict[str, Any] = dict(delta=rule == "delta", before=read == "before", chunk_size=chunk_size)
    if chosen == "kernel":
        how["overwrite"] = out_state is not None and out_state is state
        how["phi"] = (features, norm) if inside else ("identity", "none")
    o, after = METHODS[chosen](q, k, v, beta, log_decay, state, cu_seqlens, **how)
    if out_state is not None and after is not out_state:
        after = out_state.copy_(after)
    return (o if mask is None else torch.where(mask[..., None, None], o, 0.0)), after


def choose(q: Tensor, *, learning: bool = True) -> Method:
    """The method "auto" stands for: kernel where it can run, else recurrent for one token, else chunked.

    learning: whether gradients will be asked for; one token is then recurrent everywhere.
    """
    one = q.shape[1] == 1
    if q.is_cuda and HAS_TRITON and not (one and learning):
        from fastweights.torch import kernels

        if not kernels.refusal(q):
            return "kernel"
    return "recurrent" if one else "chunked"


def _recurrent(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size):
    """The equation, token by token, through autograd."""
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        core.check_offsets(offsets, q.shape[1])
        return _each(_recurrent, offsets, q, k, v, beta, log_decay, state, delta=delta, before=before)
    with torch.autocast(q.device.type, enabled=False):
        q, k, values = (x.to(state.dtype) for x in (q, k, v))
        beta = torch.ones_like(q[..., 0]) if beta is None else beta.to(state.dtype)
        decay = torch.ones_like(q[..., 0]) if log_decay is None else log_decay.to(state.dtype).exp()
        outputs = []
        for token in zip(*(x.unbind(1) for x in (q, k, values, beta, decay)), strict=True):
            state, o = core.step(state, *token, delta=delta, before=before)
            outputs.append(o)
        o = torch.stack(outputs, 1) if outputs else values
    return o.to(v.dtype), state.clone() if not outputs else state


def _each(run, offsets, q, k, v, beta, log_decay, state, **how):
    """`run` on every packed sequence by itself."""
    parts = [
        run(*(None if x is None else x[:, a:b] for x in (q, k, v, beta, log_decay)), state[n : n + 1], None,
            chunk_size=None, **how)
        for n, (a, b) in enumerate(pairwise(offsets))
    ]  # fmt: skip
    return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])


def _chunked(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size):
    from fastweights.torch.autograd import Chunked, quickly  # registering the operators costs time at import

    if torch.compiler.is_compiling():  # torch.compile refuses one tensor in two places, such as q = k
        k, v = k.view_as(k), v.view_as(v)
    inputs = (q, k, v, beta, log_decay, state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    o, state, *_ = quickly(Chunked, save)(*inputs, cu_seqlens, delta, before, chunk_size, save)
    return o, state


def _kernel(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size, overwrite, phi):
    if not HAS_TRITON:
        raise FastWeightError('method="kernel" needs Triton, which is not installed; pip install triton')
    from fastweights.torch import kernels  # importing Triton costs time

    how = dict(delta=delta, before=before, overwrite=overwrite, phi=phi)
    return kernels.fast_weight(q, k, v, beta, log_decay, state, cu_seqlens, **how)


def _maps_inside(phi, norm, q):
    """Whether the kernels map and normalise q and k themselves."""
    if not HAS_TRITON:
        return False
    from fastweights.torch.kernels import features as fused

    return fused.takes(phi, norm, q)


METHODS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrent": _recurrent,
    "chunked": _chunked,
    "kernel": _kernel,
}


def _masked(mask, q, k, v, beta, log_decay):
    """Padding turned into tokens that do nothing, whatever they held."""
    q, k, v = (torch.where(mask[..., None, None], x, 0.0) for x in (q, k, v))
    beta, log_decay = (None if x is None else torch.where(mask[..., None], x, 0.0) for x in (beta, log_decay))
    return q, k, v, beta, log_decay


def _check_out_state(out_state, K, arrays):
    if out_state is None:
        return
    q, v, cu_seqlens = arrays["q"], arrays["v"], arrays["cu_seqlens"]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = (sequences, q.shape[2], K, v.shape[-1])
    if tuple(out_state.shape) != expected or out_state.dtype not in (torch.float32, torch.float64):
        raise FastWeightError(f"out_state is {out_state.dtype} {tuple(out_state.shape)}; expected float32 {expected}: "
                              "the state after the last token goes there")  # fmt: skip
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays.values()):
        raise FastWeightError("out_state is given where gradients are wanted; expected it under torch.no_grad() alone: "
                              "a backward pass would need the state that is overwritten")  # fmt: skip


def _check_devices(arrays):
    device = arrays["q"].device
    for name, x in arrays.items():
        if x is not None and x.device != device and name != "cu_seqlens":
            raise FastWeightError(f"{name} is on {x.device}; expected {device}: the device of q")


def feature_map(x: Tensor, name: str, *, norm: str = "none", projection: Tensor | None = None) -> Tensor:
    """phi(x) for a feature map by name, normalised over the last axis: `feature_map(k, "dpfp-3", norm="sum")`.

    Args:
        x: (..., d).
        name: "identity", "relu", "silu", "elu+1", "dpfp-NU" or "favor-M".
        norm: "none", "sum", "l2" or "max".
        projection: (M, d), for "favor-M" alone: `favor_projection(M, d, seed)`.

    Returns:
        (..., width) in the dtype of x, computed in float32 or wider; on a GPU with Triton, all but FAVOR+ and "max"
        in one pass over memory.
    """
    phi = parse(name)
    transformed = torch._C._are_functorch_transforms_active()  # vmap has no rule for the kernel
    if x.is_cuda and HAS_TRITON and projection is None and not transformed:
        from fastweights.torch.kernels import features as fused

        if fused.takes(phi, norm, x):
            return fused.feature_map(x, phi, norm)
    return _feature_map(x, phi, norm, projection)


def _feature_map(x, phi, norm, projection):
    """`feature_map` in PyTorch's own operators."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if projection is not None:
        projection = torch.as_tensor(projection, dtype=wide, device=x.device)
    return phi.apply(x.to(wide), torch, hand_gradients, norm=norm, projection=projection).to(x.dtype)
