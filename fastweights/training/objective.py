"""What a training step minimises, and a batch as the tensors that it is computed from."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastweights.models.documents import Documents
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.devices import copied
from fastweights.torch.tree import map_tensors

SLOW_SHARE = 0.5  # of the loss of a Fast Weight Layer that has learned nothing in the loss that is trained


class Objective(nn.Module):
    """The weighted sum of losses of one batch, as a module that DDP and FSDP can wrap.

    With a Fast Weight Layer half of what is trained is the loss of the layer before it learned anything: its slow
    weights then stay a good model of their own, from which learning starts.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, weights: Tensor, state: State, documents: Documents) -> tuple:
        """(what is trained, the loss without gradient, the states to carry on) of a batch.

        Args:
            tokens, labels, weights: (B, T).
            state: carried from the batch before.
            documents: where documents start.
        """
        trained, loss, state = self.model.train_loss(tokens, labels, weights, state, documents, SLOW_SHARE)
        return trained, loss, map_tensors(Tensor.detach, state)


def to_batch(
    rows: np.ndarray, start: int, device: str, forget: Any = False, *, even: bool = False
) -> tuple[Tensor, Tensor, Tensor, Documents]:
    """tokens, labels, weights (B, T) and documents of rows (B, T + 1); a document's start is never a label.

    Args:
        rows: tokens, one more than the model is given.
        start: the token that starts a document.
        device: to put them on.
        forget: (B,) where a row starts with an empty memory, document or not.
        even: for compiled blocks.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    starts = tokens == start
    starts[:, 0] |= forget
    to = lambda x: copied(torch.from_numpy(np.ascontiguousarray(x)), device)  # noqa: E731
    documents = Documents.of(starts, device, even=even)
    return to(tokens), to(labels), to((labels != start).astype(np.float32)), documents
