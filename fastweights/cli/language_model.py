"""The commands train, eval, generate and read, around the language models of this package. Light to import."""

import sys
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, FromMemory, On, Run, need, say, wait_without_spinning
from fastweights.core import FastWeightError
from fastweights.models.config import DYNAMIC_LR, PRESETS, Config

FIELDS = {f.name: f for f in fields(Config)}
# headings over the options of train
TEXT, MODEL, FAST, TRAINING, MACHINE = "Text", "Model", "Fast Weight Layer", "Training", "Machine"


class Whole(StrEnum):
    """What is written whole or not at all, as choices of an option; blocks are parted by blank lines."""

    lines = "lines"
    blocks = "blocks"


ENDS = {Whole.lines: "\n", Whole.blocks: "\n\n"}


def _prepare(command: str) -> None:
    """What these commands do before they import PyTorch."""
    need(command, "lm", "torch")
    wait_without_spinning()


def _field(name: str, heading: str) -> Any:
    """The option for a field of the training configuration, with the field's help and default.

    heading: the panel of --help that it stands under.
    """
    field = FIELDS[name]
    default = "" if field.default in ("", 0, 0.0, False, None) else f" [default: {field.default}]"
    flag = field.metadata["flag"] or "--" + name.replace("_", "-")
    return typer.Option(flag, help=field.metadata["help"] + default, show_default=False, rich_help_panel=heading)


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
    _prepare("train")
    from rich.console import Console

    from fastweights.lm import training

    # An option that was not given is None: presets decide those, and a resumed run its own configuration.
    changes = {name: ctx.params[name] for name in FIELDS if ctx.params[name] is not None}
    if resume and changes:
        raise FastWeightError(f"--resume with {', '.join(changes)}; expected no changes: a run goes on as it began")
    if "layers" in changes and {"model", "depth"} & set(changes):
        raise FastWeightError("--layers with --model or --depth; expected one way to say which blocks there are")
    config = training.configured(preset, changes)
    if not resume:
        blocks = ", ".join(config.mixers)
        say(f"{run}: {blocks}; {config.head} head; {config.data} as {config.tokenizer}")
    training.train(config, run, resume=resume, console=Console())
    say(f"Next: fastweights eval {run}")


