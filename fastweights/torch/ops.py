"""`fast_weight` for PyTorch: the arguments become an Inputs and a Spec, and a method computes them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check, check_method, log_method
from fastweights.core import ARRAYS, PLAIN, FastWeightError, Inputs, Spec, expand_writes, gather_reads
from fastweights.debugging import check_values, debugging
from fastweights.features import parse, parse_fixed
from fastweights.literals import Method, Norm, Read, Rule
from fastweights.torch import hand_gradients
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.methods import map_plainly, needs_gradient, state_shape
from fastweights.torch.private import is_transformed, is_watched
from fastweights.torch.watching import watchers

HAS_TRITON = find_spec("triton") is not None


METHODS = ("recurrent", "chunked", "kernel")


def module_of(method: str) -> Any:
    """The module of a method, with refuses(inputs, spec), maps(inputs, spec) and run(inputs, spec, overwrite).

    It is imported when first used: registering operators and importing Triton cost time.
    """
    if method == "recurrent":
        from fastweights.torch import token_loop

        return token_loop
    if method == "chunked":
        from fastweights.torch import chunked

        return chunked
    from fastweights.torch import kernels

    return kernels


def fast_weight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    rule: Rule = "delta",
    read: Read = "after",
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    features: str | Callable[[Tensor], Tensor] = "identity",
    norm: Norm = "none",
    writes: int = 1,
    method: Method = "auto",
    chunk_size: int | None = None,
    out_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Write keys and values into a fast-weight memory and read it with queries, causally.

    $$ S_t = a_t S_{t-1} + \beta_t k_t (v_t - d\, (a_t S_{t-1})^\top e_t)^\top, \qquad o_t = S_t^\top q_t $$

    Args:
        q, k: (B, T, H, K) queries and keys; already mapped and normalised unless `features` and `norm` say how.
        v: (B, T, H, V) values.
        beta: (B, T, H) write rates in [0, 1], up to 2 for negative eigenvalues; 1 when absent.
        log_decay: (B, T, H) log a_t, finite and <= 0, or (B, T, H, K), a decay per key channel; none when absent.
        erase: (B, T, H, K) e_t, the key that reads what will be corrected ("delta" alone); k when absent.
        rule: "delta" writes the error (d = 1); "sum" adds the value (d = 0, linear attention).
        read: "after" reads S_t; "before" reads S_{t-1}, which token t has not touched.
        state: (B, H, K, V) memory to start from, in float32 (float64 for float64 inputs); zeros when absent.
        cu_seqlens: (N + 1,) offsets of N sequences packed into one row (B = 1); state is then (N, H, K, V).
        mask: (B, T) bool, False for padding on any side: it neither writes, decays nor reads (its output is 0).
        method: how it is computed; all give the same result. "recurrent" is a loop over tokens. "chunked" computes a
            chunk of tokens at once, by matrix products. "kernel" is the chunked form in Triton, for CUDA and not for
            float64; with a decay per channel or an erase key it takes at most 256 features (128 in float32). "auto"
            takes the kernel where it can run, else "recurrent" for a single token and "chunked" for more.
        features, norm: first replace q, k and erase by `feature_map(q, features, norm=norm)` and so on (any map but
            FAVOR+). K of the state is then the width of the features. Kernels recompute the features in the backward
            pass, so that only q and k are kept for it.
        writes: n, the number of writes per token. k, v, beta and erase then have n T tokens, and write j of token t
            stands at t n + j. A token decays once, before its first write; its query reads after its last write, or
            before its first with `read="before"`.
        chunk_size: writes per chunk of "chunked" (a kernel has its own); when absent 64, on a CPU 32 or 16.
            It changes speed alone.
        out_state: where to write the state after the last token, without gradients: `state` itself to overwrite it.

    Returns:
        o (B, T, H, V) in the dtype of v, and the state after the last token, in float32 or wider.

    Under autocast q, k and v are cast to its dtype, as a matrix product would; accumulation stays in float32.

    Examples:
        >>> q = k = torch.eye(3).reshape(1, 3, 1, 3)
        >>> v = torch.tensor([[1.0], [2.0], [3.0]]).reshape(1, 3, 1, 1)
        >>> fast_weight(q, k, v)[0].flatten().tolist()
        [1.0, 2.0, 3.0]

        One key is written twice. The delta rule replaces its value, the sum adds the two up:

        >>> k = torch.ones(1, 2, 1, 1)
        >>> v = torch.tensor([5.0, 7.0]).reshape(1, 2, 1, 1)
        >>> fast_weight(k, k, v, rule="delta")[0].flatten().tolist()
        [5.0, 7.0]
        >>> fast_weight(k, k, v, rule="sum")[0].flatten().tolist()
        [5.0, 12.0]

        A text may be cut anywhere; the state carries on:

        >>> o, state = fast_weight(k[:, :1], k[:, :1], v[:, :1])
        >>> fast_weight(k[:, 1:], k[:, 1:], v[:, 1:], state=state)[0].item()
        7.0
    """
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        erase = None if erase is None else erase.to(dtype)
    inputs = Inputs(q, k, v, beta, log_decay, erase, state, cu_seqlens, mask)
    call = _look_up(inputs, rule, read, features, norm, writes, method, chunk_size)
    if out_state is not None:
        _check_out_state(out_state, inputs, call.width)
    if call.maps_first:
        inputs = inputs.but(q=feature_map(q, features, norm=norm), k=feature_map(k, features, norm=norm))
        if erase is not None:
            inputs = inputs.but(erase=feature_map(erase, features, norm=norm))
    if watchers and not is_watched():
        for watch in watchers:
            watch(inputs, call.asked.without_maps() if call.maps_first else call.asked)
    if writes > 1:
        inputs, _ = expand_writes(inputs, call.asked, torch)
    if mask is not None:
        inputs = _masked(inputs)
    if not torch.compiler.is_compiling():
        log_method(call.method, call.why, inputs, call.asked)
    if not torch.compiler.is_compiling() and debugging():
        scanned = zip(inputs._fields, tuple(inputs)[:ARRAYS], strict=False)
        check_values({n: x.detach().double().cpu().numpy() for n, x in scanned if x is not None})
    o, after = call.run(inputs, call.spec, out_state is not None and out_state is state)
    if writes > 1:
        o = gather_reads(o, call.asked)
    if out_state is not None and after is not out_state:
        after = out_state.copy_(after)
    return (o if mask is None else torch.where(mask[..., None, None], o, 0.0)), after


