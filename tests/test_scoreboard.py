"""The scoreboard says what the CSV files say: verdicts are computed, and the page in docs is the one they give."""

import math
import shutil
import sys
from pathlib import Path

import pytest

from fastweights import cli
from fastweights.lab import EXPERIMENTS
from fastweights.lab.engine import claims, experiment, results, scoreboard
from fastweights.lab.engine.averages import Average
from fastweights.lab.engine.claims import OURS, Claim, all_hold, all_less

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fastweights", "reproduce", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def test_the_page_is_what_the_results_say():
    """When this fails: `fastweights reproduce --scoreboard`, and read what changed."""
    assert (RESULTS / scoreboard.PAGE).read_text() == scoreboard.page(RESULTS)


def test_other_results_give_another_page(tmp_path):
    """Two models change places in a copy of the results: a verdict turns round, and the page with it."""
    for path in RESULTS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    before = {j.claim.id: j.verdict for j in scoreboard.entry("question-answering", tmp_path).judged}
    done = results.read_csv(tmp_path / "question-answering.csv")
    for row in (row for rows in done.values() for row in rows if row["model"] in ("linear", "dpfp-sum")):
        row["error"] /= 2
    (tmp_path / "question-answering.csv").write_text(results.to_csv(done))
    after = {j.claim.id: j.verdict for j in scoreboard.entry("question-answering", tmp_path).judged}
    assert (before["delta-beats-sum"], after["delta-beats-sum"]) == ("reproduced", "opposite")
    assert scoreboard.page(tmp_path) != (RESULTS / scoreboard.PAGE).read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_claim_is_judged(name):
    found = scoreboard.entry(name, RESULTS)
    assert not found.reason
    module = experiment.load(name)
    assert len({claim.id for claim in module.CLAIMS}) == len(module.CLAIMS) == len(found.judged) > 0
    for j in found.judged:
        assert j.verdict in claims.VERDICTS
        assert all((j.claim.says.endswith("."), j.claim.published, j.claim.source, j.ours, j.size))
        assert j.seeds >= 1
        rows = j.claim.rows([dict(zip(j.claim.where, ("no such value",) * 9, strict=False))])
        assert not rows or not j.claim.where  # a claim is about some rows only


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_page(name):
    text = (RESULTS / f"{name}.md").read_text()
    assert f"[Claim by claim](README.md#{name})" in text
    assert "## How it was measured" in text
    assert f"[What was found]({name}.md)" in (RESULTS / scoreboard.PAGE).read_text()


def test_results_that_are_not_there_are_said_to_be_missing(tmp_path, monkeypatch, capsys):
    found = scoreboard.entry("recall", tmp_path)
    assert not found.judged
    assert found.reason.startswith(f"no results: {tmp_path / 'recall.csv'} does not exist")
    done = results.read_csv(RESULTS / "recall.csv")
    done.pop(next(iter(done)))
    (tmp_path / "recall.csv").write_text(results.to_csv(done))
    assert scoreboard.entry("recall", tmp_path).reason.startswith("1 of 162 arms have no results in")
    command(monkeypatch, "--list", "--out", str(tmp_path))
    assert capsys.readouterr().out.count("Not judged: ") == len(EXPERIMENTS)


def test_the_list_has_ours_beside_the_published(monkeypatch, capsys):
    command(monkeypatch, "--list", "--out", str(RESULTS))
    out = capsys.readouterr().out
    for entry in scoreboard.entries(RESULTS):
        for j in entry.judged:
            assert f"{j.verdict}: {j.claim.says}" in out
            assert f"ours: {j.ours}; {j.seeds} seed" in out
            assert f"published: {j.claim.published} ({j.claim.source})" in out


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    shutil.copy(RESULTS / "translation.csv", tmp_path)
    command(monkeypatch, "--scoreboard", "--out", str(tmp_path))
    text = (tmp_path / scoreboard.PAGE).read_text()
    assert text == scoreboard.page(tmp_path)
    assert text.count("Not judged: ") == len(EXPERIMENTS) - 1
    assert "| **not** |" in text


def test_verdicts():
    assert all_hold([True, True]) == "reproduced"
    assert all_hold([True, False]) == "partly"
    assert all_hold([False, False]) == "not"
    assert all_less([(1, 2), (3, 4)]) == "reproduced"
    assert all_less([(1, 2), (4, 3)]) == "partly"
    assert all_less([(2, 1), (4, 3)]) == "opposite"
    assert all_less([(2, 2), (4, 3)]) == "not"  # equal is neither
    assert all_less([(1.0, math.nan)]) == "reproduced"  # what diverged is worse than any number
    assert all_less([(math.nan, math.inf)]) == "not"
    assert Average(2.0, 1.0, 3.0).text(".1f") == "2.0 (1.0 to 3.0)"
    assert Average(2.0, 2.001, 1.999).text(".1f") == "2.0"


def test_a_claim_is_about_its_rows():
    claim = Claim("a", "A.", "-", OURS, lambda rows: ("not", str(len(rows))), dict(model=("x", "y"), width=4))
    rows = [dict(model=m, width=w, seed=s) for m in "xyz" for w in (4, 8) for s in (0, 1)]
    assert len(claim.rows(rows)) == 4
    assert claims.count_seeds(claim.rows(rows)) == 2
    assert claims.count_seeds([dict(seed=0, copy=n) for n in range(3)] + [dict(seed=0)]) == 3
