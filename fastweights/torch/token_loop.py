"""`fast_weight` token by token, through autograd: the equation itself, for any rule."""

from itertools import pairwise

import torch
from torch import Tensor

from fastweights import core
from fastweights.checks import check_offsets
from fastweights.core import TOKENS, Inputs, Spec
from fastweights.torch.dtypes import accumulation_dtype, outside_autocast
from fastweights.torch.methods import state_shape


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
        offsets = inputs.cu_seqlens.tolist()
        check_offsets(offsets, q.shape[1])
        parts = [
            run(inputs.map_tokens(lambda x: x[:, a:b])._replace(state=state[n : n + 1], cu_seqlens=None), spec)  # noqa: B023
            for n, (a, b) in enumerate(pairwise(offsets))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    outputs = []
    with outside_autocast(q):
        tokens = ([None] * q.shape[1] if x is None else x.to(wide).unbind(1) for x in inputs[:TOKENS])
        for token in zip(*tokens, strict=True):
            state, o = core.step(state, Inputs(*token), spec, torch)
            outputs.append(o)
    if not outputs:
        return v.clone(), state.clone()
    return torch.stack(outputs, 1).to(v.dtype), state
