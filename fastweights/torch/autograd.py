"""The chunked form as registered operators, so that autograd, torch.compile, vmap and checkpointing all know it."""

from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from fastweights import core
from fastweights.torch import chunked

Outputs = tuple[Tensor, Tensor, list[Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
library = torch.library.Library("fastweights", "FRAGMENT")


@contextmanager
def _own_precision(q):
    """No autocast inside; on a GPU, products for 16-bit inputs in TF32, whose error is below that of the inputs."""
    precision = torch.get_float32_matmul_precision() if q.is_cuda and q.element_size() == 2 else None
    if precision is not None:
        torch.set_float32_matmul_precision("high")
    cast = torch.is_autocast_enabled(q.device.type)
    try:
        with torch.autocast(q.device.type, enabled=False) if cast else nullcontext():
            yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)


def register(run, fake, changes=()):
    """run as the operator fastweights::<its name>, which writes into the arguments named in `changes`.

    `torch.library.custom_op` would add 0.1 ms to every call.
    """
    library.define(run.__name__ + torch.library.infer_schema(run, mutates_args=changes))
    library.impl(run.__name__, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastweights::{run.__name__}", fake, lib=library)
    return getattr(torch.ops.fastweights, run.__name__).default


def chunked_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor,
    cu_seqlens: Tensor | None, delta: bool, before: bool, chunk_size: int, save: bool, piece: int | None,
) -> Outputs:  # fmt: skip
    with _own_precision(q):
        return chunked.forward(q, k, v, beta, log_decay, state, cu_seqlens,
                               delta=delta, before=before, chunk_size=chunk_size, save=save, piece=piece)  # fmt: skip


def chunked_fake(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, chunk_size, save, piece):
    shapes = chunked.saved_shapes(q, v, cu_seqlens, chunk_size, delta, piece) if save else []
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        state.new_empty(state.shape),
        [state.new_empty(shape) for shape in shapes],
    )


def chunked_backward(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None,
    state: Tensor, cu_seqlens: Tensor | None, saved: list[Tensor],
    delta: bool, before: bool, chunk_size: int,
) -> Gradients:  # fmt: skip
    how = dict(delta=delta, before=before, chunk_size=chunk_size)
    with _own_precision(q):
        if q.numel() and not saved:  # a transform hid that a gradient would be asked for
            saved = chunked.forward(q, k, v, beta, log_decay, state, cu_seqlens, save=True, piece=None, **how)[2]
        grads = chunked.backward(do, dfinal, q, k, v, beta, log_decay, cu_seqlens, saved, **how)
    dq, dk, dv, dbeta, dlog_decay, dstate = (q.new_empty(0) if x is None else x for x in grads)
    return dq, dk, dv, dbeta, dlog_decay, dstate  # an operator cannot return None


def chunked_backward_fake(do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, saved, delta, before, chunk_size):
    like = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    rates = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (beta, log_decay))
    return *like, *rates, state.new_empty(state.shape)


chunked_op = register(chunked_forward, chunked_fake)
backward_op = register(chunked_backward, chunked_backward_fake)


class Chunked(torch.autograd.Function):
    """`chunked_op` with its gradient."""

    @staticmethod
    def forward(q, k, v, beta, log_decay, state, cu_seqlens, delta, before, chunk_size, save):
        piece = chunked.piece_steps(q, v, cu_seqlens, chunk_size)
        inputs = (q, k, v, beta, log_decay, state, cu_seqlens)
        o, state, saved = chunked_op(*inputs, delta, before, chunk_size, save, piece)
        return o, state, *saved

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, beta, log_decay, state, cu_seqlens, *ctx.how, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(q, k, v, beta, log_decay, state, cu_seqlens, *output[2:])

    @staticmethod
    def backward(ctx, do, dfinal, *unused):
        q, k, v, beta, log_decay, state, cu_seqlens, *saved = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do
        dfinal = torch.zeros_like(state) if dfinal is None else dfinal
        inputs = (do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens)
        run = ChunkedBackward.apply if torch.is_grad_enabled() else backward_op  # for second derivatives, or not
        grads = run(*inputs, saved, *ctx.how)
        grads = [None if x is None else g for x, g in zip((q, k, v, beta, log_decay, state), grads, strict=True)]
        return *grads, None, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold(Chunked.apply, 6, info.batch_size, in_dims, args)


