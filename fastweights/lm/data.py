"""A corpus as tokens on disk, and the batches of a training run.

Every document is its start token and its text; where an input is the start token, a document starts. Which tokens a
step sees is a function of the seed and the step alone, so a run can go on from any step.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import replacing
from fastweights.text import corpus, tokenizer
from fastweights.text.corpus import SPLITS

Tokenizer = tokenizer.Bytes | tokenizer.Subwords

VERSION = 1  # of the files below
INDEX = "index.json"  # where each split's documents begin; a folder that has it is complete


def cache_folder() -> Path:
    """Where encoded corpora are kept: $XDG_CACHE_HOME/fastweights, or ~/.cache/fastweights."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastweights"


@dataclass(frozen=True)
class Split:
    """Documents of one split as one array of tokens.

    Attributes:
        tokens: (N documents laid end to end,), each with the start token before its text.
        at: (N + 1,), where each begins.
        names, bytes: of each.
    """

    tokens: np.ndarray
    at: np.ndarray
    names: list[str]
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document i, the start token first."""
        return np.asarray(self.tokens[self.at[i] : self.at[i + 1]]).astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """An encoded corpus: its splits "train", "valid" and "test", its tokenizer, and the folder that it is kept in."""

    splits: dict[str, Split]
    tokenizer: Tokenizer
    folder: Path

    @property
    def bytes_per_token(self) -> float:
        """Of the training text, to turn a loss per token into bits per byte."""
        train = self.splits["train"]
        return float(train.bytes.sum() / max(1, len(train.tokens) - len(train)))


def prepare(data: str, tokens: str, cache: Path | None = None) -> Corpus:
    """The encoded corpus, from the cache folder when it is there.

    Args:
        data: as `corpus.documents` takes it.
        tokens: "bytes", "bpe:SIZE", trained on the training documents, or a tokenizer.json.
        cache: folder for encoded corpora; `cache_folder()` when absent.

    The folder's name is a hash of the corpus (names, sizes and times of its files) and the tokenizer, so that a corpus
    which has changed is encoded anew.
    """
    is_file = tokens != "bytes" and not tokens.startswith("bpe:") and Path(tokens).is_file()
    kind = hashlib.sha256(Path(tokens).read_bytes()).hexdigest() if is_file else tokens
    key = hashlib.sha256(json.dumps([VERSION, corpus.identity(data), kind]).encode()).hexdigest()[:16]
    folder = (cache or cache_folder()) / key
    if not (folder / INDEX).exists():
        _encode(data, tokens, folder)
    return open_folder(folder)


def _encode(data: str, tokens: str, folder: Path) -> None:
    """Encode a corpus into a folder, which appears when it is complete; two processes may do so at once."""
    parts = corpus.split(list(corpus.documents(data)), data)
    with_tokens = tokenizer.make(tokens, (d.data for d in parts["train"]))
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            with_tokens.save(temporary)
            index = {name: _write(temporary / f"{name}.bin", parts[name], with_tokens) for name in SPLITS}
            (temporary / INDEX).write_text(json.dumps(index))
    except FastWeightError:
        if not (folder / INDEX).exists():  # no other process was quicker
            raise


def _write(path: Path, found: Iterable[corpus.Document], with_tokens: Tokenizer) -> dict[str, Any]:
    """Write the tokens of documents to a file, 2 bytes each where the vocabulary allows; returns the index of them."""
    dtype = "uint16" if with_tokens.size <= 2**16 else "uint32"
    at, names, sizes = [0], [], []
    with open(path, "wb") as file:
        for d in found:
            encoded = np.r_[with_tokens.start, with_tokens.encode(d.data)]
            file.write(encoded.astype(dtype).tobytes())
            at.append(at[-1] + len(encoded))
            names.append(d.name)
            sizes.append(len(d.data))
    return dict(dtype=dtype, at=at, names=names, bytes=sizes)


def open_folder(folder: Path) -> Corpus:
    """The corpus in a folder; tokens stay on disk and are read where they are needed."""
    splits = {}
    for name, i in json.loads((folder / INDEX).read_text()).items():
        path = folder / f"{name}.bin"
        tokens = np.memmap(path, i["dtype"], "r") if path.stat().st_size else np.zeros(0, i["dtype"])
        splits[name] = Split(tokens, np.array(i["at"]), i["names"], np.array(i["bytes"]))
    return Corpus(splits, tokenizer.load(folder), folder)


@dataclass(frozen=True)
class Batches:
    """The batches of a run: `batches[step]` is (rows, length + 1) tokens, the same whenever it is asked for.

    carried: row r of step s + 1 goes on where row r of step s ended, and documents are shuffled every epoch.
    Otherwise rows are windows in shuffled order.
    """

    split: Split
    rows: int
    length: int
    seed: int
    carried: bool

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            need, have = self.rows * self.length + 1, len(self.split.tokens)
            raise FastWeightError(
                f"the training documents hold {have} tokens; expected at least {need}: a batch is "
                f"{self.rows} rows of {self.length} tokens and one more"
            )

    @property
    def per_epoch(self) -> int:
        """Batches until every token was seen once."""
        return (len(self.split.tokens) - 1) // self.length // self.rows

    def starts_epoch(self, step: int) -> bool:
        """Whether documents are shuffled anew before this step, so that no memory can be carried into it."""
        return step % self.per_epoch == 0

    def __getitem__(self, step: int) -> np.ndarray:
        epoch, within = divmod(step, self.per_epoch)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.split))
        if self.carried:
            windows = np.arange(self.rows) * self.per_epoch + within
        else:
            shuffled = rng.permutation(self.rows * self.per_epoch)
            windows = shuffled[within * self.rows : (within + 1) * self.rows]
        lengths = np.diff(self.split.at)[order]
        ends = np.cumsum(lengths)
        return np.stack([self._window(int(w) * self.length, order, ends) for w in windows])

    def _window(self, at: int, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """length + 1 tokens from position `at` of the documents, laid end to end in this order."""
        parts: list[np.ndarray] = []
        missing, i = self.length + 1, int(np.searchsorted(ends, at, side="right"))
        while missing:
            document = self.split.document(order[i])
            part = document[len(document) - (ends[i] - at) :][:missing]
            parts.append(part)
            at, missing, i = at + len(part), missing - len(part), i + 1
        return np.concatenate(parts)
