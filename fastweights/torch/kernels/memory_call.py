"""What the functions that plan a call of the memory need to know of it."""

from typing import NamedTuple

import torch

from fastweights.core import Inputs, Spec
from fastweights.torch.kernels import tiles
from fastweights.torch.kernels.layout import Layout


class MemoryCall(NamedTuple):
    """A call of the memory while its launches are planned.

    Attributes:
        x: an `Inputs` of slots (plan.py). q and k are mapped and normalised. Where sequences are cut into sections
            (sequence_parallel.py), arrays with an entry per token have the shape (B * sections, T / sections, ...), but
            the state still has one entry per sequence.
        layout: where the chunks of x are; sections count as sequences.
        spec: the rule, and whether queries read before their token's write.
        precision: PRECISION of the kernels, as `float32_products` gives it.
        sections: into how many sections each sequence is cut; 1 for none.
    """

    x: Inputs
    layout: Layout
    spec: Spec
    precision: str
    sections: int

    @property
    def batch(self) -> int:
        """B, the number of sequences (packed: of rows)."""
        return self.x.q.shape[0] // self.sections


def float32_products() -> str:
    """How products of float32 inputs are made, by torch's own setting: as exactly as can be, or in one pass of TF32."""
    return tiles.exact_products() if torch.get_float32_matmul_precision() == "highest" else "tf32"
