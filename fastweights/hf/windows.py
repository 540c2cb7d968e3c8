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
from fastweights.torch import cross_entropy, graphs
from fastweights.torch.dynamic import GradientStatistics, token_losses
from fastweights.torch.side_stream import SideStream

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

    every: windows to a step of matrices inside the model; one that they learn from is the last of its group.

    Examples:
        >>> [len(group) for group in groups(list(Reading(4, 2).spans(40)))]
        [1, 8, 8, 3]
        >>> [len(group) for group in groups(list(Reading(4, 2).spans(40)), every=8)]
        [1, 1, 2, 4, 8, 4]
    """
    taught = (every is not None and teaches(number, every) for number in range(1, len(spans) + 1))
    steps = itertools.accumulate(taught, initial=0)  # before each window

    def alike(numbered: tuple[int, Span]) -> tuple[int, ...]:
        step, (first, start, stop) = numbered
        return stop - first, stop - start, step

    for _, group in itertools.groupby(zip(steps, spans, strict=False), alike):
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

    def losses(self, spans: list[Span]) -> Tensor:
        """Losses (n,) of the n tokens that the windows of these spans answer, by the logits of the model itself."""
        tokens, labels = self._tokens(spans)
        return self._call(self._answer, labels.shape[1], tokens, labels)[0].flatten()

    def read(self, spans: list[Span], *, losses: bool = True) -> list[Tensor]:
        """Features (1, n, D) of the n tokens that the windows of these spans answer, and the model's losses (1, n).

        The chosen matrices learn from the last of these windows after it is read, where it is one that teaches, as they
        do in forward passes of the model (hooks.py).

        Args:
            spans: of one group.
            losses: whether they are wanted; without, there are only the features.
        """
        tokens, labels = self._tokens(spans)
        self.passes += len(spans)
        inputs = (tokens, labels, *(self.learned or ()))
        if self.fast is None or not teaches(self.passes, self.fast.every) or tokens.shape[1] < 2:
            found = self._call(self._read, losses, *inputs)
        else:
            both = self._call(self._teach, losses, *inputs)
            found, self.learned = both[: 1 + losses], both[1 + losses :]
        return [x.flatten(0, 1)[None] for x in found]

    def _tokens(self, spans):
        """Tokens (B, n) of windows of equal lengths, and the labels (B, k) of those that they answer."""
        tokens = torch.cat([self.row[:, first:stop] for first, _, stop in spans])
        return tokens, torch.cat([self.row[:, start + 1 : stop + 1] for _, start, stop in spans])

    def _answer(self, keep: int, tokens: Tensor, labels: Tensor) -> tuple[Tensor]:
        """Losses (B, k) of windows, as the model answers by itself."""
        return (token_losses(self.model(tokens, use_cache=False, logits_to_keep=keep).logits[:, -keep:], labels),)

    def _read(self, losses: bool, tokens: Tensor, labels: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        """Features (B, k, D) of the last k tokens of windows (B, n), and the model's losses (B, k) if wanted."""
        weights = None if self.fast is None else self.fast.whole(learned)
        x = body(self.model, tokens, weights)[:, -labels.shape[1] :]
        if not losses:
            return (x,)
        output = self.model.get_output_embeddings()
        bias = getattr(output, "bias", None)
        bias = x.new_zeros(len(output.weight)) if bias is None else bias
        return x, cross_entropy.loss(x, output.weight.mT, bias, labels)

    def _teach(self, losses: bool, tokens: Tensor, labels: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        """What `_read` gives for windows of which the last teaches, and then the matrices as they are after its lesson.

        The other windows are read on a second stream of a GPU, since a single window does not keep a GPU busy.
        """
        fast: Any = self.fast
        keep, found, side_stream = labels.shape[1], [], SideStream(tokens)
        if len(tokens) > 1:
            with side_stream.fork("others"):
                found.append(self._read(losses, tokens[:-1], labels[:-1], *learned))
        tokens, labels = tokens[-1:], labels[-1:]
        leaves = tuple(S.detach().requires_grad_() for S in learned)
        known = max(tokens.shape[1] - keep - 1, 0) if fast.every == 1 else 0
        with torch.enable_grad():
            x = body(self.model, tokens, fast.whole(leaves))[:, known:]
        # The label of the last token is of the next window: it is scored here, and does not teach yet.
        ends = torch.cat([tokens[:, known + 1 :], labels[:, -1:]], 1)
        real = torch.arange(x.shape[1], device=x.device)[None] < x.shape[1] - 1
        loss, gradients = fast.gradients(x, ends, real, self.model.get_output_embeddings(), leaves, keep=False)
        found.append((x.detach()[:, -keep:], loss[:, -keep:])[: 1 + losses])
        learned = fast.after(learned, gradients)
        side_stream.join("others")
        return *(torch.cat(parts) for parts in zip(*found, strict=True)), *learned

    def _call(self, f: Callable[..., tuple[Tensor, ...]], flag: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """f(flag, *inputs), on a GPU as a CUDA graph unless someone else's hook looks at the model."""
        fast, attached = self.fast, getattr(getattr(self.model, "fast_head", None), "hooks", None)
        inside = getattr(attached, "body", None)  # also where it takes no part
        ours = {self.model, self.model.get_output_embeddings(), *(() if inside is None else inside.modules)}
        if any((m._forward_hooks or m._forward_pre_hooks) and m not in ours for m in self.model.modules()):
            return f(flag, *inputs)
        places = tuple(p.data_ptr() for p in self.model.parameters())
        chosen = None if fast is None else (fast.names, fast.step, fast.every == 1)
        how = torch.get_float32_matmul_precision(), getattr(self.model.config, "_attn_implementation", None)
        return graphs.call((f.__name__, flag, chosen, how, places), partial(f, flag), inputs)
