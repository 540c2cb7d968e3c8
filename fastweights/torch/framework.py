"""PyTorch, as the code that is written once for every framework sees it.

`OPS` has, for each function of `fastweights.framework.Ops`, the one of PyTorch that does it, or a few words around it.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as scored
from torch.nn.functional import pad

from fastweights.framework import Ops
from fastweights.torch import cross_entropy, hand_gradients
from fastweights.torch.dtypes import accumulation_dtype, wide
from fastweights.torch.ops import fast_weight, feature_map


def _array(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """numbers beside `like`; on a GPU copied there once, since a copy would wait, and break a CUDA graph."""
    dtype = accumulation_dtype(like)
    if like.is_cuda and type(like) is Tensor and not torch.compiler.is_compiling():
        return _kept(numbers, dtype, like.device)
    return torch.tensor(numbers, dtype=dtype, device=like.device)


@cache
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """numbers as a tensor that stays, made outside of inference mode so that every later call may use it."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def _cross_entropy(logits, labels):
    """Loss (...) per token of logits (..., V), in float32 or wider."""
    flat = scored(wide(logits).flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def _layer_memory(q: Tensor, k: Tensor, v: Tensor, *, state: Any, **how: Any) -> tuple[Tensor, Tensor]:
    """`fast_weight` for a Fast Weight Layer, whose keys are one wider than its input, for the bias.

    On a GPU they are filled up with zeros to a multiple of 8: matrix units want aligned rows.
    """
    missing = -q.shape[-1] % 8 if q.is_cuda and q.shape[-1] > 1 else 0
    return _padded(q, k, v, state, missing, **how) if missing else fast_weight(q, k, v, state=state, **how)


def _padded(q, k, v, state, missing, **how):
    """`fast_weight` with keys that are wider by `missing` zeros; the state is as without them."""
    width = q.shape[-1]
    state = None if state is None else pad(state, (0, 0, 0, missing))
    o, state = fast_weight(pad(q, (0, missing)), pad(k, (0, missing)), v, state=state, **how)
    return o, state[:, :, :width]


OPS = Ops(
    xp=torch,
    nn=hand_gradients,
    fast_weight=fast_weight,
    layer_memory=_layer_memory,
    feature_map=feature_map,
    matmul=torch.matmul,
    split=lambda x, sizes, axis=-1: torch.split(x, sizes, axis),
    shape=lambda x: x.shape,
    wide=wide,
    cast=lambda x, like: x.to(like.dtype),
    array=_array,
    zeros=lambda shape, like: like.new_zeros(shape),
    arange=lambda n, like: torch.arange(n, device=like.device),
    take=torch.take_along_dim,
    repeat=torch.repeat_interleave,
    searchsorted=lambda ordered, values: torch.searchsorted(ordered, values, right=True),
    stop=torch.detach,
    head=cross_entropy.head,
    loss=cross_entropy.loss,
    summed=cross_entropy.summed,
    aligned=lambda E, c: (E, c),
    missing_keys=lambda width: 0,
    cross_entropy=_cross_entropy,
)
