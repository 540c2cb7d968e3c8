"""What a held, refreshed Fast Weight Layer is trained by: one number, computed together with its gradients.

`LanguageModel.train_loss` and `FWLBlock.loss` come here where `refuses` allows it. `objective` lays the tokens out in
chunks, and `Objective` runs one of two hand-written forms: products with earlier tokens on a GPU (dual.py), weights of
every row's own on a CPU (walk.py). On a GPU all of it is one CUDA graph.

Rows may hold several documents and may go on with the document of an earlier call. They are laid out in chunks, a new
document from a new chunk on, so that shapes depend on the batch, its length and the most documents in a row alone, and
a CUDA graph can capture it. On a GPU nothing here waits for the device.

Letters: B rows of T new tokens; n chunks of C = `refresh` tokens of a row; D, F, E = size the widths.
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
from fastweights.torch.learning.dual import DualForm
from fastweights.torch.learning.loss_form import Batch, Weights
from fastweights.torch.learning.steps import used_steps
from fastweights.torch.learning.training_layout import Layout, flat_places, lay_out, placed
from fastweights.torch.learning.walk import WalkedForm
from fastweights.torch.private import has_modes, is_watched
from fastweights.torch.side_stream import SideStream

DEVICES = ("cuda", "cpu")  # on which these forms are faster than autograd
WALK_DEVICES = ("cpu",)  # where walk.py is taken; elsewhere dual.py
MAX_ROW_TOKENS = 8192  # for dual.py: the cost of products with earlier tokens grows with their number
BATCH_FIELDS = len(Batch._fields) - len(Batch._field_defaults)  # without what was carried into the window


class Trained(NamedTuple):
    """What `objective` returns.

    Attributes:
        value: what is trained; the only one that can be differentiated.
        loss: (B, T), losses of the layer that learns.
        slow_loss: (B, T), losses of the trained weights alone; 0 if slow_share is 0, and on a CPU in the first chunks
            where no token counts.
        state: the RefreshState after the last token of each row.
    """

    value: Tensor
    loss: Tensor
    slow_loss: Tensor
    state: RefreshState


def unfit(config: FWLConfig, device: str, length: int) -> str | None:
    """Why rows of `length` tokens cannot be trained here on this kind of device ("cuda", "cpu"); None if they can."""
    if config.refresh is None:
        return "the layer is not refreshed"
    if config.within != "held":
        return f"within is {config.within!r}"
    if device not in DEVICES:
        return f"it was not tried on this device ({device})"
    if device not in WALK_DEVICES and length + config.refresh > MAX_ROW_TOKENS:
        return f"rows are longer than {MAX_ROW_TOKENS} tokens"
    return None


def refuses(config: FWLConfig, x: Tensor, weights: Tensor, state: Any, *, packed: bool) -> str | None:
    """Why `objective` cannot serve these arguments; None if it can.  packed: whether rows hold several documents."""
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
    params: dict[str, Tensor],
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
    """The sum over tokens of weights (1 - slow_share) loss + weights slow_share slow_loss, with losses and state.

    Args:
        config: arguments of the layer.
        params: its parameters by name.
        x: (B, T, D), output of the body.
        labels, weights: (B, T).
        state: the RefreshState of the rows before x; when absent nothing was read before.
        starts: (B, T), True where a document starts; nowhere when absent.
        keep: (B,), 0 where a row does not go on with the document of the state.
        documents: the most documents in a row, or more.
        slow_share: how much the loss of the trained weights alone counts.
    """
    C, (B, T, _) = config.refresh, x.shape
    assert C is not None
    low, wide = autocast_dtype(x) or x.dtype, accumulation_dtype(x)
    n = -(-(T if state is None else T + C) // C) + documents - 1
    with torch.no_grad():
        waiting = labels.new_zeros(B) if state is None else state.waiting
        layout = lay_out(config, starts, waiting, keep, T, n, wide)
        share = (weights / fwl.normalization(config, OPS, weights, None)).to(wide)
        old_x, old_labels, old_shares = (None, None, None) if state is None else _waiting_tokens(state, keep)
        placed_labels = placed(labels, layout, n * C, old_labels)
        placed_shares = placed(share, layout, n * C, old_shares)
        placed_weights = placed(weights.to(wide), layout, n * C)
    batch = Batch(
        placed(x.to(low), layout, n * C, old_x),
        placed_labels,
        placed_shares,
        placed_weights * (1 - slow_share),
        placed_weights * slow_share,
        layout.read_factors,
        layout.carried_factors,
    )
    vectors = torch.cat([params[name] for name in ("bias1", "bias2", "scale", "shift")]).to(wide)
    embedding, bias = cross_entropy.embedding_rows(params["unembed"], params["unembed_bias"], low)
    steps = used_steps(config, params["steps"]).to(wide)
    layer = Weights(params["dense1"].to(low), params["dense2"].to(low), vectors, steps, embedding, bias)
    setting = Setting(config, config.decay is None and documents == 1, slow_share > 0)
    carried = () if state is None else tuple(S[:, 0] for S in state[:3])
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        value, loss, slow_loss, *learned = Objective.apply(
            setting, layout.last_chunk, *layer, *batch[:BATCH_FIELDS], *carried
        )
    places = flat_places(layout.place, n * C)
    loss, slow_loss = (y.flatten().index_select(0, places).view(B, T) for y in (loss, slow_loss))
    return Trained(value, loss, slow_loss, _state_after(config, batch, layout, learned, params["dense1"].dtype))


class Setting(NamedTuple):
    """What `Objective` depends on besides tensors.

    Attributes:
        config: arguments of the layer.
        unit_factors: whether nothing decays and no document starts inside a row.
        slow: whether the loss of the trained weights alone is wanted.
    """

    config: FWLConfig
    unit_factors: bool
    slow: bool


class Objective(torch.autograd.Function):
    """The value and all else that `_compute` returns but gradients; these are computed with the value, and kept."""

    @staticmethod
    def forward(ctx, setting, last_chunk, *tensors):
        """Value, losses, slow losses (B, n C), and what the rows have learned in three parts, as a state has it.

        tensors: the fields of `Weights`, those of `Batch` but the last three, and what the rows carried: dense1,
        dense2 and norm of a RefreshState without their second axis, or nothing.
        """

        def compute(last_chunk: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            end_of_layer = len(Weights._fields)
            end_of_batch = end_of_layer + BATCH_FIELDS
            layer, batch = Weights(*tensors[:end_of_layer]), Batch(*tensors[end_of_layer:end_of_batch])
            return _compute(setting, last_chunk, layer, batch, carried=tensors[end_of_batch:])

        key = "objective", *setting, len(tensors)
        value, *others = graphs.call(key, compute, (last_chunk, *tensors))
        results, gradients = others[:5], others[5:]
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [y.dtype for y in tensors[: len(gradients)]]
        ctx.inputs_without_gradient = len(tensors) - len(gradients)
        ctx.mark_non_differentiable(*results)
        return value, *results

    @staticmethod
    @once("the weighted mean of `FWLBlock.run(...).loss`")
    def backward(ctx, dvalue, *_):
        """The gradients that the forward pass computed, times that of its value: of the weights and of x."""
        gradients = [(g * dvalue).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, *gradients, *[None] * ctx.inputs_without_gradient


def _compute(setting, last_chunk, layer, batch, carried):
    """Run a form of the loss forwards and backwards.

    Args:
        setting: a `Setting`.
        last_chunk: (B,), the last chunk of each row.
        layer: the `Weights`.
        batch: the `Batch`, without what was carried.
        carried: what was carried into the window, as a state has it: (B, D + 1, F), (B, F + 1, E) and (B, 1, 2 E); or
            an empty tuple.

    Returns:
        The value; losses and slow losses (B, n C); what the rows have learned, in the form of `carried`; the gradients
        of the weights and of x.
    """
    config = setting.config
    if carried:
        dense1, dense2, norm = carried
        S1, S2 = (y.to(batch.x.dtype)[:, :-1] for y in (dense1, dense2))  # whole tensors are cast faster
        S_vectors = torch.cat([dense1[:, -1], dense2[:, -1], norm[:, 0]], 1)
        batch = batch._replace(S1=S1, S2=S2, S_vectors=S_vectors)
    form_class = WalkedForm if batch.x.device.type in WALK_DEVICES else DualForm
    form, side_stream = form_class(config, layer, batch, unit_factors=setting.unit_factors), SideStream(batch.x)
    # Chunk after chunk a GPU is not full: what does not depend on the order of chunks runs on a side stream.
    with side_stream.fork("slow"):
        slow_results = form.slow() if setting.slow else None
    loss = form.forward()
    with side_stream.fork("learned"):
        learned = _carried_on(config, form.learned(last_chunk), carried, batch.carried_factors, last_chunk)
    dx, dweights = form.backward()
    side_stream.join_all()
    value = (loss * batch.loss_weights).sum()
    if slow_results is None:
        return value, loss, torch.zeros_like(loss), *learned, *dweights, dx
    slow_loss, dx_slow, dweights_slow = slow_results
    value = value + (slow_loss * batch.slow_loss_weights).sum()
    dweights = Weights(*(y + z for y, z in zip(dweights, dweights_slow, strict=True)))
    return value, loss, slow_loss, *learned, *dweights, dx.add_(dx_slow)


def _waiting_tokens(state, keep):
    """Inputs (B, C, D), labels and shares (B, C) of the tokens that wait in the state, 0 where there are none.

    keep: (B,), 0 where a row does not go on with the document of the state; None for 1.
    """
    waiting = state.waiting if keep is None else state.waiting * keep.to(state.waiting.dtype)
    is_token = torch.arange(state.pending.shape[1], device=waiting.device) < waiting[:, None]
    return state.pending * is_token[..., None], state.labels * is_token, state.shares * is_token


def _carried_on(config, learned, carried, carried_factors, last_chunk):
    """What the rows carry out of the window, in the form of a state: what they learned, and what is left of `carried`.

    Args:
        config: arguments of the layer.
        learned: changes of W1, W2 and the vectors before the last chunk of each row (`LossForm.learned`).
        carried: what they carried into the window, as for `_compute`.
        carried_factors: (B, n), how much of `carried` is left at each chunk.
        last_chunk: (B,), the last chunk of each row.
    """
    S1, S2, vectors = learned
    b1, b2, norm = vectors[:, None].split([config.hidden_width, config.size, 2 * config.size], 2)
    blocks = (S1, b1), (S2, b2), (norm,)
    if not carried:
        return [torch.cat(y, 1) for y in blocks]
    remaining = carried_factors.gather(1, last_chunk[:, None])[..., None]
    return [_scaled_plus_blocks(S, remaining, y) for S, y in zip(carried, blocks, strict=True)]


def _scaled_plus_blocks(old, factor, blocks):
    """old (B, rows, width) times factor (B, 1, 1), plus blocks (B, some rows, width) that lie one below the other."""
    out, first = torch.empty_like(old), 0
    for block in blocks:
        part = slice(first, first + block.shape[1])
        torch.addcmul(block, old[:, part], factor, out=out[:, part])
        first = part.stop
    return out


def _state_after(config, batch, layout: Layout, learned, dtype) -> RefreshState:
    """The RefreshState after the last token of each row.

    Args:
        config: arguments of the layer.
        batch: the rows.
        layout: where their tokens are.
        learned: what they have learned, as `_compute` returned it.
        dtype: of the inputs that wait.
    """
    C, row = config.refresh, torch.arange(len(layout.last_chunk), device=layout.last_chunk.device)
    with torch.no_grad():
        tokens = (layout.last_chunk * C)[:, None] + torch.arange(C, device=row.device)
        pending, labels, shares = (y[row[:, None], tokens] for y in (batch.x, batch.labels, batch.share))
        dense1, dense2, norm = (y[:, None] for y in learned)
        return RefreshState(dense1, dense2, norm, pending.to(dtype), labels, shares, layout.last_count)
