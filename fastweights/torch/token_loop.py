"""`fast_weight` token by token, through autograd: the equation itself, for any rule."""

from itertools import pairwise

import torch
from torch import Tensor

from fastweights import core
from fastweights.checks import check_offsets
from fastweights.core import RULES, TOKENS, Inputs, Spec
from fastweights.torch.dtypes import accumulation_dtype, outside_autocast
from fastweights.torch.methods import needs_gradient, state_shape
from fastweights.torch.packing import whole_numbers
from fastweights.torch.private import is_watched


def refuses(inputs: Inputs, spec: Spec) -> None:
    """Nothing: every rule has a loop."""


def maps(inputs: Inputs, spec: Spec) -> bool:
    """q and k come mapped."""
    return False


def run(inputs: Inputs, spec: Spec, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """(o, state), one `core.step` per token.

    Autograd keeps the memory of every token for the backward pass, so this suits short texts, single tokens, and rules
    that have no chunked form. Packed sequences are run one after the other.
    """
    q, v = inputs.q, inputs.v
    wide = accumulation_dtype(q.dtype)
    state = q.new_zeros(state_shape(inputs, spec), dtype=wide) if inputs.state is None else inputs.state
    if inputs.cu_seqlens is not None:
        offsets = whole_numbers(inputs.cu_seqlens, "cu_seqlens")
        check_offsets(offsets, q.shape[1])
        parts = [
            run(inputs.map_tokens(lambda x: x[:, a:b]).but(state=state[n : n + 1], cu_seqlens=None), spec)  # noqa: B023
            for n, (a, b) in enumerate(pairwise(offsets))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    outputs = []
    with outside_autocast(q):
        if q.shape[1] == 1 and RULES[spec.rule] in ONE and not is_watched() and not needs_gradient(inputs):
            return _one_token(inputs, state, spec, wide)
        tokens = ([None] * q.shape[1] if x is None else x.to(wide).unbind(1) for x in tuple(inputs)[:TOKENS])
        for token in zip(*tokens, strict=True):
            state, o = core.step(state, Inputs(*token), spec, torch)
            outputs.append(o)
    if not outputs:
        return v.clone(), state.clone()
    return torch.stack(outputs, 1).to(v.dtype), state


ONE = (RULES["delta"], RULES["sum"])  # rules whose single token `_one_token` computes


def _one_token(inputs, state, spec, wide):
    """`core.step` of one token without gradients: products with the memory as they are, and one new memory.

    A step of generation is bound by how often it passes over the memory, or, where that is small, by the number of
    operations.
    """
    v = inputs.v
    B, H = v.shape[0], v.shape[2]
    rows = lambda x: (x if x.dtype == wide else x.to(wide)).reshape(B * H, 1, *(x.shape[3:] or (1,)))  # noqa: E731
    old = state.flatten(0, 1)
    q, k, y = rows(inputs.q), rows(inputs.k), rows(v)
    decay = None if inputs.log_decay is None else rows(inputs.log_decay).exp().mT  # (rows, 1 or K, 1)
    S = old.clone() if decay is None else old * decay
    if spec.rule == "delta":
        y = torch.baddbmm(y, k if inputs.erase is None else rows(inputs.erase), S, alpha=-1)
    if inputs.beta is not None:
        y = y * rows(inputs.beta)
    S.baddbmm_(k.mT, y)
    o = torch.bmm(q, old if spec.before else S)
    return o.view(v.shape).to(v.dtype), S.view(state.shape)