class _Call(NamedTuple):
    """What the arguments of one call come to. Shapes and dtypes decide it, so calls of the same ones share it."""

    asked: Spec
    spec: Spec  # what is left of it for the method
    run: Callable[[Inputs, Spec, bool], tuple[Tensor, Tensor]]
    maps_first: bool  # q and k are mapped before the method sees them
    width: int  # of the features
    method: str
    why: str


_calls: dict[tuple, _Call] = {}


def _look_up(inputs, *switches):
    """The _Call of these arguments, from the last call of the same shapes where there was one."""
    if is_watched():
        return _decide(inputs, *switches)
    key = (switches, needs_gradient(inputs), *[None if x is None else (x.shape, x.dtype, x.device) for x in inputs])
    try:
        call = _calls.get(key)
    except TypeError:  # a switch that cannot be hashed cannot be right either
        return _decide(inputs, *switches)
    if call is None:
        call = _decide(inputs, *switches)
        if len(_calls) > 4096:  # lengths that never repeat must not fill the memory
            _calls.clear()
        _calls[key] = call
    return call


def _decide(inputs, rule, read, features, norm, writes, method, chunk_size):
    """Check the arguments of a call and choose its method."""
    phi = parse_fixed(features)
    asked = spec = Spec.make(rule, read, features if callable(features) else phi.name, norm, writes, chunk_size)
    check_method(method, METHODS)
    check(inputs, spec, width=phi.width)
    _check_devices(inputs)
    name, why = method, "asked for by name"
    if method == "auto":
        name, why = choice(inputs, spec, learning=needs_gradient(inputs))
    if name == "kernel" and not HAS_TRITON:
        raise FastWeightError('method="kernel" needs Triton, which is not installed; pip install triton')
    module = module_of(name)
    if reason := module.refuses(inputs, spec):
        raise FastWeightError(f"method={name!r} {reason}")
    maps_first = (spec.features, spec.norm) != PLAIN and (
        inputs.mask is not None or writes > 1 or not module.maps(inputs, spec)
    )
    if name == "kernel":
        spec = spec.but(chunk_size=None)  # kernels have chunks of their own
    if maps_first:
        spec = spec.without_maps()
    return _Call(asked, spec.but(writes=1), module.run, maps_first, phi.width(inputs.q.shape[-1]), name, why)


