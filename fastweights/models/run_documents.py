"""Documents to score a trained run with: files, held-out documents, and training batches for their statistics."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.core import FastWeightError
from fastweights.models import run_folder
from fastweights.models.language_model import LanguageModel
from fastweights.text import corpus_files
from fastweights.text import encoded_corpus as data
from fastweights.text.scores import Text

STATISTICS = 24  # training batches of one segment each, for the step of each weight in dynamic evaluation


def read_file(model: LanguageModel, path: Path) -> Text:
    """A file of any bytes as the model's tokens."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FastWeightError(f"cannot read {path}: {error.strerror}; expected a file") from None
    if not content:
        raise FastWeightError(f"{path} is empty; expected a file with at least one byte")
    return Text(path.name, content, model.tokenizer.encode(content))


def corpus_of(run: Path) -> corpus_files.Corpus:
    """The encoded corpus that a run was trained on."""
    config, about = run_folder.read_config(run)
    return data.prepare_again(Path(str(about.get("corpus", ""))), config.data, config.tokenizer)


def held_out(run: Path, model: LanguageModel, min_bytes: int, limit: int) -> list[Text]:
    """Test documents of a run, as texts to score.

    Args:
        run, model: the folder and its model.
        min_bytes: shorter ones are left out.
        limit: bytes of all together; the last one is cut there. 0 for no limit.
    """
    split = corpus_of(run).splits["test"]
    texts: list[Text] = []
    left = limit or math.inf
    for i, name in enumerate(split.names):
        if split.bytes[i] < min_bytes or left <= 0:
            continue
        tokens = split.document(i)[1:]
        sizes = np.cumsum(model.tokenizer.lengths()[tokens])
        tokens = tokens[: max(1, int(np.searchsorted(sizes, left, side="right")))]
        texts.append(Text(name, model.tokenizer.decode(tokens), tokens))
        left -= len(texts[-1].data)
    if not texts:
        longest = int(max(split.bytes, default=0))
        raise FastWeightError(
            f"no test document has {min_bytes} bytes; expected --min-bytes of at most {longest}, or files named"
        )
    return texts


def training_batches(run: Path, model: LanguageModel) -> tuple[torch.Tensor, ...]:
    """Segments of training documents, the same each time."""
    split, rng = corpus_of(run).splits["train"], np.random.default_rng(0)
    length = min(model.config.length, len(split.tokens) - 1)
    at = rng.integers(0, len(split.tokens) - length, STATISTICS)
    device: Any = model.embedding.weight.device
    segments = [np.asarray(split.tokens[a : a + length + 1]).astype(np.int64) for a in at]
    return tuple(torch.from_numpy(segment)[None].to(device) for segment in segments)