class ChunkedBackward(torch.autograd.Function):
    """`backward_op` with its own gradient, for second derivatives: that of `plain`, the same function."""

    @staticmethod
    def forward(do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, saved, delta, before, chunk_size):
        return backward_op(do, dfinal, q, k, v, beta, log_decay, state, cu_seqlens, saved, delta, before, chunk_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *_, ctx.delta, ctx.before, ctx.chunk_size = inputs
        ctx.undifferentiated = len(inputs) - 8
        ctx.plain = plain
        ctx.save_for_backward(*inputs[:9])

    @staticmethod
    def backward(ctx, *second):
        do, dfinal, *inputs, cu_seqlens = ctx.saved_tensors
        how = dict(delta=ctx.delta, before=ctx.before, chunk_size=ctx.chunk_size)
        wanted = [i for i, x in enumerate(inputs) if x is not None]
        with torch.enable_grad():
            ups = [_watched(x) for x in (do, dfinal)]
            copies = [None if x is None else _watched(x) for x in inputs]
            asked = [copies[i] for i in wanted]
            first = torch.autograd.grad(ctx.plain(*copies, cu_seqlens, **how), asked, ups, create_graph=True,
                                        materialize_grads=True)  # fmt: skip
            found = torch.autograd.grad(first, [*ups, *asked], [second[i] for i in wanted], create_graph=True,
                                        materialize_grads=True)  # fmt: skip
        of = dict(zip(wanted, found[2:], strict=True))
        return *found[:2], *(of.get(i) for i in range(len(inputs))), *[None] * ctx.undifferentiated

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold(ChunkedBackward.apply, 8, info.batch_size, in_dims, args)


def quickly(function, save):
    """What calls an autograd function with least delay: `forward` itself where nothing is saved for a gradient.

    `apply` binds arguments to defaults for the sake of transforms; where none look on, what it calls then will do.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply
    return super(torch.autograd.Function, function).apply if save else function.forward


def _watched(x):
    """x as a node of its own in the graph, so that a gradient for it alone can be asked."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _fold(op, packed_at, n, in_dims, args):
    """The vmap rule of both: the mapped axis joins the batch; packed rows, which have no batch, run in turn.

    packed_at: the position of cu_seqlens. The arrays before it are mapped; what a forward saved, after it, is
    dropped (its rows mix batch and steps), and the backward computes it again.
    """
    if in_dims[packed_at] is not None:
        raise core.FastWeightError(
            "cu_seqlens is mapped by vmap; expected one packing for all: its values decide shapes"
        )
    arrays, packed, rest = list(args[:packed_at]), args[packed_at], list(args[packed_at + 1 :])
    rest = [x.new_empty(0) if isinstance(x, Tensor) else [] if isinstance(x, list) else x for x in rest]
    if op == Chunked.apply:
        rest[-1] = False
    for i, (x, d) in enumerate(zip(arrays, in_dims, strict=False)):
        if x is not None:
            arrays[i] = x.unsqueeze(0).expand(n, *x.shape) if d is None else x.movedim(d, 0)
    if packed is None:
        out = op(*(None if x is None else x.flatten(0, 1) for x in arrays), None, *rest)
        out = tuple(x.unflatten(0, (n, -1)) if x.dim() > 1 else x for x in out)
    else:
        runs = [op(*(None if x is None else x[j] for x in arrays), packed, *rest) for j in range(n)]
        out = tuple(torch.stack(x) if x[0].dim() > 1 else x[0] for x in zip(*runs, strict=True))
    return out, tuple(0 if x.dim() > 1 else None for x in out)


def plain(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size):
    """The same function in differentiable operators, chunk after chunk: what second derivatives go through."""
    wide = state.dtype
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        parts = [
            plain(*(None if x is None else x[:, a:b] for x in (q, k, v, beta, log_decay)), state[n : n + 1], None,
                  delta=delta, before=before, chunk_size=chunk_size)
            for n, (a, b) in enumerate(pairwise(offsets))
        ]  # fmt: skip
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    log_decay = torch.zeros_like(q[..., 0]) if log_decay is None else log_decay
    heads_first = [x.to(wide).transpose(1, 2) for x in (q, k, v, beta, log_decay)]
    S, outputs = state, [v[:, :0].to(wide).transpose(1, 2)]
    with torch.device(q.device):
        for a in range(0, q.shape[1], chunk_size):
            part = [x[:, :, a : a + chunk_size] for x in heads_first]
            S, o = core.chunk(S, *part, delta=delta, before=before, xp=torch)
            outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2).to(v.dtype), S
