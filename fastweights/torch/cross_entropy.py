"""Cross-entropy of an output embedding, a block of logits at a time: they are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated. For upstream gradients `dloss` of the loss
and `dr` of r, with the mean m = r + E_y,

    dz_v = p_v (dloss + E_v . dr - m . dr) - [v = y] dloss
    dn = dz E^T,    dE = n^T dz + dr^T (p - [v = y]),    dc = sum dz

The forward takes some tokens and all words at a time, so that the softmax is whole; the backward all tokens and some
words, so that the gradient of a word is. Letters: N tokens, V words, E as words (V, size), one row per word.
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
ALIGNED = 64  # words are filled up to a multiple of it on a GPU, whose matrix units want aligned rows


def rows(E: Tensor, c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E (size, V) as words (V, size) and c (V,), filled up with words that no token means."""
    missing = -E.shape[1] % ALIGNED if E.is_cuda else 0
    if on_gpu(E) and not E.mT.is_contiguous() and not torch.is_grad_enabled():
        from fastweights.torch.kernels import cross_entropy as kernels

        words = kernels.rows(E, missing, dtype)
    else:
        words = E.to(dtype).mT.contiguous()
        words = torch.nn.functional.pad(words, (0, 0, 0, missing)) if missing else words
    c = torch.nn.functional.pad(c, (0, missing), value=-torch.inf) if missing else c
    return words, c.to(dtype)


