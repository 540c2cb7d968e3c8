"""Results of an experiment on disk: a line per arm while it runs, a table at the end; never half written."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastweights.core import FastWeightError
from fastweights.files import read_text, write_text

Arm = dict[str, Any]
Row = dict[str, Any]
TABLE = "a table of `fastweights reproduce`, whose last column says which arm a row is of"
LINES = "lines of `fastweights reproduce`, each an arm and its rows"


def key(arm: Arm) -> str:
    """What identifies an arm: a short hash of its fields. Another setting is another arm, and runs again."""
    return hashlib.sha256(json.dumps(arm, sort_keys=True).encode()).hexdigest()[:10]


class Results:
    """The arms of one experiment that are done: `results[key]` is the rows of an arm, each with the arm's own fields.

    They are in FOLDER/NAME.jsonl, and in FOLDER/NAME.PART.jsonl of the parts that ran by themselves.
    """

    def __init__(self, folder: Path, name: str, part: str = ""):
        self.folder, self.name, self.part = folder, name, part
        self.path = folder / (f"{name}.{part}.jsonl" if part else f"{name}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FastWeightError(f"cannot write to {folder}: {error.strerror}") from None
        self.done: dict[str, list[Row]] = {}
        for path in [folder / f"{name}.csv", *sorted(folder.glob(f"{name}.*jsonl"))]:
            if path.exists():
                self.done |= read_csv(path) if path.suffix == ".csv" else read_lines(path)

    def __contains__(self, key: str) -> bool:
        return key in self.done

    def __getitem__(self, key: str) -> list[Row]:
        return self.done[key]

    def add(self, arm: Arm, rows: list[Row], seconds: float) -> None:
        """Keep the rows of an arm, on disk before this returns.

        Args:
            arm: what was run; its fields are added to every row.
            rows: what came of it.
            seconds: that it took.
        """
        if clash := sorted(set(arm) & {name for row in rows for name in row}):
            raise FastWeightError(f"{self.name}: rows have {', '.join(clash)}, which the arm has; expected other names")
        whole = [arm | row | {"seconds": round(seconds, 2)} for row in rows]
        # A line that a kill cut off must not swallow the next one.
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        line = json.dumps({"arm": arm, "rows": whole}) + "\n"
        with open(self.path, "a") as file:
            file.write("\n" * torn + line)
            file.flush()
            os.fsync(file.fileno())
        self.done[key(arm)] = whole

    def write_csv(self) -> Path:
        """All of it as FOLDER/NAME.csv, which then holds what the lines held."""
        path = self.folder / f"{self.name}.csv"
        write_text(path, to_csv(self.done))
        for lines in self.folder.glob(f"{self.name}.*jsonl"):
            lines.unlink()
        return path


def read_lines(path: Path) -> dict[str, list[Row]]:
    """{key of an arm: its rows} of a file of lines; a line that a kill cut off is left out."""
    done = {}
    for line in read_text(path, LINES).splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a kill: that arm runs again
            continue
        arm, rows = (entry.get("arm"), entry.get("rows")) if isinstance(entry, dict) else (None, None)
        if not isinstance(arm, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FastWeightError(f"{path} has a line {line[:60]!r}; expected {LINES}")
        done[key(arm)] = rows
    return done


def to_csv(done: dict[str, list[Row]]) -> str:
    """Every field of any row, empty where a row has none; the last column says which arm it is of."""
    columns = list(dict.fromkeys(c for rows in done.values() for row in rows for c in row))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*columns, "arm"])
    for arm, rows in done.items():
        for row in rows:
            table.writerow([*(_cell(row.get(c)) for c in columns), arm])
    return text.getvalue()


def _cell(value: Any) -> str:
    """A value as text for CSV: six figures of a number, nothing for None."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> dict[str, list[Row]]:
    """What `to_csv` wrote: numbers are numbers again, empty cells are absent."""
    done: dict[str, list[Row]] = {}
    try:
        for cells in csv.DictReader(io.StringIO(read_text(path, TABLE), newline="")):
            arm = cells.pop("arm", None)
            if arm is None or None in cells:
                raise FastWeightError(f"{path} has a row without a cell for each column; expected {TABLE}")
            done.setdefault(arm, []).append({c: _value(text) for c, text in cells.items() if text})
    except csv.Error as error:
        raise FastWeightError(f"{path} is not CSV ({error}); expected {TABLE}") from None
    return done


def _value(text: str) -> Any:
    """A cell as the whole number, number, truth value or text that it was."""
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def mean_over(rows: Iterable[Row], by: tuple[str, ...], value: str) -> dict[tuple, tuple[float, float, float]]:
    """(mean, lowest, highest) of a field over the rows that share the fields `by`, such as over seeds.

    Args:
        rows: of a CSV, as dicts.
        by: fields that the rows of a group share.
        value: field that is averaged.

    Examples:
        >>> mean_over([dict(R=20, seed=0, error=1.0), dict(R=20, seed=1, error=3.0)], ("R",), "error")
        {(20,): (2.0, 1.0, 3.0)}
    """
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(b) for b in by), []).append(float(row[value]))
    return {group: (sum(x) / len(x), min(x), max(x)) for group, x in groups.items()}
