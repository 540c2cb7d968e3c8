"""Softmax of a block of logits in one pass each way, for head.py on a GPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(z, top, total, shrink, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # one program: one token's row of the block
    at = z + row * stride
    column = tl.arange(0, BLOCK)
    old = tl.load(top + row)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for a in range(0, width, BLOCK):
        best = tl.maximum(best, tl.load(at + a + column, mask=a + column < width, other=-float("inf")).to(tl.float32))
    new = tl.maximum(old, tl.max(best, 0))
    added = tl.zeros([BLOCK], tl.float32)
    for a in range(0, width, BLOCK):
        inside = a + column < width
        p = tl.exp(tl.load(at + a + column, mask=inside, other=-float("inf")).to(tl.float32) - new)
        added += p
        tl.store(at + a + column, p.to(z.dtype.element_ty), mask=inside)
    factor = tl.exp(old - new)
    tl.store(top + row, new)
    tl.store(total + row, tl.load(total + row) * factor + tl.sum(added, 0))
    tl.store(shrink + row, factor)


@triton.jit
def _backward(z, e, log_sum, offset, of_loss, label, first, width, stride, HAS_E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lse, off, ofl, y = (
        tl.load(log_sum + row),
        tl.load(offset + row),
        tl.load(of_loss + row),
        tl.load(label + row) - first,
    )
    column = tl.arange(0, BLOCK)
    for a in range(0, width, BLOCK):
        inside = a + column < width
        at = row * stride + a + column
        p = tl.exp(tl.load(z + at, mask=inside, other=-float("inf")).to(tl.float32) - lse)
        hit = a + column == y
        factor = off
        if HAS_E:
            factor = off + tl.load(e + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(e + at, (p - tl.where(hit, 1.0, 0.0)).to(e.dtype.element_ty), mask=inside)
        dz = p * factor - tl.where(hit, ofl, 0.0)
        tl.store(z + at, dz.to(z.dtype.element_ty), mask=inside)


def softmax_block(z: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """z (N, width) becomes exp(z - top), with top and total (N,) updated in place; returns what shrinks older sums."""
    shrink = torch.empty_like(top)
    if z.numel():
        _forward[(len(z),)](z, top, total, shrink, z.shape[1], z.stride(0), BLOCK=1024, num_warps=4)
    return shrink


def gradient_block(z, e, log_sum, offset, of_loss, labels, first):
    """z becomes dz and e, if given, p - [v = y]; see head.py."""
    if z.numel():
        _backward[(len(z),)](z, z if e is None else e, log_sum, offset, of_loss, labels, first, z.shape[1], z.stride(0),
                             HAS_E=e is not None, BLOCK=1024, num_warps=4)  # fmt: skip
