"""Cross-entropy of an output embedding, a block of logits at a time: they are never held whole.

With features n, output embedding E and its bias c, logits are z = n E + c. With p = softmax(z) and y the label, the
loss is log sum exp z - z_y, and its gradient at n is r = sum_v p_v E_v - E_y. Both are returned and both can be
differentiated: a Fast Weight Layer learns from r. For upstream gradients `dloss` of the loss and `dr` of r, with the
mean m = r + E_y,

    dz_v = p_v (dloss + E_v . dr - m . dr) - [v = y] dloss
    dn = dz E^T,    dE = n^T dz + dr^T (p - [v = y]),    dc = sum dz

The forward pass takes some tokens and the whole vocabulary at a time, so that the softmax is whole; the backward pass
all tokens and some words, so that the gradient of a word is.

A user's call comes through `head`, `loss` or `summed`, whose E is (size, V) as the layers keep it. What is below them
takes `embedding` (V, size), E as one contiguous row per word, and `bias` (V,), c, both in the dtype of the products, as
`embedding_rows` returns them. N tokens, V words. On a GPU the passes over logits are kernels/cross_entropy.py.
"""

from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastweights.torch.derivatives import differentiable, once
from fastweights.torch.dtypes import accumulation_dtype, autocast_dtype, outside_autocast
from fastweights.torch.private import is_transformed

BLOCK = {"cpu": 2**25, "cuda": 2**27}  # logits held at a time
ALIGNED = 64  # on a GPU rows are added to the embedding up to a multiple of it: matrix units want aligned sizes


