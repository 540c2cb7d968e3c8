"""Reading a text with a model of Hugging Face: one of ours, a hybrid with our operation, or one with a head."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.inspect.reading import (
    CARRIED,
    LEARNING,
    LONG,
    LONG_TEXT,
    SEGMENT,
    WINDOWS,
    Mode,
    Reading,
    Watch,
    check_text,
    cut,
    joined,
)
from fastweights.torch.dynamic import token_losses
from fastweights.torch.probing.probes import probe


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
    text = cut(text, text.sizes, limit)
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
    return joined(losses)


def _windows(model: Any, row: Tensor, window: int, watch: Watch, seen: Any) -> np.ndarray:
    """Losses (T,) of a text in windows of `window` tokens, each read from an empty memory, in nats."""
    losses = []
    for at in range(0, row.shape[1] - 1, window):
        part = row[:, at : at + window + 1]
        losses.append(token_losses(model(part[:, :-1], use_cache=False).logits, part[:, 1:]))
        watch(seen)
    return joined(losses)
