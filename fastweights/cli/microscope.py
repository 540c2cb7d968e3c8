"""The command inspect: one page of what a model's memories did with a text. Light to import."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import Device, On, busy, need, say, wait_without_spinning
from fastweights.core import FastWeightError

BUDGET = 4_600_000  # bytes for the sources of all tokens, before they are compressed


def inspect(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of `fastweights train`; with --hf, of a model.", metavar="RUN", show_default=False),
    ],
    file: Annotated[Path, typer.Argument(help="Text file to read.", metavar="FILE", show_default=False)],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Page to write; FILE.html when absent.")] = None,
    hf: Annotated[bool, typer.Option("--hf", help="RUN is a Hugging Face folder or a GGUF file.")] = False,
    head: Annotated[
        Path | None, typer.Option(help="Folder of `fastweights hf adapt`, for --hf.", show_default=False)
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Another RUN, to be shown beside the first.", show_default=False)
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Tokens between two measurements of a memory.")] = 16,
    window: Annotated[int, typer.Option(min=2, help="Tokens that a read or write is followed back.")] = 2048,
    limit: Annotated[int, typer.Option(min=0, help="Tokens of FILE to read; 0 for all.")] = 131_072,
    device: On = Device.auto,
) -> None:
    """Show what a model's memories did with a text: one HTML page that needs no network.

    The page shows the text, coloured by how much each token surprised the model, with its memory and without it. For a
    token that you choose it shows which earlier tokens its prediction was read from, and what its own write took out of
    the memory. Charts show for every head how strongly it wrote, how wrong it was, how full it became and how soon it
    forgot.

    For example: `fastweights inspect runs/first README.md -o page.html`
    """
    need("inspect", "inspect", "torch", "plotly")
    if hf:
        need("inspect --hf", "hf", "transformers")
    wait_without_spinning()
    if head is not None and not hf:
        raise FastWeightError(f"--head is {head} without --hf; expected both: a head belongs to a Hugging Face model")
    from fastweights.inspect import hf_reader, page, page_data, run_reader
    from fastweights.inspect.sources import SourceTracker

    out = out or Path(file.name + ".html")
    models = [run, *([compare] if compare is not None else [])]
    blocks = []
    for model in models:
        tracker = SourceTracker(window, BUDGET // len(models))
        how: dict[str, Any] = dict(every=every, limit=limit, device=device, observer=tracker)
        with busy(f"Reading {file} with {model}, from several places"):
            if hf:
                reading = hf_reader.read_hf(model, file, head=head, window=window, **how)
            else:
                reading = run_reader.read_run(model, file, **how)
        blocks.append(page_data.model_block(reading, tracker.result()))
        kept = len(reading.text.tokens)
        count = len(reading.probe.memories)
        say(f"{model}: {kept:,} tokens of {file}, {count} {'memory' if count == 1 else 'memories'}")
    size = page.write(out, blocks, f"What the memory did with {file.name}")
    say(f"Written to {out} ({size / 2**20:.1f} MiB); open it in a browser")