def evaluate(
    run: Run,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files to score; the run's held-out documents when absent.", metavar="FILES"),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to score in: static, memory, cache, fast, both or dynamic; repeatable. All by default."
        ),
    ] = None,
    memory: FromMemory = None,
    min_bytes: Annotated[int, typer.Option(help="Bytes below which a held-out document is left out.")] = 8192,
    limit: Annotated[int, typer.Option(help="Bytes of held-out documents to score; 0 for all.")] = 262_144,
    dynamic_lr: Annotated[float, typer.Option(help="Learning rate of dynamic evaluation.")] = DYNAMIC_LR,
    dynamic_segment: Annotated[int, typer.Option(help="Tokens between two updates of dynamic evaluation.")] = 64,
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
    _prepare("eval")
    from fastweights.cli.scores import report_scores, score_modes
    from fastweights.lm import laws
    from fastweights.models import evaluation, run_documents
    from fastweights.models.dynamic_evaluation import Dynamic
    from fastweights.models.memory import Memory
    from fastweights.models.run_documents import held_out, read_file
    from fastweights.models.run_folder import load
    from fastweights.text.scores import summary

    model = load(run, device=device)
    asked = mode or evaluation.modes(model)
    # Names of modes are checked before anything is read; scoring takes minutes.
    for each in asked:
        evaluation.check_mode(model, each)
    texts = [read_file(model, path) for path in files or ()] or held_out(run, model, min_bytes, limit)
    before = None if memory is None else Memory.load(memory, model)
    batches = run_documents.training_batches(run, model) if "dynamic" in asked else ()
    dynamic = Dynamic(lr=dynamic_lr, segment=dynamic_segment, batches=batches)
    for each in asked:
        laws.check(model, each, evaluation.row_of(model, texts[0]), dynamic)
    scores = score_modes(
        asked,
        texts,
        lambda mode, advance: evaluation.score(model, texts, mode, memory=before, dynamic=dynamic, advance=advance),
    )
    numbers = summary(texts, scores, model.tokenizer.lengths()) | dict(run=str(run))
    json, plot = json or run / "eval.json", plot or run / "eval.png"
    memories = evaluation.memory_norms(model, texts[0])
    report_scores(numbers, scores, texts, model.tokenizer.lengths(), json, plot, memories)
    say("Every mode was causal, normalised, scored before it learned, and read once (checked on the first document).")


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on with.")] = "",
    memory: FromMemory = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 400,
    until: Annotated[str, typer.Option(help="Text after which to stop.")] = "",
    whole: Annotated[
        Whole | None, typer.Option(help="Leave out the last line, or block of lines, where the text stopped within it.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the choice of tokens; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens to choose among; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Probability that the tokens to choose among have together, the likeliest first.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Probability that a token needs, as a share of the likeliest one's; 0 for any.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice: the same seed writes the same text.")] = 0,
    learn: Annotated[bool, typer.Option(help="Let a Fast Weight Layer learn from the text it writes.")] = True,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in a neural cache of the prompt and the output.")] = False,
    device: On = Device.auto,
) -> None:
    """Write text, token by token, with memory of constant size.

    It goes on with `--prompt`, with the document that `fastweights read` put into a memory file, or with both; without
    either it begins a document of its own. It stops at the end of that document, after `--until`, or after `--tokens`.
    A lower temperature keeps closer to what the model finds likely, a higher one is more varied. A model that learns
    from what it writes also learns its own mistakes; `--no-learn` helps where it repeats itself.

    For example: `fastweights generate runs/first --prompt "def main("`
    """
    _prepare("generate")
    from fastweights.lm import generation
    from fastweights.models.memory import Memory
    from fastweights.models.run_folder import load
    from fastweights.torch import NeuralCache

    how = generation.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    model = load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    mixed: dict[str, Any] = dict(cache=NeuralCache()) if cache else {}
    if cache and prompt:
        mixed["cached"] = generation.read_into(mixed["cache"], model, prompt, before, learn=learn)
    # The prompt is read into the memory in one go; from there on each token takes one step.
    if prompt or before is None:
        before = model.read(prompt, before)
    sys.stdout.write(prompt)
    end = prompt
    written = generation.generate(model, before, tokens, how, learn=learn, **mixed)
    pieces = generation.text_of(model, written, until)
    for piece in pieces if whole is None else generation.parts_of(pieces, ENDS[whole]):
        sys.stdout.write(piece)
        sys.stdout.flush()
        end = piece
    if whole is None or not end.endswith("\n"):
        sys.stdout.write("\n")


def read(
    run: Run,
    file: Annotated[Path, typer.Argument(help="File to read, of any length.", metavar="FILE", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Memory file to write; FILE.memory when absent.")
    ] = None,
    memory: FromMemory = None,
    device: On = Device.auto,
) -> None:
    """Read a document once into a memory of constant size, which `generate` and `eval` can start from.

    The file is read to its end, however long it is; the memory has the same size after a page and after a book. With
    `--memory` it goes on from an earlier memory: several documents can be read into one. A memory belongs to the model
    that wrote it, and is refused by any other.

    For example: `fastweights read runs/first README.md -o readme.memory`
    """
    _prepare("read")
    from fastweights.models.memory import Memory
    from fastweights.models.run_documents import read_file
    from fastweights.models.run_folder import load

    out = out or file.with_name(file.name + ".memory")
    model = load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    found = model.read(read_file(model, file).tokens, before)
    found.save(out)
    say(
        f"{file}: {found.count:,} tokens in {found.bytes / 1024:,.0f} KiB of memory. "
        f"Go on with: fastweights generate {run} --memory {out}"
    )
