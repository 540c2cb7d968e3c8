"""Documents: found, split into train, valid and test by name, never by chance."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


def documents(spec: str) -> Iterator[Document]:
    """The documents of a corpus in a fixed order; empty and binary ones left out.

    Args:
        spec: "stdlib", the source code of the running Python's standard library; "stdlib-modules", the same without
            its tables of characters and its applications; a file; a folder, all files in it; or "hf:NAME[:CONFIG]",
            a dataset that `datasets` streams.
    """
    if spec.startswith("hf:"):
        yield from _hugging_face(spec)
        return
    root, paths = files(spec)
    for path in paths:
        data = path.read_bytes()
        if data.strip() and b"\0" not in data[:8192]:
            yield Document(path.relative_to(root).as_posix(), data)


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
    paths = (p for p in root.rglob("*") if p.is_file())
    found = sorted(p for p in paths if not any(part.startswith(".") for part in p.relative_to(root).parts))
    whole = root.resolve()
    for path in found:  # a folder from a stranger must not bring in files of the user
        if not (target := path.resolve()).is_relative_to(whole):
            raise FastWeightError(
                f"{path} is a link to {target}; expected files within {root}: name that folder instead"
            )
    return root, found


def identity(spec: str) -> list:
    """What changes when the corpus does: names, sizes and times of its files; the name alone of a dataset."""
    if spec.startswith("hf:"):
        return [spec]
    root, paths = files(spec)
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in paths)
    return [str(root), *([name, s.st_size, s.st_mtime_ns] for name, s in stats)]


def split(found: list[Document], spec: str) -> dict[str, list[Document]]:
    """By a hash of the name: 90 % train, 5 % valid, 5 % test. Fewer than three documents are cut instead.

    A document keeps its split when others are added or removed, so that no run is tested on what another was trained
    on.
    """
    if not found:
        raise FastWeightError(
            f"data is {spec!r}, which holds no text; expected at least one file that is neither empty nor binary"
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
