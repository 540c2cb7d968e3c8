"""What a release rests on: one version, metadata that agree with the workflow, a changelog in its usual form."""

import re
import tomllib
from pathlib import Path

import pytest

import fastweights

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pythons():
    """Versions of Python that the classifiers name."""
    return {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}


def test_the_version_is_said_once():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", fastweights.__version__)
    assert f"version: {fastweights.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{fastweights.__version__}}}" in (ROOT / "README.md").read_text()


def test_the_workflow_runs_what_ci_runs_on_the_pythons_we_name():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["pinned"]["steps"]
    assert set(jobs["pinned"]["strategy"]["matrix"]["python"]) == pythons()
    made = {step["run"].removeprefix("make ") for job in jobs.values() for step in job["steps"] if "make" in str(step)}
    targets = (made - {"${{ matrix.target }}"}) | {
        x["target"] for x in jobs["dependencies"]["strategy"]["matrix"]["include"]
    }
    rules = set(re.findall(r"^([\w ]+):(?! \w+ :=)", (ROOT / "Makefile").read_text(), re.M))
    assert {"oldest", "newest", "release"} == targets <= {name for rule in rules for name in rule.split()}


def test_the_files_that_the_makefile_names_are_there():
    named = set(re.findall(r"tests/\w+\.py", (ROOT / "Makefile").read_text()))
    assert len(named) > 5
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_every_folder_and_file_of_the_sdist_is_there():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert [name for name in build["include"] if not (ROOT / name).exists()] == []


def test_the_changelog_has_its_form():
    headings = re.findall(r"^(#+) (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == [("#", "Changelog"), ("##", "[Unreleased]")]
    for level, text in headings[1:]:
        if level == "##":
            assert re.fullmatch(r"\[(Unreleased|\d+\.\d+\.\d+)\]( - \d{4}-\d\d-\d\d)?", text)
        else:
            assert (level, text) in {
                ("###", s) for s in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
            }


def test_constraints_name_the_triton_that_pytorch_asks_for():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    asked = {"2.13.0": "3.7.1"}  # PyTorch's CUDA builds on PyPI require one version of Triton, or pip finds no solution
    assert pins["triton"] == asked[pins["torch"]]
