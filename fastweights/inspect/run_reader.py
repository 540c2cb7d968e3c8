"""Reading a text with a run of `fastweights train`: with memory, without, and from memories of earlier tokens."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.inspect.reading import (
    CARRIED,
    LEARNING,
    WINDOWS,
    Mode,
    Reading,
    RolledBack,
    SegmentObserver,
    check_text,
    first_tokens,
    join_losses,
    segment_length,
)
from fastweights.models import evaluation, run_folder
from fastweights.models.language_model import LanguageModel
from fastweights.models.run_documents import read_file
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.probing.probes import probe
from fastweights.torch.tree import map_tensors

ROLLED_BACK = 8  # tokens whose memory can be rolled back to
WINDOWS_AT_ONCE = 8  # windows that are read as rows of one batch


def read_run(run: Path, file: Path, *, every: int, limit: int, device: str, observer: SegmentObserver) -> Reading:
    """Read a file with a run of `fastweights train`.

    The text is read once under the probe with the memory carried, which gives the losses with memory and, where the
    model has a Fast Weight Layer, those with the layer learning; then without a memory; then again from the memory of
    each token that can be rolled back to.

    Args:
        run: folder of the run.
        file: text file.
        every: tokens between two measurements of a memory.
        limit: tokens of the file to read; 0 for all.
        device: "cpu" or "cuda".
        observer: follows the text as it is read under the probe.

    Raises:
        FastWeightError: the model has no fast-weight memory, or the file is not text.
    """
    model = run_folder.load(run, device=device)
    if not any(isinstance(m, FastWeightAttention) for m in model.modules()):
        raise FastWeightError(
            f"run {run} has blocks {', '.join(model.config.mixers)}; expected at least one with a "
            "fast-weight memory: there is nothing to inspect"
        )
    text = read_file(model, file)
    check_text(file, text.data)
    text = first_tokens(text, text.widths(model.tokenizer.lengths()), limit)
    widths = text.widths(model.tokenizer.lengths())
    row = evaluation.row_of(model, text)
    T = row.shape[1] - 1
    length = segment_length(T)
    observer.begin(T)
    state = model.init_state(1)
    carried, learning = [], []  # losses of both modes
    memories: dict[int, list] = {}  # states of the blocks by the token that they were taken at
    with torch.no_grad(), probe(model, every=every, keep=True) as probed:
        for start in range(0, T, length):
            memories[start] = state.blocks
            part = row[:, start : start + length + 1]
            scores = model.score(part[:, :-1], part[:, 1:], state)
            state = scores.state
            carried.append(scores.loss if scores.slow is None else scores.slow)
            learning.append(scores.loss)
            observer(probed)
    static = evaluation.score(model, [text], "static").losses[0]
    modes = [
        Mode("static", "memory off", WINDOWS.format(model.config.length), static),
        Mode("memory", "memory on", CARRIED, join_losses(carried)),
    ]
    if model.fast is not None:
        modes.append(Mode("fast", "memory on, layer learns", LEARNING, join_losses(learning)))
    rolled_back = [
        RolledBack(token, _losses_from_memory(model, row[:, token:], memories[token]))
        for token in _spread_tokens(list(memories), T)
    ]
    return Reading(str(run), text, widths, modes, rolled_back, probed)


@torch.no_grad()
def _losses_from_memory(model: LanguageModel, row: Tensor, blocks: list) -> np.ndarray:
    """Losses (n,) in nats of a text that is read in windows which all start from the same memory.

    Windows are as long as those of training. Up to WINDOWS_AT_ONCE are rows of one batch; the last, shorter one is read
    alone.

    Args:
        model: the language model, whose Fast Weight Layer does not learn.
        row: tokens (1, n + 1), the first of which is only read.
        blocks: state of the blocks at the first token, of one row.
    """
    length, T, losses = model.config.length, row.shape[1] - 1, []
    for start in range(0, T, WINDOWS_AT_ONCE * length):
        part = row[0, start : start + WINDOWS_AT_ONCE * length + 1]
        n = len(part) - 1
        windows = n // length
        rest = n - windows * length
        for first, rows, width in ((0, windows, length), (windows * length, 1, rest)):
            size = rows * width
            if size:
                state = model.init_state(rows)._replace(blocks=map_tensors(partial(_repeat, rows), blocks))
                tokens = part[first : first + size].view(rows, width)
                labels = part[first + 1 : first + size + 1].view(rows, width)
                losses.append(model.score(tokens, labels, state, learn=False).loss.flatten())
    return torch.cat(losses).double().cpu().numpy()


def _repeat(rows: int, x: Tensor) -> Tensor:
    """A tensor (1, ...) of a state as (rows, ...), in memory of its own: the state of several windows."""
    return x.expand(rows, *x.shape[1:]).contiguous()


def _spread_tokens(tokens: list[int], T: int) -> list[int]:
    """Up to ROLLED_BACK of these tokens, spread over a text of T tokens; not the first, which has no memory."""
    inside = [token for token in tokens if 0 < token < T]
    step = max(1, math.ceil(len(inside) / ROLLED_BACK))
    return inside[step - 1 :: step]
