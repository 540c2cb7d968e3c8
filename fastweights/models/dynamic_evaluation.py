"""Dynamic evaluation of a language model of this package: memory is carried and all weights learn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastweights.models.config import DYNAMIC_LR
from fastweights.models.language_model import LanguageModel
from fastweights.torch.dynamic import DynamicEvaluation, GradientStatistics

EPS = 1e-4  # added to the root mean squared gradient that divides a weight's step
CLIP = 1.0  # largest norm of a segment's gradient


@dataclass(frozen=True)
class Dynamic:
    """How the weights learn from a text while it is scored.

    Attributes:
        lr: learning rate.
        decay: how strongly weights are pulled back to the trained ones.
        segment: tokens between two updates.
        batches: training tokens (B, T), which say how large each weight's gradients are; without any, plain gradient
            descent.
    """

    lr: float = DYNAMIC_LR
    decay: float = 0.0
    segment: int = 64
    batches: tuple[Tensor, ...] = ()


@contextmanager
def dynamic_scorer(model: LanguageModel, how: Dynamic) -> Iterator[Callable[..., Tensor]]:
    """A function that scores a document (1, T + 1) from a state, (1, T); each starts from the trained weights.

    With `advance` it says the number of tokens of every segment that was read.

    The model is as it was when the block ends. Memory is carried over the document, segment by segment.
    """
    # The state that the next document starts from; `DynamicEvaluation` itself knows none before the first segment.
    first: list[Any] = [None]

    def call(model: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        return model.logits(tokens, first[0] if state is None else state)

    statistics = GradientStatistics.collect(model, how.batches, call=call) if how.batches else None
    rule = "rms" if how.batches else "sgd"
    with DynamicEvaluation(
        model,
        rule=rule,
        lr=how.lr,
        decay=how.decay,
        eps=EPS,
        segment=how.segment,
        carry=True,
        statistics=statistics,
        clip=CLIP,
        call=call,
    ) as dynamic:

        def run(row: Tensor, state: Any, advance: Callable[[int], Any] = lambda n: None) -> Tensor:
            first[0] = state
            dynamic.reset()
            return dynamic.run(row, advance=advance).losses

        yield run
