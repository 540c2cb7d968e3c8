"""Documents: found, split into train, valid and test by name, never by chance."""

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fastweights.core import FastWeightError

SPLITS = ("train", "valid", "test")
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Folders of the standard library that are tables, or programs and tools written apart from its modules
APART = {"encodings", "pydoc_data", "idlelib", "lib2to3", "distutils", "tkinter", "turtledemo"}
PIECES = ((0.0, 0.9), (0.9, 0.95), (0.95, 1.0))  # of a corpus of fewer files than splits


@dataclass(frozen=True)
class Document:
    """A document: its name, by which it is split into train, valid and test, and its bytes."""

    name: str
    data: bytes


def documents(spec: str, left_out: Counter[str] | None = None) -> Iterator[Document]:
    """The documents of a corpus in a fixed order; empty and binary ones left out.

    A file with a zero byte near its start is binary, and so is text in UTF-16.

    Args:
        spec: "stdlib", the source code of the running Python's standard library; "stdlib-modules", the same without
            its tables of characters and its applications; a file; a folder, all files in it; or "hf:NAME[:CONFIG]",
            a dataset that `datasets` streams.
        left_out: counts the files that are left out, as "empty" and "binary".
    """
    if spec.startswith("hf:"):
        yield from _hugging_face(spec)
        return
    root, paths = files(spec)
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            _unreadable(error)
        reason = "empty" if not data.strip() else "binary" if b"\0" in data[:8192] else ""
        if not reason:
            yield Document(path.relative_to(root).as_posix(), data)
        elif left_out is not None:
            left_out[reason] += 1


def files(spec: str) -> tuple[Path, list[Path]]:
    """The root and the files that a local corpus consists of, sorted.

    Hidden files, and the standard library's tests and installed packages, are left out.
    """
    if spec in ("stdlib", "stdlib-modules"):
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = SKIPPED | (APART if spec == "stdlib-modules" else set())
        return root, sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    root = Path(spec)
    if root.is_file():
        return root.parent, [root]
    if not root.is_dir():
        raise FastWeightError(
            f"data is {spec!r}; expected stdlib, stdlib-modules, hf:NAME or an existing file or folder"
        )
    found = sorted(_walked(root))
    whole = root.resolve()
    for path in found:  # a folder from a stranger must not bring in files of the user
        if not (target := path.resolve()).is_relative_to(whole):
            raise FastWeightError(
                f"{path} is a link to {target}; expected files within {root}: name that folder instead"
            )
    return root, found


def _walked(root: Path) -> Iterator[Path]:
    """The files in a folder and in the folders within, but for hidden ones; links to folders are not followed."""
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _unreadable(error: OSError) -> NoReturn:
    """Raise FastWeightError: what cannot be read must not be missing without a word."""
    raise FastWeightError(
        f"cannot read {error.filename}: {error.strerror}; expected files and folders that can be read"
    ) from None


def identity(spec: str) -> list:
    """What changes when the corpus does: names, sizes and times of its files; the name alone of a dataset."""
    if spec.startswith("hf:"):
        return [spec]
    root, paths = files(spec)
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in paths)
    return [str(root), *([name, s.st_size, s.st_mtime_ns] for name, s in stats)]


def split(found: list[Document], spec: str, left_out: Counter[str] | None = None) -> dict[str, list[Document]]:
    """By a hash of the name: 90 % train, 5 % valid, 5 % test. Fewer than three documents are cut instead.

    A document keeps its split when others are added or removed, so that no run is tested on what another was trained
    on.

    Args:
        found: all documents.
        spec: where they are from, for the message when there are none.
        left_out: what `documents` left out, for the same.
    """
    if not found:
        but = f" ({said(left_out)})" if left_out else ""
        raise FastWeightError(
            f"data is {spec!r}, which holds no text; expected at least one file that is neither empty nor binary{but}"
        )
    # One or two documents: each is cut into three parts instead.
    if len(found) < len(SPLITS):
        return {
            name: [piece for d in found if (piece := _cut(d, *part)).data.strip()]
            for name, part in zip(SPLITS, PIECES, strict=True)
        }
    parts: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for d in found:
        bucket = _bucket(d.name)
        parts["train" if bucket < 90 else "valid" if bucket < 95 else "test"].append(d)
    for name in SPLITS:  # a small corpus may leave a split without a document
        if not parts[name]:
            donor = max(parts.values(), key=len)
            donor.sort(key=lambda d: (_bucket(d.name), d.name))
            parts[name].append(donor.pop())
    return parts


def said(left_out: Mapping[str, int]) -> str:
    """What was left out, in words.

    Examples:
        >>> said({"empty": 1, "binary": 2})
        'left out: 1 empty file, 2 binary files; a zero byte makes a file binary: convert UTF-16 to UTF-8'
    """
    parts = [f"{n} {kind} file{'s' * (n != 1)}" for kind, n in left_out.items()]
    why = "; a zero byte makes a file binary: convert UTF-16 to UTF-8" if "binary" in left_out else ""
    return f"left out: {', '.join(parts)}{why}"


def _bucket(name: str) -> int:
    """A number from 0 to 99 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:4], "big") % 100


def _cut(d: Document, start: float, stop: float) -> Document:
    """The part of a document between two shares of its length."""
    n = len(d.data)
    return Document(f"{d.name}[{start:.0%}-{stop:.0%}]", d.data[int(n * start) : int(n * stop)])


def _hugging_face(spec: str) -> Iterator[Document]:
    """The rows of a dataset: its column "text", or the first column of strings."""
    _, name, *config = spec.split(":")
    try:
        import datasets
    except ImportError:
        raise FastWeightError(f"data is {spec!r}, which needs datasets, not installed; pip install datasets") from None
    rows = datasets.load_dataset(name, *config[:1], split="train", streaming=True)
    for i, row in enumerate(rows):
        texts = [row["text"]] if "text" in row else [v for v in row.values() if isinstance(v, str)][:1]
        if not texts:
            raise FastWeightError(f"data is {spec!r}, whose rows have {', '.join(row)}; expected a column of text")
        if texts[0].strip():
            yield Document(f"{i}", texts[0].encode("utf-8", "surrogatepass"))
        if i % 10_000 == 0 and i:
            print(f"{i} documents of {spec}", file=sys.stderr)
