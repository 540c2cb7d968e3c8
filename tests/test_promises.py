"""docs/reliability.md is true: the tests that it names exist, and its figures are those of the files."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
FIGURES = ROOT / "benchmarks" / "reliability"


def named_tests(page):
    """(file, test) of every test that a table names; a name alone is of the file named before it."""
    file = None
    for at, name in re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", page):
        file = at or file
        yield file, name


def test_every_promise_has_its_test():
    found = list(named_tests(PAGE))
    assert len(found) > 20
    missing = [(f, n) for f, n in found if f"def {n}(" not in (ROOT / "tests" / f).read_text()]
    assert missing == []


def test_every_command_exists():
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"`make (\w+)`", PAGE + (ROOT / "SECURITY.md").read_text())):
        assert re.search(rf"^[\w ]*\b{name}\b[\w ]*:", makefile, re.M), name


@pytest.mark.parametrize("name, keys", [
    ("fuzz", ("files", "failed")), ("properties", ("cases", "failed")), ("soak", ("tokens",)), ("steps", ("steps",)),
])  # fmt: skip
def test_figures_are_those_of_the_files(name, keys):
    figures = json.loads((FIGURES / f"{name}.json").read_text())
    for key in keys:
        assert f"{figures[key]:,}" in PAGE, (name, key)


UNSAFE = (
    r"\bpickle\b|torch\.load\(|trust_remote_code|allow_pickle|(?<![.\w])(?:eval|exec)\("
    r"|\burllib\.request\b|\brequests\.get"
)


def test_nothing_is_unpickled_executed_or_fetched():
    found = [(p.name, m[0]) for p in (ROOT / "fastweights").rglob("*.py") for m in re.finditer(UNSAFE, p.read_text())]
    assert found == []
    assert re.search(UNSAFE, "x = eval(text)")  # the check can fail
    assert not re.search(UNSAFE, "model.eval()")
