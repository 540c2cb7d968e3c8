"""What `eval` and `hf eval` share: a score per mode under a progress bar, then a table, a JSON file and a picture."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fastweights.cli.options import say
from fastweights.files import write_json
from fastweights.text import report
from fastweights.text.scores import Score, Text


def score_modes(
    modes: list[str], texts: list[Text], score: Callable[[str, Callable[[int], Any]], Score]
) -> list[Score]:
    """A score for every mode, under a progress bar.

    Args:
        modes: names, in the order of the table.
        texts: what is scored, for the length of the bars.
        score: score(mode, advance); advance(bytes) moves the bar.
    """
    console = Console()
    scores = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for mode in modes:
            task = progress.add_task(report.LABELS.get(mode, mode), total=sum(len(t.data) for t in texts))
            scores.append(score(mode, partial(progress.advance, task)))
    return scores


def report_scores(
    numbers: dict[str, Any],
    scores: list[Score],
    texts: list[Text],
    lengths: np.ndarray | None,
    json: Path,
    plot: Path,
    memories: Sequence[Any] = (),
) -> None:
    """Print the numbers of `summary` as a table, write them as JSON, and draw the loss by position.

    Args:
        numbers: of `summary`, and what else the JSON file shall hold.
        scores, texts, lengths: what they were made of.
        json, plot: files to write; without matplotlib there is no picture.
        memories: curves of the memories for the picture.
    """
    try:
        report.show(numbers, Console())
    finally:  # also where whoever reads the output has gone: scoring takes minutes
        write_json(json, numbers)
    drawn = report.plot(scores, texts, lengths, plot, memories)
    say(f"Written to {json}" + (f" and {plot}" if drawn else " (no picture: matplotlib is not installed)"))
