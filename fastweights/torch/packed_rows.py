"""The convolution of packed sequences on a CPU: each after the W - 1 inputs before it, as one longer row.

Sequences of one length are rows side by side, computed as a batch that is not packed. A compiler cannot see lengths, so
it gets an operator around the same code: compiled and eager numbers are equal to the last bit.
"""

import torch
from torch import Tensor

from fastweights.torch.hand_gradients import depthwise, depthwise_backward
from fastweights.torch.packing import Sequences


def convolve(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(y (1, T, channels), the last W - 1 inputs of each sequence (N, W - 1, channels)) of x (1, T, channels).

    Args:
        x: sequences laid end to end.
        weight: (W, channels), W at least 2; the last row multiplies the token itself.
        before: (N, W - 1, channels), the inputs before each sequence; zeros when absent.
        cu_seqlens: (N + 1,) offsets.
    """
    call = _operator if torch.compiler.is_compiling() else _convolve
    return call(x, weight, before, cu_seqlens)


def _convolve(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`convolve` in operations that autograd sees."""
    lengths, rows, before = _given(x, weight, before, cu_seqlens)
    if rows:
        row = _beside(x, before, lengths, rows)
        return depthwise(row, weight).flatten(0, 1)[None], torch.cat([row[:, lengths[0] :], before[rows:]])
    row, sizes = _longer(x, before, lengths), _places(lengths, len(weight))
    y = depthwise(row[None], weight)[0].split(sizes[:-1])
    return torch.cat(y[::2])[None], torch.stack(row.split(sizes)[1::2])


def _given(x, weight, before, cu_seqlens):
    """Lengths, how many rows of one length they are (0 where they differ), and the inputs before each sequence."""
    lengths = Sequences.of(cu_seqlens, x.shape[1]).length.tolist()
    before = x.new_zeros(len(lengths), len(weight) - 1, x.shape[2]) if before is None else before.to(x.dtype)
    real = [n for n in lengths if n]
    alike = len(set(real)) == 1 and not any(lengths[len(real) :])  # rows, and empty sequences after them
    return lengths, len(real) if alike else 0, before


def _beside(x, before, lengths, rows):
    """Rows of one length side by side, each after its inputs before."""
    return torch.cat([before[:rows], x[0].unflatten(0, (rows, -1))], 1)


def _longer(x, before, lengths):
    """One row (L, channels) of all sequences, each after its inputs before."""
    pairs = zip(before.unbind(0), x[0].split(lengths), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def _places(lengths, W):
    """Outputs of each sequence in that row, and the W - 1 places after it, which belong to none."""
    return [size for n in lengths for size in (n, W - 1)]


@torch.library.custom_op("fastweights::packed_rows", mutates_args=())
def _operator(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _convolve(x, weight, before, cu_seqlens)


@_operator.register_fake
def _(x, weight, before, cu_seqlens):
    W, channels = weight.shape
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty(cu_seqlens.shape[0] - 1, W - 1, channels)


@torch.library.custom_op("fastweights::packed_rows_backward", mutates_args=())
def _backward(
    dy: Tensor, dlast: Tensor, x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, rows, inputs = _given(x, weight, before, cu_seqlens)
    W, channels = weight.shape
    if rows:
        row, up = _beside(x, inputs, lengths, rows), dy[0].unflatten(0, (rows, -1))
        drow, dweight = depthwise_backward(row, weight, up)
        drow[:, lengths[0] :] += dlast[:rows]
        dx, dbefore = drow[:, W - 1 :].flatten(0, 1)[None], torch.cat([drow[:, : W - 1], dlast[rows:]])
    else:
        row, none = _longer(x, inputs, lengths), dy.new_zeros(W - 1, channels)
        up = torch.cat([part for own in dy[0].split(lengths) for part in (own, none)][:-1])
        drow, dweight = depthwise_backward(row[None], weight, up[None])
        for part, d in zip(drow[0].split(_places(lengths, W))[1::2], dlast, strict=True):
            part += d
        parts = drow[0].split([size for n in lengths for size in (W - 1, n)])
        dx, dbefore = torch.cat(parts[1::2])[None], torch.stack(parts[::2])
    return dx.to(x.dtype).contiguous(), dweight, dbefore.to(x.dtype if before is None else before.dtype)


@_backward.register_fake
def _(dy, dlast, x, weight, before, cu_seqlens):
    W, channels = weight.shape
    dbefore = x.new_empty(cu_seqlens.shape[0] - 1, W - 1, channels, dtype=(x if before is None else before).dtype)
    return x.new_empty(x.shape), torch.empty_like(weight), dbefore


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy, dlast):
    x, weight, before, cu_seqlens = ctx.saved_tensors
    dx, dweight, dbefore = _backward(dy, dlast, x, weight, before, cu_seqlens)
    return dx, dweight, None if before is None else dbefore, None


_operator.register_autograd(_gradients, setup_context=_keep)
