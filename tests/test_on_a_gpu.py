"""What only a GPU can check (benchmarks/on_a_gpu): jobs are run, ended, kept, left out, resumed, and beside aims."""

import argparse
import json
import os
import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.on_a_gpu import __main__ as command
from benchmarks.on_a_gpu import aims, runner
from benchmarks.on_a_gpu.jobs import CALLS, JOBS, READY, Job

ROOT = Path(__file__).parents[1]
NOTHING = {"PEERS": None, "MODEL": None, "TEXT": None}
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", subprocess.Popen(["sleep", "300"]).pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def jobs(monkeypatch):
    """A table of jobs in place of the real one, and two seconds of grace past a job's time."""
    table = {}
    monkeypatch.setattr(runner, "JOBS", table)
    monkeypatch.setattr(runner, "GRACE", 2)
    return table


def python(code, seconds=60, alone=True, **how):
    """A job that runs a line of Python; JSON and other words are arguments of it."""
    return Job(f"-c {shlex.quote(code)} JSON", seconds, alone, **how)


def writes(text):
    return python(f"import sys; print(sys.argv[1]); open(sys.argv[1], 'w').write({text!r})")


def ended(found):
    return {name: result["how"] for name, result in found.items()}


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True


def test_one_job_costs_the_others_nothing(jobs, tmp_path):
    """Jobs that fail, hang, ignore SIGTERM, are killed or write half a file; what each printed and measured is kept."""
    jobs |= {
        "quick": python("print(1 + 1)", alone=False),
        "stubborn": python(STUBBORN, 1, alone=False),
        "fails": python("raise SystemExit(4)"),
        "dies": python("import os; print('before', flush=True); os.kill(os.getpid(), 9)"),
        "numbers": writes("[7]"),
        "half": writes("[7"),
        "long": python("print(5)", 7200),
    }
    began = time.monotonic()
    found = runner.run(jobs, tmp_path, 60, NOTHING)
    assert time.monotonic() - began < 40
    left = found.pop("long")["how"]
    assert left.startswith("left out: no time: 3")
    assert left.endswith("s were left, and it needs 7200")
    assert ended(found) == {
        "quick": "done", "stubborn": "ended by its limit", "fails": "failed, exit code 4",
        "dies": "failed, exit code -9", "numbers": "done", "half": "done; its numbers cannot be read",
    }  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text())["numbers"]["numbers"] == [7]
    log = (tmp_path / "log.txt").read_text()
    assert "quick: done" in log
    assert "\n\n2\n" in log
    assert "before" in log
    (pid,) = (line.split()[1] for line in log.splitlines() if line.startswith("child"))
    assert is_gone(pid)  # with the job
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt"}


def test_a_job_ends_with_the_call_and_its_numbers_are_kept(jobs, tmp_path):
    part = "(path.parent / '.slow.1.part.json').write_text('9')"  # as a file is written whole, or not at all
    write = (
        f"import pathlib, sys, time; path = pathlib.Path(sys.argv[1]); path.write_text('8'); {part}; time.sleep(300)"
    )
    jobs["slow"] = python(write, 2)
    runner.GRACE = 300
    began = time.monotonic()
    found = runner.run(["slow"], tmp_path, 4 / 60, NOTHING)
    assert time.monotonic() - began < 30
    assert ended(found) == {"slow": "ended with the call"}
    assert found["slow"]["numbers"] == 8
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt"}


def test_results_are_on_disk_before_the_slowest_of_those_side_by_side_ends(jobs, tmp_path):
    see = f"import json, time; time.sleep(6); print(list(json.load(open({str(tmp_path / 'results.json')!r}))))"
    jobs |= {"sees": python(see, alone=False), "first": python("pass", alone=False)}
    runner.run(jobs, tmp_path, 60, NOTHING)
    assert "['first']" in (tmp_path / "log.txt").read_text()