def choice(inputs: Inputs, spec: Spec, *, learning: bool = True) -> tuple[Method, str]:
    """(the method "auto" stands for, why): the first of kernel, chunked and recurrent that does not refuse.

    learning: whether gradients will be asked for. One token is recurrent, unless a kernel can do it in one launch.
    """
    one = inputs.q.shape[1] == 1
    if not inputs.q.is_cuda:
        without = f"kernels need a CUDA device, and q is on {inputs.q.device}"
    elif not HAS_TRITON:
        without = "kernels need Triton, which is not installed"
    elif one and learning:
        without = "the kernel of one token has no gradients"
    elif reason := module_of("kernel").refuses(inputs, spec):
        without = f"the kernel {reason}"
    else:
        return "kernel", "the fastest on a GPU with Triton"
    if one:
        return "recurrent", f"there is one token; {without}"
    if reason := module_of("chunked").refuses(inputs, spec):
        return "recurrent", f"the chunked method {reason}; {without}"
    return "chunked", without


def choose(inputs: Inputs, spec: Spec, *, learning: bool = True) -> Method:
    """The method "auto" stands for; `choice` says why."""
    return choice(inputs, spec, learning=learning)[0]


def _masked(inputs):
    """Padding turned into tokens that do nothing, whatever they held."""
    mask = inputs.mask
    clean = lambda x: torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, 0.0)  # noqa: E731
    return inputs.map_tokens(clean).but(mask=None)


def _check_out_state(out_state, inputs, width):
    """Raise FastWeightError unless the state after the last token can be written to `out_state`.

    Its shape must be that of the state (width: the memory's K), its dtype one that a memory has, and no gradient may be
    asked for: a backward pass would need the state that is overwritten.
    """
    expected = (*state_shape(inputs, Spec())[:2], width, inputs.v.shape[-1])
    if tuple(out_state.shape) != expected or out_state.dtype not in (torch.float32, torch.float64):
        raise FastWeightError(
            f"out_state is {out_state.dtype} {tuple(out_state.shape)}; expected float32 {expected}: "
            "the state after the last token goes there"
        )
    if needs_gradient(inputs):
        raise FastWeightError(
            "out_state is given where gradients are wanted; expected it under torch.no_grad() alone: "
            "a backward pass would need the state that is overwritten"
        )


def _check_devices(inputs):
    """Raise FastWeightError unless all arrays are on q's device. Offsets may be anywhere: they are read on the CPU."""
    device = inputs.q.device
    for name, x in zip(Inputs._fields, inputs, strict=True):
        if x is not None and x.device != device and name != "cu_seqlens":
            raise FastWeightError(f"{name} is on {x.device}; expected {device}: the device of q")


def feature_map(
    x: Tensor, name: str | Callable[[Tensor], Tensor], *, norm: Norm = "none", projection: Tensor | None = None
) -> Tensor:
    """phi(x) for a feature map by name, normalised over the last axis: `feature_map(k, "dpfp-3", norm="sum")`.

    What a query reads of a key is phi(q) . phi(k), so the map decides which keys are alike and how many of them a
    memory
    holds apart: at most as many as phi(x) has entries.

    Args:
        x: (..., d).
        name: "identity", "relu", "silu", "elu+1", "dpfp-NU" (width 2 d NU), "favor-M" (width 2 M), or a function.
        norm: "none"; "l2", to length 1; "sum", to sum 1; "max", to a largest entry of 1; "hellinger", the root of
            "sum".
        projection: (M, d), for "favor-M" alone: `favor_projection(M, d, seed)`.

    Returns:
        (..., width) in the dtype of x, computed in float32 or wider; on a GPU with Triton, all but FAVOR+ and "max"
        in one pass over memory.

    Examples:
        >>> feature_map(torch.tensor([[3.0, 4.0]]), "identity", norm="l2")
        tensor([[0.6000, 0.8000]])
        >>> feature_map(torch.randn(2, 10, 4, 16), "dpfp-3").shape
        torch.Size([2, 10, 4, 96])
    """
    if not _has_kernel(x, name, norm, projection):
        return _map(x, name, norm, projection)
    from fastweights.torch.kernels import features as fused

    return fused.feature_map(x, parse(name), norm)


def _has_kernel(x, name, norm, projection):
    """Whether a kernel maps x in one pass over memory."""
    if not x.is_cuda or not HAS_TRITON or projection is not None or is_transformed():
        return False  # vmap has no rule for the kernel
    from fastweights.torch.kernels import features as fused

    return fused.takes(parse(name), norm, x)


def _map(x, name, norm, projection):
    """`feature_map` in PyTorch's own operators: on a CPU, for FAVOR+, and where a compiler or a transform looks on."""
    if projection is None:
        return map_plainly(x, Spec(features=name, norm=norm))
    wide = accumulation_dtype(x.dtype)
    projection = torch.as_tensor(projection, dtype=wide, device=x.device)
    return parse(name).apply(x.to(wide), torch, hand_gradients, norm=norm, projection=projection).to(x.dtype)
