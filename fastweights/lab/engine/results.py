"""Results of an experiment on disk: one line per arm while it runs, one CSV table at the end; never half written.

docs/results/overwrite.jsonl          a line per finished arm: {"arm": {...}, "rows": [{...}, ...]}
docs/results/overwrite.2-of-8.jsonl   the same of a part that ran by itself (--part 2/8)
docs/results/overwrite.csv            all rows, once `Results.write_csv` is called; the lines are then deleted
"""

import csv
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

from fastweights.core import FastWeightError
from fastweights.files import read_text, write_text

Arm = dict[str, Any]  # settings of one unit of work, such as dict(model="delta", S=20, steps=1000, seed=0)
Row = dict[str, Any]  # fields of one result: those of its arm, and what was measured
TABLE = "a table of `fastweights reproduce`, whose last column says which arm a row is of"
LINES = "lines of `fastweights reproduce`, each an arm and its rows"


def arm_key(arm: Arm) -> str:
    """A short hash of an arm's fields, which identifies the arm. Another setting is another arm, and runs again."""
    return hashlib.sha256(json.dumps(arm, sort_keys=True).encode()).hexdigest()[:10]


class Results:
    """The finished arms of one experiment: `results[key]` is the rows of the arm with that `arm_key`.

    Each row has the fields of its arm, of its measurement, and `seconds`.

    Args:
        folder: where the files are; made if need be.
        name: of the experiment.
        part: suffix of the file of lines where only a part of the arms runs here; all files of the folder are read.
    """

    def __init__(self, folder: Path, name: str, part: str = ""):
        self.folder, self.name, self.part = folder, name, part
        self.path = folder / (f"{name}.{part}.jsonl" if part else f"{name}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FastWeightError(f"cannot write to {folder}: {error.strerror}") from None
        self.rows_by_arm: dict[str, list[Row]] = {}
        table = folder / f"{name}.csv"
        if table.exists():
            self.rows_by_arm |= read_csv(table)
        for path in sorted(folder.glob(f"{name}.*jsonl")):
            self.rows_by_arm |= read_lines(path)

    def __contains__(self, key: str) -> bool:
        return key in self.rows_by_arm

    def __getitem__(self, key: str) -> list[Row]:
        return self.rows_by_arm[key]

    def add(self, arm: Arm, rows: list[Row], seconds: float) -> None:
        """Keep the rows of a finished arm; they are on disk when this returns.

        Args:
            arm: the arm, whose fields are added to every row.
            rows: what was measured.
            seconds: how long the arm took.
        """
        if clash := sorted(set(arm) & {name for row in rows for name in row}):
            raise FastWeightError(f"{self.name}: rows have {', '.join(clash)}, which the arm has; expected other names")
        full_rows = [arm | row | {"seconds": round(seconds, 2)} for row in rows]
        # A last line that a killed process left without its end must not swallow the new one.
        last_line_is_cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        line = json.dumps({"arm": arm, "rows": full_rows}) + "\n"
        with open(self.path, "a") as file:
            file.write("\n" + line if last_line_is_cut else line)
            file.flush()
            os.fsync(file.fileno())
        self.rows_by_arm[arm_key(arm)] = full_rows

    def write_csv(self) -> Path:
        """Write all rows to FOLDER/NAME.csv, and delete the files of lines, whose rows the table now holds."""
        path = self.folder / f"{self.name}.csv"
        write_text(path, to_csv(self.rows_by_arm))
        for lines in self.folder.glob(f"{self.name}.*jsonl"):
            lines.unlink()
        return path


def read_lines(path: Path) -> dict[str, list[Row]]:
    """{key of an arm: its rows} of a file of lines; a line that a killed process cut off is left out."""
    rows_by_arm = {}
    for line in read_text(path, LINES).splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut off: that arm runs again
            continue
        arm, rows = (entry.get("arm"), entry.get("rows")) if isinstance(entry, dict) else (None, None)
        if not isinstance(arm, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FastWeightError(f"{path} has a line {line[:60]!r}; expected {LINES}")
        rows_by_arm[arm_key(arm)] = rows
    return rows_by_arm


def to_csv(rows_by_arm: dict[str, list[Row]]) -> str:
    """Rows as CSV: a column for every field of any row, and a last one, arm, for the key of the arm."""
    columns = list(dict.fromkeys(name for rows in rows_by_arm.values() for row in rows for name in row))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*columns, "arm"])
    for key, rows in rows_by_arm.items():
        for row in rows:
            table.writerow([*(_to_cell(row.get(name)) for name in columns), key])
    return text.getvalue()


def _to_cell(value: Any) -> str:
    """A value as text for CSV: numbers with a fraction in six figures, nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> dict[str, list[Row]]:
    """{key of an arm: its rows} of a table that `to_csv` made; empty cells are absent from the rows."""
    rows_by_arm: dict[str, list[Row]] = {}
    try:
        for cells in csv.DictReader(io.StringIO(read_text(path, TABLE), newline="")):
            key = cells.pop("arm", None)
            if key is None or None in cells:
                raise FastWeightError(f"{path} has a row without a cell for each column; expected {TABLE}")
            row = {name: _from_cell(text) for name, text in cells.items() if text}
            rows_by_arm.setdefault(key, []).append(row)
    except csv.Error as error:
        raise FastWeightError(f"{path} is not CSV ({error}); expected {TABLE}") from None
    return rows_by_arm


def _from_cell(text: str) -> Any:
    """The value that a cell's text was written from: truth value, whole number, number or text."""
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
