"""`fast_weight` as Triton kernels: the chunk inverses, a walk over the memory, and the same backwards.

docs/maths.md derives what they compute. Block sizes are fixed by shape and dtype, so that a first call compiles and
never measures. The operators are registered, so that autograd, torch.compile, vmap and checkpointing know them.
"""

from functools import partial

import torch
import triton
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.features import parse
from fastweights.torch import autograd
from fastweights.torch.autograd import register
from fastweights.torch.kernels import backward, blocks, chunks, forward, inverse, pieces, segments, step
from fastweights.torch.kernels import features as maps
from fastweights.torch.kernels.launch import on_device_of, together
from fastweights.torch.layout import bound

PLAIN = ("identity", "none")  # q and k as they are
INTERPRETED = chunks.INTERPRETED


def fast_weight(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, overwrite=False, phi=PLAIN):
    """(o, state), or FastWeightError with the reason why the kernels cannot run these inputs.

    overwrite: the new state may take the place of the old one; only a single token does so.
    phi: the names of a feature map and norm that `maps.takes` q and k with. Only q and k themselves are kept for a
        backward pass; their features are made anew.
    """
    if reason := refusal(q):
        raise FastWeightError(f'method="kernel" {reason}')
    if one_step(q, cu_seqlens) and not needs_gradient(q, k, v, beta, log_decay, state):
        if overwrite and state.is_contiguous():
            return step.step_op_(q, k, v, beta, log_decay, state, delta, before, *phi), state
        return step.step_op(q, k, v, beta, log_decay, state, delta, before, *phi)
    if torch.compiler.is_compiling():  # torch.compile refuses one tensor in two places, such as q = k
        k, v = k.view_as(k), v.view_as(v)
    inputs = (q, k, v, beta, log_decay, state)
    save = needs_gradient(*inputs)
    o, state, *_ = autograd.quickly(Kernel, save)(*inputs, cu_seqlens, delta, before, *phi, save)
    return o, state


