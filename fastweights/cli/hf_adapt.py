"""`fastweights hf adapt`: train a head that learns while it reads, for a model of Hugging Face."""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.huggingface import Model, Window
from fastweights.cli.options import Device, On, need, say, typed
from fastweights.core import FastWeightError


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
            raise FastWeightError("--data is missing; expected stdlib, stdlib-modules, a file, a folder or hf:NAME")
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
    say(f"Next: {typed('fastweights', 'hf', 'eval', model)} FILES {typed('--head', out)} --window {how.window}")


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
