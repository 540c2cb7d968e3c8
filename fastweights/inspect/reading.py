"""What reading a text under a probe gives, whichever model reads: losses by what it may remember, and the probe."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.text.scores import Text
from fastweights.torch.probing.probes import Probe

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


def joined(losses: list[Tensor]) -> np.ndarray:
    """Losses of parts, (1, n) each, as one array (T,) in float64."""
    return torch.cat(losses, 1)[0].double().cpu().numpy()


def cut(text: Text, widths: np.ndarray, limit: int) -> Text:
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