def one_step(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether this is one token of every sequence, narrow enough for a program to hold its memory's rows."""
    return q.shape[1] == 1 and cu_seqlens is None and q.shape[-1] <= 4096


def needs_gradient(*inputs: Tensor | None) -> bool:
    """Whether autograd, or a transform that may want it, looks on."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def refusal(q: Tensor) -> str | None:
    """Why the kernels cannot run on inputs like q, or None."""
    if q.dtype not in blocks.ON_CHIP:
        return f"computes in float32 or less; q is {q.dtype}"
    if not q.is_cuda and not INTERPRETED:
        return f"needs a CUDA device; q is on {q.device}"
    return None


def run_forward(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, features, norm, save):
    """(o, final state, X, S, u): the inverses, the memory before each piece, and what was written, if saved."""
    q, k = mapped(features, norm, q, k)
    shape, n = v.shape, segments.count(q, cu_seqlens, delta)
    every = blocks.every(q.shape[-1], v.shape[-1], q.dtype, delta, beta, log_decay)
    q, k, v, beta, log_decay = segments.cut(n, *contiguous(q, k, v, beta, log_decay))
    state, how = state.contiguous(), dict(delta=delta, before=before, precision=float32_products())
    layout = chunks.Layout.of(q, cu_seqlens, every)
    triton.set_allocator(scratch)
    beta, log_g = chunks.rates(beta, log_decay, layout, k)
    X = inverse.inverse(k, beta, log_g, layout, how["precision"]) if delta else None
    if n > 1:
        state = segments.before_each(q, k, v, beta, log_g, X, state, layout, **how)
    o, state, S, u = forward.walk(q, k, v, beta, log_g, X, state, layout, **how, save=save)
    if n > 1:
        o, state = o.view(shape), state[n - 1 :: n].contiguous()
    return o, state, X if save and delta else q.new_empty(0), S, u.view(shape) if u.numel() else u


def run_backward(do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, X, S, u, delta, before, features, norm):
    """Gradients of q, k, v, beta, log_decay (None where absent) and state."""
    raw = q, k
    q, k = mapped(features, norm, q, k)
    B, T, n = q.shape[0], q.shape[1], segments.count(q, cu_seqlens, delta)
    every = blocks.every(q.shape[-1], v.shape[-1], q.dtype, delta, beta, log_decay)
    do, q, k, v, beta, log_decay = segments.cut(n, *contiguous(do, q, k, v, beta, log_decay))
    dfinal = None if dfinal is None else dfinal.contiguous()
    how = dict(delta=delta, before=before, precision=float32_products())
    layout = chunks.Layout.of(q, cu_seqlens, every)
    triton.set_allocator(scratch)
    X = X if delta else None
    beta_rows, log_g = chunks.rates(beta, log_decay, layout, k)
    if n > 1:
        dfinal = torch.zeros_like(state) if dfinal is None else dfinal
        dfinal = segments.after_each(q, k, beta_rows, log_g, X, do, dfinal, layout, **how)
    dy, dstate, D = backward.reverse(q, k, beta_rows, log_g, X, do, dfinal, layout, **how, save=True)
    if every > 1:
        u = u if delta else v
        dq, dk, dbeta = pieces.past(k, beta, S, do, u, dy, layout, **how)
        grads = [dq, pieces.future(q, k, D, do, u, dy, dk, layout, **how), dy, dbeta, None]
    else:
        grads = list(backward.local(q, k, v, beta, log_decay, beta_rows, log_g, X, S, D, do, dy, layout, **how))
    if n > 1:
        grads = [None if x is None else x.view(B, T, *x.shape[2:]) for x in grads]
        dstate = dstate[::n].contiguous()
    if (features, norm) != PLAIN:
        phi = parse(features)
        grads[:2] = (maps.features_backward(g, x, phi.kind, phi.size, norm) for g, x in zip(grads, raw, strict=False))
    return *grads, dstate


def mapped(features, norm, *tensors):
    """phi of each."""
    if (features, norm) == PLAIN:
        return tensors
    phi = parse(features)
    return [maps.features(x, phi.kind, phi.size, norm) for x in tensors]


def float32_products() -> str:
    """How products of float32 inputs are made, by torch's own setting: exact to its last bits, or one pass of tf32."""
    return chunks.exact_products() if torch.get_float32_matmul_precision() == "highest" else "tf32"


def scratch(size, alignment, stream):
    """Device memory for the descriptors of the copy engine; Triton asks for it at launch, in any thread."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def saved_shapes(q, v, beta, log_decay, cu_seqlens, delta, name):
    """Shapes of X, S and u that `run_forward` saves."""
    (B, T, H, D), V = q.shape, v.shape[-1]
    K = parse(name).width(D)
    every = blocks.every(K, V, q.dtype, delta, beta, log_decay)
    rows, kept = (bound(B, T, chunks.C * size, cu_seqlens) for size in (1, every))
    X = (rows, H, chunks.C, chunks.C) if delta else (0,)
    return X, (kept, H, V, K), v.shape if delta and every > 1 else (0,)


def kernel(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor,
    cu_seqlens: Tensor | None, delta: bool, before: bool, features: str, norm: str, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs, how = (q, k, v, beta, log_decay, state, cu_seqlens), (delta, before, features, norm)

    def with_backward():  # which will follow
        o, _, *saved = run_forward(*inputs, *how, save)
        if save:
            run_backward(o, None, *inputs, *saved, *how)

    with on_device_of(q):
        return together(lambda: run_forward(*inputs, *how, save), with_backward, q)


def kernel_fake(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, features, norm, save):
    shapes = saved_shapes(q, v, beta, log_decay, cu_seqlens, delta, features) if save else ((0,),) * 3
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        state.new_empty(state.shape),
        *(v.new_empty(shape) for shape in shapes),
    )


def kernel_backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None,
    state: Tensor, cu_seqlens: Tensor | None, X: Tensor, S: Tensor, u: Tensor,
    delta: bool, before: bool, features: str, norm: str,
) -> autograd.Gradients:  # fmt: skip
    inputs, how = (q, k, v, beta, log_decay, state, cu_seqlens), (delta, before, features, norm)

    def run():
        saved = X, S, u
        if q.numel() and not S.numel():  # nothing was saved: a transform hid that a gradient would be asked for
            saved = run_forward(*inputs, *how, True)[2:]
        return run_backward(do, dfinal, *inputs, *saved, *how)

    with on_device_of(q):
        grads = together(run, run, q)
    dq, dk, dv, dbeta, dlog_decay, dstate = (q.new_empty(0) if x is None else x for x in grads)
    return dq, dk, dv, dbeta, dlog_decay, dstate  # an operator cannot return None


def kernel_backward_fake(
    do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, X, S, u, delta, before, features, norm
):
    like = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    rates = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (beta, log_decay))
    return *like, *rates, state.new_empty(state.shape)


kernel_op, backward_op = register(kernel, kernel_fake), register(kernel_backward, kernel_backward_fake)


class Kernel(autograd.Chunked):
    """`kernel_op` with its gradient."""

    @staticmethod
    def forward(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, features, norm, save):
        return kernel_op(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, features, norm, save)

    @staticmethod
    def backward(ctx, do, dfinal, *unused):
        q, k, v, beta, log_decay, state, *rest = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do
        run = backward_op
        if torch.is_grad_enabled():  # second derivatives
            run, dfinal = KernelBackward.apply, torch.zeros_like(state) if dfinal is None else dfinal
        grads = run(do, dfinal, q, k, v, beta, log_decay, state, *rest, *ctx.how)
        grads = [None if x is None else g for x, g in zip((q, k, v, beta, log_decay, state), grads, strict=True)]
        return *grads, *[None] * 6

    @staticmethod
    def vmap(info, in_dims, *args):
        unsaved = lambda *x: Kernel.apply(*x[:-1], False)  # noqa: E731 (its rows mix batch and steps)
        return autograd._fold(unsaved, 6, info.batch_size, in_dims, args)


class KernelBackward(autograd.ChunkedBackward):
    """`backward_op`; its own gradient, for second derivatives, is that of `autograd.plain`."""

    @staticmethod
    def forward(do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, X, S, u, delta, before, features, norm):
        inputs = (do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens)
        return backward_op(*inputs, X, S, u, delta, before, features, norm)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, delta, before, features, norm = inputs
        autograd.ChunkedBackward.setup_context(ctx, (*tensors, None, None, delta, before, chunks.C), output)
        ctx.plain = partial(plain, features, norm)

    @staticmethod
    def backward(ctx, *second):
        return autograd.ChunkedBackward.backward(ctx, *second)[:-1]

    @staticmethod
    def vmap(info, in_dims, *args):
        return autograd._fold(KernelBackward.apply, 8, info.batch_size, in_dims, args)


def plain(features, norm, q, k, *rest, **how):
    """`autograd.plain` of mapped q and k."""
    if (features, norm) != PLAIN:
        phi = parse(features)
        q, k = (maps.eager(x, phi.kind, phi.size, norm) for x in (q, k))
    return autograd.plain(q, k, *rest, **how)
