"""Score, adapt and exchange models of Hugging Face.

MODEL is a folder that `transformers` loads, or a GGUF file; nothing is downloaded.

For example: `fastweights hf eval SmolLM2.gguf book.txt`
"""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.options import Run, need, say

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
