"""The retrieval task of Schlag et al. 2021, section 6.1: pairs of a key and a value, and a question after them.

A sequence holds L pairs of a key and a value, each one of S; then a key asks for its value, the last one if there were
several. Setting 1: L = S, every key and value once. Setting 2: L = 2 S, drawn with replacement, so that keys are
overwritten. The loss is half the squared distance to the one-hot value; answering nothing scores 0.5.

Shapes: B sequences, L pairs, A models side by side, each with its own sequences; N questions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

QUESTIONS = 200  # at most, for each sequence that is scored


@dataclass(frozen=True)
class Task:
    """The task at one size.

    Attributes:
        keys: S, the number of different keys, and of different values.
        replace: whether pairs are drawn with replacement (setting 2), so that keys are overwritten.
    """

    keys: int
    replace: bool

    @property
    def length(self) -> int:
        """L, pairs of a sequence in training: S, or 2 S where keys are overwritten."""
        return self.keys * (1 + self.replace)

    def sequences(self, B: int, L: int, A: int, device: str) -> tuple[Tensor, Tensor]:
        """Keys and values (B, L, A) of random sequences, whole numbers from 0 to S - 1.

        Args:
            B: sequences for each model.
            L: pairs in each sequence; S in setting 1.
            A: models, each of which has its own sequences.
            device: "cpu" or "cuda".
        """
        if self.replace:
            keys, values = torch.randint(self.keys, (2, B, L, A), device=device)
        else:
            keys, values = torch.rand(2, B, self.keys, A, device=device).argsort(2)
        return keys, values

    def question(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One question for each sequence: the key at a random position (B, A), and its last value (B, A).

        Args:
            keys, values: (B, L, A), of `sequences`.
        """
        B, L, A = keys.shape
        position = torch.randint(L, (B, 1, A), device=keys.device)
        query_keys = keys.gather(1, position)
        order = torch.arange(1, L + 1, device=keys.device)[:, None]
        last = ((keys == query_keys) * order).argmax(1, keepdim=True)
        return query_keys[:, 0], values.gather(1, last)[:, 0]

    def all_questions(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A question for each of the first N keys, at most QUESTIONS.

        Args:
            keys, values: (B, L, A), of `sequences`.

        Returns:
            The keys that are asked for (B, N, A), their last values (B, N, A), and whether the key occurs (B, N, A):
            where it does not, its value means nothing.
        """
        N = min(self.keys, QUESTIONS)
        order = torch.arange(1, keys.shape[1] + 1, device=keys.device)[:, None, None]
        query_keys = torch.arange(N, device=keys.device)[:, None]
        last = ((keys[:, :, None] == query_keys) * order).amax(1)  # (B, N, A), from 1 on; 0 where absent
        return query_keys.expand_as(last), values.gather(1, (last - 1).clamp(min=0)), last > 0
