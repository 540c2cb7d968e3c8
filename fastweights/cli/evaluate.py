"""`fastweights eval`: score text that a run has not seen, by what it may remember. Light to import."""

from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.options import Device, FromMemory, On, Run, busy, prepare_torch, say
from fastweights.core import FastWeightError
from fastweights.models.config import DYNAMIC_LR

MODES = ("static", "memory", "cache", "fast", "both", "dynamic")  # names that the shell completes
LIMIT = 262_144  # bytes of held-out documents to score by default


def evaluate(
    run: Run,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files to score; the run's held-out documents when absent.", metavar="FILES"),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to score in: static, memory, cache, fast, both or dynamic; repeatable. All by default.",
            autocompletion=lambda: list(MODES),
        ),
    ] = None,
    memory: FromMemory = None,
    min_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Bytes below which a held-out document is left out; 8192 when absent, or none where all are shorter.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Bytes to score; 0 for all. 262144 of held-out documents, all of files when absent."),
    ] = None,
    dynamic_lr: Annotated[float, typer.Option(min=0, help="Learning rate of dynamic evaluation.")] = DYNAMIC_LR,
    dynamic_segment: Annotated[int, typer.Option(min=1, help="Tokens between two updates of dynamic evaluation.")] = 64,
    json: Annotated[Path | None, typer.Option(help="JSON file for all numbers; RUN/eval.json when absent.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the loss and the memory by position; RUN/eval.png when absent.")
    ] = None,
    device: On = Device.auto,
) -> None:
    """Score documents that the model was not trained on, with and without memory, next to gzip and xz.

    RUN is a folder of `fastweights train`; for any other language model see `fastweights hf eval`. The modes are

    - static: windows of the training length, each read with an empty memory;
    - memory: the document is read once, its memory carried from start to end;
    - cache: the same, mixed with a look-up of words that followed similar places (a neural cache);
    - fast: as memory, and the Fast Weight Layer learns from every token;
    - both: fast and cache together;
    - dynamic: as memory, and all weights are trained on each segment after it is scored.

    In the table "gain" is what a mode gains over static windows, "learning" over the same model when it learns nothing
    from the text, "carried" what the model takes along from token to token, and "peak" the most memory that scoring
    held at once, beyond the model and the documents. Before it scores, it checks that every mode keeps the laws of
    adaptation: causal, normalised, scored before learned from, one pass.

    For example: `fastweights eval runs/first README.md --mode static --mode memory`
    """
    prepare_torch("eval")
    from fastweights.cli.scores import report_scores, score_modes
    from fastweights.lm import laws
    from fastweights.models import evaluation
    from fastweights.models.dynamic_evaluation import Dynamic
    from fastweights.models.memory import Memory
    from fastweights.models.run_documents import corpus_of, held_out, read_file, training_batches, within
    from fastweights.models.run_folder import load
    from fastweights.text.scores import summary

    if files and min_bytes is not None:
        raise FastWeightError("--min-bytes with FILES; expected one of them: files that are named are scored")
    model = load(run, device=device)
    asked = list(dict.fromkeys(mode or evaluation.modes(model)))
    # Names of modes are checked before anything is read; scoring takes minutes.
    for each in asked:
        evaluation.check_mode(model, each)
    corpus = cache(lambda: corpus_of(run))  # opened once, and only where it is needed
    if files:
        texts = within([read_file(model, path) for path in files], limit or 0, model)
    else:
        texts = held_out(corpus(), model, min_bytes, LIMIT if limit is None else limit)
        count = len(corpus().splits["test"])
        if len(texts) < count:
            say(f"Scoring {len(texts)} of {count} held-out documents; --min-bytes and --limit choose them.")
    before = None if memory is None else Memory.load(memory, model)
    batches = training_batches(corpus(), model) if "dynamic" in asked else ()
    dynamic = Dynamic(lr=dynamic_lr, segment=dynamic_segment, batches=batches)
    known: laws.Known = {}
    for each in asked:
        with busy(f"Checking that the mode {each} keeps the laws of adaptation"):
            laws.check(model, each, evaluation.row_of(model, texts[0]), dynamic, known)
    known.clear()
    scores = score_modes(
        asked,
        texts,
        lambda mode, advance: evaluation.score(model, texts, mode, memory=before, dynamic=dynamic, advance=advance),
    )
    with busy("Comparing with gzip and xz"):
        numbers = summary(texts, scores, model.tokenizer.lengths()) | dict(run=str(run))
    json, plot = json or run / "eval.json", plot or run / "eval.png"
    memories = evaluation.memory_norms(model, texts[0])
    report_scores(numbers, scores, texts, model.tokenizer.lengths(), json, plot, memories)
    say("Every mode was causal, normalised, scored before it learned, and read once (checked on the first document).")
