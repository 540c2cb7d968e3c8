"""How a text longer than a model's window is read: several windows side by side.

Matrices inside the model (`attach(where=...)`) may learn from some of the windows.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.body import FastBody, teaches
from fastweights.hf.head_training import body
from fastweights.torch import graphs
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
        learned = () if self.learned is None else self.learned
        self.passes += len(spans)
        if self.fast is None or not teaches(self.passes, self.fast.every) or tokens.shape[1] < 2:
            (x,) = self._call(self._read, keep, tokens, *learned)
        else:
            x, *gradients = self._call(self._teach, keep, tokens, *learned)
            if gradients:
                self.learned = self.fast.after(learned, gradients)
        return x.flatten(0, 1)[None]

    def _read(self, keep: int, tokens: Tensor, *learned: Tensor) -> tuple[Tensor]:
        """Features (B, keep, D) of the last tokens of windows (B, n)."""
        weights = None if self.fast is None else self.fast.whole(learned)
        return (body(self.model, tokens, weights)[:, -keep:],)

    def _teach(self, keep: int, tokens: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        """The same of a window (1, n) that teaches, and the gradients that it teaches by, if any token is new."""
        fast: Any = self.fast
        leaves = tuple(S.detach().requires_grad_() for S in learned)
        known = max(tokens.shape[1] - keep - 1, 0) if fast.every == 1 else 0
        with torch.enable_grad():
            x = body(self.model, tokens, fast.whole(leaves))
            read = x[:, known:-1]
        kept = x.detach()[:, -keep:]
        if not read.shape[1]:
            return (kept,)
        output = self.model.get_output_embeddings()
        return kept, *fast.gradients(read, tokens[:, known + 1 :], None, output, leaves, keep=False)

    def _call(self, f: Callable[..., tuple[Tensor, ...]], keep: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """f(keep, *inputs), on a GPU as a CUDA graph unless someone else's hook looks at the model."""
        fast = self.fast
        ours = {self.model, self.model.get_output_embeddings(), *(() if fast is None else fast.modules)}
        if any((m._forward_hooks or m._forward_pre_hooks) and m not in ours for m in self.model.modules()):
            return f(keep, *inputs)
        places = tuple(p.data_ptr() for p in self.model.parameters())
        chosen = None if fast is None else (fast.names, fast.every == 1)
        how = torch.get_float32_matmul_precision(), getattr(self.model.config, "_attn_implementation", None)
        return graphs.call((f.__name__, keep, chosen, how, places), partial(f, keep), inputs)
