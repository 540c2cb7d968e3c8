"""Reading a text with a run of `fastweights train`: with memory, without, and from memories that it goes back to."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.inspect.reading import (
    CARRIED,
    LEARNING,
    LONG,
    LONG_TEXT,
    SEGMENT,
    WINDOWS,
    Mode,
    Reading,
    RolledBack,
    Watch,
    check_text,
    cut,
    joined,
)
from fastweights.models import evaluation, run_folder
from fastweights.models.run_documents import read_file
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.probing.probes import probe
from fastweights.torch.tree import map_tensors

POINTS = 8  # memories of the text that can be rolled back to


def read_run(run: Path, file: Path, *, every: int, limit: int, device: str, watch: Watch) -> Reading:
    """Read a file with a run of `fastweights train`.

    The text is read once under the probe with the memory carried, which gives the losses with memory and, where the
    model has a Fast Weight Layer, those with the layer learning; then without a memory; then again from each memory
    that can be rolled back to.

    Args:
        run: folder of the run.
        file: text file.
        every: tokens between two measurements of a memory.
        limit: tokens of the file to read; 0 for all.
        device: "cpu" or "cuda".
        watch: called after each segment, while the probe still holds that segment's keys and values.

    Returns:
        Losses by mode, and the probe.

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
    text = cut(text, text.widths(model.tokenizer.lengths()), limit)
    row = evaluation.row_of(model, text)
    T = row.shape[1] - 1
    size = LONG if T > LONG_TEXT else SEGMENT
    watch.begin(T)
    state, slow, fast = model.init_state(1), [], []
    # The memory at the start of each segment is kept: some of them are what the page can roll back to.
    states: dict[int, Any] = {}
    with torch.no_grad(), probe(model, every=every, keep=True) as seen:
        for at in range(0, T, size):
            states[at] = state.blocks
            part = row[:, at : at + size + 1]
            scores = model.score(part[:, :-1], part[:, 1:], state)
            state = scores.state
            slow.append(scores.loss if scores.slow is None else scores.slow)
            fast.append(scores.loss)
            watch(seen)
    # The same text once more, in windows that each start with an empty memory: what there is to gain.
    static = evaluation.score(model, [text], "static").losses[0]
    modes = [
        Mode("static", "memory off", WINDOWS.format(model.config.length), static),
        Mode("memory", "memory on", CARRIED, joined(slow)),
    ]
    if model.fast is not None:
        modes.append(Mode(*LEARNING, joined(fast)))
    points = _points(states, T)
    back = [RolledBack(at, _from_memory(model, row[:, at:], states[at])) for at in points]
    return Reading(str(run), text, text.widths(model.tokenizer.lengths()), modes, back, seen)


def _repeated(rows: int, x: Tensor) -> Tensor:
    """A tensor (1, ...) as (rows, ...), each row with memory of its own: a state for several windows at once."""
    return x.expand(rows, *x.shape[1:]).contiguous()


@torch.no_grad()
def _from_memory(model: Any, row: Tensor, blocks: Any) -> np.ndarray:
    """Losses of a text (1, n + 1) in windows that all start from the same memory.

    Windows are as long as those of training, and up to 8 are read as rows of one batch; the last, shorter one is read
    alone.

    Args:
        model: the language model.
        row: tokens (1, n + 1), the first of which is only read.
        blocks: state of the blocks at the first token, of one row; the Fast Weight Layer starts as trained.

    Returns:
        (n,) in nats.
    """
    length, T, losses = model.config.length, row.shape[1] - 1, []
    for at in range(0, T, 8 * length):
        part = row[0, at : at + 8 * length + 1]
        n = len(part) - 1
        whole = n // length * length
        for a, b, rows in ((0, whole, n // length), (whole, n, 1)):
            if b > a:
                state = model.init_state(rows)
                some = map_tensors(partial(_repeated, rows), blocks)
                tokens, labels = part[a:b].view(rows, -1), part[a + 1 : b + 1].view(rows, -1)
                losses.append(model.score(tokens, labels, state._replace(blocks=some), learn=False).loss.flatten())
    return torch.cat(losses).double().cpu().numpy()


def _points(states: dict[int, Any], T: int) -> list[int]:
    """Up to POINTS positions at which the memory is known, spread over the text."""
    known = [at for at in states if 0 < at < T]
    step = max(1, math.ceil(len(known) / POINTS))
    return known[step - 1 :: step]
