"""Killed at random moments, and hung: small versions of `make kill`, which kills twenty times, also ddp and fsdp."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights import FastWeightError
from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.training import parallel, trainer

SMALL = dict(head="linear", dim=8, heads=1, depth=1, length=8, batch=1, eval_every=2, warmup=1, steps=6, device="cpu")


def command(*arguments):
    """The long check in a process of its own: it forks, which one with threads must not."""
    return subprocess.run([sys.executable, "-m", "reliability.kill", *arguments], capture_output=True, text=True,
                          cwd=Path(__file__).parent, timeout=600)  # fmt: skip


def test_killed_at_random_moments_it_ends_as_if_left_alone(tmp_path):
    done = command("--kills", "2", "--steps", "9", "--parallel", "none", "--out", str(tmp_path / "kill.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kill.json").read_text())["none"]
    assert found["same"]
    assert found["kills"] == 2


def test_a_hung_process_does_not_hang_the_other():
    done = command("--hang")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 0 of 2 lost the others" in done.stdout
    assert "The last checkpoint of" in done.stdout


def test_a_worker_that_torchrun_starts_again_goes_on(tmp_path, monkeypatch):
    """`make elastic` does it with torchrun."""
    (tmp_path / "a.txt").write_bytes(b"one fish two fish red fish blue fish\n" * 20)
    config = Config(data=str(tmp_path / "a.txt"), **SMALL)
    losses = lambda run: [json.loads(x)["loss"] for x in (run / run_folder.METRICS).read_text().splitlines()]  # noqa: E731
    wanted = losses(train(config, tmp_path / "alone", cache=tmp_path / "cache"))
    real = trainer.Trainer.step

    def lost(self, at, *arguments):
        if at == 5:
            raise RuntimeError("[gloo] Connection closed by peer")
        return real(self, at, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", lost)
        with pytest.raises(RuntimeError, match="closed by peer"):  # alone, it is nobody's loss
            train(config, tmp_path / "run", cache=tmp_path / "cache")
    with pytest.raises(FastWeightError, match="exists; expected a new folder, or --resume"):
        train(config, tmp_path / "run", cache=tmp_path / "cache")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert losses(train(config, tmp_path / "run", cache=tmp_path / "cache")) == wanted
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(FastWeightError, match=r"process 0 of 2 lost the others .*--max-restarts"),
        parallel.said_when_others_are_lost(tmp_path / "run", "ddp", 1.0),
    ):
        raise RuntimeError("[gloo] Connection closed by peer")
    with (
        pytest.raises(RuntimeError, match="a bug"),
        parallel.said_when_others_are_lost(tmp_path / "run", "ddp", 1.0),
    ):
        raise RuntimeError("a bug")
