"""Safetensors files that are whole or absent, with the SHA-256 of their tensors and metadata in their metadata.

A file from before there were checksums is read without.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.core import FastWeightError, FastWeightWarning
from fastweights.files import CHECKSUM, checksum, replacing

if TYPE_CHECKING:
    from torch import Tensor


BEFORE = {"kind", "fingerprint", "last", "count", "step", "about", "format"}  # metadata of files without a checksum


def _of_tensors(tensors: "Mapping[str, Tensor]", about: dict[str, str]) -> str:
    """The checksum of names, dtypes, shapes, numbers and metadata."""
    import torch

    def parts() -> "Iterator[bytes | memoryview]":
        yield json.dumps(about, sort_keys=True).encode()
        for name, x in sorted(tensors.items()):
            yield f"\n{name} {x.dtype} {tuple(x.shape)} ".encode()
            if x.numel():
                yield x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data

    return checksum(parts())


def write_tensors(
    path: Path, tensors: "Mapping[str, Tensor]", about: dict[str, str], previous: Path | None = None
) -> None:
    """A safetensors file with `about` and a checksum as its metadata, whole or absent. Tensors of any device become
    copies on the CPU.  previous: as of `replacing`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    with replacing(path, previous) as temporary:
        try:
            save_file(whole, temporary, about | {CHECKSUM: _of_tensors(whole, about)})
        except SafetensorError as error:
            raise OSError(str(error)) from None


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors and the metadata of a safetensors file that `write_tensors` wrote; raises if it is not as written."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FastWeightError(f"{path} {what}; expected a safetensors file")
    try:
        with safe_open(path, "pt") as file:
            # copies: what is mapped would change with the file, and kill the process if it were cut
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, KeyError) as error:
        raise FastWeightError(f"{path} cannot be read: {error}; expected a complete safetensors file") from None
    written = about.pop(CHECKSUM, None)
    if written is None and set(about) <= BEFORE:
        return tensors, about
    if written != _of_tensors(tensors, about):
        raise FastWeightError(
            f"{path} is damaged: its checksum is not that of its content; expected the file as it was written"
        )
    return tensors, about


def read_first_whole(paths: "Sequence[Path]") -> "tuple[dict[str, Tensor], dict[str, str], Path]":
    """(tensors, metadata, path) of the first of these files that is whole; warns of those that are damaged.

    Args:
        paths: in the order in which they are wanted, such as the last checkpoint and the one before.
    """
    damaged: list[str] = []
    for path in paths:
        try:
            tensors, metadata = read_tensors(path)
        except FastWeightError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            warnings.warn(f"{line}. {path.name} is used instead", FastWeightWarning, stacklevel=3)
        return tensors, metadata, path
    raise FastWeightError("; ".join(damaged))
