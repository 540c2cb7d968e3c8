"""Documents to score a trained run with: files, held-out documents, and training batches for their statistics."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.core import FastWeightError
from fastweights.models import run_folder
from fastweights.models.language_model import LanguageModel
from fastweights.text import encoded_corpus as data
from fastweights.text import tokenizer
from fastweights.text.corpus_files import Corpus
from fastweights.text.scores import Text
from fastweights.text.streams import sizes

LONG = 8192  # bytes of a test document that is worth scoring, where there are some
STATISTICS = 24  # training batches of one segment each, for the step of each weight in dynamic evaluation


def read_file(model: LanguageModel, path: Path) -> Text:
    """A file of any bytes as the model's tokens."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FastWeightError(f"cannot read {path}: {error.strerror}; expected a file") from None
    if not content:
        raise FastWeightError(f"{path} is empty; expected a file with at least one byte")
    tokens = model.tokenizer.encode(content)
    return Text(path.name, content, tokens, sizes(model.tokenizer, tokens))


def corpus_of(run: Path, cache: Path | None = None) -> Corpus:
    """The encoded corpus that a run was trained on; where it is gone, its data encoded again by the run's tokenizer.

    Args:
        run: folder.
        cache: folder for encoded corpora; the user's cache folder when absent.
    """
    config, about = run_folder.read_config(run)
    folder = Path(str(about.get("corpus", "")))
    found = data.prepare_again(folder, config.data, config.tokenizer, cache, run / tokenizer.FILE)
    if found.tokenizer.name != about.get("tokenizer", found.tokenizer.name):
        raise FastWeightError(
            f"{found.folder} was encoded by {found.tokenizer.name}; expected {about['tokenizer']}, whose tokens the "
            f"weights of run {run} know"
        )
    return found


def held_out(corpus: Corpus, model: LanguageModel, min_bytes: int | None, limit: int) -> list[Text]:
    """Test documents of a run, as texts to score.

    Args:
        corpus: of the run, as `corpus_of` opens it.
        model: of the run.
        min_bytes: shorter ones are left out; LONG when absent, or none where no document is so long.
        limit: bytes of all together; the last one is cut there. 0 for no limit.
    """
    split = corpus.splits["test"]
    longest = int(max(split.bytes, default=0))
    if min_bytes is None:
        min_bytes = LONG if longest >= LONG else 0
    chosen = [i for i in range(len(split)) if split.bytes[i] >= min_bytes]
    if not chosen:
        raise FastWeightError(
            f"no test document has {min_bytes} bytes; expected --min-bytes of at most {longest}, or files named"
        )
    texts = ((split.names[i], split.document(i)[1:]) for i in chosen)
    return within((_text(name, tokens, model) for name, tokens in texts), limit, model)


def _text(name: str, tokens: np.ndarray, model: LanguageModel) -> Text:
    """A text of these tokens."""
    return Text(name, model.tokenizer.decode(tokens), tokens, sizes(model.tokenizer, tokens))


def within(texts: Iterable[Text], limit: int, model: LanguageModel) -> list[Text]:
    """The first `limit` bytes of texts, the last of which is cut there; all where the limit is 0."""
    found: list[Text] = []
    left = limit or math.inf
    for text in texts:
        if left <= 0:
            break
        if len(text.data) > left:
            ends = np.cumsum(text.widths(model.tokenizer.lengths()))
            text = _text(text.name, text.tokens[: max(1, int(np.searchsorted(ends, left, side="right")))], model)
        found.append(text)
        left -= len(text.data)
    return found


def training_batches(corpus: Corpus, model: LanguageModel) -> tuple[torch.Tensor, ...]:
    """Segments of training documents, the same each time."""
    split, rng = corpus.splits["train"], np.random.default_rng(0)
    length = min(model.config.length, len(split.tokens) - 1)
    at = rng.integers(0, len(split.tokens) - length, STATISTICS)
    device: Any = model.embedding.weight.device
    segments = [np.asarray(split.tokens[a : a + length + 1]).astype(np.int64) for a in at]
    return tuple(torch.from_numpy(segment)[None].to(device) for segment in segments)
