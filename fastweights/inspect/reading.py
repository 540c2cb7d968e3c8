"""The result of reading a text under a probe, whichever model reads it: losses by mode, and the probe.

run_reader.py and hf_reader.py make a `Reading`; page_data.py turns it into the data of the page.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.text.scores import Text
from fastweights.torch.probing.probes import Probe

SEGMENT, LONG_SEGMENT = 256, 1024  # tokens read at a time, and those of a text of more than LONG_TEXT tokens
LONG_TEXT = 8192
GARBLED = 0.3  # share of characters that are no text, above which a file is none


class Mode(NamedTuple):
    """One way in which the text was read.

    Attributes:
        key: its name in the data of the page, such as "memory".
        label: its name on the page.
        about: a sentence that says what it is.
        losses: (T,) of each token, in nats.
    """

    key: str
    label: str
    about: str
    losses: np.ndarray


class RolledBack(NamedTuple):
    """Losses with the memory as it was at some token, whatever was read after it.

    Attributes:
        token: the token.
        losses: (T - token,) of the tokens from that one on, in nats.
    """

    token: int
    losses: np.ndarray


class Reading(NamedTuple):
    """A text that was read.

    Attributes:
        name: of the model.
        text: bytes and tokens.
        widths: (T,), bytes of each token.
        modes: the ways in which the text was read; the last is the one that the page shows first.
        rolled_back: losses from memories of earlier tokens; empty where the page offers none.
        probe: closed, with the measurements of the last mode.
    """

    name: str
    text: Text
    widths: np.ndarray
    modes: list[Mode]
    rolled_back: list[RolledBack]
    probe: Probe


class SegmentObserver(Protocol):
    """Follows a text while it is read (sources.py)."""

    def begin(self, tokens: int) -> None:
        """Called first, with the number of tokens of the text."""

    def __call__(self, probe: Probe) -> None:
        """Called after each segment, with the open probe, which still holds the segment's keys and values."""


WINDOWS = "Windows of {} tokens, each read with an empty memory."
CARRIED = "The memory is carried from the first token on."
LEARNING = "The memory is carried, and the Fast Weight Layer learns from every token."


def segment_length(tokens: int) -> int:
    """How many tokens of a text of so many tokens are read at a time."""
    return LONG_SEGMENT if tokens > LONG_TEXT else SEGMENT


def check_text(path: Path, data: bytes) -> None:
    """Raise unless these bytes are text.

    A zero byte means a binary file. Text in another encoding than UTF-8 passes as long as little of it is garbled: the
    page shows it with replacement characters.

    Args:
        path: of the file, for the message.
        data: all its bytes.
    """
    if b"\0" in data:
        raise FastWeightError(f"{path} is not text: byte {data.index(0)} of it is 0; expected a text file")
    text = data.decode("utf-8", "replace")
    garbled = text.count("�") / max(1, len(text))
    if garbled > GARBLED:
        raise FastWeightError(f"{path} is not text: {garbled:.0%} of it is no UTF-8; expected a text file")


def join_losses(losses: list[Tensor]) -> np.ndarray:
    """Losses of parts of a text, (1, n) each, as one array (T,) in float64."""
    return torch.cat(losses, 1)[0].double().cpu().numpy()


def first_tokens(text: Text, widths: np.ndarray, limit: int) -> Text:
    """The first `limit` tokens of a text; all of it when `limit` is 0.

    Args:
        text: bytes and tokens.
        widths: (T,), bytes of each token.
        limit: number of tokens.
    """
    if not limit or len(text.tokens) <= limit:
        return text
    data = text.data[: int(widths[:limit].sum())]
    sizes = None if text.sizes is None else text.sizes[:limit]
    return Text(text.name, data, text.tokens[:limit], sizes)
