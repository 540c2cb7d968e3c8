"""`fastweights train`: an option for every field of the training configuration. Light to import."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import prepare_torch, say, typed
from fastweights.core import FastWeightError
from fastweights.models.config import CHOICES, FAST_FIELDS, MIXERS, OTHERS, PRESETS, Config

FIELDS = {f.name: f for f in fields(Config)}
# headings over the options of train
TEXT, MODEL, FAST, TRAINING, MACHINE = "Text", "Model", "Fast Weight Layer", "Training", "Machine"


def _field(name: str, heading: str) -> Any:
    """The option for a field of the training configuration, with the field's help and default.

    heading: the panel of --help that it stands under.
    """
    field = FIELDS[name]
    default = "" if field.default in ("", 0, 0.0, False, None) else f" [default: {field.default}]"
    flag = field.metadata["flag"] or "--" + name.replace("_", "-")
    words = list(OTHERS + MIXERS if name == "model" else CHOICES.get(name, ()))
    help = field.metadata["help"] + default
    complete = (lambda: words) if words else None  # what the Tab key offers
    return typer.Option(flag, help=help, show_default=False, rich_help_panel=heading, autocompletion=complete)


def _check_used(config: Config, changes: dict[str, Any]) -> None:
    """Raise where an option was given that this model has no use for.

    Args:
        config: what will be trained.
        changes: options that were given.
    """
    layer = "a Fast Weight Layer (--head fwl)"
    idle = (
        {"window": "softmax attention among the blocks"} if not {"softmax", "transformer"} & set(config.mixers) else {}
    )
    if config.head != "fwl":
        idle |= dict.fromkeys(("fast_hidden", *FAST_FIELDS), layer)
    elif not config.refresh:
        idle |= dict.fromkeys(
            ("train_refresh", "within", "fast_step", "step_lr"), "a layer that is refreshed (--refresh)"
        )
    for name in idle.keys() & changes.keys():
        raise FastWeightError(
            f"--{name.replace('_', '-')} is {changes[name]}; expected it with {idle[name]} alone: this model has none"
        )


def train(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder to make for the run.", metavar="RUN")] = Path("runs/first"),
    preset: Annotated[
        str,
        typer.Option(
            help="Preset that the defaults come from: laptop, gpu, paper-small or paper-medium.",
            autocompletion=lambda: list(PRESETS),
        ),
    ] = "laptop",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in RUN where it stopped.")] = False,
    data: Annotated[str | None, _field("data", TEXT)] = None,
    tokenizer: Annotated[str | None, _field("tokenizer", TEXT)] = None,
    context: Annotated[str | None, _field("context", TEXT)] = None,
    forget: Annotated[float | None, _field("forget", TEXT)] = None,
    model: Annotated[str | None, _field("model", MODEL)] = None,
    layers: Annotated[str | None, _field("layers", MODEL)] = None,
    depth: Annotated[int | None, _field("depth", MODEL)] = None,
    dim: Annotated[int | None, _field("dim", MODEL)] = None,
    heads: Annotated[int | None, _field("heads", MODEL)] = None,
    ff: Annotated[str | None, _field("ff", MODEL)] = None,
    hidden: Annotated[int | None, _field("hidden", MODEL)] = None,
    head: Annotated[str | None, _field("head", MODEL)] = None,
    fast_hidden: Annotated[int | None, _field("fast_hidden", FAST)] = None,
    refresh: Annotated[int | None, _field("refresh", FAST)] = None,
    train_refresh: Annotated[int | None, _field("train_refresh", FAST)] = None,
    within: Annotated[str | None, _field("within", FAST)] = None,
    fast_step: Annotated[float | None, _field("fast_step", FAST)] = None,
    fast_decay: Annotated[float | None, _field("fast_decay", FAST)] = None,
    fast_clip: Annotated[float | None, _field("fast_clip", FAST)] = None,
    step_lr: Annotated[float | None, _field("step_lr", FAST)] = None,
    start: Annotated[str | None, _field("start", FAST)] = None,
    dropout: Annotated[float | None, _field("dropout", MODEL)] = None,
    window: Annotated[int | None, _field("window", MODEL)] = None,
    length: Annotated[int | None, _field("length", TRAINING)] = None,
    batch: Annotated[int | None, _field("batch", TRAINING)] = None,
    accumulate: Annotated[int | None, _field("accumulate", TRAINING)] = None,
    steps: Annotated[int | None, _field("steps", TRAINING)] = None,
    minutes: Annotated[float | None, _field("minutes", TRAINING)] = None,
    lr: Annotated[float | None, _field("lr", TRAINING)] = None,
    final_lr: Annotated[float | None, _field("final_lr", TRAINING)] = None,
    warmup: Annotated[int | None, _field("warmup", TRAINING)] = None,
    clip: Annotated[float | None, _field("clip", TRAINING)] = None,
    weight_decay: Annotated[float | None, _field("weight_decay", TRAINING)] = None,
    seed: Annotated[int | None, _field("seed", TRAINING)] = None,
    eval_every: Annotated[int | None, _field("eval_every", TRAINING)] = None,
    device: Annotated[str | None, _field("device", MACHINE)] = None,
    dtype: Annotated[str | None, _field("dtype", MACHINE)] = None,
    compile: Annotated[bool | None, _field("compile", MACHINE)] = None,
    checkpointing: Annotated[bool | None, _field("checkpointing", MACHINE)] = None,
    parallel: Annotated[str | None, _field("parallel", MACHINE)] = None,
    patience: Annotated[float | None, _field("patience", MACHINE)] = None,
) -> None:
    """Train a language model. Without options: on the Python standard library, in minutes on a laptop.

    RUN is a folder that is made for the run: its configuration, tokenizer, weights and log. A tenth of the documents is
    kept apart for validation and test. Ctrl-C saves; `--resume` goes on as if nothing had happened.

    A model is a stack of blocks, each with a mixer (a fast-weight memory, softmax attention or an LSTM) and a
    feed-forward layer, and an output layer. Options that are not given have the values of `--preset`; the defaults
    shown are those of the preset laptop.

    For example: `fastweights train runs/hybrid --layers "delta*3,softmax"`
    """
    prepare_torch("train")
    from rich.console import Console

    from fastweights.lm import training

    # An option that was not given is None: presets decide those, and a resumed run its own configuration.
    changes = {name: ctx.params[name] for name in FIELDS if ctx.params[name] is not None}
    source = ctx.get_parameter_source("preset")
    chosen = source is not None and source.name != "DEFAULT"
    if resume and (changes or chosen):
        given = ", ".join([*changes, *["preset"] * chosen])
        raise FastWeightError(f"--resume with {given}; expected no changes: a run goes on as it began")
    if chosen and "start" in changes:
        raise FastWeightError("--from with --preset; expected one of them: all but the layer is as in the run it names")
    if "layers" in changes and {"model", "depth"} & set(changes):
        raise FastWeightError("--layers with --model or --depth; expected one way to say which blocks there are")
    config = training.configured(preset, changes)
    _check_used(config, changes)
    first = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun one speaks
    if not resume and first:
        blocks = ", ".join(config.mixers)
        say(f"{run}: {blocks}; {config.head} head; {config.data} as {config.tokenizer}")
    training.train(config, run, resume=resume, console=Console())
    if first:
        say(f"Next: {typed('fastweights', 'eval', run)}")
