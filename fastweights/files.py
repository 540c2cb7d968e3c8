"""Files and folders that are whole or absent: written under a temporary name, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastweights.core import FastWeightError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write a file or a folder to; it becomes `path` when the block ends without an error.

    What was there before stays until then, and after an error.

    >>> path = Path("notes.txt")
    >>> with replacing(path) as temporary:
    ...     written = temporary.write_text("whole")
    >>> path.read_text()
    'whole'
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_file():
            mask = os.umask(0)  # the only way to learn it
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)  # safetensors makes files that others may not read
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        kept = "what was there is intact" if path.exists() else "nothing was kept"
        raise FastWeightError(f"cannot write {path}: {error.strerror or error}; {kept}") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """Write a text file that is whole or absent."""
    with replacing(path) as temporary:
        temporary.write_text(content)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that is whole or absent, one entry per line as far as it is nested once."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", about: dict[str, str]) -> None:
    """A safetensors file with `about` as its metadata, whole or absent. Tensors of any device become copies on the
    CPU.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(whole, temporary, about)
        except SafetensorError as error:
            raise OSError(str(error)) from None


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors and the metadata of a safetensors file; FastWeightError says whether it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FastWeightError(f"{path} does not exist; expected a safetensors file")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FastWeightError(f"{path} cannot be read: {error}; expected a complete safetensors file") from None


def read_json(path: Path, why: str) -> dict[str, Any]:
    """The object in a JSON file.  why: what was expected, for the message when there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FastWeightError(f"{path} does not exist; expected {why}") from None
    except ValueError as error:
        raise FastWeightError(f"{path} is not JSON ({error}); expected {why}") from None
