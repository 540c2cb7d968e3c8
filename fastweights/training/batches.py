"""The batches of a training run: which tokens a step sees is a function of the seed and the step alone.

A run can therefore go on from any step. Where an input is the start token, a document starts; it is never a label.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.text.corpus_files import Split


@dataclass(frozen=True)
class Batches:
    """The batches of a run: `batches[step]` is (rows, length + 1) tokens, the same whenever it is asked for.

    carried: row r of step s + 1 goes on where row r of step s ended, and documents are shuffled every epoch.
    Otherwise rows are windows in shuffled order.
    """

    split: Split
    rows: int
    length: int
    seed: int
    carried: bool
    known: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)  # the epoch that was asked for last

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            need, have = self.rows * self.length + 1, len(self.split.tokens)
            raise FastWeightError(
                f"the training documents hold {have} tokens; expected at least {need}: a batch is "
                f"{self.rows} rows of {self.length} tokens and one more (--batch and --length make it smaller)"
            )

    @property
    def per_epoch(self) -> int:
        """Batches until every token was seen once."""
        return (len(self.split.tokens) - 1) // self.length // self.rows

    def starts_epoch(self, step: int) -> bool:
        """Whether documents are shuffled anew before this step, so that no memory can be carried into it."""
        return step % self.per_epoch == 0

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The order of documents, where each ends in it, and the order of windows unless they are carried.

        Drawn from the seed and the number of the epoch, so that a run which goes on draws what it would have drawn.
        """
        if epoch not in self.known:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(len(self.split))
            shuffled = None if self.carried else rng.permutation(self.rows * self.per_epoch)
            self.known.clear()
            self.known[epoch] = order, np.cumsum(np.diff(self.split.at)[order]), shuffled
        return self.known[epoch]

    def __getitem__(self, step: int) -> np.ndarray:
        """The batch of a step, (rows, length + 1): inputs are all but the last column, labels all but the first."""
        epoch, within = divmod(step, self.per_epoch)
        order, ends, shuffled = self._epoch(epoch)
        if shuffled is None:
            # Row r reads its own stretch of the corpus, window after window.
            windows = np.arange(self.rows) * self.per_epoch + within
        else:
            windows = shuffled[within * self.rows : (within + 1) * self.rows]
        return np.stack([self._window(int(w) * self.length, order, ends) for w in windows])

    def _window(self, at: int, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """length + 1 tokens from position `at` of the documents, laid end to end in this order."""
        parts: list[np.ndarray] = []
        missing, i = self.length + 1, int(np.searchsorted(ends, at, side="right"))
        while missing:
            document = self.split.document(order[i])
            part = document[len(document) - (ends[i] - at) :][:missing]
            parts.append(part)
            at, missing, i = at + len(part), missing - len(part), i + 1
        return np.concatenate(parts)


class Ahead:
    """make(step), made in another thread while the step before is under way."""

    def __init__(self, make: Callable[[int], Any]):
        self.make, self.pool = make, ThreadPoolExecutor(1, "batches")
        self.next: tuple[int, Future] | None = None

    def __call__(self, step: int) -> Any:
        """What was made for this step, or make it now; then start on the next one."""
        here = self.next is not None and self.next[0] == step
        found = self.next[1].result() if self.next is not None and here else self.make(step)
        self.next = step + 1, self.pool.submit(self.make, step + 1)
        return found
