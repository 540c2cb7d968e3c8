"""Score, adapt and exchange models of Hugging Face.

MODEL is a folder that `transformers` loads, or a GGUF file; nothing is downloaded.

For example: `fastweights hf eval SmolLM2.gguf book.txt`
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, On, Run, need, say
from fastweights.core import FastWeightError

LR = {"sgd": 3e-2, "rms": 1e-5}  # learning rates of dynamic evaluation, without and with statistics

Model = Annotated[
    Path, typer.Argument(help="Folder of a Hugging Face model, or a GGUF file.", metavar="MODEL", show_default=False)
]
Window = Annotated[int, typer.Option(min=2, help="Tokens that the model sees at once.")]


def export(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(help="Folder to make for the exported model.", metavar="FOLDER", show_default=False)
    ],
    last: Annotated[bool, typer.Option("--last", help="Export the last weights instead of the best.")] = False,
) -> None:
    """Write a run of `fastweights train` as a Hugging Face folder: weights, configuration and tokenizer.

    After `import fastweights.hf`, `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it, with the same logits for the
    same text, and `generate`, `pipeline` and `Trainer` take it as any other model.

    For example: `fastweights hf export runs/first exported`
    """
    need("hf export", "hf", "torch", "transformers")
    from fastweights.hf.export import export as export_run

    model = export_run(run, folder, last=last)
    parameters = sum(p.numel() for p in model.parameters())
    say(
        f"{folder}: {parameters:,} parameters. Load with: import fastweights.hf; "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    )


def adapt(
    ctx: typer.Context,
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="Documents to train on: stdlib, a file, a folder, or hf:NAME[:CONFIG].", show_default=False),
    ] = "",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for the head; MODEL.head when absent.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training in OUT where it stopped, as it began.")
    ] = False,
    size: Annotated[int, typer.Option(help="Hidden width of the head; 0 for twice the model's own width.")] = 0,
    refresh: Annotated[int, typer.Option(min=1, help="Tokens between two steps of the head in a text.")] = 64,
    step: Annotated[float, typer.Option(help="Step size of the head in a text, before it is trained.")] = 0.01,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Documents read side by side.")] = 4,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of each document per step, the span of backpropagation.")
    ] = 1024,
    window: Window = 1024,
    stride: Annotated[int, typer.Option(min=1, help="Tokens between the starts of two windows.")] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate of the head's matrices.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the head's weights and of the order of documents.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
    device: On = Device.auto,
) -> None:
    """Train a Fast Weight Layer for a frozen model, and save this small part alone.

    The model reads documents, and a small layer before its output learns from each of them as it is read; what is
    trained is where that layer starts and how long its steps are, so that it learns well from documents to come. The
    model's own weights stay as they are. `fastweights hf eval --head` and `fastweights.hf.load_attached` use the
    result. An untrained layer, which `hf eval` takes without `--head`, is of use already.

    For example: `fastweights hf adapt SmolLM2.gguf --data books/ -o books.head`
    """
    need("hf adapt", "hf", "torch", "transformers")
    import numpy as np
    import torch
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from fastweights.hf import head_checkpoints
    from fastweights.hf.attach import attach, attached, load_attached
    from fastweights.hf.head_training import Adapting, HeadTrainer
    from fastweights.hf.loading import load_model, read_corpus, row_of

    # The head stands beside the model unless told otherwise.
    out = out or model.with_name(model.name + ".head")
    # A resumed training goes on with its own settings, data and head; a new one must not overwrite another.
    if resume:
        # These say where things are and not how the head is trained, so they may change.
        free = {"model", "out", "resume", "save_every", "device"}
        _refuse_changes(ctx, free)
        about = head_checkpoints.read_progress(out)
        how, data = Adapting(**about["how"]), about["data"]
    else:
        if not data:
            raise FastWeightError("--data is missing; expected stdlib, a file, a folder, or hf:NAME[:CONFIG]")
        head_checkpoints.check_new(out)
        how = Adapting(steps=steps, batch=batch, length=length, window=window, stride=stride, lr=lr, seed=seed)
        about = dict(data=data, step=0, history=[])
    # The model itself is frozen; only the head has parameters that are trained.
    body, tokenizer = load_model(model, device=device)
    if resume:
        load_attached(body, out)
    else:
        torch.manual_seed(how.seed)
        attach(body, size or None, refresh=refresh, step_size=step)
    # Every document starts with the tokenizer's own start token.
    documents = [row_of(tokenizer, text)[0].numpy() for text in read_corpus(tokenizer, data)]
    trainer = HeadTrainer(body, documents, how)
    if resume:
        head_checkpoints.restore(trainer, out, about)
    tokens = sum(map(len, documents))
    new = sum(p.numel() for p in attached(body).parameters())
    say(f"{out}: a head of {new:,} parameters for {model}; {len(documents):,} documents, {tokens:,} tokens")
    console = Console()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=how.steps, completed=trainer.at)
        # Losses are shown as means over the last 20 steps: one step's documents differ too much from the next's.
        recent: list[tuple[float, float]] = []
        while trainer.at < how.steps:
            recent.append(trainer.step())
            if not all(np.isfinite(recent[-1])):
                raise FastWeightError(
                    f"the loss is {recent[-1][0]} at step {trainer.at}; expected a number: lower --lr"
                )
            loss, without = np.mean(recent[-20:], 0)
            text = f"loss {loss:.3f}  without the head {without:.3f}"
            progress.update(task, completed=trainer.at, description=text)
            if trainer.at % save_every == 0 or trainer.at == how.steps:
                about["history"].append(dict(step=trainer.at, loss=float(loss), without=float(without)))
                head_checkpoints.save(trainer, out, about)
                console.print(f"step {trainer.at:>6}   {text}", highlight=False)
    say(f"Next: fastweights hf eval {model} FILES --head {out} --window {how.window}")


def _refuse_changes(ctx: typer.Context, free: set[str]) -> None:
    """Refuse options that were given although the training goes on as it began.

    Args:
        ctx: of the command, which knows which options the user typed.
        free: options that may be given all the same.
    """
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params if name not in free}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise FastWeightError(f"--resume with {', '.join(given)}; expected no changes: a training goes on as it began")


def evaluate(
    model: Model,
    files: Annotated[list[Path], typer.Argument(help="Files to score.", metavar="FILES", show_default=False)],
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to score in: static, still, fast, cache, both, body, all, dynamic or dynamic+cache; repeatable. "
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
            help="Third of the model whose feed-forward layers learn too, in the modes body and all: first, middle, "
            "last or all. None when absent; with --head, as it was trained."
        ),
    ] = "",
    window: Window = 1024,
    stride: Annotated[
        int, typer.Option(min=1, help="Tokens scored at a time, and between two updates of dynamic evaluation.")
    ] = 256,
    limit: Annotated[int, typer.Option(help="Bytes of each file to score, from its start; 0 for all.")] = 262_144,
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
    - body: matrices inside the model learn, one step per stride (`--where`);
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
        attach(found, where=where or None)
    # An untrained head that learns nothing is the model itself, so "still" is of use with --head alone.
    asked = [m for m in scoring.modes(found) if m != "dynamic+cache" and (m != "still" or head is not None)]
    peaks: list[int | None] = []

    def score(mode: str, advance: Any) -> Score:
        # The peak of each mode by itself.
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        scored = scoring.score(found, tokenizer, texts, mode, how, advance=advance)
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
        return scored

    # All modes read the same texts; the model's weights are put back between them.
    scores = score_modes(mode or asked, texts, score)
    numbers = summary(texts, scores, None)
    for row, peak in zip(numbers["modes"], peaks, strict=True):
        row["peak_gpu_bytes"] = peak
    settings = dict(window=window, stride=stride, lr=lr, parameters=list(names), head=head and str(head))
    numbers |= dict(model=str(model), settings=settings)
    json, plot = json or Path(f"{model.name}.eval.json"), plot or Path(f"{model.name}.eval.png")
    report_scores(numbers, scores, texts, None, json, plot)
