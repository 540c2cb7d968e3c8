"""`fastweights hf eval`: score texts with a model of Hugging Face, by what it may learn from them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.huggingface import Model, Window
from fastweights.cli.options import Device, On, busy, need
from fastweights.core import FastWeightError

LR = {"sgd": 3e-2, "rms": 1e-5}  # learning rates of dynamic evaluation, without and with statistics


def where_of(model: Any, asked: str) -> str | None:
    """Which feed-forward layers learn: those asked for, or all of a model whose layers are known; None for none."""
    from fastweights.hf.body import down_projections

    if asked:
        return None if asked == "none" else asked
    try:
        return "all" if down_projections(model, "all") else None
    except FastWeightError:
        return None


def evaluate(
    model: Model,
    files: Annotated[list[Path], typer.Argument(help="Files to score.", metavar="FILES", show_default=False)],
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to score in: static, still, fast, cache, both, body, body+cache, all, dynamic or "
            "dynamic+cache; repeatable. "
            "All that apply when absent."
        ),
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(help="Folder of `fastweights hf adapt`; a head without training when absent.", show_default=False),
    ] = None,
    where: Annotated[
        str,
        typer.Option(
            help="Third of the model whose feed-forward layers learn in the modes body, body+cache and all: first, "
            "middle, last, all or none. All when absent; with --head, as it was trained."
        ),
    ] = "",
    every: Annotated[
        int,
        typer.Option(
            min=1,
            help="Windows to a step of the matrices of --where: with 8 they learn from every eighth window, which "
            "keeps most of the gain at a fraction of the time.",
        ),
    ] = 8,
    window: Window = 1024,
    stride: Annotated[
        int, typer.Option(min=1, help="Tokens scored at a time, and between two updates of dynamic evaluation.")
    ] = 256,
    limit: Annotated[
        int, typer.Option(min=0, help="Bytes of each file to score, from its start; 0 for all.")
    ] = 262_144,
    dynamic_lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of dynamic evaluation; 3e-2, or 1e-5 with statistics, when absent."),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of weights that dynamic evaluation trains, such as `*.mlp.*`, or `middle` for the ends of the "
            "feed-forward layers in the middle third; repeatable. All when absent."
        ),
    ] = None,
    statistics: Annotated[
        str,
        typer.Option(help="Training text of dynamic evaluation: says how large each weight's gradients are."),
    ] = "",
    json: Annotated[
        Path | None, typer.Option(help="JSON file for all numbers; MODEL.eval.json here when absent.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the loss by position; MODEL.eval.png here when absent.")
    ] = None,
    device: On = Device.auto,
) -> None:
    """Score texts with any causal language model, next to gzip and xz.

    Each token is predicted with at most a window of text before it. The modes are

    - static: nothing is remembered of what has left the window;
    - still: with a trained layer (`--head`) that learns nothing from the text: what its training alone is worth;
    - fast: the layer learns from every token of the text;
    - cache: mixed with a look-up of words that followed similar places earlier in the text (a neural cache);
    - both: fast and cache together;
    - body: matrices inside the model (`--where`) learn from one window of eight (`--every`);
    - body+cache: these and the look-up, which gain the most for their time;
    - all: body, fast and cache together;
    - dynamic: the model's weights are trained on each stride after it is scored;
    - dynamic+cache: the same, mixed with the look-up.

    The model itself is as before afterwards.

    For example: `fastweights hf eval SmolLM2.gguf book.txt --head books.head`
    """
    need("hf eval", "hf", "torch", "transformers")
    from dataclasses import replace

    import torch

    from fastweights.cli.scores import report_scores, score_modes
    from fastweights.hf import scoring
    from fastweights.hf.attach import attach, load_attached
    from fastweights.hf.body import down_projections
    from fastweights.hf.loading import load_model, read_file
    from fastweights.text.scores import Score, summary

    # With statistics each weight's step is divided by its usual gradient, so the rate has another scale.
    lr = LR["rms" if statistics else "sgd"] if dynamic_lr is None else dynamic_lr
    found, tokenizer = load_model(model, device=device)
    names = tuple(parameters or ("*",))
    names = down_projections(found) if names == ("middle",) else names
    how = scoring.Reading(window=window, stride=stride, lr=lr, parameters=names)
    texts = [read_file(tokenizer, file, limit) for file in files]
    if statistics:
        how = replace(how, statistics=scoring.gradient_statistics(found, tokenizer, statistics, window))
    if head is not None:
        load_attached(found, head)
    else:
        # A head without training is random in its first layer: the seed makes scores repeatable.
        torch.manual_seed(0)
        attach(found, where=where_of(found, where), every=every)
    # An untrained head that learns nothing is the model itself, so "still" is of use with --head alone.
    asked = [m for m in scoring.modes(found) if m != "dynamic+cache" and (m != "still" or head is not None)]
    for each in mode or ():  # before anything is scored, which takes minutes
        scoring.check_mode(found, each)
    asked = list(dict.fromkeys(mode or asked))
    peaks: list[int | None] = []

    def score(mode: str, advance: Any) -> Score:
        # The peak of each mode by itself.
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        scored = scoring.score(found, tokenizer, texts, mode, how, advance=advance)
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
        return scored

    # All modes read the same texts; the model's weights are put back between them.
    scores = score_modes(asked, texts, score)
    with busy("Comparing with gzip and xz"):
        numbers = summary(texts, scores, None)
    for row, peak in zip(numbers["modes"], peaks, strict=True):
        row["peak_gpu_bytes"] = peak
    settings = dict(window=window, stride=stride, lr=lr, parameters=list(names), head=head and str(head))
    numbers |= dict(model=str(model), settings=settings)
    json, plot = json or Path(f"{model.name}.eval.json"), plot or Path(f"{model.name}.eval.png")
    report_scores(numbers, scores, texts, None, json, plot)
