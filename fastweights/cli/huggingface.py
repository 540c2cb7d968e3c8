"""The commands export, adapt and eval: their flags and help. Light to import, as fastweights/hf itself is not."""

from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.language_model import COMMANDS as lm_commands
from fastweights.cli.language_model import On
from fastweights.core import FastWeightError

HF_LR = {"sgd": 3e-2, "rms": 1e-5}  # rates of dynamic evaluation without and with statistics


def _commands(name: str) -> Any:
    for package, extra in (("torch", "PyTorch"), ("transformers", "transformers")):
        if not find_spec(package):
            raise FastWeightError(f"{name} needs {extra}, which is not installed; pip install 'fastweights[hf]'")
    from fastweights.hf import commands

    return commands


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a trained run.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    last: Annotated[bool, typer.Option("--last", help="The last weights, not the best.")] = False,
) -> None:
    """Write a run as a Hugging Face folder: weights, configuration and tokenizer.

    `import fastweights.hf` lets `AutoModelForCausalLM.from_pretrained` load it.

    For example: `fastweights export runs/first exported`
    """
    _commands("export").export_run(run, folder, last=last)


Model = Annotated[Path, typer.Argument(help="Hugging Face folder, or a GGUF file.", show_default=False)]
Window = Annotated[int, typer.Option(min=2, help="Tokens that the model sees at once.")]


def adapt(
    model: Model,
    data: Annotated[str, typer.Option(help="Documents to train on: stdlib, a file, a folder, or hf:NAME[:CONFIG].")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for the head; MODEL.head when absent.")
    ] = None,
    size: Annotated[int, typer.Option(help="Hidden width of the head; 0 for the model's own width.")] = 0,
    mode: Annotated[str, typer.Option(help="residual, which starts as nothing, or between.")] = "residual",
    decay: Annotated[float, typer.Option(help="Share of what was learned that is kept per token.")] = 0.999,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Documents read side by side.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each per step, the span of backpropagation.")] = 1024,
    window: Window = 1024,
    stride: Annotated[int, typer.Option(min=1, help="Tokens between two windows.")] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights and order of documents.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with OUT where it stopped.")] = False,
    device: On = "auto",
) -> None:
    """Train a Fast Weight Layer for a frozen model, and save this small part alone.

    The head learns how to learn from a document while the model reads it. `fastweights eval --hf` and
    `fastweights.hf.load_attached` use it.

    For example: `fastweights adapt SmolLM2.gguf --data books/ -o books.head --steps 1000`
    """
    commands = _commands("adapt")
    from fastweights.hf.head_training import Adapting

    how = Adapting(steps=steps, batch=batch, length=length, window=window, stride=stride, lr=lr, seed=seed)
    commands.adapt(model, data, out or model.with_name(model.name + ".head"), how, size=size, mode=mode, decay=decay,
                   save_every=save_every, resume=resume, device=device)  # fmt: skip


def evaluate(
    hf: Annotated[
        Path | None, typer.Option(help="Instead of RUN: a Hugging Face folder or GGUF file.", show_default=False)
    ] = None,
    head: Annotated[
        Path | None, typer.Option(help="With --hf: what `fastweights adapt` wrote, for mode fast.", show_default=False)
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="With --hf: tokens that the model sees at once.")] = 1024,
    stride: Annotated[int, typer.Option(min=1, help="With --hf: tokens scored at a time, and between updates.")] = 256,
    parameters: Annotated[
        list[str] | None,
        typer.Option(help="With --hf: names that dynamic evaluation trains, such as `*.mlp.*`; repeatable. All."),
    ] = None,
    statistics: Annotated[
        str, typer.Option(help="With --hf: training text that says how large each weight's gradients are.")
    ] = "",
    **given: Any,
) -> None:
    """Score documents that a model was not trained on, with and without memory, next to gzip and xz.

    A run of `fastweights train`, or with `--hf` any causal language model: static windows, an attached head and
    dynamic evaluation, each token with at most a window before it.

    For example: `fastweights eval runs/first README.md --mode static --mode memory`, or
    `fastweights eval --hf SmolLM2.gguf book.txt --head books.head --window 512`
    """
    if hf is None:
        if given["run"] is None:
            raise FastWeightError("RUN is missing; expected the folder of a run, or --hf and a model")
        lm_commands["eval"](**given)
        return
    commands = _commands("eval")
    files = [file for file in (given.pop("run"), *(given.pop("files") or ())) if file is not None]
    for name in ("memory", "dynamic_segment", "min_bytes"):
        if given[name] != DEFAULTS[name].default:
            flag = "--" + name.replace("_", "-")
            raise FastWeightError(f"{flag} with --hf; expected one of them: {flag} is for runs of this program")
    chosen = given["dynamic_lr"] != DEFAULTS["dynamic_lr"].default
    lr = given["dynamic_lr"] if chosen else HF_LR["rms" if statistics else "sgd"]
    commands.evaluate(
        hf, files, modes=given["mode"] or [], head=head, window=window, stride=stride, lr=lr,
        parameters=tuple(parameters or ("*",)), statistics=statistics, limit=given["limit"], json=given["json"],
        picture=given["plot"], device=given["device"],
    )  # fmt: skip


def _with_flags_of(command: Any, other: Any) -> Any:
    """`command` with its own flags and those of `other`, whose first argument may then be absent."""
    own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    first, *rest = signature(other).parameters.values()
    optional = Annotated[Path | None, typer.Argument(help="Folder of a trained run.", show_default=False)]
    taken = [first.replace(annotation=optional, default=None), *rest]
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*taken, *own)]
    command.__signature__ = Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


DEFAULTS = signature(lm_commands["eval"]).parameters
COMMANDS = {"export": export, "adapt": adapt, "eval": _with_flags_of(evaluate, lm_commands["eval"])}