def test_what_is_done_is_not_run_again(jobs, tmp_path):
    """A second call runs what failed; preparation runs as long as what it prepares is not done."""
    jobs |= {
        "right": python("print('ran')"),
        "wrong": python("raise SystemExit(1)"),
        f"{READY}right": python("pass"),
        f"{READY}wrong": python("pass"),
    }
    runner.run(jobs, tmp_path, 60, NOTHING)
    jobs["wrong"] = python("print('mended')")
    before = (tmp_path / "log.txt").read_text()
    again = runner.run(jobs, tmp_path, 60, NOTHING)
    log = (tmp_path / "log.txt").read_text()[len(before) :]
    assert [line.split()[1] for line in log.splitlines() if line.startswith("=====")] == ["wrong:", f"{READY}wrong:"]
    assert ended(again)["wrong"] == "done"
    assert "ran" in before
    runner.run(["right"], tmp_path, 60, NOTHING, again=True)
    assert (tmp_path / "log.txt").read_text().endswith("ran\n")


def test_what_was_not_brought_along_is_left_out(jobs, tmp_path):
    jobs |= {
        "model": Job("-c pass MODEL", 60),
        "text": Job("-c pass TEXT", 60),
        "peer": python("import absent_peer; print(absent_peer.__file__)", needs="absent_peer"),
        "apart": python("import absent_peer"),
        "word": Job("-c 'import sys; print(sys.argv[1:])' MODEL STDLIB/os.py", 60),
    }
    found = runner.run(["model", "text", "peer"], tmp_path / "a", 60, NOTHING)
    assert ended(found) == {
        "model": "left out: it needs --model",
        "text": "left out: it needs --text",
        "peer": "left out: absent_peer is not installed, and not in --peers",
    }
    for name in ("peers", "model", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "peers" / "absent_peer.py").write_text("")
    brought = {word: tmp_path / word.lower() for word in NOTHING}
    found = runner.run(jobs, tmp_path / "b", 60, brought)
    assert found.pop("text")["how"].startswith(f"left out: {tmp_path / 'text'} has no pages.npz, which")
    assert ended(found) == {"model": "done", "peer": "done", "apart": "failed, exit code 1", "word": "done"}
    log = (tmp_path / "b" / "log.txt").read_text()
    assert str(tmp_path / "peers" / "absent_peer.py") in log
    assert str([str(tmp_path / "model"), os.__file__]) in log


def test_a_module_runs_once_its_imports_are_done(jobs, tmp_path):
    """Alone and by -m: it waits in a process of its own, and is run as `python -m` does; nothing is timed meanwhile."""
    (tmp_path / "in.json").write_text("[1]")
    others = "*(path.read_text() for path in pathlib.Path(sys.argv[1]).parent.glob('*.log'))"
    see = f"import pathlib, sys; print('others:', {others})"
    jobs |= {
        "first": python(see),
        "copy": Job(f"-m json.tool {tmp_path / 'in.json'} JSON", 60),
        "none": Job("-m no_such_module", 60),
    }
    found = runner.run(jobs, tmp_path / "out", 60, NOTHING)
    assert ended(found) == {"first": "done", "copy": "done", "none": "failed, exit code 1"}
    (seen,) = (part for part in (tmp_path / "out" / "log.txt").read_text().split("=====") if "others:" in part)
    assert seen.count("imports done") == 2
    assert found["copy"]["numbers"] == [1]
    assert "No module named no_such_module" in (tmp_path / "out" / "log.txt").read_text()


def test_the_plan_is_honest(jobs):
    jobs |= {
        "a": python("", 10, alone=False), "b": python("", 20, alone=False), "c": python("", 30), "d": python("", 50),
        "e": python("", 5, alone=False), "f": python("", 5),
    }  # fmt: skip
    assert runner.groups(jobs) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert runner.planned(list(jobs), 200) == (list(jobs), 110)
    assert runner.planned(list(jobs), 60) == (["a", "b", "c", "e", "f"], 60)


@pytest.mark.parametrize("call", ["first", "second", "third"])
def test_each_call_fits_into_ten_minutes(call):
    fits, seconds = runner.planned(list(CALLS[call]), 9.5 * 60)
    assert fits == list(CALLS[call])
    assert seconds <= 9.5 * 60


class Parsed(Exception):
    """Raised once a command line was understood, in place of what it asks for."""


