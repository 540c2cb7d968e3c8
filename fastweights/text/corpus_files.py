"""The files of an encoded corpus: the tokens of each split, an index of its documents, the tokenizer, and checksums.

Every document is its start token and its text, laid end to end with the others of its split.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import checksum, checksum_of_file, read_json, replacing, write_checked_json
from fastweights.text import corpus, tokenizer
from fastweights.text.tokenizer import Tokenizer

VERSION = 2  # of the files below
INDEX = "index.json"  # where each split's documents begin, and checksums; a folder that has it is complete
MAPPED = 2**28  # bytes of tokens beyond which they stay on the disk


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
    left_out: dict[str, int] = field(default_factory=dict)  # numbers of files that were "empty" or "binary"

    @property
    def bytes_per_token(self) -> float:
        """Of the training text, to turn a loss per token into bits per byte."""
        train = self.splits["train"]
        return float(train.bytes.sum() / max(1, len(train.tokens) - len(train)))

    def __str__(self) -> str:
        """How much text there is for what, in words."""
        what = zip(("to train on", "to validate with", "to test with"), corpus.SPLITS, strict=True)
        parts = [f"{_count(self.splits[name])} {purpose}" for purpose, name in what]
        return ", ".join(parts) + (f"; {corpus.said(self.left_out)}" if self.left_out else "")

    @property
    def share_to_train(self) -> float:
        """The share of the bytes that a model is trained on."""
        sizes = {name: int(split.bytes.sum()) for name, split in self.splits.items()}
        return sizes["train"] / max(1, sum(sizes.values()))


def _count(split: Split) -> str:
    """The bytes and documents of a split, in words."""
    return f"{int(split.bytes.sum()):,} bytes in {len(split):,} document{'s' * (len(split) != 1)}"


def write_folder(data: str, tokens: str, folder: Path) -> None:
    """Encode a corpus into a folder, which appears when it is complete; two processes may do so at once.

    The tokenizer is trained on the training documents alone: what is held out must not shape it.

    Args:
        data: as `corpus.documents` takes it.
        tokens: "bytes", "bpe:SIZE" or a tokenizer.json.
        folder: to make.
    """
    left_out: Counter[str] = Counter()
    parts = corpus.split(list(corpus.documents(data, left_out)), data, left_out)
    with_tokens = tokenizer.make(tokens, (d.data for d in parts["train"]))
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            with_tokens.save(temporary)
            index = {name: _write(temporary / f"{name}.bin", parts[name], with_tokens) for name in corpus.SPLITS}
            about = dict(version=VERSION, tokenizer=with_tokens.name, splits=index, left_out=dict(left_out))
            write_checked_json(temporary / INDEX, about)
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
    version = index.get("version", 1 if set(index) == set(corpus.SPLITS) else 2)
    if version != VERSION:
        age = "an older" if version in range(1, VERSION) else "another"
        raise FastWeightError(
            f"{folder} was written by {age} version of this library: its files are of version "
            f"{version!r:.20}; expected version {VERSION}"
        )
    try:
        splits = {name: _open(folder / f"{name}.bin", index["splits"][name]) for name in corpus.SPLITS}
        wanted = str(index["tokenizer"])
        left_out = {str(kind): int(n) for kind, n in dict(index.get("left_out", {})).items()}
    except (KeyError, TypeError, ValueError, OSError, OverflowError) as error:
        raise FastWeightError(
            f"{folder / INDEX} is damaged ({type(error).__name__}: {error}); expected {why}"
        ) from None
    found = tokenizer.load(folder)
    if found.name != wanted:
        raise FastWeightError(f"{folder / tokenizer.FILE} is {found.name}; expected {wanted}: it is missing or damaged")
    return Corpus(splits, found, folder, left_out)


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
