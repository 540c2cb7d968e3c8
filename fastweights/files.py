"""Files and folders that are whole or absent, written under a temporary name and renamed; checksums tell of damage.

A JSON file carries the SHA-256 of its other keys in the key "sha256". A file from before there were checksums is read
without.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastweights.core import FastWeightError

if TYPE_CHECKING:
    pass

CHECKSUM = "sha256"  # name of the entry that holds it
STALE = 60  # seconds after which what a killed process left half written is removed


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """A temporary path to write a file or a folder to; it becomes `path` when the block ends without an error.

    What was there before stays until then, and after an error.

        >>> path = Path("notes.txt")
        >>> with replacing(path) as temporary:
        ...     written = temporary.write_text("whole")
        >>> path.read_text()
        'whole'

    Args:
        path: of the file or folder.
        previous: what the one that was there is called afterwards; it is gone when absent.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            if file.is_file():
                _make_lasting(file)
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        kept = "what was there is intact" if path.exists() else "nothing was kept"
        raise FastWeightError(f"cannot write {path}: {error.strerror or error}; {kept}") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _make_lasting(file: Path) -> None:
    """Readable as the user's other files are, and on the disk."""
    mask = os.umask(0)  # the only way to learn it
    os.umask(mask)
    file.chmod(0o666 & ~mask)  # safetensors makes files that others may not read
    _sync(file)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # only there has a folder to be told
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left."""
    for left in path.parent.glob(f".{path.stem}.*.part{path.suffix}"):
        number = left.name.removeprefix(f".{path.stem}.").partition(".")[0]
        with suppress(OSError):
            newest = max(p.stat().st_mtime for p in [left, *left.rglob("*")])
            if number.isdigit() and not _runs(int(number)) and time.time() - newest > STALE:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _runs(process: int) -> bool:
    """Whether a process of this number is running."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_text(path: Path, content: str) -> None:
    """Write a text file in UTF-8, whatever the language of the system; it is whole or absent."""
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that is whole or absent, one entry per line as far as it is nested once."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_checked_json(path: Path, content: dict[str, Any]) -> None:
    """The same with a checksum, which `read_json` compares."""
    plain = json.loads(json.dumps(content))
    write_json(path, {CHECKSUM: _of_json(plain)} | plain)  # first, so that JSON is left where its line is deleted


def checksum(parts: "Iterable[bytes | memoryview]") -> str:
    """SHA-256 of the parts, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def checksum_of_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_json(content: object) -> str:
    """The checksum of an object, whatever the order of its keys."""
    return checksum([json.dumps(content, sort_keys=True).encode()])


def read_text(path: Path, why: str) -> str:
    """The text of a UTF-8 file.  why: what was expected, for the message when it is something else."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FastWeightError(f"{path} cannot be read: {error.strerror}; expected {why}") from None
    except UnicodeDecodeError as error:
        raise FastWeightError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); expected {why}") from None


def read_json(path: Path, why: str) -> dict[str, Any]:
    """The object in a JSON file, its checksum compared where it has one.

    Args:
        path: of the file.
        why: what was expected, for the message when there is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FastWeightError(f"{path} does not exist; expected {why}") from None
    except OSError as error:
        raise FastWeightError(f"{path} cannot be read: {error.strerror}; expected {why}") from None
    except (ValueError, RecursionError) as error:
        raise FastWeightError(f"{path} is not JSON ({error}); expected {why}") from None
    if not isinstance(content, dict):
        raise FastWeightError(f"{path} holds a {type(content).__name__}; expected {why}")
    written = content.pop(CHECKSUM, None)
    if written is not None and written != _of_json(content):
        raise FastWeightError(
            f"{path} is damaged or was edited: its checksum is not that of its content; expected {why}. "
            f'To keep an edit, delete its line "{CHECKSUM}"'
        )
    return content
