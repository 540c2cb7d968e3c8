"""The command demo: train, evaluate, generate, and say in words what was shown. Light to import."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli import evaluate, generate
from fastweights.cli.options import prepare_torch, say, typed
from fastweights.core import FastWeightError

PROMPT = "class Queue:\n    def __init__(self"
# what each mode of `eval` did, as the end of "..., "
WHAT = {
    "memory": "when it carried its memory from window to window",
    "cache": "when it also looked up words that came before in the file",
    "fast": "when its Fast Weight Layer learned from the file on the way",
    "both": "with that layer and the look-up together",
    "dynamic": "when all of its weights were trained on the file on the way (dynamic evaluation)",
}


def demo(
    run: Annotated[Path, typer.Argument(help="Folder to make for the run.", metavar="RUN")] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to train at most.")] = 4.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train at most.")] = 1500,
    limit: Annotated[int, typer.Option(min=1, help="Bytes of held-out documents to score.")] = 65_536,
    prompt: Annotated[str, typer.Option(help="Text to go on with.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 300,
    data: Annotated[
        str, typer.Option(help="Documents to train on: stdlib-modules, stdlib, a file or a folder.")
    ] = "stdlib-modules",
    tokenizer: Annotated[
        str, typer.Option(help="Tokens of the model: bytes, or bpe:SIZE, pieces of words found in the text.")
    ] = "bpe:512",
) -> None:
    """Train, evaluate and generate on this machine, in minutes, and say in words what was shown.

    Nothing is downloaded: the text is the source code of Python's standard library, without its tables of characters
    and its applications. Three steps, each of which is a command of its own:

    1. `train`: a language model of about a million weights, for four minutes at most. Its tokens are 512 pieces of
       words, two bytes on average.
    2. `eval`: files that it has not seen, with and without memory, beside gzip and xz.
    3. `generate`: text that goes on with a prompt. It has the looks of Python, not the sense: that takes larger models
       and longer training.

    At the end the numbers are said again in sentences. The run stays in its folder, and the other commands can use it.

    For example: `fastweights demo runs/short --minutes 1`
    """
    if (run / "config.json").exists():
        other = typed("fastweights", "demo", f"{run}-2")
        raise FastWeightError(f"run {run} exists; expected a new folder, as in: {other}")
    prepare_torch("demo")
    from rich.console import Console

    from fastweights.lm import training

    time = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
    say(f"1 of 3. Training a language model on {data}, for {time} at most.", style="bold")
    changes = dict(data=data, tokenizer=tokenizer, steps=steps, minutes=minutes, batch=4)  # more steps in four minutes
    config = training.configured("laptop", changes)
    training.train(config, run, console=Console())
    say("\n2 of 3. Reading files that it has not seen, with and without memory.", style="bold")
    evaluate.evaluate(run, limit=limit)
    say("\n3 of 3. Writing, token by token.", style="bold")
    # The layer that learned while it read would also learn its own mistakes: writing, it soon repeats itself.
    how: dict[str, Any] = dict(temperature=0.7, min_p=0.1, learn=False)
    generate.generate(run, prompt=prompt, tokens=tokens, whole=generate.Whole.blocks, **how)
    say("\nWhat you have just seen", style="bold")
    say(in_words(json.loads((run / "eval.json").read_bytes()), run))


def in_words(numbers: dict[str, Any], run: Path) -> str:
    """The numbers of an evaluation as sentences, and what to do next.

    Args:
        numbers: what `eval` wrote as JSON.
        run: folder of the run.
    """
    # Every number that is said comes from eval.json; nothing is computed twice.
    rows = {row["mode"]: row for row in numbers["modes"]}
    bits = {mode: row["bits_per_byte"] for mode, row in rows.items()}
    others = " and ".join(f"{value:.2f} for {name.partition(' ')[0]}" for name, value in numbers["compressors"].items())
    carried = rows["memory"]["state_bytes"] / 1024
    commands = {
        typed("fastweights", "generate", run) + ' --prompt "def "': "go on writing",
        typed("fastweights", "read", run) + " FILE -o file.memory": "read a file into a memory, to start from",
        "fastweights train runs/mine --data FOLDER": "train on your own text",
    }
    return "\n".join(
        [
            f"A model was trained here, and read {numbers['bytes']:,} bytes of files that it had never seen.",
            "Bits per byte say how well it predicted them; fewer are better. It took",
            "",
            f"  {bits['static']:.2f}  in windows, each with an empty memory",
            *(f"  {bits[mode]:.2f}  {what}" for mode, what in WHAT.items() if mode in bits),
            "",
            f"For comparison: {others}.",
            f"Its fast-weight memory has {carried:,.0f} KiB, however long the text is.",
            "",
            "Next:",
            *(f"  {command:{max(map(len, commands))}}   {what}" for command, what in commands.items()),
            "",
            f"{run / 'eval.png'} shows the bits per byte by position in the file.",
        ]
    )