@pytest.mark.parametrize("name", JOBS)
def test_every_command_line_is_understood(name, monkeypatch, tmp_path):
    """Its module, files and options exist: a typing error would cost minutes on a GPU."""
    kind, *words = shlex.split(JOBS[name].arguments)
    for word in (w for w in (kind, *words) if w.startswith(("tests/", "benchmarks/"))):
        assert (ROOT / word).exists(), word
    words = [word.replace("SCRATCH", str(tmp_path)).replace("TEXT", str(tmp_path)) for word in words]
    if words[0] == "pytest":
        return
    if words[:2] == ["fastweights", "bench"]:
        understood("bench", *words[2:])
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self, args=None, namespace=None):
        _, others = parse(self, args, namespace)
        raise Parsed(others)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    run = runpy.run_path
    if kind == "-m":
        run, (kind, *words) = runpy.run_module, words
    monkeypatch.setattr(sys, "argv", [kind, *words])
    with pytest.raises(Parsed) as stop:
        run(kind, run_name="__main__")
    (others,) = stop.value.args
    if kind == "benchmarks.eager_and_captured":
        understood("train", "RUN", *others)
    else:
        assert not others


def understood(*words):
    """Raise unless the program takes these words."""
    import typer

    from fastweights import cli

    at, context = typer.main.get_command(cli.app), None
    while hasattr(at, "commands"):
        context = at.make_context(words[0], [], parent=context, resilient_parsing=True)
        at, words = at.commands[words[0]], words[1:]
    at.make_context("command", list(words), parent=context)


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    def says(*arguments):
        monkeypatch.setattr(sys, "argv", ["on_a_gpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            command.main()
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert command.has_gpu() == torch.cuda.is_available()
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    assert "PyTorch finds no GPU here" in says(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "no job is called train-9x9; expected some of kernels" in says(tmp_path, "train-9x9")
    assert "--model" in says(tmp_path, "--model", tmp_path / "absent")
    assert "expected a folder for results" in says()


def test_the_command_runs_what_it_is_asked_for(jobs, monkeypatch, capsys, tmp_path):
    jobs["fine"] = writes('{"seconds": {"x, bfloat16": 2.5, "y, bfloat16": 7, "z, float32": 11}}')
    jobs["bad"] = python("1/0")
    monkeypatch.setattr(command, "JOBS", jobs)
    monkeypatch.setattr(command, "CALLS", {"first": {"fine": jobs["fine"]}, "second": jobs})
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(aims, "AIMS", [aim._replace(job="fine") for aim in aims.AIMS if aim.job == "first-calls"])
    for asked, code in ((["first"], 0), (["second", "bad"], 1), (["--table"], None)):
        monkeypatch.setattr(sys, "argv", ["on_a_gpu", str(tmp_path), *asked])
        if code is None:
            command.main()
        else:
            with pytest.raises(SystemExit) as stop:
                command.main()
            assert stop.value.code == code
        out = capsys.readouterr().out
        assert "fine" in out
        rows = [[cell.strip() for cell in line.split("│")[2:6]] for line in out.splitlines() if "seconds:" in line]
        assert rows == [
            ["seconds: x, bfloat16", "at most 5", "2.5", "yes"],
            ["seconds: y, bfloat16", "at most 5", "7", "NO"],
            ["seconds: z, float32", "at most 10", "11", "NO"],
        ]
    assert "failed, exit code 1" in out
    monkeypatch.setattr(sys, "argv", ["on_a_gpu", "--list"])
    command.main()
    assert "first: some 60 s\n  fine" in capsys.readouterr().out


DECAYS = dict(none=1.0, head=1.1, channel=2.0)  # milliseconds
MODES = {"static": 1, "cache": 1.1, "body+cache": 1.25, "both": 2, "dynamic": 7}
SUMMARY = (
    "arm,gain_over_memory", "memory,0", "dynamic-all-rms,0.2", "refresh-64-trained,0.19",
    "refresh-16-trained-at-64,0.18", "cache-refresh-64-trained,0.3",
)  # fmt: skip


def numbers():
    """JSON as every job with an aim writes it, from the functions that write it where they take no GPU."""
    from fastweights.bench import decode, fwl, memory, report, train
    from fastweights.bench.case import Case
    from fastweights.bench.timing import Timing
    from fastweights.models.config import Config

    def timed(**ms):
        return {name.replace("_", " "): Timing(x, x, x, 9) for name, x in ms.items()}

    def result(shape, decay, ours, theirs=None, rule="delta"):
        passes = {
            which: timed(kernel=factor * ours, **({} if theirs is None else {"FLA": factor * theirs}))
            for which, factor in (("forward", 1), ("forward_backward", 3))
        }
        return memory.Result(Case(rule, shape, decay=decay), "kernel", passes)

    def step(model, how, rate):
        sizes = ("8 x 512", model, "linear", how, 1)
        return train.Result(*sizes, rate, 0.2, 25.0, 9.0, 9.5, 0, flop_per_token=10**8)

    def rows(*results):
        return {"train": train.payload(results, 8192)}

    shape, other = (8, 4096, 16, 128, 128), (4, 2048, 16, 128, 128)
    costs = [result(s, d, ms * x) for s, x in ((shape, 1), (other, 2)) for d, ms in DECAYS.items()]
    no_backward = result(shape, "channel", 1, 1.5, "sum")
    del no_backward.passes["forward_backward"]["FLA"]
    transformer = rows(step("transformer", "eager", 1e6), step("transformer", "captured", 2.5e6))
    ours = step("deltanet", "eager", 3e6), step("deltanet", "captured", 6e6)
    loops = (("eager", 5.0), (decode.OURS, 12.0), (decode.THEIRS, 10.0))
    texts = [decode.Result(batch, how, rate, 1.0) for batch in (1, 64) for how, rate in loops]
    blocks = [
        dict(shape=s, refresh=r, error=0.0, timings=timed(torch=1, jax=ms, keras=ms))
        for s, r, ms in zip(list(fwl.PUBLISHED) * 2, (None, None, 64, 64), (17.55, 260.6, 39, 130.3), strict=True)
    ]
    found = {
        "kernels": dict(of=93, held=92, worst=0.7, failed={"x": "y"}),
        "decay": report.payload("cpu", costs),
        "first-calls": dict(seconds={"delta rule, bfloat16": 4.5, "delta rule, float32": 11.0}),
        "kda-128": report.payload("cpu", [result(shape, "channel", 1, 2.5), result(other, "channel", 2, 1)]),
        "gla-128": report.payload("cpu", [no_backward]),
        "train-8x512": transformer,
        "train-fla": rows(*ours, step("FLA DeltaNet", "eager", 2e6)),
        "train-paper": transformer,
        "train-fwl": dict(ratio={"no layer": 1.0, "every 64": 1.21, "every 32": 1.25}),
        "losses": dict(ways=0.01, seeds=0.04),
        "decode": {"decode": decode.payload(texts, Config.of("paper-small"))},
        "fwl-jax": {"fwl_frameworks": fwl.payload_frameworks(blocks)},
        "pretrained-512": dict(modes={mode: dict(of_static=x) for mode, x in MODES.items()}),
        "learning-lstm": dict(tables={"126": {"summary.csv": SUMMARY[0]}, "32": {"summary.csv": "\n".join(SUMMARY)}}),
    }  # fmt: skip
    return {name: dict(how="done", seconds=1.0, numbers=json.loads(json.dumps(x))) for name, x in found.items()}


def test_numbers_stand_beside_their_aims():
    rows = {(job, what): (aim, got, holds) for job, what, aim, got, holds in aims.judged(numbers())}
    first, second = "8,4096,16,128,128", "4,2048,16,128,128"
    expected = {
        ("kernels", "checks that hold, of all: 92 of 93"): ("at least 1", "0.989", "NO"),
        ("kernels", "largest error, of what is allowed"): ("at most 1", "0.7", "yes"),
        ("decay", f"one per head / none, with backward: {first}"): ("at most 1.2", "1.1", "yes"),
        ("decay", f"one per channel / per head, with backward: {second}"): ("at most 1.4", "1.82", "NO"),
        ("decay", f"one per head / none, forward: {second}"): ("", "1.1", ""),
        ("first-calls", "seconds: delta rule, bfloat16"): ("at most 5", "4.5", "yes"),
        ("first-calls", "seconds: delta rule, float32"): ("at most 10", "11", "NO"),
        ("kda-128", f"FLA's chunk_kda / ours, forward: {first}"): ("at least 1", "2.5", "yes"),
        ("kda-128", f"FLA's chunk_kda / ours, with backward: {second}"): ("at least 1", "0.5", "NO"),
        ("gla-128", f"FLA's chunk_gla / ours, forward: {first}"): ("at least 1", "1.5", "yes"),
        ("gla-128", "FLA's chunk_gla / ours, with backward"): ("at least 1", "nothing of the kind was measured", ""),
        ("train-8x512", "share of 787 TFLOP/s, captured: transformer"): ("at least 0.3", "0.318", "yes"),
        ("train-paper", "words/s, captured: transformer"): ("at least 63000", "2,500,000", "yes"),
        ("train-fla", "tokens/s, of FLA's layer: captured"): ("at least 1", "3", "yes"),
        ("train-fwl", "ms of a step, of no layer: every 64"): ("", "1.21", ""),
        ("losses", "what ways differ by, of what seeds do"): ("at most 1", "0.25", "yes"),
        ("decode", "tokens/s of generate by our loop, of its own: 64 texts"): ("at least 1", "1.2", "yes"),
        ("fwl-jax", "ms, of the published block's: published form: 4,2048,512,512,32000"): ("at most 1", "0.9", "yes"),
        ("fwl-jax", "ms, of the published block's: published form: 4,4096,768,768,50257"): ("at most 1", "2", "NO"),
        ("fwl-jax", "ms, of the published block's: refresh 64: 4,2048,512,512,32000"): ("", "2", ""),
        ("pretrained-512", "time, of static windows: body+cache"): ("at most 1.3", "1.25", "yes"),
        ("pretrained-512", "time, of static windows: dynamic"): ("", "7", ""),
        ("learning-lstm", "gain, of dynamic evaluation's: refresh-16-trained-at-64"): ("at least 0.95", "0.9", "NO"),
        ("learning-lstm", "gain, of dynamic evaluation's: refresh-64-trained"): ("at least 0.9", "0.95", "yes"),
    }  # fmt: skip
    assert {key: rows.get(key) for key in expected} == expected


def test_numbers_that_lack_something_say_what():
    found = numbers()
    del found["pretrained-512"]["numbers"]["modes"]["dynamic"]
    found["kernels"]["numbers"] = None  # ended before it wrote any
    rows = aims.judged(found)
    assert ("pretrained-512", "time, of static windows", "", "not in its numbers: KeyError 'dynamic'", "") in rows
    assert not [row for row in rows if row[0] == "kernels"]
    caption = str(aims.table(found).caption)
    assert caption.startswith("not measured: kernels, kda-64, ")
    assert "decode" not in caption


def test_every_aim_is_of_a_job_and_every_job_of_a_call():
    assert {aim.job for aim in aims.AIMS} <= set(JOBS)
    assert {name for jobs in CALLS.values() for name in jobs} == set(JOBS)
    assert sum(map(len, CALLS.values())) == len(JOBS)  # no name twice
    assert {name.removeprefix(READY) for name in JOBS} <= set(JOBS)


def test_a_kernel_check_that_breaks_is_one_that_failed(capsys):
    pytest.importorskip("triton")
    from benchmarks import check_kernels

    def holds(**case):
        return [], ("dq", 0.5, 2.0)

    def errs(**case):
        return [("o", 3.0, 2.0)], ("o", 3.0, 2.0)

    def breaks(**case):
        raise RuntimeError("out of memory")

    done = [check_kernels.run((check, dict(T=3))) for check in (holds, errs, breaks)]
    found = check_kernels.summary(done, 7, 2.0)
    assert (found["of"], found["held"], found["worst"]) == (7, 1, 1.5)
    assert found["failed"] == {"errs {'T': 3}": "[('o', 3.0, 2.0)]", "breaks {'T': 3}": "RuntimeError: out of memory"}
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "FAIL", "FAIL"]
