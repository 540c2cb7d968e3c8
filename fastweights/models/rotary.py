"""Rotary positions: pairs of features of queries and keys, turned by angles that grow with the position."""

import torch
from torch import Tensor

from fastweights.torch.methods import register


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: x (B, T, H, K), pairs of features turned by angles that grow with the position.

    The product of a query and a key then depends on the distance between them alone.  turns (2, T, K / 2): cosine and
    sine of every angle, as `angles` gives them.
    """
    half = x.shape[-1] // 2
    cos, sin = turns[:, :, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _angles(like: Tensor, positions: int, half: int) -> Tensor:
    """(2, positions, half): cosine and sine of the angles of rotary positions, on the device of `like`."""
    rates = 10_000.0 ** -(torch.arange(half, device=like.device) / half)
    angles = torch.arange(positions, device=like.device)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def _angles_fake(like, positions, half):
    """An empty tensor of that shape, for compilers."""
    return like.new_empty(2, positions, half, dtype=torch.float32)


# An operator, since a compiler would work out powers and sines again for every number that is turned.
_angles_op = register("angles", "(Tensor like, int positions, int half) -> Tensor", _angles, _angles_fake)


def angles(like: Tensor, positions: int, half: int) -> Tensor:
    """`_angles`; where a compiler looks on, as an operator."""
    return (_angles_op if torch.compiler.is_compiling() else _angles)(like.detach(), positions, half)
