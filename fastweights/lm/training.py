"""`train`: a configuration becomes a folder with a trained model; a run that was stopped goes on in its own folder."""

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from fastweights.core import FastWeightError, FastWeightWarning
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.models.run_documents import corpus_of
from fastweights.text.corpus_files import Corpus
from fastweights.text.encoded_corpus import prepare
from fastweights.torch.devices import pick_device
from fastweights.training import checkpoints, log
from fastweights.training.parallel import Ranks, restarted, said_when_others_are_lost
from fastweights.training.trainer import Trainer

LEAST_SHARE = 0.5  # of the text, below which training on it is worth a warning


def train(
    config: Config, run: str | Path, *, resume: bool = False, console: Console | None = None, cache: Path | None = None
) -> Path:
    """Train a model into the folder `run`; returns the folder.

    `train(Config.of("laptop", steps=100), "runs/first")` does what `fastweights train runs/first --steps 100` does.

    Args:
        config: what to train, on what and for how long.
        run: folder to make: configuration, tokenizer, weights, log. It must not exist, unless `resume` is set.
        resume: go on with the run that is there, with its own configuration. A worker that torchrun starts again does.
        console: where progress is shown; nowhere when absent.
        cache: folder for tokenised documents; the user's cache folder when absent.
    """
    run = Path(run)
    if not isinstance(config, Config):
        raise FastWeightError(f"config is a {type(config).__name__}; expected a Config, such as Config.of('laptop')")
    config, again = _claim(run, config, resume)
    resume = again and checkpoints.exists(run)  # killed before its first, it starts again
    with said_when_others_are_lost(run, config.parallel, config.patience):
        ranks = Ranks.start(config.parallel, pick_device(config.device), config.patience)
        for turn in (ranks.first, not ranks.first):  # the first makes what the others read
            if turn:
                shown = console if ranks.first and console is not None else Console(quiet=True)
                with shown.status(f"Reading {escape(config.data)}"):
                    corpus = corpus_of(run, cache) if again else prepare(config.data, config.tokenizer, cache)
            ranks.wait()
        torch.manual_seed(config.seed)
        model = LanguageModel(config.in_training, corpus.tokenizer.size).to(ranks.device)
        if config.start:
            run_folder.start_from(model, Path(config.start), weights=not resume)
        if ranks.first and not again:
            _say_what_there_is(config, corpus, model, console)
        trainer = Trainer(config, run, corpus, model, ranks)
        if ranks.first:  # from here on the run exists: what can be refused has been
            _write_folder(run, config, corpus, model, resume)
        ranks.wait()
        trainer.go(resume, console if ranks.first else None)
        ranks.end()
    return run


def _say_what_there_is(config: Config, corpus: Corpus, model: LanguageModel, console: Console | None) -> None:
    """How much text and how many weights, and a warning where most of the text is held out."""
    size = sum(p.numel() for p in model.parameters())
    if console is not None:
        made = f"Model: {size:,} weights, a vocabulary of {model.vocab:,} tokens."
        console.print(f"Text: {corpus}. {made}", highlight=False, markup=False, soft_wrap=True)
    if corpus.share_to_train < LEAST_SHARE:
        warnings.warn(
            f"{corpus.share_to_train:.0%} of the text of {config.data} is for training: which documents are held out "
            "follows from their names, and large ones are among them. A file that is named alone is cut in three",
            FastWeightWarning,
            stacklevel=3,
        )


def _write_folder(run: Path, config: Config, corpus: Corpus, model: LanguageModel, resume: bool) -> None:
    """The files of a run that training does not change; the configuration stays as it was when the run is resumed."""
    corpus.tokenizer.save(run)  # first: where there is a configuration, there is its tokenizer
    if not resume:
        size = sum(p.numel() for p in model.parameters())
        about = dict(corpus=str(corpus.folder), tokenizer=corpus.tokenizer.name, parameters=size)
        run_folder.write_config(run, config, model.vocab, **about)


def configured(preset: str, changes: dict[str, Any]) -> Config:
    """The configuration that a command line stands for.

    Args:
        preset: whose values hold where nothing else is said.
        changes: fields that were given. With `start`, the configuration of that run is taken, with a Fast Weight Layer
            to train, and the changes go on top of it.
    """
    if "start" not in changes:
        return Config.of(preset, **changes)
    config, _ = run_folder.read_config(Path(changes["start"]))
    rest = {name: value for name, value in changes.items() if name != "start"}
    return config.starting_from(changes["start"], **rest)


def _claim(run: Path, config: Config, resume: bool) -> tuple[Config, bool]:
    """The configuration to train, and whether it is that of a run which is there already."""
    if not resume and not (run / run_folder.CONFIG).exists():
        return config, False
    if not resume and not restarted():
        raise FastWeightError(f"run {run} exists; expected a new folder, or --resume to go on with it")
    config, _ = run_folder.read_config(run)
    if not checkpoints.exists(run) and log.passed_a_checkpoint(run / run_folder.METRICS):
        raise FastWeightError(f"run {run} has no {run_folder.LAST}; expected a run that saved a checkpoint to resume")
    return config, True
