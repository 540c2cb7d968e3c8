"""Corpora of the lab as arrays of tokens: WikiText-2 by words or bytes, enwik8, or the standard library's sources."""

import functools
import lzma
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import read_text
from fastweights.text import corpus

NAMES = ("wikitext-2-words", "wikitext-2-bytes", "enwik8", "stdlib-words", "stdlib-bytes")
SPLITS = ("train", "valid", "test")
# What a corpus is read from, as patterns below the folder of the user's data; the standard library needs nothing.
FILES: dict[str, tuple[str, ...]] = {
    "enwik8": ("enwik8*",),
    **dict.fromkeys(("wikitext-2-words", "wikitext-2-bytes"), tuple(f"wikitext-2/wiki.{s}.tokens" for s in SPLITS)),
}
MEGABYTES = 12  # of enwik8: the first, cut 90 / 5 / 5
RARE = 3  # words of the standard library seen less often are unknown; WikiText marks its own
TITLE = re.compile(r"^ = [^=].*[^=] = $", re.M)  # of an article of WikiText


@dataclass(frozen=True)
class Text:
    """One corpus as streams of tokens.

    Attributes:
        name: of NAMES.
        vocab: number of different tokens.
        train, valid, test: (tokens,) each, documents laid end to end.
        starts: of documents, in each stream.
        bytes_per_token: of the test stream, to turn nats per token into bits per byte.
        by_words: whether a token is a word rather than a byte.
    """

    name: str
    vocab: int
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    starts: dict[str, np.ndarray]  # of documents, in each stream
    bytes_per_token: float
    by_words: bool


@functools.lru_cache(6)
def load(name: str, data: Path | None, limit: int = 0) -> Text:
    """A corpus by name, as streams of tokens.

    Args:
        name: of NAMES.
        data: folder of the user's files; the standard library's sources need none.
        limit: tokens kept of each split; 0 keeps all.
    """
    if name not in NAMES:
        raise FastWeightError(f"corpus is {name!r}; expected one of {', '.join(NAMES)}")
    absent = [f for f in FILES.get(name, ()) if data is None or not any(data.glob(f))]
    if absent:
        raise FastWeightError(f"data is {data}; expected a folder with {', '.join(absent)}, which {name} is read from")
    by_words = name.endswith("words")
    if data is None or name.startswith("stdlib"):
        documents = _stdlib(limit)
    else:
        documents = _wikitext(data / "wikitext-2") if name.startswith("wikitext") else _enwik8(data)
    parts, starts, sizes = {}, {}, {}
    types = _types(documents["train"], 1 if name.startswith("wikitext") else RARE) if by_words else {}
    for split in SPLITS:
        pieces = [
            np.array([types.get(w, 0) for w in _words(d)]) if by_words else np.frombuffer(d.encode(), np.uint8)
            for d in documents[split]
        ]
        stream = np.concatenate(pieces).astype(np.int64)
        at = np.cumsum([0, *map(len, pieces)])[:-1]
        sizes[split] = sum(len(d.encode()) for d in documents[split]) / max(1, len(stream))
        parts[split] = stream[:limit] if limit else stream
        starts[split] = at[at < len(parts[split])]
    vocab = len(types) if by_words else 256
    return Text(name, vocab, parts["train"], parts["valid"], parts["test"], starts, sizes["test"], by_words)


def _words(document: str) -> list[str]:
    """What stands between spaces, and <eos> for a line's end."""
    return [w for line in document.splitlines() for w in (*line.split(), "<eos>")]


def _types(documents: list[str], least: int) -> dict[str, int]:
    """Numbers of the words seen at least so often, in order of appearance; all others are 0, <unk>."""
    counts = Counter(w for d in documents for w in _words(d))
    kept = dict.fromkeys(w for w, n in counts.items() if n >= least)
    return {w: i for i, w in enumerate({"<unk>": None} | kept)}


def _wikitext(folder: Path) -> dict[str, list[str]]:
    """The articles of each split, cut at their titles."""
    found = {}
    for split in SPLITS:
        text = read_text(folder / f"wiki.{split}.tokens", "articles of WikiText")
        at = [m.start() for m in TITLE.finditer(text)]
        found[split] = [text[a:b] for a, b in zip([0, *at[1:]], [*at[1:], len(text)], strict=True)]
    return found


def _enwik8(folder: Path) -> dict[str, list[str]]:
    """The first megabytes, cut into three splits of one document each."""
    path = next((p for p in (folder / "enwik8.xz", folder / "enwik8") if p.exists()), None)
    if path is None:
        raise FastWeightError(f"data is {folder}; expected enwik8 or enwik8.xz there: no other form is read")
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            raw = file.read(MEGABYTES * 10**6)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise FastWeightError(f"{path} cannot be read: {error}; expected enwik8, as it is or by xz") from None
    edges = [0, int(len(raw) * 0.9), int(len(raw) * 0.95), len(raw)]
    return {s: [raw[a:b].decode("utf-8", "ignore")] for s, a, b in zip(SPLITS, edges, edges[1:], strict=False)}


def _stdlib(limit: int) -> dict[str, list[str]]:
    """The standard library's sources, split by name. With a limit only the first files are read: enough to try
    things.
    """
    found = []
    for document in corpus.documents("stdlib"):
        found.append(document)
        if limit and len(found) >= 40:
            break
    parts = corpus.split(found, "stdlib")
    return {s: [d.data.decode("utf-8", "replace") for d in parts[s]] for s in SPLITS}
