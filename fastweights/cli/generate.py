"""`fastweights generate` and `fastweights read`: text from a memory, and a memory from a text. Light to import."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, FromMemory, On, Run, prepare_torch, reading, say, typed


class Whole(StrEnum):
    """What is written whole or not at all, as choices of an option; blocks are parted by blank lines."""

    lines = "lines"
    blocks = "blocks"


ENDS = {Whole.lines: "\n", Whole.blocks: "\n\n"}


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
    learn: Annotated[
        bool,
        typer.Option(help="Let a Fast Weight Layer learn from the text it writes, not from prompt and memory alone."),
    ] = True,
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
    prepare_torch("generate")
    from fastweights.lm import generation
    from fastweights.models.memory import Memory
    from fastweights.models.run_folder import load
    from fastweights.torch import NeuralCache

    how = generation.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    model = load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    mixed: dict[str, Any] = dict(cache=NeuralCache()) if cache else {}
    given = os.fsencode(prompt)  # the bytes that were typed, also where they are no text
    if cache and given:
        mixed["cached"] = generation.read_into(mixed["cache"], model, given, before)
    # The prompt is read into the memory in one go; from there on each token takes one step.
    if given or before is None:
        before = model.read(given, before)
    last = model.tokenizer.encode(given).tolist() if given else [before.last]
    end = given.decode(errors="replace")
    sys.stdout.write(end)
    written = generation.generate(model, before, tokens, how, learn=learn, **mixed)
    pieces = generation.text_of(model, written, until, last)
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
    prepare_torch("read")
    from fastweights.models.memory import Memory
    from fastweights.models.run_documents import read_file
    from fastweights.models.run_folder import load

    out = out or file.with_name(file.name + ".memory")
    model = load(run, device=device)
    before = None if memory is None else Memory.load(memory, model)
    tokens = read_file(model, file).tokens
    with reading(file.name, len(tokens)) as advance:
        found = model.read(tokens, before, advance=advance)
    found.save(out)
    earlier = "" if before is None else f", after {before.count - 1:,} before"  # a count has the start of the document
    say(
        f"{file}: {len(tokens):,} tokens{earlier}, in {found.bytes / 1024:,.0f} KiB of memory. "
        f"Go on with: {typed('fastweights', 'generate', run, '--memory', out)}"
    )
