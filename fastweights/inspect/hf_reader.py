"""Reading a text with a model of Hugging Face: one of ours, a hybrid with our operation, or one with a head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.inspect.reading import (
    CARRIED,
    LEARNING,
    WINDOWS,
    Mode,
    Reading,
    SegmentObserver,
    check_text,
    first_tokens,
    join_losses,
    segment_length,
)
from fastweights.torch.dynamic import token_losses
from fastweights.torch.probing.probes import Probe, probe

AfterSegment = Callable[[], None]  # called when a segment has been read


def read_hf(
    folder: Path,
    file: Path,
    *,
    head: Path | None,
    every: int,
    limit: int,
    window: int,
    device: str,
    observer: SegmentObserver,
) -> Reading:
    """Read a file with a model of Hugging Face, in one of three ways.

    One of our models carries its memory through the text, once with its Fast Weight Layer off and once on. A hybrid of
    Hugging Face is given our operation by `accelerate`, which is what the probe can look into, and reads windows. With
    a head of `fastweights hf adapt`, the model reads a sliding window, with the head off and on.

    Args:
        folder: of the model, or a GGUF file.
        file: text file.
        head: folder of an attached head, or None.
        every: tokens between two measurements of a memory.
        limit: tokens of the file to read; 0 for all.
        window: tokens that the model sees at once.
        device: "cpu" or "cuda".
        observer: follows the text as it is read under the probe.
    """
    from fastweights.hf import accelerate, scoring
    from fastweights.hf.attach import load_attached, using
    from fastweights.hf.loading import load_model, read_file, row_of
    from fastweights.hf.model import FastWeightForCausalLM

    model, tokenizer = load_model(folder, device=device)
    text = read_file(tokenizer, file)
    check_text(file, text.data)
    assert text.sizes is not None
    text = first_tokens(text, text.sizes, limit)
    assert text.sizes is not None
    if head is not None:
        load_attached(model, head)
    ours = isinstance(model, FastWeightForCausalLM)
    if not ours and head is None:
        accelerate(model)
    row = row_of(tokenizer, text).to(model.device)
    observer.begin(row.shape[1] - 1)
    sliding = scoring.Reading(window=window, stride=max(1, window // 4))
    modes = []
    # Without the head, or without learning
    with torch.no_grad():
        if head is not None:
            with using(model, head=False, cache=False):
                losses = scoring.score(model, tokenizer, [text], "static", sliding).losses[0]
            modes.append(Mode("static", "window", f"Each token sees up to {window} tokens before it.", losses))
        if ours and model.fast is not None:
            adapt, model.config.adapt = model.config.adapt, False
            losses = _read_carried(model, row, lambda: None)
            model.config.adapt = adapt
            modes.append(Mode("memory", "memory on", CARRIED, losses))
    # As the model reads, under the probe
    with torch.no_grad(), probe(model, every=every, keep=True) as probed:
        after_segment = _observe(observer, probed)
        if ours and model.fast is not None:
            losses = _read_carried(model, row, after_segment)
            modes.append(Mode("fast", "memory on, layer learns", LEARNING, losses))
        elif ours:
            modes.append(Mode("memory", "memory on", CARRIED, _read_carried(model, row, after_segment)))
        elif head is None:
            losses = _read_windows(model, row, window, after_segment)
            modes.append(Mode("static", "memory on", WINDOWS.format(window), losses))
        else:
            losses = scoring.score(model, tokenizer, [text], "fast", sliding).losses[0]
            modes.append(Mode("fast", "the head learns", "The attached head learns from every token.", losses))
    return Reading(str(folder), text, text.sizes, modes, [], probed)


def _observe(observer: SegmentObserver, probed: Probe) -> AfterSegment:
    """A call of the observer with the probe."""
    return lambda: observer(probed)


def _read_carried(model: Any, row: Tensor, after_segment: AfterSegment) -> np.ndarray:
    """Losses (T,) in nats of a text (1, T + 1) that one of our models reads segment by segment, its memory carried."""
    from fastweights.hf.cache import FastWeightCache

    T, cache, losses = row.shape[1] - 1, FastWeightCache(), []
    length = segment_length(T)
    for start in range(0, T, length):
        part = row[:, start : start + length + 1]
        logits = model(part[:, :-1], past_key_values=cache, use_cache=True).logits
        losses.append(token_losses(logits, part[:, 1:]))
        after_segment()
    return join_losses(losses)


def _read_windows(model: Any, row: Tensor, window: int, after_segment: AfterSegment) -> np.ndarray:
    """Losses (T,) in nats of a text (1, T + 1) in windows, each read with an empty memory."""
    losses = []
    for start in range(0, row.shape[1] - 1, window):
        part = row[:, start : start + window + 1]
        losses.append(token_losses(model(part[:, :-1], use_cache=False).logits, part[:, 1:]))
        after_segment()
    return join_losses(losses)