def score(
    n: Tensor, words: Tensor, c: Tensor, labels: Tensor, dloss: Tensor, *, gradient: bool, learn: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log sums of the logits and gradients of sum(dloss * loss), a block of tokens at a time.

    Args:
        n: (N, size) features.
        words, c: (V, size) and (V,), the output embedding and its bias.
        labels: (N,).
        dloss: (N,) in float32 or wider, how much each token's loss counts.
        gradient: whether dn is wanted.
        learn: whether dwords and dc are wanted too.

    Returns:
        log sum exp z (N,); dn like n; dwords and dc in float32 or wider. None for what was not asked for.
    """
    log_sum = torch.empty_like(dloss)
    dn = torch.empty_like(n) if gradient else None
    dwords, dc = (torch.zeros_like(x, dtype=dloss.dtype) if learn else None for x in (words, c))
    for a, b in _blocks(n, len(n), len(words)):
        z = torch.addmm(c, n[a:b], words.mT)
        parts = None
        if dn is None:
            _log_sum(z, log_sum[a:b])
            continue
        if not _softmax(z, log_sum[a:b], dloss[a:b], labels[a:b], sums=learn):
            _log_sum(z, log_sum[a:b])
            parts = _gradient(z, None, log_sum[a:b], dloss[a:b], dloss[a:b], labels[a:b], 0, sums=learn)
        torch.mm(z, words, out=dn[a:b])
        if dwords is not None and dc is not None and parts is not None:
            _add_product(dwords, z.mT, n[a:b])
            dc += parts.sum(0)
        del z
    return log_sum, dn, dwords, dc


def losses(n: Tensor, words: Tensor, c: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    """log sum exp z - z_y (N,)."""
    return _less_label(log_sum, n, words, labels, c=c)


def score_backward(
    n: Tensor,
    words: Tensor,
    c: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    r: Tensor | None,
    dloss: Tensor | None,
    dr: Tensor | None,
    dwords: Tensor,
    dc: Tensor,
    beside: Any = None,
) -> Tensor:
    """Back through (loss, r): dn (N, size) in float32 or wider; those of words and c are added to dwords and dc.

    Args:
        n, words, c, labels: as for `score`.
        log_sum, r: what it returned.
        dloss, dr: gradients of the loss (N,) and of r (N, size); None where there is none.
        dwords, dc: grow in place.
        beside: a `Beside` on whose stream they do, if given; it holds what they are made of.
    """
    wide, N, height = log_sum.dtype, len(n), len(n) if dr is None else 2 * len(n)
    offset = dloss = torch.zeros_like(log_sum) if dloss is None else dloss.to(wide).contiguous()
    if dr is not None and r is not None:
        dr = dr.contiguous()
        offset = _less_label(dloss, dr, words, labels, r=r)
    dn = both = None
    for a, b in _blocks(n, len(words), height):
        block = torch.empty(height, b - a, dtype=n.dtype, device=n.device)
        torch.addmm(c[a:b], n, words[a:b].mT, out=block[:N])
        if dr is not None:
            torch.mm(dr, words[a:b].mT, out=block[N:])
        e = None if dr is None else block[N:]
        sums = _gradient(block[:N], e, log_sum, offset, dloss, labels, a, sums=True)
        with nullcontext() if beside is None else beside.fork("words", given=(block, n, dr, sums)):
            if both is None:
                both = n if dr is None else torch.cat([n, dr])
            _add_product(dwords[a:b], block.mT, both)
            dc[a:b] += sums.sum(0)
        if dn is None:
            dn = wide_product(block[:N], words[a:b], wide)
        else:
            _add_product(dn, block[:N], words[a:b])
        del block, e
    return torch.zeros_like(n, dtype=wide) if dn is None else dn


class Head(torch.autograd.Function):
    """(loss (N,), r (N, size), log sum exp z (N,)) for n (N, size), words (V, size), c (V,), labels (N,).

    r is empty when not wanted.
    """

    @staticmethod
    def forward(n, words, c, labels, want_r):
        """Losses and, where wanted, r = softmax(z) words - words[label], block by block of the vocabulary."""
        ones = torch.ones(labels.shape, dtype=accumulation_dtype(n), device=n.device)
        log_sum, r, _, _ = score(n, words, c, labels, ones, gradient=want_r, learn=False)
        return losses(n, words, c, labels, log_sum), n.new_empty(0) if r is None else r, log_sum

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs, r and log sum exp z: with it the logits of a block can be made again one block at a time."""
        n, words, c, labels, ctx.want_r = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(n, words, c, labels, output[1], output[2])

    @staticmethod
    def backward(ctx, dloss, dr, _):
        """Gradients of n, words and c from those of the losses and of r."""
        n, words, c, labels, r, log_sum = ctx.saved_tensors
        dr = dr if ctx.want_r else None  # of an empty r torch.compile makes zeros
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a second derivative
            plain = lambda n, words, c: _plain(n, words, c, labels)  # noqa: E731
            return *differentiable(plain, (n, words, c), ctx.needs_input_grad, (dloss, dr)), None, None
        dwords, dc = (torch.zeros_like(x, dtype=log_sum.dtype) for x in (words, c))
        dn = score_backward(n, words, c, labels, log_sum, r, dloss, dr, dwords, dc)
        return dn.to(n.dtype), dwords.to(words.dtype), dc.to(c.dtype), None, None


class Summed(torch.autograd.Function):
    """sum(weights * loss) for n (N, size), words (V, size), c (V,), labels and weights (N,).

    The gradients are made with the value, while the logits are there: they are not computed a second time.
    """

    @staticmethod
    def forward(ctx, n, words, c, labels, weights):
        """The sum; its gradients are kept, those of words and c in float32 or wider."""
        log_sum, dn, dwords, dc = score(n, words, c, labels, weights, gradient=True, learn=True)
        ctx.save_for_backward(dn, dwords, dc)
        ctx.dtypes = n.dtype, words.dtype, c.dtype
        return (losses(n, words, c, labels, log_sum) * weights).sum()

    @staticmethod
    @once("the sum of `LanguageModel.score(...).loss`")
    def backward(ctx, dvalue):
        """The gradients times that of the sum."""
        found = ((g * dvalue).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *found, None, None


def _add_product(out, a, b):
    """out += a b, where out may be wider than a and b."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and torch.version.cuda and not torch.compiler.is_compiling():  # which does not know this one
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out += a @ b


def wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a b, of matrices or batches of them, in the wider dtype; in one go where the device can."""
    if a.dtype != wide and a.is_cuda and torch.version.cuda and not torch.compiler.is_compiling():
        return (torch.ops.aten.bmm if a.dim() == 3 else torch.ops.aten.mm).dtype(a, b, wide)
    return (a @ b).to(wide)


def _less_label(base, n, words, labels, *, r=None, c=None):
    """base - n . (E_y + r) - c_y (N,), without what is None."""
    if on_gpu(n):
        from fastweights.torch.kernels import cross_entropy as kernels

        return kernels.less_label(base, n, words, labels, r, c)
    mine = words.index_select(0, labels).to(accumulation_dtype(n))
    less = base - (n * (mine if r is None else mine + r)).sum(1)
    return less if c is None else less - c.index_select(0, labels)


def _softmax(z, log_sum, dloss, labels, *, sums):
    """Whether log_sum and (p - [v = y]) dloss, in the place of z, were made in one go: of few words, and no sums."""
    if sums or not on_gpu(z):
        return False
    from fastweights.torch.kernels import cross_entropy as kernels

    if z.shape[1] > kernels.WHOLE:
        return False
    kernels.softmax(z, log_sum, dloss, labels)
    return True


def _log_sum(z, out):
    """Log of the summed exponentials of each row of z, into `out`."""
    if on_gpu(z):
        from fastweights.torch.kernels import cross_entropy as kernels

        kernels.log_sum(z, out)
    else:
        torch.logsumexp(z.to(out.dtype), 1, out=out)


def _gradient(z, e, log_sum, offset, dloss, labels, first, *, sums):
    """From the logits z and e = E dr of a block whose first word is `first`: z becomes dz and e p - [v = y].

    Returns the sum of dz over tokens, if asked for, in parts (any number, words).
    """
    if on_gpu(z):
        from fastweights.torch.kernels import cross_entropy as kernels

        return kernels.gradient(z, e, log_sum, offset, dloss, labels, first, sums=sums)
    p = z.to(log_sum.dtype).sub_(log_sum[:, None]).exp_()
    dz = p * (offset[:, None] if e is None else offset[:, None] + e.to(p.dtype))
    if torch.compiler.is_compiling() or z.is_meta:  # how many labels are here depends on what they are
        hot = (labels[:, None] - first == torch.arange(z.shape[1], device=z.device)).to(p.dtype)
        dz, p = dz - hot * dloss[:, None], p - hot
    else:
        here = (labels >= first) & (labels < first + z.shape[1])
        at = (labels - first).clamp(0, z.shape[1] - 1)[:, None]
        dz.scatter_add_(1, at, torch.where(here, -dloss, 0.0).to(dz.dtype)[:, None])
        if e is not None:
            p.scatter_add_(1, at, -here.to(p.dtype)[:, None])
    if e is not None:
        e.copy_(p)
    z.copy_(dz)
    return dz.sum(0, keepdim=True) if sums else None


@cache
def _triton() -> bool:
    """Whether Triton is installed, asked once."""
    return find_spec("triton") is not None


def on_gpu(x: Tensor) -> bool:
    """Whether the kernels run on x; `torch.compile` fuses the plain form itself, and cannot trace these inside it."""
    if torch.compiler.is_compiling():  # asked first: the compiler cannot trace the question whether Triton is there
        return False
    return x.is_cuda and x.dtype != torch.float64 and _triton()


def _blocks(like, n, width):
    """Ranges that cover n, alike in length, of at most BLOCK numbers when each of n is `width` of them."""
    most = max(1, BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, width))
    length = -(-n // max(1, -(-n // most)))
    if most >= ALIGNED:
        length = min(length + -length % ALIGNED, most - most % ALIGNED)
    return [(a, min(a + length, n)) for a in range(0, n, max(1, length))]


def scored(
    n: Tensor, words: Tensor, c: Tensor, labels: Tensor, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`head` for an output embedding that `rows` made ready; without the gradient at n when not asked for."""
    flat = n.to(words.dtype).flatten(0, -2).contiguous()
    with outside_autocast(n), _there(n):
        if is_transformed():
            loss, r = _plain(flat, words, c, labels.flatten())
            return loss.view(labels.shape), r.view(n.shape)
        loss, r, _ = Head.apply(flat, words, c, labels.flatten(), gradient)
    return loss.view(labels.shape), r.view(n.shape) if gradient else None


def _plain(n, words, c, labels):
    """(loss (N,), r (N, size)) as `Head` has them, in differentiable operations that hold all logits."""
    log_p = torch.log_softmax((n @ words.mT + c).to(accumulation_dtype(n)), -1)
    loss = -log_p.gather(1, labels[:, None])[:, 0]
    return loss, log_p.exp().to(words.dtype) @ words - words[labels]


def _there(n):
    """Where kernels are launched on the device of n; a compiler does that by itself."""
    return torch.cuda.device_of(n) if n.is_cuda and not torch.compiler.is_compiling() else nullcontext()


def _ready(n: Tensor, E: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The output embedding as `rows`, in the dtype that a product with n has here."""
    return rows(E, c, autocast_dtype(n) or n.dtype)


def head(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (...) per token in float32 or wider and its gradient at n (..., size), for E (size, V) and labels (...)."""
    loss, r = scored(n, *_ready(n, E, c), labels)
    assert r is not None
    return loss, r


def loss(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """Loss (...) per token of features n (..., size), for E (size, V), c (V,) and labels (...)."""
    return scored(n, *_ready(n, E, c), labels, gradient=False)[0]


def summed(n: Tensor, E: Tensor, c: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * loss) of features n (..., size), as `loss` has it, for weights (...), which have no gradient.

    For training: the gradients are made with the sum, in three products of tokens and words where `loss` needs four.
    """
    if is_transformed():
        return (loss(n, E, c, labels) * weights).sum()
    words, c = _ready(n, E, c)
    flat, counts = n.to(words.dtype).flatten(0, -2).contiguous(), weights.to(accumulation_dtype(n)).flatten()
    with outside_autocast(n), _there(n):
        return Summed.apply(flat, words, c, labels.flatten(), counts)
