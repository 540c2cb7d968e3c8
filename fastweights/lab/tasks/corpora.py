"""Corpora of the lab as arrays of tokens: WikiText-2 by words or bytes, enwik8, or the standard library's sources."""

import functools
import lzma
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import read_text
from fastweights.text import corpus

NAMES = ("wikitext-2-words", "wikitext-2-bytes", "enwik8", "stdlib-words", "stdlib-bytes")
SPLITS = ("train", "valid", "test")
WIKITEXT_FILES = tuple(f"wikitext-2/wiki.{split}.tokens" for split in SPLITS)
# Files that a corpus is read from, as patterns below the folder of the user's data; the standard library needs none.
FILES: dict[str, tuple[str, ...]] = {
    "enwik8": ("enwik8*",),
    "wikitext-2-words": WIKITEXT_FILES,
    "wikitext-2-bytes": WIKITEXT_FILES,
}
MEGABYTES = 12  # of enwik8: the first, cut 90 / 5 / 5
RARE = 3  # words of the standard library that are seen less often are unknown; WikiText marks its own
TITLE = re.compile(r"^ = [^=].*[^=] = $", re.M)  # of an article of WikiText


@dataclass(frozen=True)
class Corpus:
    """A corpus as streams of tokens.

    Attributes:
        name: one of NAMES.
        vocab: number of different tokens.
        streams: by split, the tokens (T,) of its documents laid end to end.
        starts: by split, the positions in the stream at which a document starts.
        bytes_per_token: of the test split, to turn nats per token into bits per byte.
    """

    name: str
    vocab: int
    streams: dict[str, np.ndarray]
    starts: dict[str, np.ndarray]
    bytes_per_token: float


@functools.lru_cache(6)
def load(name: str, data: Path | None, limit: int = 0) -> Corpus:
    """A corpus by name.

    Args:
        name: one of NAMES.
        data: folder of the user's files; None will do for the standard library's sources.
        limit: number of tokens of each split that are kept; 0 keeps all.
    """
    if name not in NAMES:
        raise FastWeightError(f"corpus is {name!r}; expected one of {', '.join(NAMES)}")
    absent = [f for f in FILES.get(name, ()) if data is None or not any(data.glob(f))]
    if absent:
        raise FastWeightError(f"data is {data}; expected a folder with {', '.join(absent)}, which {name} is read from")
    if data is None or name.startswith("stdlib"):
        documents = _stdlib(limit)
    elif name.startswith("wikitext"):
        documents = _wikitext(data / "wikitext-2")
    else:
        documents = _enwik8(data)
    by_words = name.endswith("words")
    numbers = _number_words(documents["train"], 1 if name.startswith("wikitext") else RARE) if by_words else {}
    streams, starts = {}, {}
    for split in SPLITS:
        if by_words:
            encoded = [np.array([numbers.get(word, 0) for word in _words(text)]) for text in documents[split]]
        else:
            encoded = [np.frombuffer(text.encode(), np.uint8) for text in documents[split]]
        stream = np.concatenate(encoded).astype(np.int64)
        first_tokens = np.cumsum([0, *map(len, encoded)])[:-1]
        if split == "test":
            bytes_per_token = sum(len(text.encode()) for text in documents[split]) / max(1, len(stream))
        streams[split] = stream[:limit] if limit else stream
        starts[split] = first_tokens[first_tokens < len(streams[split])]
    return Corpus(name, len(numbers) if by_words else 256, streams, starts, bytes_per_token)


def _words(document: str) -> list[str]:
    """The words of a document, which are what stands between spaces, and <eos> for the end of a line."""
    return [word for line in document.splitlines() for word in (*line.split(), "<eos>")]


def _number_words(documents: list[str], least: int) -> dict[str, int]:
    """Numbers of the words that are seen at least `least` times, in order of appearance; 0 is <unk>, for all others."""
    counts = Counter(word for document in documents for word in _words(document))
    known = dict.fromkeys(word for word, count in counts.items() if count >= least)
    return {word: i for i, word in enumerate({"<unk>": None} | known)}


def _wikitext(folder: Path) -> dict[str, list[str]]:
    """The articles of each split, cut at their titles."""
    articles = {}
    for split in SPLITS:
        text = read_text(folder / f"wiki.{split}.tokens", "articles of WikiText")
        titles = [match.start() for match in TITLE.finditer(text)]
        edges = [0, *titles[1:], len(text)]  # what stands before the first title belongs to the first article
        articles[split] = [text[a:b] for a, b in pairwise(edges)]
    return articles


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
    parts = [raw[a:b].decode("utf-8", "ignore") for a, b in pairwise(edges)]
    return {split: [part] for split, part in zip(SPLITS, parts, strict=True)}


def _stdlib(limit: int) -> dict[str, list[str]]:
    """The standard library's sources, split by their names; only the first 40 files with a limit, to try things."""
    documents = []
    for document in corpus.documents("stdlib"):
        documents.append(document)
        if limit and len(documents) >= 40:
            break
    splits = corpus.split(documents, "stdlib")
    return {split: [document.data.decode("utf-8", "replace") for document in splits[split]] for split in SPLITS}
