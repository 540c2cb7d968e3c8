"""What `fastweights reproduce` prints: the list of experiments and claims, and the table and verdicts of one."""

from pathlib import Path
from typing import Any

from fastweights.cli.options import say

SHOWN_ROWS = 60
STYLES = dict(reproduced="green", partly="yellow", opposite="red") | {"not": "red"}


def show_result(outcome: Any, plan: Any, console: Any) -> None:
    """Print an experiment's table, what it confirmed and what it did not, and where its files are.

    Args:
        outcome: rows, what was confirmed and what not, arms that are missing, files.
        plan: of the experiment.
        console: of rich.
    """
    from fastweights.lab.engine.experiment import docstring

    rows = plan.module.table(outcome.rows) if outcome.rows else []
    if rows:
        console.print(_table(docstring(plan.name).splitlines()[0], rows[:SHOWN_ROWS]))
    if len(rows) > SHOWN_ROWS:
        say(f"{len(rows) - SHOWN_ROWS} more rows in the CSV", "dim")
    for line in outcome.confirmed:
        say(line, "green")
    for line in outcome.failed:
        say(line, "red")
    if outcome.missing:
        left = f"{outcome.missing} of {len(plan.arms)} arms are still to run"
        say(f"{left}, so nothing was checked; the same command goes on", "yellow")
    for file in outcome.files:
        say(f"Written to {file}")


def _table(heading: str, rows: list[dict]) -> Any:
    """Rows as a table of the terminal: numbers to the right, text to the left.

    Args:
        heading: above the table.
        rows: from column to value; a value that a row lacks is left blank.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=heading, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    # Rows may have different fields; a column is there if any row has it.
    columns = list(dict.fromkeys(c for row in rows for c in row))
    for c in columns:
        text = any(isinstance(row.get(c), str) for row in rows)
        table.add_column(c, justify="left" if text else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(c)) for c in columns))
    return table


def _cell(value: Any) -> str:
    """A value in four figures; nothing for None.

    Examples:
        >>> _cell(0.123456), _cell(None), _cell(12)
        ('0.1235', '', '12')
    """
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def list_experiments(out: Path | None) -> None:
    """Print every experiment, claim by claim: the verdict, ours beside the published, seeds and size.

    All of it is computed from the results that are there.
    """
    from fastweights.lab.engine import scoreboard
    from fastweights.lab.engine.experiment import docstring, section

    folder = scoreboard.folder_of_results(out)
    found = scoreboard.entries(folder)
    # Experiment by experiment, claim by claim.
    for entry in found:
        say(f"{entry.name}  {entry.title}", "bold")
        say(f"  Paper: {entry.paper}", "dim")
        say(f"  Cost: {section(docstring(entry.name), 'Cost')}", "dim")
        if entry.reason:
            say(f"  Not judged: {entry.reason}", "yellow")
        for j in entry.judged:
            say(f"  {j.verdict}: {j.claim.says}", STYLES[j.verdict])
            say(f"      ours: {j.ours}; {j.seeds} seed{'s' * (j.seeds > 1)}; {j.size}")
            say(f"      published: {j.claim.published} ({j.claim.source})", "dim")
    say(f"\nOf the papers' claims: {scoreboard.counts(found)}. Computed from the results in {folder}.")
    say("For example: fastweights reproduce overwrite --smoke")
