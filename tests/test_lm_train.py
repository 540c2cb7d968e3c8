"""Training: it learns, it goes on exactly where it stopped, and its files are whole or absent."""

import io
import json
import os
import signal
import threading
import time

import pytest
import torch
from rich.console import Console
from two_processes import in_two_processes, same_worker

from fastweights import tensor_files
from fastweights.core import FastWeightError
from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.training import checkpoints, log, optimizer, trainer
from fastweights.training.optimizer import share_of_rate
from fastweights.training.parallel import Ranks

SMALL = dict(
    head="linear",
    dim=16,
    heads=2,
    layers="delta,softmax",
    length=16,
    batch=2,
    eval_every=4,
    warmup=2,
    steps=8,
    dropout=0.1,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (root / f"{i}.txt").write_bytes(b"The %d quick brown foxes jump over the lazy dog.\n" % i * (2 + i))
    return str(root)


@pytest.fixture
def go(corpus, tmp_path):
    """Train into tmp_path / name: the losses of every step."""

    def call(name, resume=False, **changes):
        run = train(Config(data=corpus, **(SMALL | changes)), tmp_path / name, resume=resume, cache=tmp_path / "cache")
        return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    return call


def stop_after(monkeypatch, step):
    """Kill the run, without a chance to save, when this step is done."""
    real = trainer.Trainer.step

    def killed(self, at, *arguments):
        if at == step:
            raise RuntimeError("killed")
        return real(self, at, *arguments)

    monkeypatch.setattr(trainer.Trainer, "step", killed)
    return real


@pytest.mark.parametrize("changes", [
    dict(), dict(head="fwl", refresh=3, train_refresh=5), dict(context="packed"), dict(accumulate=2),
    dict(layers="lstm,performer"),
])  # fmt: skip
def test_a_killed_run_goes_on_exactly(go, monkeypatch, tmp_path, changes):
    """Killed after step 6 and resumed from the checkpoint of step 4: the losses of an uninterrupted run."""
    wanted = go("whole", **changes)
    real = stop_after(monkeypatch, 6)
    with pytest.raises(RuntimeError, match="killed"):
        go("killed", **changes)
    monkeypatch.setattr(trainer.Trainer, "step", real)
    assert go("killed", resume=True) == wanted
    a, b = (tensor_files.read_tensors(tmp_path / name / run_folder.LAST)[0] for name in ("whole", "killed"))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    if "refresh" in changes:
        read, kept = run_folder.load(tmp_path / "killed"), [x for name, x in a.items() if name.endswith("pending")]
        assert (read.fast.config.refresh, kept[0].shape[1]) == (3, 5)  # while it reads, and while it was trained


def test_ctrl_c_saves_and_says_how_to_go_on(go, tmp_path, corpus, capsys):
    from rich.console import Console

    def interrupt():
        path = tmp_path / "run" / run_folder.METRICS
        while not (path.exists() and path.read_text().count("\n") >= 3):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    config = Config(data=corpus, **(SMALL | dict(steps=100_000, eval_every=100_000)))
    run = train(config, tmp_path / "run", console=Console(width=300), cache=tmp_path / "cache")
    assert f"Go on with: fastweights train {run} --resume" in capsys.readouterr().out
    steps = len((run / run_folder.METRICS).read_text().splitlines())
    assert json.loads(tensor_files.read_tensors(run / run_folder.LAST)[1]["about"])["step"] == steps >= 3


@pytest.mark.parametrize("head", ["linear", "fwl"])
def test_it_learns(go, head):
    losses = go("run", steps=60, head=head, lr=1e-2, dropout=0.0, eval_every=60, batch=4)
    assert losses[0] > 5
    assert losses[-1] < 2.5


def test_a_warm_start_trains_the_fast_weight_layer_alone(go, corpus, tmp_path):
    go("static", head="linear", steps=6)
    changes = dict(head="fwl", start=str(tmp_path / "static"), refresh=4, steps=8, lr=1e-2, step_lr=0.1)
    losses = go("warm", **changes)
    assert losses[-1] < losses[0]
    before, after = run_folder.load(tmp_path / "static"), run_folder.load(tmp_path / "warm", last=True)
    for name, x in before.state_dict().items():
        assert torch.equal(x, after.state_dict()[name]), name
    first, last = (json.loads(line) for line in (tmp_path / "warm/metrics.jsonl").read_text().splitlines()[3::4])
    assert first["step_dense1"] != last["step_dense1"]
    with pytest.raises(
        FastWeightError, match=r"of run .*static has shape .*; expected .* the same blocks and vocabulary"
    ):
        go("wider", **changes | dict(dim=32))
    with pytest.raises(FastWeightError, match=r"head is 'linear' with start .*; expected 'fwl'"):
        go("linear", **changes | dict(head="linear"))


def test_the_first_steps_are_one_over_the_mean_squared_key():
    model = LanguageModel(Config(**SMALL | dict(head="fwl", refresh=4)), 257)
    x, fast = torch.randn(2, 50, 16), model.fast
    fast.start_steps(x, 2.0)
    a = torch.relu(x @ fast.dense1 + fast.bias1) ** 2
    sizes = fast.step_sizes()
    for name, key in (("dense1", x), ("dense2", a)):
        assert sizes[name] == pytest.approx(2 / (float(key.detach().square().sum(-1).mean()) + 1), rel=1e-5)
    assert sizes["scale"] == pytest.approx(2 / 17, rel=1e-3)


def test_steps_have_a_rate_of_their_own():
    config = Config(**SMALL | dict(head="fwl", refresh=4, step_lr=0.5))
    model = LanguageModel(config, 257)
    groups = optimizer.make_optimizer(model, config).param_groups
    assert [g["peak"] for g in groups] == [config.lr, config.lr, 0.5]
    assert groups[2]["params"] == [model.fast.steps]
    assert [g["weight_decay"] for g in groups] == [config.weight_decay, 0.0, 0.0]
    assert {p.dim() for p in groups[0]["params"]} == {2}


def test_rows_forget_now_and_then(go, monkeypatch):
    """So that a model has started with an empty memory: other rows in every step, as often as was asked for."""
    seen, real = [], trainer.to_batch

    def watched(rows, start, device, forget=None, **how):
        if forget is None:  # a validation
            return real(rows, start, device, **how)
        batch = real(rows, start, device, forget, **how)
        assert (batch[3].keep.bool().numpy() == ~(forget | (rows[:, 0] == start))).all()
        seen.append(forget)
        return batch

    monkeypatch.setattr(trainer, "to_batch", watched)
    go("run", forget=0.25, batch=16, steps=8, eval_every=100)
    assert len({row.tobytes() for row in seen}) > 4
    assert 0.1 < sum(row.mean() for row in seen) / len(seen) < 0.4


def test_accumulation_is_a_larger_batch(go):
    kept = dict(dropout=0.0, layers="delta", steps=4)
    assert go("two", batch=2, accumulate=2, **kept) == pytest.approx(go("four", batch=4, **kept), rel=1e-5)


def test_a_time_limit_ends_the_schedule(go, tmp_path):
    losses = go("run", steps=1_000_000, minutes=0.02, eval_every=1_000_000)
    assert 1 <= len(losses) < 1000
    assert (tmp_path / "run" / run_folder.BEST).exists()


def test_schedule():
    c = Config(warmup=10, steps=100, final_lr=0.1)
    rates = [share_of_rate(c, i, i / 100) for i in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    tensor_files.write_tensors(path, {"a": torch.ones(3)}, {})

    def full(tensors, name, about):
        name.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(FastWeightError, match="No space left on device; what was there is intact"):
        tensor_files.write_tensors(path, {"a": torch.zeros(3)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert tensor_files.read_tensors(path)[0]["a"].sum() == 3


def test_a_run_that_is_not_there_or_half_written(go, tmp_path):
    with pytest.raises(FastWeightError, match="does not exist; expected a folder that `fastweights train` made"):
        run_folder.load(tmp_path / "none")
    go("run", steps=2, eval_every=1)
    with pytest.raises(FastWeightError, match="exists; expected a new folder, or --resume"):
        go("run", steps=2)
    run = tmp_path / "run"
    (run / run_folder.BEST).unlink()
    (run / run_folder.LAST).unlink()
    (run / run_folder.PREVIOUS).unlink()
    with pytest.raises(FastWeightError, match="has no checkpoint yet"):
        run_folder.load(run)
    with pytest.raises(FastWeightError, match="expected a run that saved a checkpoint to resume"):
        go("run", resume=True)
    (run / run_folder.CONFIG).write_text("{")
    with pytest.raises(FastWeightError, match="is not JSON"):
        run_folder.load(run)


def test_no_file_of_a_run_is_pickled(go, tmp_path):
    go("run", steps=2)
    kinds = {p.suffix for p in (tmp_path / "run").iterdir() if p.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}


def train_as_one_of_two(rank, config, run, cache, joined):
    """Train, then go on for two steps more. joined: in a process group that is there already, as a caller may have."""
    if joined:
        torch.distributed.init_process_group("gloo")
    train(config, run, cache=cache)
    if not joined:
        return
    torch.distributed.barrier()
    if rank == 0:
        make_longer(run)
    torch.distributed.barrier()
    train(config, run, resume=True, cache=cache)
    torch.distributed.destroy_process_group()


def resume_as_one_of_two(rank, config, run, cache):
    train(config, run, resume=True, cache=cache)


def make_longer(run):
    """Eight steps instead of six."""
    about = json.loads((run / run_folder.CONFIG).read_text())
    about["config"]["steps"] = 8
    del about["sha256"]  # an edit
    (run / run_folder.CONFIG).write_text(json.dumps(about))


@same_worker
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_one_with_twice_the_batch(go, tmp_path, corpus, parallel):
    """And they resume as one does: in new processes, or (sharded) in the caller's own process group."""
    same = dict(head="fwl", steps=6, eval_every=3, dropout=0.0)
    wanted = go("one", batch=4, **same)
    config = Config(data=corpus, parallel=parallel, device="cpu", **(SMALL | same))
    run, joined = tmp_path / "two", parallel == "fsdp"
    in_two_processes(train_as_one_of_two, config, run, tmp_path / "cache", joined)
    losses = lambda: [json.loads(line)["loss"] for line in (run / run_folder.METRICS).read_text().splitlines()]  # noqa: E731
    if not joined:
        assert losses() == pytest.approx(wanted, rel=1e-4)
        make_longer(run)
        in_two_processes(resume_as_one_of_two, config, run, tmp_path / "cache")
    assert losses()[:6] == pytest.approx(wanted, rel=1e-4)
    assert len(losses()) == 8
    assert max(losses()[6:]) < wanted[0] - 0.5
    assert torch.isfinite(run_folder.load(run).score(*torch.zeros(2, 1, 5, dtype=torch.long)).loss).all()
    config, about = run_folder.read_config(run)
    with pytest.raises(FastWeightError, match="carries the memory of 2 batches; expected 1: resume with as many"):
        checkpoints.restore(run, LanguageModel(config, about["vocab"]), Ranks())


def test_processes_must_be_asked_for(go, monkeypatch):
    with pytest.raises(FastWeightError, match="parallel is 'ddp'; expected torchrun to start this"):
        go("run", parallel="ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FastWeightError, match="torchrun started 2 processes; expected --parallel"):
        go("run")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_progress_bar_shows_steps_and_times_on_a_narrow_terminal(width, tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    lines = log.Log(tmp_path, "metrics.jsonl", 0, 20_000, 1.0, console)
    speed = dict(tokens_per_second=236_252.0, share_of_peak=0.3)
    lines.step(1300, 0.065, 1.25, speed)
    lines.began = (time.perf_counter() - 60, 0.0)  # a minute for 0.5 of the run: as much is left
    lines.step(10_000, 0.5, 1.25, speed)
    console.print(lines.progress.get_renderable())
    (line,) = out.getvalue().splitlines()
    assert "10000/20000" in line
    assert line.rstrip().endswith("0:01:00 left")
    assert ("1.803 bits/byte  236,252 tokens/s" in line) == (width >= 80)


def test_a_run_takes_a_config(tmp_path):
    with pytest.raises(FastWeightError, match="config is a dict; expected a Config, such as"):
        train(dict(dim=16), tmp_path / "run")
