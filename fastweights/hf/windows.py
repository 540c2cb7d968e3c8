"""How a text longer than a model's window is read: several windows side by side.

Matrices inside the model (`attach(where=...)`) may learn from some of the windows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.body import FastBody, teaches
from fastweights.hf.head_training import body
from fastweights.torch.dynamic import GradientStatistics

ROWS = 8  # windows that are read side by side
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Reading:
    """How a long text is read, window by window.

    Attributes:
        window: tokens a model sees at once.
        stride: tokens scored at a time, between two updates.
        lr, parameters, statistics: of dynamic evaluation; with statistics its rule is "rms", else "sgd".
    """

    window: int = 1024
    stride: int = 256
    lr: float = 1e-3
    parameters: tuple[str, ...] = ("*",)
    statistics: GradientStatistics | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.window:
            raise FastWeightError(f"stride is {self.stride}; expected from 1 to the window of {self.window} tokens")

    def spans(self, tokens: int) -> Iterator[Span]:
        """(first, start, stop): inputs from `first` are read, those from `start` to `stop` answered.

        Examples:
            >>> list(Reading(window=4, stride=2).spans(5))
            [(0, 0, 2), (0, 2, 4), (2, 4, 5)]
        """
        for start in range(0, tokens, self.stride):
            yield max(0, start + self.stride - self.window), start, min(start + self.stride, tokens)


def groups(spans: list[Span], every: int | None = None) -> Iterator[list[Span]]:
    """Spans of windows that are read side by side: neighbours of equal lengths, ROWS at most.

    every: windows to a step of matrices inside the model; one that they learn from is read alone.

    Examples:
        >>> [len(group) for group in groups(list(Reading(4, 2).spans(40)))]
        [1, 8, 8, 3]
        >>> [len(group) for group in groups(list(Reading(4, 2).spans(40)), every=8)]
        [1, 1, 1, 1, 3, 1, 7, 1, 4]
    """

    def alike(numbered: tuple[int, Span]) -> tuple[int, ...]:
        number, (first, start, stop) = numbered
        alone = every is not None and teaches(number, every)
        return stop - first, stop - start, number if alone else 0

    for _, group in itertools.groupby(enumerate(spans, 1), alike):
        rows = [span for _, span in group]
        yield from (rows[i : i + ROWS] for i in range(0, len(rows), ROWS))


class Windows:
    """A text that a model reads window by window, with what matrices inside the model have learned of it.

    model: a causal language model;  row: (1, T + 1), the text;  fast: matrices that learn, or None for none.
    """

    def __init__(self, model: Any, row: Tensor, fast: FastBody | None = None):
        self.model, self.row, self.fast = model, row, fast
        self.learned = None if fast is None else fast.init_state(1)
        self.passes = 0

    def groups(self, how: Reading) -> Iterator[list[Span]]:
        """Spans to be read side by side, in the order of the text."""
        return groups(list(how.spans(self.row.shape[1] - 1)), None if self.fast is None else self.fast.every)

    def features(self, spans: list[Span]) -> Tensor:
        """Features (1, n, D) of the n tokens that the windows of these spans answer, one window after the other.

        The chosen matrices learn from a window after it is read, where it is one that teaches, as they do in forward
        passes of the model (hooks.py).
        """
        keep = spans[0][2] - spans[0][1]
        tokens = torch.cat([self.row[:, first:stop] for first, _, stop in spans])
        if self.fast is None or self.learned is None:
            return body(self.model, tokens)[:, -keep:].flatten(0, 1)[None]
        self.passes += len(spans)
        if not teaches(self.passes, self.fast.every) or tokens.shape[1] < 2:
            x = body(self.model, tokens, self.fast.whole(self.learned))
        else:
            leaves = tuple(S.detach().requires_grad_() for S in self.learned)
            with torch.enable_grad():
                x = body(self.model, tokens, self.fast.whole(leaves))
            known = max(tokens.shape[1] - keep - 1, 0) if self.fast.every == 1 else 0
            if known < tokens.shape[1] - 1:
                with torch.enable_grad():
                    read = x[:, known:-1]
                output = self.model.get_output_embeddings()
                self.learned = self.fast.learn(read, tokens[:, known + 1 :], None, output, leaves, keep=False)
            x = x.detach()
        return x[:, -keep:].flatten(0, 1)[None]
