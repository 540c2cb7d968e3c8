"""Files that are whole or absent: written under a temporary name, then renamed."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fastweights.core import FastWeightError


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """safetensors; what was there before stays until the new file is complete."""
    whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    _replace(path, lambda temporary: save_file(whole, temporary, about))


def write_json(path: Path, content: object) -> None:
    _replace(path, lambda temporary: temporary.write_text(json.dumps(content, indent=1) + "\n"))


def _replace(path: Path, write) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        mask = os.umask(0)  # the only way to learn it
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # safetensors makes files that others may not read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        kept = "; the file that was there is intact" if path.exists() else ""
        raise FastWeightError(f"cannot write {path}: {why}{kept}") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    if not path.is_file():
        raise FastWeightError(f"{path} does not exist; expected a safetensors file")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FastWeightError(f"{path} cannot be read: {error}; expected a complete safetensors file") from None


def read_json(path: Path, why: str) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FastWeightError(f"{path} does not exist; expected {why}") from None
    except ValueError as error:
        raise FastWeightError(f"{path} is not JSON ({error}); expected {why}") from None
