"""Reading a text under a probe: losses by what the model may remember, and what its memories did on the way."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.models import evaluation, run_folder
from fastweights.models.run_documents import read_file
from fastweights.text.scores import Text
from fastweights.torch.dynamic import token_losses
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.probes import Probe, probe
from fastweights.torch.tree import map_tensors

POINTS = 8  # memories of the text that can be rolled back to
SEGMENT, LONG = 256, 1024  # tokens read at a time, and of a text of more than LONG_TEXT tokens
LONG_TEXT = 8192
GARBLED = 0.3  # share of bytes that are no text, above which a file is none


class Mode(NamedTuple):
    """Losses (T,) in nats of one way to read: its key, what the page calls it, and a sentence that says what it is."""

    key: str
    label: str
    about: str
    losses: np.ndarray


class RolledBack(NamedTuple):
    """Losses (T - at,) of the tokens from `at` on when the memory is that of `at`, whatever came after."""

    at: int
    losses: np.ndarray


class Reading(NamedTuple):
    """What was read and how.  text: of bytes and tokens;  widths (T,): bytes of each token;  probe: closed."""

    name: str
    text: Text
    widths: np.ndarray
    modes: list[Mode]
    rolled_back: list[RolledBack]
    probe: Probe


class Watch(Protocol):
    """Follows a text: `begin` with its number of tokens, then a call after each segment, with the open probe."""

    def begin(self, tokens: int) -> None: ...

    def __call__(self, probe: Probe) -> None: ...


WINDOWS = "Windows of {} tokens, each read with an empty memory."
CARRIED = "The memory is carried from the first token on."
LEARNING = (
    "fast",
    "memory on, layer learns",
    "The memory is carried, and the Fast Weight Layer learns from every token.",
)


def check_text(path: Path, data: bytes) -> None:
    """Raise unless these bytes are text.

    A zero byte says a binary file at once. Text in another encoding than UTF-8 passes as long as few bytes are garbled:
    the page shows it with replacement characters.

    Args:
        path: for the message.
        data: the whole file.
    """
    if b"\0" in data:
        raise FastWeightError(f"{path} is not text: byte {data.index(0)} of it is 0; expected a text file")
    text = data.decode("utf-8", "replace")
    bad = text.count("�") / max(1, len(text))
    if bad > GARBLED:
        raise FastWeightError(f"{path} is not text: {bad:.0%} of it is no UTF-8; expected a text file")


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
    text = _cut(text, model.tokenizer.lengths()[text.tokens], limit)
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
        Mode("memory", "memory on", CARRIED, _joined(slow)),
    ]
    if model.fast is not None:
        modes.append(Mode(*LEARNING, _joined(fast)))
    points = _points(states, T)
    back = [RolledBack(at, _from_memory(model, row[:, at:], states[at])) for at in points]
    return Reading(str(run), text, model.tokenizer.lengths()[text.tokens], modes, back, seen)


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


def read_hf(
    folder: Path, file: Path, *, head: Path | None, every: int, limit: int, window: int, device: str, watch: Watch
) -> Reading:
    """Read a file with a model of Hugging Face: one of ours, one whose layers `accelerate` knows, or with a head.

    Three cases. One of our models carries its memory through the text, once with its Fast Weight Layer off and once on.
    A hybrid of Hugging Face is given our operation by `accelerate`, which is what the probe can look into, and reads
    windows. With a head of `fastweights hf adapt`, the model reads a sliding window, with the head off and on.

    Args:
        folder: of the model, or a GGUF file.
        file: text file.
        head: folder of an attached head, or None.
        every: tokens between two measurements of a memory.
        limit: tokens of the file to read; 0 for all.
        window: tokens that the model sees at once.
        device: "cpu" or "cuda".
        watch: called after each segment.
    """
    from fastweights.hf import accelerate
    from fastweights.hf.attach import load_attached, using
    from fastweights.hf.loading import load_model, row_of
    from fastweights.hf.loading import read_file as read_hf_file
    from fastweights.hf.model import FastWeightForCausalLM
    from fastweights.hf.scoring import Reading as How
    from fastweights.hf.scoring import score

    model, tokenizer = load_model(folder, device=device)
    text = read_hf_file(tokenizer, file)
    check_text(file, text.data)
    assert text.sizes is not None
    text = _cut(text, text.sizes, limit)
    if head is not None:
        load_attached(model, head)
    how, ours = How(window=window, stride=max(1, window // 4)), isinstance(model, FastWeightForCausalLM)
    row = row_of(tokenizer, text).to(model.device)
    watch.begin(row.shape[1] - 1)
    if not ours and head is None:
        accelerate(model)
    modes = []
    if head is not None:
        with torch.no_grad(), using(model, head=False, cache=False):
            static = score(model, tokenizer, [text], "static", how).losses[0]
        modes.append(Mode("static", "window", f"Each token sees up to {window} tokens before it.", static))
    if ours and model.fast is not None:
        adapt, model.config.adapt = model.config.adapt, False
        with torch.no_grad():
            modes.append(Mode("memory", "memory on", CARRIED, _carried(model, row, None, None)))
        model.config.adapt = adapt
    with torch.no_grad(), probe(model, every=every, keep=True) as seen:
        if ours:
            kind = ("memory", "memory on", CARRIED) if model.fast is None else LEARNING
            modes.append(Mode(*kind, _carried(model, row, watch, seen)))
        elif head is None:
            modes.append(Mode("static", "memory on", WINDOWS.format(window), _windows(model, row, window, watch, seen)))
        else:
            fast = score(model, tokenizer, [text], "fast", how).losses[0]
            modes.append(Mode("fast", "the head learns", "The attached head learns from every token.", fast))
    assert text.sizes is not None
    return Reading(str(folder), text, text.sizes, modes, [], seen)


def _carried(model: Any, row: Tensor, watch: Watch | None, seen: Any) -> np.ndarray:
    """Losses of a text that one of our models reads segment by segment."""
    from fastweights.hf.cache import FastWeightCache

    T, cache, losses = row.shape[1] - 1, FastWeightCache(), []
    size = LONG if T > LONG_TEXT else SEGMENT
    for at in range(0, T, size):
        part = row[:, at : at + size + 1]
        logits = model(part[:, :-1], past_key_values=cache, use_cache=True).logits
        losses.append(token_losses(logits, part[:, 1:]))
        if watch is not None:
            watch(seen)
    return _joined(losses)


def _windows(model: Any, row: Tensor, window: int, watch: Watch, seen: Any) -> np.ndarray:
    """Losses (T,) of a text in windows of `window` tokens, each read from an empty memory, in nats."""
    losses = []
    for at in range(0, row.shape[1] - 1, window):
        part = row[:, at : at + window + 1]
        losses.append(token_losses(model(part[:, :-1], use_cache=False).logits, part[:, 1:]))
        watch(seen)
    return _joined(losses)


def _joined(losses: list[Tensor]) -> np.ndarray:
    """Losses of parts, (1, n) each, as one array (T,) in float64."""
    return torch.cat(losses, 1)[0].double().cpu().numpy()


def _cut(text: Text, widths: np.ndarray, limit: int) -> Text:
    """The first `limit` tokens of a text.

    Args:
        text: bytes and tokens.
        widths: (T,), bytes of each token.
        limit: 0 for all.
    """
    if not limit or len(text.tokens) <= limit:
        return text
    data = text.data[: int(widths[:limit].sum())]
    sizes = None if text.sizes is None else text.sizes[:limit]
    return Text(text.name, data, text.tokens[:limit], sizes)
