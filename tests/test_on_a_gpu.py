"""The list of what only a GPU can check (benchmarks/on_a_gpu.py): jobs are run, ended by their limits and kept."""

import json
import shlex
import time
from pathlib import Path

import pytest

from benchmarks import on_a_gpu
from benchmarks.on_a_gpu import Job

ROOT = Path(__file__).parents[1]


def test_jobs_are_run_ended_and_kept(monkeypatch, tmp_path):
    write = "-c 'import sys; print(sys.argv[1]); open(sys.argv[1], chr(119)).write(chr(55))' JSON"
    jobs = {
        "quick": Job("-c 'print(1 + 1)'", 60, alone=False),
        "slow": Job("-c 'import time; print(3, flush=True); time.sleep(60)'", 5, alone=False),
        "fails": Job("-c 'raise SystemExit(4)'", 60),
        "numbers": Job(write, 60),
        "long": Job("-c 'print(5)'", 7200),
    }
    monkeypatch.setattr(on_a_gpu, "JOBS", jobs)
    began = time.monotonic()
    found = on_a_gpu.run(list(jobs), tmp_path, minutes=60)
    assert time.monotonic() - began < 40
    assert {name: result["how"] for name, result in found.items()} == {
        "quick": "done", "slow": "ended by its limit", "fails": "failed, exit code 4", "numbers": "done",
        "long": "left out: no time",
    }  # fmt: skip
    assert found["numbers"]["numbers"] == 7
    assert json.loads((tmp_path / "results.json").read_text())["numbers"]["numbers"] == 7
    log = (tmp_path / "log.txt").read_text()
    assert "quick: done" in log
    assert "\n\n2\n" in log
    assert "\n\n3\n" in log  # what a job printed before it was ended
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt"}


@pytest.mark.parametrize("job", on_a_gpu.JOBS.values(), ids=on_a_gpu.JOBS)
def test_every_job_names_what_there_is(job):
    """The files and modules of benchmarks/ and tests/ that a job's command names exist."""
    kind, *words = shlex.split(job.arguments)
    files = [kind, *words] if kind != "-m" else words
    for word in (w for w in files if w.startswith(("tests/", "benchmarks/"))):
        assert list(ROOT.glob(word)), word
    if kind == "-m" and words[0].startswith("benchmarks."):
        assert (ROOT / (words[0].replace(".", "/") + ".py")).is_file()


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["on_a_gpu", str(tmp_path / "new")])
    monkeypatch.setattr(on_a_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        on_a_gpu.main()
    assert "PyTorch finds no GPU here" in capsys.readouterr().err