def embedding_rows(E: Tensor, c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E (size, V) as embedding (V, size) and c (V,) as bias, in `dtype`; on a GPU V is rounded up to ALIGNED.

    Rows that this adds are 0 and have the bias -inf: words of probability 0.
    """
    missing = -E.shape[1] % ALIGNED if E.is_cuda else 0
    if on_gpu(E) and not E.mT.is_contiguous() and not torch.is_grad_enabled():
        from fastweights.torch.kernels import cross_entropy as kernels

        embedding = kernels.rows(E, missing, dtype)
    else:
        embedding = E.to(dtype).mT.contiguous()
        embedding = torch.nn.functional.pad(embedding, (0, 0, 0, missing)) if missing else embedding
    bias = torch.nn.functional.pad(c, (0, missing), value=-torch.inf) if missing else c
    return embedding, bias.to(dtype)


def score(
    n: Tensor, embedding: Tensor, bias: Tensor, labels: Tensor, dloss: Tensor, *, want_dn: bool, want_dembedding: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log sums of the logits and gradients of sum(dloss * loss), a block of tokens at a time.

    Args:
        n: (N, size), features.
        embedding, bias: (V, size) and (V,).
        labels: (N,).
        dloss: (N,) in float32 or wider, the factor of each token's loss in the sum.
        want_dn: whether to compute dn.
        want_dembedding: whether to compute dembedding and dbias too.

    Returns:
        log sum exp z (N,); dn like n; dembedding and dbias in the dtype of dloss. None for what was not wanted.
    """
    log_sum = torch.empty_like(dloss)
    dn = torch.empty_like(n) if want_dn else None
    dembedding, dbias = (torch.zeros_like(x, dtype=dloss.dtype) if want_dembedding else None for x in (embedding, bias))
    for start, stop in _block_ranges(n, len(n), len(embedding)):
        part = slice(start, stop)
        z = torch.addmm(bias, n[part], embedding.mT)
        partial_sums = None
        if dn is None:
            _log_sum(z, log_sum[part])
            continue
        if not _fused_softmax(z, log_sum[part], dloss[part], labels[part], want_sums=want_dembedding):
            _log_sum(z, log_sum[part])
            partial_sums = _gradient(
                z, None, log_sum[part], dloss[part], dloss[part], labels[part], 0, want_sums=want_dembedding
            )
        torch.mm(z, embedding, out=dn[part])
        if dembedding is not None and dbias is not None and partial_sums is not None:
            add_product(dembedding, z.mT, n[part])
            dbias += partial_sums.sum(0)
        del z
    return log_sum, dn, dembedding, dbias


def losses(n: Tensor, embedding: Tensor, bias: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    """The loss log sum exp z - z_y (N,) of each token, from `log_sum` of `score`."""
    return _minus_label_logit(log_sum, n, embedding, labels, bias=bias)


def score_backward(
    n: Tensor,
    embedding: Tensor,
    bias: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    r: Tensor | None,
    dloss: Tensor | None,
    dr: Tensor | None,
    dembedding: Tensor,
    dbias: Tensor,
    side_stream: Any = None,
) -> Tensor:
    """The gradient of n (N, size), in float32 or wider, from gradients of the losses and of r.

    Args:
        n, embedding, bias, labels: as for `score`.
        log_sum: log sum exp z (N,), as `score` returned it.
        r: (N, size), the gradient of each token's loss at n: dn of `score` with ones as dloss. None without dr.
        dloss: (N,), gradients of the losses; None for zeros.
        dr: (N, size), gradient of r; None for zeros.
        dembedding, dbias: gradients of embedding and bias, in the dtype of log_sum; grow in place.
        side_stream: a `SideStream` on which dembedding and dbias are computed; the caller joins it.
    """
    wide, N, height = log_sum.dtype, len(n), len(n) if dr is None else 2 * len(n)
    offset = dloss = torch.zeros_like(log_sum) if dloss is None else dloss.to(wide).contiguous()
    if dr is not None and r is not None:
        dr = dr.contiguous()
        offset = _minus_label_logit(dloss, dr, embedding, labels, r=r)
    dn = n_and_dr = None
    for start, stop in _block_ranges(n, len(embedding), height):
        words = embedding[start:stop]
        block = torch.empty(height, stop - start, dtype=n.dtype, device=n.device)  # z, and below it E dr
        torch.addmm(bias[start:stop], n, words.mT, out=block[:N])
        if dr is not None:
            torch.mm(dr, words.mT, out=block[N:])
        e = None if dr is None else block[N:]
        partial_sums = _gradient(block[:N], e, log_sum, offset, dloss, labels, start, want_sums=True)
        keep = (block, n, dr, partial_sums)
        with nullcontext() if side_stream is None else side_stream.fork("embedding", keep=keep):
            if n_and_dr is None:
                n_and_dr = n if dr is None else torch.cat([n, dr])
            add_product(dembedding[start:stop], block.mT, n_and_dr)
            dbias[start:stop] += partial_sums.sum(0)
        if dn is None:
            dn = wide_product(block[:N], words, wide)
        else:
            add_product(dn, block[:N], words)
        del block, e
    return torch.zeros_like(n, dtype=wide) if dn is None else dn


class LossAndGradient(torch.autograd.Function):
    """(loss (N,), r (N, size), log sum exp z (N,)) for n (N, size), embedding (V, size), bias (V,), labels (N,).

    r is the gradient of each loss at n; an empty tensor when not wanted.
    """

    @staticmethod
    def forward(n, embedding, bias, labels, want_r):
        """Losses and, where wanted, r = softmax(z) embedding - embedding[label], block by block of tokens."""
        ones = torch.ones(labels.shape, dtype=accumulation_dtype(n), device=n.device)
        log_sum, r, _, _ = score(n, embedding, bias, labels, ones, want_dn=want_r, want_dembedding=False)
        return losses(n, embedding, bias, labels, log_sum), n.new_empty(0) if r is None else r, log_sum

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs, r and log sum exp z, from which the backward pass recomputes logits block by block."""
        n, embedding, bias, labels, ctx.want_r = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(n, embedding, bias, labels, output[1], output[2])

    @staticmethod
    def backward(ctx, dloss, dr, _):
        """Gradients of n, embedding and bias from those of the losses and of r."""
        n, embedding, bias, labels, r, log_sum = ctx.saved_tensors
        dr = dr if ctx.want_r else None  # torch.compile passes zeros as the gradient of an empty r
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a second derivative

            def with_all_logits(n, embedding, bias):
                return _with_all_logits(n, embedding, bias, labels)

            inputs = n, embedding, bias
            return *differentiable(with_all_logits, inputs, ctx.needs_input_grad, (dloss, dr)), None, None
        dembedding, dbias = (torch.zeros_like(x, dtype=log_sum.dtype) for x in (embedding, bias))
        dn = score_backward(n, embedding, bias, labels, log_sum, r, dloss, dr, dembedding, dbias)
        return dn.to(n.dtype), dembedding.to(embedding.dtype), dbias.to(bias.dtype), None, None


class SummedLoss(torch.autograd.Function):
    """sum(weights * loss) for n (N, size), embedding (V, size), bias (V,), labels and weights (N,).

    The gradients are computed together with the value, from the same logits.
    """

    @staticmethod
    def forward(ctx, n, embedding, bias, labels, weights):
        """The sum; keeps its gradients, those of embedding and bias in float32 or wider."""
        log_sum, dn, dembedding, dbias = score(n, embedding, bias, labels, weights, want_dn=True, want_dembedding=True)
        ctx.save_for_backward(dn, dembedding, dbias)
        ctx.dtypes = n.dtype, embedding.dtype, bias.dtype
        return (losses(n, embedding, bias, labels, log_sum) * weights).sum()

    @staticmethod
    @once("the sum of `LanguageModel.score(...).loss`")
    def backward(ctx, dvalue):
        """The kept gradients times the gradient of the sum."""
        gradients = ((g * dvalue).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *gradients, None, None


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, of matrices; out may have a wider dtype than a and b, and nothing is rounded to theirs then."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and torch.version.cuda and not torch.compiler.is_compiling():  # which does not know this one
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out += a @ b


def wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a b, of matrices or batches of them, in the dtype `wide`; a single operation where the device has one."""
    if a.dtype != wide and a.is_cuda and torch.version.cuda and not torch.compiler.is_compiling():
        return (torch.ops.aten.bmm if a.dim() == 3 else torch.ops.aten.mm).dtype(a, b, wide)
    return (a @ b).to(wide)


def _minus_label_logit(base, n, embedding, labels, *, r=None, bias=None):
    """base - n . (E_y + r) - c_y (N,), y the label; without r or c where they are None."""
    if on_gpu(n):
        from fastweights.torch.kernels import cross_entropy as kernels

        return kernels.less_label(base, n, embedding, labels, r, bias)
    label_rows = embedding.index_select(0, labels).to(accumulation_dtype(n))
    result = base - (n * (label_rows if r is None else label_rows + r)).sum(1)
    return result if bias is None else result - bias.index_select(0, labels)


def _fused_softmax(z, log_sum, dloss, labels, *, want_sums):
    """Write log sum exp z, and (p - [v = y]) dloss in the place of z, by one kernel if it can.

    Returns whether it did: the kernel runs on a GPU, for vocabularies that one program can hold, without sums.
    """
    if want_sums or not on_gpu(z):
        return False
    from fastweights.torch.kernels import cross_entropy as kernels

    if z.shape[1] > kernels.WHOLE:
        return False
    kernels.softmax(z, log_sum, dloss, labels)
    return True


def _log_sum(z, out):
    """Write the log of the summed exponentials of each row of z into `out`."""
    if on_gpu(z):
        from fastweights.torch.kernels import cross_entropy as kernels

        kernels.log_sum(z, out)
    else:
        torch.logsumexp(z.to(out.dtype), 1, out=out)


def _gradient(z, e, log_sum, offset, dloss, labels, first, *, want_sums):
    """For a block of words: logits z become dz = p (offset + e) - [v = y] dloss, and e becomes p - [v = y], in place.

    Args:
        z: (N, words), logits of the block.
        e: (N, words), E dr; None for 0.
        log_sum, offset, dloss: (N,), log sum exp z; dloss - m . dr; the gradient of the loss.
        labels: (N,).
        first: number of the block's first word.
        want_sums: whether to return sums.

    Returns:
        dz summed over some tokens each (any number, words), whose total is the gradient of the bias; or None.
    """
    if on_gpu(z):
        from fastweights.torch.kernels import cross_entropy as kernels

        return kernels.gradient(z, e, log_sum, offset, dloss, labels, first, sums=want_sums)
    p = z.to(log_sum.dtype).sub_(log_sum[:, None]).exp_()
    dz = p * (offset[:, None] if e is None else offset[:, None] + e.to(p.dtype))
    if torch.compiler.is_compiling() or z.is_meta:  # no indices: which labels lie in the block depends on values
        is_label = (labels[:, None] - first == torch.arange(z.shape[1], device=z.device)).to(p.dtype)
        dz, p = dz - is_label * dloss[:, None], p - is_label
    else:
        in_block = (labels >= first) & (labels < first + z.shape[1])
        column = (labels - first).clamp(0, z.shape[1] - 1)[:, None]
        dz.scatter_add_(1, column, torch.where(in_block, -dloss, 0.0).to(dz.dtype)[:, None])
        if e is not None:
            p.scatter_add_(1, column, -in_block.to(p.dtype)[:, None])
    if e is not None:
        e.copy_(p)
    z.copy_(dz)
    return dz.sum(0, keepdim=True) if want_sums else None


@cache
def _has_triton() -> bool:
    """Whether Triton is installed, looked up once."""
    return find_spec("triton") is not None


def on_gpu(x: Tensor) -> bool:
    """Whether the kernels run on x; `torch.compile` fuses the plain form itself, and cannot trace these inside it."""
    if torch.compiler.is_compiling():  # asked first: the compiler cannot trace the question whether Triton is there
        return False
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


def _block_ranges(like, count, width):
    """Ranges (start, stop) that cover 0 to count, of about equal length.

    A range has at most BLOCK numbers on the device of `like`, when each of `count` rows or columns has `width`.
    """
    max_length = max(1, BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, width))
    length = -(-count // max(1, -(-count // max_length)))
    if max_length >= ALIGNED:
        length = min(length + -length % ALIGNED, max_length - max_length % ALIGNED)
    return [(start, min(start + length, count)) for start in range(0, count, max(1, length))]


def loss_and_gradient(
    n: Tensor, embedding: Tensor, bias: Tensor, labels: Tensor, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """As `head`, for an output embedding that `embedding_rows` prepared; gradient=False leaves the gradient None."""
    flat = n.to(embedding.dtype).flatten(0, -2).contiguous()
    with outside_autocast(n), _device_of(n):
        if is_transformed():
            loss, r = _with_all_logits(flat, embedding, bias, labels.flatten())
            return loss.view(labels.shape), r.view(n.shape)
        loss, r, _ = LossAndGradient.apply(flat, embedding, bias, labels.flatten(), gradient)
    return loss.view(labels.shape), r.view(n.shape) if gradient else None


def _with_all_logits(n, embedding, bias, labels):
    """(loss (N,), r (N, size)) of `LossAndGradient` in differentiable operations, which hold all logits."""
    log_p = torch.log_softmax((n @ embedding.mT + bias).to(accumulation_dtype(n)), -1)
    loss = -log_p.gather(1, labels[:, None])[:, 0]
    return loss, log_p.exp().to(embedding.dtype) @ embedding - embedding[labels]


def _device_of(n):
    """A context in which kernels are launched on the device of n; a compiler does that by itself."""
    return torch.cuda.device_of(n) if n.is_cuda and not torch.compiler.is_compiling() else nullcontext()


def _prepared(n: Tensor, E: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """`embedding_rows` in the dtype that a product with n has here, with autocast or without."""
    return embedding_rows(E, c, autocast_dtype(n) or n.dtype)


def head(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token and its gradient at the features.

    Args:
        n: (..., size), features.
        E, c: (size, V) and (V,), output embedding and bias.
        labels: (...).

    Returns:
        Losses (...) in float32 or wider, and r (..., size). Both can be differentiated.
    """
    loss, r = loss_and_gradient(n, *_prepared(n, E, c), labels)
    assert r is not None
    return loss, r


def loss(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """The loss (...) of each token, without its gradient; arguments as for `head`."""
    return loss_and_gradient(n, *_prepared(n, E, c), labels, gradient=False)[0]


def summed(n: Tensor, E: Tensor, c: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * loss), as `loss` has it, for weights (...), which get no gradient.

    For training: gradients are computed with the sum, in three products of tokens and words where `loss` needs four.
    """
    if is_transformed():
        return (loss(n, E, c, labels) * weights).sum()
    embedding, bias = _prepared(n, E, c)
    flat, flat_weights = n.to(embedding.dtype).flatten(0, -2).contiguous(), weights.to(accumulation_dtype(n)).flatten()
    with outside_autocast(n), _device_of(n):
        return SummedLoss.apply(flat, embedding, bias, labels.flatten(), flat_weights)
