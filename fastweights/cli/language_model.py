"""The commands train, eval, generate and read of the program: their flags and help. Light to import."""

import os
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.core import FastWeightError
from fastweights.models.config import DYNAMIC_LR, Config, flags


def _commands(name: str) -> Any:
    if not find_spec("torch"):
        raise FastWeightError(f"{name} needs PyTorch, which is not installed; pip install 'fastweights[lm]'")
    # threads that wait by spinning slow each other down 16-fold on a busy machine; read when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from fastweights.lm import commands

    return commands


def _flags(command):
    """One flag per field of the training configuration, with its type, default and help."""
    parameters = []
    for f in flags():
        flag = "--" + f.name.replace("_", "-")
        option = typer.Option(flag, help=f.metadata["help"] + _default(f), show_default=False)
        annotation = Annotated[f.type | None, option]
        parameters.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    command.__signature__ = Signature([*own, *parameters])
    command.__annotations__ = {p.name: p.annotation for p in [*own, *parameters]}
    return command


def _default(field) -> str:
    return "" if field.default in ("", 0, 0.0, False) else f" [default: {field.default}]"


Run = Annotated[Path, typer.Argument(help="Folder of a trained run.", show_default=False)]
On = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
FromMemory = Annotated[Path | None, typer.Option(help="Start from what `fastweights read` wrote.", show_default=False)]


@_flags
def train(
    run: Annotated[Path, typer.Argument(help="Folder for the run.")] = Path("runs/first"),
    preset: Annotated[str, typer.Option(help="Sizes: laptop, gpu, paper-small or paper-medium.")] = "laptop",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run where it stopped.")] = False,
    **given,
) -> None:
    """Train a language model. Without flags: on the Python standard library, in minutes on a laptop.

    Ctrl-C saves; `--resume` goes on as if nothing had happened. Defaults are those of the preset laptop.

    For example: `fastweights train runs/hybrid --layers "delta*3,softmax" --tokenizer bpe:1024`
    """
    commands = _commands("train")

    changes = {name: value for name, value in given.items() if value is not None}
    if resume and changes:
        raise FastWeightError(f"--resume with {', '.join(changes)}; expected no changes: a run goes on as it began")
    commands.train(Config.of(preset, **changes), run, resume)


def evaluate(
    run: Run,
    files: Annotated[list[Path] | None, typer.Argument(help="Files to score; held-out documents when absent.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="static, memory, fast or dynamic; repeatable. All when absent.")
    ] = None,
    memory: FromMemory = None,
    min_bytes: Annotated[int, typer.Option(help="Leave out held-out documents shorter than this.")] = 8192,
    limit: Annotated[int, typer.Option(help="Bytes of held-out documents to score; 0 for all.")] = 262_144,
    dynamic_lr: Annotated[float, typer.Option(help="Rate of dynamic evaluation.")] = DYNAMIC_LR,
    dynamic_segment: Annotated[int, typer.Option(help="Tokens between its updates.")] = 64,
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers; RUN/eval.json when absent.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw loss by position; RUN/eval.png when absent.")] = None,
    device: On = "auto",
) -> None:
    """Score documents that the model was not trained on, with and without memory, next to gzip and xz.

    In the table "carried" is what the model takes along from token to token, and "peak" the most memory that scoring
    held at once, beyond the model and the documents.

    For example: `fastweights eval runs/first README.md --mode static --mode memory`
    """
    commands = _commands("eval")
    from fastweights.models.dynamic_evaluation import Dynamic

    how = Dynamic(lr=dynamic_lr, segment=dynamic_segment)
    commands.evaluate(run, files or [], modes=mode or [], memory=memory, min_bytes=min_bytes, limit=limit, dynamic=how,
                      json=json, picture=plot, device=device)  # fmt: skip


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on with.")] = "",
    memory: FromMemory = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most this many.")] = 400,
    until: Annotated[str, typer.Option(help="Stop after this text.")] = "",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among this many; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest, up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    learn: Annotated[bool, typer.Option(help="Let a Fast Weight Layer learn from what it generates.")] = True,
    device: On = "auto",
) -> None:
    """Write text, token by token, with memory of constant size.

    For example: `fastweights generate runs/first --prompt "def main(" --temperature 0.5`
    """
    commands = _commands("generate")
    from fastweights.lm.generation import Sampling

    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    commands.generate(run, prompt, memory=memory, tokens=tokens, until=until, how=how, learn=learn, device=device)


def read(
    run: Run,
    file: Annotated[Path, typer.Argument(help="Text of any length.", show_default=False)],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="FILE.memory when absent.")] = None,
    memory: FromMemory = None,
    device: On = "auto",
) -> None:
    """Read a document once into a memory of constant size, which `generate` and `eval` can start from.

    For example: `fastweights read runs/first README.md -o readme.memory`
    """
    commands = _commands("read")

    commands.read(run, file, out or file.with_name(file.name + ".memory"), memory=memory, device=device)


COMMANDS = {"train": train, "eval": evaluate, "generate": generate, "read": read}
