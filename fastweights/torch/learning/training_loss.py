"""What a held, refreshed Fast Weight Layer is trained by: one number, computed with its gradients.

On a GPU by products with earlier tokens (dual.py), on a CPU by weights of every row's own (walk.py).

Rows may hold several documents and may go on with the document of an earlier call. They are laid out in chunks, a new
document from a new chunk on, so that shapes depend on the batch, its length and the most documents in a row alone, and
a CUDA graph can capture all of it. Nothing here waits for a device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights import fwl
from fastweights.fwl_config import FWLConfig
from fastweights.refresh import RefreshState
from fastweights.torch import cross_entropy, graphs
from fastweights.torch.derivatives import once
from fastweights.torch.dtypes import accumulation_dtype, autocast_dtype
from fastweights.torch.framework import OPS
from fastweights.torch.learning import dual, walk
from fastweights.torch.learning.steps import used_steps
from fastweights.torch.private import has_modes, is_watched
from fastweights.torch.side_stream import SideStream

DEVICES = ("cuda", "cpu")  # where it is the faster form
WALKED = ("cpu",)  # where rows have weights of their own; elsewhere products with earlier tokens take their place
LONGEST = 8192  # tokens of a row: what earlier tokens cost grows with their number, weights of a row's own do not


class Trained(NamedTuple):
    """What `objective` returns: value, the only one that can be differentiated; loss and slow (B, T); the state.

    On a CPU slow is 0 in the first chunks where no token counts.
    """

    value: Tensor
    loss: Tensor
    slow: Tensor
    state: RefreshState


class Layout(NamedTuple):
    """Where tokens go: place (B, T) of each new token among the n C of its row; last (B,), the row's last chunk.

    left (B,): tokens of that chunk.  mask (B, n, n), kept (B, n): as `dual.Rows` has them.
    """

    place: Tensor
    last: Tensor
    left: Tensor
    mask: Tensor
    kept: Tensor


def unfit(config: FWLConfig, device: str, length: int) -> str | None:
    """Why rows of `length` tokens are trained in another way on this kind of device, or None."""
    if config.refresh is None:
        return "the layer is not refreshed"
    if config.within != "held":
        return f"within is {config.within!r}"
    if device not in DEVICES:
        return f"it was not tried on this device ({device})"
    if device not in WALKED and length + config.refresh > LONGEST:
        return f"rows are longer than {LONGEST} tokens"
    return None


def refuses(config: FWLConfig, x: Tensor, weights: Tensor, state: Any, *, packed: bool) -> str | None:
    """Why `objective` cannot serve these arguments, or None."""
    if not torch.is_grad_enabled():
        return "nothing is differentiated"
    if is_watched() or has_modes():
        return "the call is traced"
    if packed and config.normalizer == "sequence":
        return "normalizer is 'sequence' and rows hold several documents"
    if weights.requires_grad or (state is not None and any(y.requires_grad for y in state)):
        return "weights or the state have gradients"
    return unfit(config, x.device.type, x.shape[1])


def objective(
    config: FWLConfig,
    p: dict[str, Tensor],
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    state: RefreshState | None = None,
    *,
    starts: Tensor | None = None,
    keep: Tensor | None = None,
    documents: int = 1,
    slow_share: float = 0.0,
) -> Trained:
    """The sum over tokens of weights (1 - slow_share) loss + weights slow_share slow_loss.

    Args:
        config, p: what the block is, and its parameters by name.
        x: (B, T, D).
        labels, weights: (B, T).
        state: of B rows, to go on from; nothing was read before when absent.
        starts: (B, T), where documents start; nowhere when absent.
        keep: (B,), 0 where a row does not go on with what the state has of it.
        documents: the most documents in a row, or more.
        slow_share: how much the loss of the trained weights alone counts.
    """
    C, (B, T, _) = config.refresh, x.shape
    assert C is not None
    low, wide = autocast_dtype(x) or x.dtype, accumulation_dtype(x)
    n = -(-(T if state is None else T + C) // C) + documents - 1
    with torch.no_grad():
        waiting = labels.new_zeros(B) if state is None else state.waiting
        layout = lay_out(config, starts, waiting, keep, T, n, wide, like=labels)
        share = (weights / fwl.normalization(config, OPS, weights, None)).to(wide)
        waits = (None, None, None) if state is None else _held(state, keep)
        labels, shares, counts = (
            _placed(y, layout, n * C, held)
            for y, held in zip((labels, share, weights.to(wide)), (*waits[1:], None), strict=True)
        )
    rows = dual.Rows(
        _placed(x.to(low), layout, n * C, waits[0]),
        labels,
        shares,
        counts * (1 - slow_share),
        counts * slow_share,
        layout.mask,
        layout.kept,
        *(() if state is None else (S[:, 0] for S in state[:3])),  # as they are: `_work` has them in its own form
    )
    vectors = torch.cat([p[name] for name in ("bias1", "bias2", "scale", "shift")]).to(wide)
    words, c = cross_entropy.embedding_rows(p["unembed"], p["unembed_bias"], low)
    steps = used_steps(config, p["steps"]).to(wide)
    w = dual.Weights(p["dense1"].to(low), p["dense2"].to(low), vectors, steps, words, c)
    plain = config.decay is None and documents == 1
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        value, loss, slow, *carried = Objective.apply(config, plain, slow_share > 0, layout.last, len(w), *w, *rows)
    at = _flat(layout.place, n * C)
    new = lambda y: y.flatten().index_select(0, at).view(B, T)  # noqa: E731
    return Trained(value, new(loss), new(slow), _state_after(config, rows, layout, carried, p["dense1"].dtype))


class Objective(torch.autograd.Function):
    """(value, losses, slow losses, what the rows carry on in three parts); the gradients are made with the value."""

    @staticmethod
    def forward(ctx, config, plain, slow, last, count, *given):
        """given: the `count` fields of `dual.Weights`, then those of its Rows; None where there is nothing."""
        there = tuple(y for y in given if y is not None)
        has = [y is not None for y in given]

        def work(last: Tensor, *some: Tensor) -> tuple[Tensor, ...]:
            rest = iter(some)
            every: list[Any] = [next(rest) if here else None for here in has]
            return _work(config, plain, slow, last, dual.Weights(*every[:count]), dual.Rows(*every[count:]))

        key = "objective", config, plain, slow, tuple(has)
        value, *others = graphs.call(key, work, (last, *there))
        ctx.save_for_backward(*others[5:])
        ctx.dtypes = [y.dtype for y in (*given[:count], given[count])]
        ctx.mark_non_differentiable(*others[:5])
        return value, *others[:5]

    @staticmethod
    @once("the weighted mean of `FWLBlock.run(...).loss`")
    def backward(ctx, dvalue, *_):
        """The gradients that the forward pass made, times that of its value."""
        found = [(g * dvalue).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, None, None, *found, *[None] * 9


def _work(config, plain, slow, last, w, rows):
    """Value, losses, slow losses, what the rows carry on (3), gradients of the weights (6) and of x.

    What they carried before comes in the place of S1, S2 and vectors of `rows` as a state has it: (B, D + 1, F),
    (B, F + 1, E) and (B, 1, 2 E).
    """
    *_, dense1, dense2, norm = rows
    if dense1 is not None:
        S1, S2 = (y.to(rows.x.dtype)[:, :-1] for y in (dense1, dense2))  # whole tensors are cast faster
        rows = rows._replace(S1=S1, S2=S2, vectors=torch.cat([dense1[:, -1], dense2[:, -1], norm[:, 0]], 1))
    passes = walk.Walk if rows.x.device.type in WALKED else dual.Pass
    run, beside = passes(config, w, rows, plain=plain), SideStream(rows.x)
    # Chunk after chunk a GPU is not full: what does not depend on the chunks is done beside them.
    with beside.fork("slow"):
        unlearned = run.slow() if slow else None
    loss = run.forward()
    with beside.fork("learned"):
        learned = _carried_on(config, run.learned(last), (dense1, dense2, norm), rows.kept, last)
    dx, dw = run.backward()
    beside.join_all()
    value = (loss * rows.weights).sum()
    if unlearned is None:
        return value, loss, torch.zeros_like(loss), *learned, *dw, dx
    slow_loss, more, dmore = unlearned
    value = value + (slow_loss * rows.slow).sum()
    dw = dual.Weights(*(y + z for y, z in zip(dw, dmore, strict=True)))
    return value, loss, slow_loss, *learned, *dw, dx.add_(more)


def lay_out(
    config: FWLConfig,
    starts: Tensor | None,
    waiting: Tensor,
    keep: Tensor | None,
    T: int,
    n: int,
    wide: torch.dtype,
    *,
    like: Tensor,
) -> Layout:
    """Chunks of C tokens: what waits in the state first, then the new tokens; every document begins with a chunk.

    Args:
        config: of the layer.
        starts, waiting, keep: where documents start (B, T), tokens that wait (B,), and whether they matter (B,).
        T, n: new tokens of a row, and room for chunks.
        wide: dtype of the masks.
        like: a tensor of integers on the device.
    """
    C, B = config.refresh, len(waiting)
    assert C is not None
    waiting = waiting if keep is None else waiting * keep.to(waiting.dtype)
    t = torch.arange(T, device=like.device).expand(B, T)
    new = torch.zeros_like(t, dtype=torch.bool) if starts is None else starts & (t > 0)
    document = new.long().cumsum(1)
    position = t - torch.where(new, t, 0).cummax(1).values + waiting[:, None] * (document == 0)
    offset = position % C
    chunk = (offset == 0).long().cumsum(1) - (waiting == 0).long()[:, None]
    owner = torch.full((B, n), -1, device=like.device).scatter_(1, chunk, document)
    owner[:, 0] = 0
    c = torch.arange(n, device=like.device)
    mask = (owner[:, :, None] == owner[:, None]) & (c[:, None] > c)
    kept = owner == 0
    mask, kept = mask.to(wide), kept.to(wide)
    if config.decay is not None:
        age = config.decay**C
        mask, kept = mask * age ** (c[:, None] - c - 1).clamp(min=0), kept * age**c
    if keep is not None:
        kept = kept * keep.to(wide)[:, None]
    return Layout(chunk * C + offset, chunk[:, -1], offset[:, -1] + 1, mask, kept)


def _flat(place, length):
    """Places in rows of `length` tokens as places among all tokens."""
    first = torch.arange(len(place), device=place.device) * length
    return (place + first[:, None]).flatten()


def _placed(new, layout, length, held=None):
    """(B, length, ...): new tokens (B, T, ...) at their places, those that waited before them, else 0."""
    B = len(new)
    flat = new.new_zeros(B * length, *new.shape[2:])
    if held is not None:
        flat.unflatten(0, (B, length))[:, : held.shape[1]] = held.to(new.dtype)
    return flat.index_copy_(0, _flat(layout.place, length), new.flatten(0, 1)).unflatten(0, (B, length))


def _held(state, keep):
    """What waits in the state, 0 beyond it: inputs, labels and shares."""
    waiting = state.waiting if keep is None else state.waiting * keep.to(state.waiting.dtype)
    real = torch.arange(state.pending.shape[1], device=waiting.device) < waiting[:, None]
    return state.pending * real[..., None], state.labels * real, state.shares * real


def _carried_on(config, learned, carried, kept, last):
    """What rows carry after their chunk `last`: what was learned (`Pass.learned`), and what is kept of `carried`."""
    S1, S2, vectors = learned
    b1, b2, norm = vectors[:, None].split([config.hidden_width, config.size, 2 * config.size], 2)
    parts = (S1, b1), (S2, b2), (norm,)
    if carried[0] is None:
        return [torch.cat(y, 1) for y in parts]
    kept = kept.gather(1, last[:, None])[..., None]
    return [_grown(S, kept, y) for S, y in zip(carried, parts, strict=True)]


def _grown(old, kept, new):
    """old (B, rows, width) times kept, plus the parts of new, one below the other."""
    out, first = torch.empty_like(old), 0
    for y in new:
        part = slice(first, first + y.shape[1])
        torch.addcmul(y, old[:, part], kept, out=out[:, part])
        first = part.stop
    return out


def _state_after(config, rows, layout, carried, dtype) -> RefreshState:
    """The RefreshState after the last token of each row."""
    C, row = config.refresh, torch.arange(len(layout.last), device=layout.last.device)
    with torch.no_grad():
        at = (layout.last * C)[:, None] + torch.arange(C, device=row.device)
        pending, labels, shares = (y[row[:, None], at] for y in (rows.x, rows.labels, rows.share))
        dense1, dense2, norm = (y[:, None] for y in carried)
        return RefreshState(dense1, dense2, norm, pending.to(dtype), labels, shares, layout.left)
