"""A corpus as tokens, kept in a cache folder: encoded once, checked whenever it is opened, made again where it changed.

What the files in that folder hold is in `corpus_files`.
"""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

from fastweights.core import FastWeightError, FastWeightWarning
from fastweights.files import checksum_of_file
from fastweights.text import corpus
from fastweights.text.corpus_files import INDEX, VERSION, Corpus, open_folder, write_folder


def cache_folder() -> Path:
    """Where encoded corpora are kept: $XDG_CACHE_HOME/fastweights, or ~/.cache/fastweights."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastweights"


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
    try:
        write_folder(data, tokens, folder)
    except FastWeightError as error:
        if cache is None and str(error).startswith("cannot write"):
            raise FastWeightError(f"{error}. Encoded text is kept there unless XDG_CACHE_HOME says where") from None
        raise
    return open_folder(folder)


def _name(data: str, tokens: str, version: int) -> str:
    """What the folder of an encoded corpus is called in a version of these files."""
    is_file = tokens != "bytes" and not tokens.startswith("bpe:") and Path(tokens).is_file()
    kind = checksum_of_file(Path(tokens)) if is_file else tokens
    return hashlib.sha256(json.dumps([version, corpus.identity(data), kind]).encode()).hexdigest()[:16]


def prepare_again(folder: Path, data: str, tokens: str, cache: Path | None = None, own: Path | None = None) -> Corpus:
    """The corpus that a run began with, encoded in `folder`; made again from its data where it is gone, damaged or
    of an older version.

    Args:
        folder: of the encoded corpus, as the run noted it.
        data: as `corpus.documents` takes it.
        tokens: the tokenizer, as `prepare` takes it.
        cache: folder for encoded corpora; `cache_folder()` when absent.
        own: the tokenizer.json of the run, if it has one: a tokenizer that is trained again on text which has changed
            is another one, whose tokens mean nothing to the run's weights.
    """
    damage = f"{folder} is gone"
    if (folder / INDEX).exists():
        try:
            return open_folder(folder)
        except FastWeightError as error:
            damage = str(error)
    try:
        found = prepare(data, str(own) if own is not None and own.exists() else tokens, cache)
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
