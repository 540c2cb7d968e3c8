"""The retrieval task of Schlag et al. 2021, section 6.1: pairs of a key and a value, and a question after them.

A sequence holds L pairs of a key and a value out of S each; after it a key asks for its (last) value. Setting 1: L = S,
every key and value once. Setting 2: L = 2 S, drawn with replacement, so keys are overwritten. Loss: half the squared
distance to the one-hot value; answering nothing scores 0.5.

Shapes: B sequences, L pairs, A models side by side, each with its own sequences; N queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 200  # at most, per sequence that is scored


@dataclass(frozen=True)
class Task:
    """The task at one size.

    Attributes:
        keys: S, of keys and of values.
        replace: whether pairs are drawn with replacement (setting 2), so that keys are overwritten.
    """

    keys: int
    replace: bool

    @property
    def length(self) -> int:
        """L, pairs of a sequence in training: S, or 2 S where keys are overwritten."""
        return self.keys * (1 + self.replace)

    def sequences(self, B: int, L: int, A: int, device: str) -> tuple[Tensor, Tensor]:
        """Keys and values (B, L, A), integers.

        Args:
            B: sequences.
            L: pairs in each.
            A: models that are trained side by side, each with its own sequences.
            device: to put them on.
        """
        if self.replace:
            keys, values = torch.randint(self.keys, (2, B, L, A), device=device)
        else:
            keys, values = torch.rand(2, B, self.keys, A, device=device).argsort(2)
        return keys, values

    def question(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The key at a random position of each sequence, and its last value: (B, A) each."""
        B, L, A = keys.shape
        at = torch.randint(L, (B, 1, A), device=keys.device)
        asked = keys.gather(1, at)
        order = torch.arange(1, L + 1, device=keys.device)[:, None]
        last = ((keys == asked) * order).argmax(1, keepdim=True)
        return asked[:, 0], values.gather(1, last)[:, 0]

    def all_questions(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each of the first N keys: its last value (B, N, A) and whether it occurs; and the keys themselves."""
        N = min(self.keys, QUERIES)
        order = torch.arange(1, keys.shape[1] + 1, device=keys.device)[:, None, None]
        asked = torch.arange(N, device=keys.device)[:, None]
        last = ((keys[:, :, None] == asked) * order).amax(1)  # (B, N, A), 0 where absent
        return asked.expand_as(last), values.gather(1, (last - 1).clamp(min=0)), last > 0
