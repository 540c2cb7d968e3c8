"""A corpus as tokens on disk, and the batches of a training run.

Every document is its start token and its text; where an input is the start token, a document starts. Which tokens a
step sees is a function of the seed and the step alone, so a run can go on from any step.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.core import FastWeightError, FastWeightWarning
from fastweights.files import checksum, checksum_of_file, read_json, replacing, write_checked_json
from fastweights.text import corpus, tokenizer
from fastweights.text.corpus import SPLITS

Tokenizer = tokenizer.Bytes | tokenizer.Subwords

VERSION = 2  # of the files below
INDEX = "index.json"  # where each split's documents begin, and checksums; a folder that has it is complete
MAPPED = 2**28  # bytes of tokens beyond which they stay on the disk


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
        """Number of documents."""
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
    """The encoded corpus, from the cache folder when it is there and whole.

    Args:
        data: as `corpus.documents` takes it.
        tokens: "bytes", "bpe:SIZE", trained on the training documents, or a tokenizer.json.
        cache: folder for encoded corpora; `cache_folder()` when absent.

    The folder's name is a hash of the corpus (names, sizes and times of its files) and the tokenizer, so that a corpus
    which has changed is encoded anew. So is one that is damaged, with a warning.
    """
    folder = (cache or cache_folder()) / _name(data, tokens, VERSION)
    # The index is written last, so a folder that has one was complete once; checksums tell whether it still is.
    if (folder / INDEX).exists():
        try:
            return open_folder(folder)
        except FastWeightError as error:
            warnings.warn(f"{error}. It is made again from {data}", FastWeightWarning, stacklevel=2)
    shutil.rmtree(folder, ignore_errors=True)
    _encode(data, tokens, folder)
    return open_folder(folder)


def _name(data: str, tokens: str, version: int) -> str:
    """What the folder of an encoded corpus is called in a version of these files."""
    is_file = tokens != "bytes" and not tokens.startswith("bpe:") and Path(tokens).is_file()
    kind = checksum_of_file(Path(tokens)) if is_file else tokens
    return hashlib.sha256(json.dumps([version, corpus.identity(data), kind]).encode()).hexdigest()[:16]


def prepare_again(folder: Path, data: str, tokens: str, cache: Path | None = None) -> Corpus:
    """The corpus that a run began with, encoded in `folder`; made again from its data where it is gone, damaged or
    of an older version.

    Args:
        folder: of the encoded corpus, as the run noted it.
        data: as `corpus.documents` takes it.
        tokens: the tokenizer, as `prepare` takes it.
        cache: folder for encoded corpora; `cache_folder()` when absent.
    """
    damage = f"{folder} is gone"
    if (folder / INDEX).exists():
        try:
            return open_folder(folder)
        except FastWeightError as error:
            damage = str(error)
    try:
        found = prepare(data, tokens, cache)
    except FastWeightError as error:
        raise FastWeightError(
            f"{damage}, and {error}; the checkpoint is intact, and goes on once the data is back"
        ) from None
    if folder.name not in [_name(data, tokens, version) for version in range(1, VERSION + 1)]:
        warnings.warn(
            f"{damage}, and {data} has changed since this run began: it goes on with other text",
            FastWeightWarning,
            stacklevel=2,
        )
    return found


def _encode(data: str, tokens: str, folder: Path) -> None:
    """Encode a corpus into a folder, which appears when it is complete; two processes may do so at once.

    The tokenizer is trained on the training documents alone: what is held out must not shape it.

    Args:
        data: as `corpus.documents` takes it.
        tokens: "bytes", "bpe:SIZE" or a tokenizer.json.
        folder: to make.
    """
    parts = corpus.split(list(corpus.documents(data)), data)
    with_tokens = tokenizer.make(tokens, (d.data for d in parts["train"]))
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            with_tokens.save(temporary)
            index = {name: _write(temporary / f"{name}.bin", parts[name], with_tokens) for name in SPLITS}
            write_checked_json(temporary / INDEX, dict(version=VERSION, tokenizer=with_tokens.name, splits=index))
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
    return dict(dtype=dtype, at=at, names=names, bytes=sizes, tokens_sha256=checksum_of_file(path))


def open_folder(folder: Path) -> Corpus:
    """The corpus in a folder that `prepare` made; raises FastWeightError where it is not as it was written."""
    why = "a folder that `fastweights train` made of its documents"
    index = read_json(folder / INDEX, why)
    # The first version named its splits at the top, without checksums; the second did not say its number at first.
    version = index.get("version", 1 if set(index) == set(SPLITS) else 2)
    if version != VERSION:
        age = "an older" if version in range(1, VERSION) else "another"
        raise FastWeightError(
            f"{folder} was written by {age} version of this library: its files are of version "
            f"{version!r:.20}; expected version {VERSION}"
        )
    try:
        splits = {name: _open(folder / f"{name}.bin", index["splits"][name]) for name in SPLITS}
        wanted = str(index["tokenizer"])
    except (KeyError, TypeError, ValueError, OSError, OverflowError) as error:
        raise FastWeightError(
            f"{folder / INDEX} is damaged ({type(error).__name__}: {error}); expected {why}"
        ) from None
    found = tokenizer.load(folder)
    if found.name != wanted:
        raise FastWeightError(f"{folder / tokenizer.FILE} is {found.name}; expected {wanted}: it is missing or damaged")
    return Corpus(splits, found, folder)


def _open(path: Path, about: dict[str, Any]) -> Split:
    """A split, whose tokens are read; those of a large one stay on the disk.

    Args:
        path: of the tokens.
        about: what the index says of this split: type, offsets of documents, their names, sizes and checksum.

    Raises:
        FastWeightError: its size or checksum is not what the index says.
    """
    dtype, at, sizes = str(about["dtype"]), np.array(about["at"], np.int64), np.array(about["bytes"], np.int64)
    names = [str(name) for name in about["names"]]
    if dtype not in ("uint16", "uint32") or at.ndim != 1 or not len(at) or at[0] != 0 or (np.diff(at) < 0).any():
        raise ValueError("documents do not follow one another")
    size = path.stat().st_size
    if not len(names) == len(sizes) == len(at) - 1 or size != at[-1] * np.dtype(dtype).itemsize:
        raise FastWeightError(f"{path} has {size} bytes; expected {at[-1] * np.dtype(dtype).itemsize}: it is damaged")
    tokens: np.ndarray
    if size > MAPPED:
        tokens, found = np.memmap(path, dtype, "r"), checksum_of_file(path)
    else:
        content = path.read_bytes()
        tokens, found = np.frombuffer(content, dtype), checksum([content])
    if found != about["tokens_sha256"]:
        raise FastWeightError(f"{path} is damaged: its checksum is not that of its content; expected it as written")
    return Split(tokens, at, names, sizes)


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
    known: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)  # the epoch that was asked for last

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

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The order of documents, where each ends in it, and the order of windows unless they are carried.

        Drawn from the seed and the number of the epoch, so that a run which goes on draws what it would have drawn.
        """
        if epoch not in self.known:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(len(self.split))
            shuffled = None if self.carried else rng.permutation(self.rows * self.per_epoch)
            self.known.clear()
            self.known[epoch] = order, np.cumsum(np.diff(self.split.at)[order]), shuffled
        return self.known[epoch]

    def __getitem__(self, step: int) -> np.ndarray:
        """The batch of a step, (rows, length + 1): inputs are all but the last column, labels all but the first."""
        epoch, within = divmod(step, self.per_epoch)
        order, ends, shuffled = self._epoch(epoch)
        if shuffled is None:
            # Row r reads its own stretch of the corpus, window after window.
            windows = np.arange(self.rows) * self.per_epoch + within
        else:
            windows = shuffled[within * self.rows : (within + 1) * self.rows]
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


class Ahead:
    """make(step), made in another thread while the step before is under way."""

    def __init__(self, make: Callable[[int], Any]):
        self.make, self.pool = make, ThreadPoolExecutor(1, "batches")
        self.next: tuple[int, Future] | None = None

    def __call__(self, step: int) -> Any:
        """What was made for this step, or make it now; then start on the next one."""
        here = self.next is not None and self.next[0] == step
        found = self.next[1].result() if self.next is not None and here else self.make(step)
        self.next = step + 1, self.pool.submit(self.make, step + 1)
        return found
