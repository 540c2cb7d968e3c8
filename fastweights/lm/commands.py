"""What the program's commands do, without their flags."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from fastweights.core import FastWeightError
from fastweights.files import write_json
from fastweights.lm import data, evaluation, generation
from fastweights.lm.training import train as run_training
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.models.dynamic_evaluation import Dynamic
from fastweights.models.language_model import LanguageModel
from fastweights.models.memory import Memory
from fastweights.text import report
from fastweights.text.scores import Text, summary

STATISTICS = 24  # training batches of one segment each, for the step of each weight in dynamic evaluation


def train(config: Config, run: Path, resume: bool) -> None:
    console = Console()
    if not resume:
        blocks = ", ".join(config.mixers)
        console.print(f"{run}: {blocks}; {config.head} head; {config.data} as {config.tokenizer}", highlight=False)
    run_training(config, run, resume=resume, console=console)
    console.print(f"Next: fastweights eval {run}", highlight=False, markup=False, soft_wrap=True)


def evaluate(run: Path, files: list[Path], *, modes: list[str], memory: Path | None, min_bytes: int, limit: int,
             dynamic: Dynamic, json: Path | None, picture: Path | None, device: str) -> None:  # fmt: skip
    console = Console()
    model = run_folder.load(run, device=device)
    asked = modes or evaluation.modes(model)
    for mode in asked:
        evaluation.check_mode(model, mode)
    texts = [_text(model, path) for path in files] or held_out(run, model, min_bytes, limit)
    before = None if memory is None else Memory.load(memory, model)
    if "dynamic" in asked and not dynamic.batches:
        dynamic = replace(dynamic, batches=training_batches(run, model))
    scores = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for mode in asked:
            task = progress.add_task(report.LABELS.get(mode, mode), total=sum(len(t.data) for t in texts))
            done = partial(progress.advance, task)
            scores.append(evaluation.score(model, texts, mode, memory=before, dynamic=dynamic, advance=done))
    found = summary(texts, scores, model.tokenizer.lengths())
    report.show(found, console)
    json, picture = json or run / "eval.json", picture or run / "eval.png"
    write_json(json, found | dict(run=str(run)))
    drawn = report.plot(scores, texts, model.tokenizer.lengths(), picture)
    written = f"{json} and {picture}" if drawn else f"{json} (no picture: matplotlib is not installed)"
    console.print(f"Written to {written}", highlight=False, markup=False, soft_wrap=True)


def generate(run: Path, prompt: str, *, memory: Path | None, tokens: int, until: str, how: generation.Sampling,
             learn: bool, device: str) -> None:  # fmt: skip
    model = run_folder.load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    if prompt or before is None:
        before = model.read(prompt, before)
    sys.stdout.write(prompt)
    for piece in generation.text_of(model, generation.generate(model, before, tokens, how, learn=learn), until):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def read(run: Path, file: Path, out: Path, *, memory: Path | None, device: str) -> None:
    model = run_folder.load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    found = model.read(_text(model, file).tokens, before)
    found.save(out)
    line = (
        f"{file}: {found.count:,} tokens in {found.bytes / 1024:,.0f} KiB of memory. Go on with: fastweights generate"
    )
    Console().print(f"{line} {run} --memory {out}", highlight=False, markup=False, soft_wrap=True)


def _text(model: LanguageModel, path: Path) -> Text:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FastWeightError(f"cannot read {path}: {error.strerror}; expected a file") from None
    if not content:
        raise FastWeightError(f"{path} is empty; expected a file with at least one byte")
    return Text(path.name, content, model.tokenizer.encode(content))


def corpus_of(run: Path) -> data.Corpus:
    """The encoded corpus that a run was trained on."""
    config, about = run_folder.read_config(run)
    encoded = Path(about.get("corpus", ""))
    return (
        data.open_folder(encoded) if (encoded / "index.json").exists() else data.prepare(config.data, config.tokenizer)
    )


def held_out(run: Path, model: LanguageModel, min_bytes: int, limit: int) -> list[Text]:
    """Test documents of at least min_bytes, the last one cut where `limit` bytes are reached."""
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
        raise FastWeightError(f"no test document has {min_bytes} bytes; expected --min-bytes of at most {longest}, or "
                              "files named")  # fmt: skip
    return texts


def training_batches(run: Path, model: LanguageModel) -> tuple[torch.Tensor, ...]:
    """Segments of training documents, the same each time."""
    split, rng = corpus_of(run).splits["train"], np.random.default_rng(0)
    length = min(model.config.length, len(split.tokens) - 1)
    at = rng.integers(0, len(split.tokens) - length, STATISTICS)
    device: Any = model.embedding.weight.device
    return tuple(torch.from_numpy(np.asarray(split.tokens[a : a + length + 1]).astype(np.int64))[None].to(device)
                 for a in at)  # fmt: skip
