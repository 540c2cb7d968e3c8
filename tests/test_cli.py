"""The program: what it prints, how it fails, and how fast it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastweights
from fastweights import cli
from fastweights.bench import peers
from fastweights.bench.case import Case, Contestant, our_method
from fastweights.cli import bench as bench_cli
from fastweights.core import FastWeightError

ROOT = Path(fastweights.__file__).parents[1]
HEAVY = ("numpy", "torch", "jax", "keras", "tensorflow", "transformers")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def alone(monkeypatch):
    """No peers: they take seconds to import."""
    monkeypatch.setattr(peers, "PEERS", ())


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "fastweights [OPTIONS] COMMAND" in out
    for command in ("bench", "info"):
        assert command in out


@pytest.mark.parametrize("command", [["bench"], ["bench", "memory"], ["info"]])
def test_every_command_teaches_with_an_example(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"For example: fastweights {command[0]}" in out


def test_version(run):
    assert run("--version") == (0, f"fastweights {fastweights.__version__}\n", "")


def test_unknown_command(run):
    code, _, err = run("frobnicate")
    assert code == 2
    assert "No such command 'frobnicate'" in err


def test_python_dash_m():
    done = python("-m", "fastweights", "--version")
    assert (done.returncode, done.stdout) == (0, f"fastweights {fastweights.__version__}\n")


def test_info_as_json(run):
    code, out, _ = run("info", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["versions"]["fastweights"] == fastweights.__version__
    assert found["versions"]["torch"]
    assert found["cores"] >= 1
    assert found["auto"]["one token, cpu"] == "recurrent"


def test_info_as_text_without_torch(run, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, out, _ = run("info")
    assert code == 0
    assert "fastweights" in out
    assert "auto" not in out


def test_bench_without_torch_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(bench_cli, "find_spec", lambda name: None)
    code, out, err = run("bench", "--smoke")
    assert (code, out) == (2, "")
    assert err == "Error: bench needs PyTorch, which is not installed; pip install 'fastweights[torch]'\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "1,2"], "--shape is '1,2'; expected B,T,H,K"),
        (["--method", "magic"], "--method is 'magic'; expected one of recurrent, chunked"),
        (["--peer", "nobody"], "--peer is 'nobody'; expected one of"),
        (["--length-scaling", "--softmax"], "drop --shape, --softmax, --features and --norm"),
        (["--features", "dpfp"], "features is 'dpfp'; expected"),
        (["--json", "/dev/null/x.json"], "cannot write to /dev/null"),
    ],
)
def test_mistakes_are_one_line(run, alone, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("bench", "--smoke", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1


def test_bugs_keep_their_traceback(monkeypatch):
    def app(**how):
        json.loads("{")  # a ValueError, but not one of our messages

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(json.JSONDecodeError):
        cli.main()


def test_our_errors_are_caught_wherever_they_are_raised(run, monkeypatch):
    def app(**how):
        raise FastWeightError("beta has shape [1]; expected [2]")  # brackets are not markup

    monkeypatch.setattr(cli, "app", app)
    assert run() == (2, "", "Error: beta has shape [1]; expected [2]\n")


def test_bench_smoke_prints_tables_and_writes_json(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "PEERS", tuple(peer for peer in peers.PEERS if peer.name == "fast-transformers"))
    code, out, err = run("bench", "--smoke")
    assert code == 0, err
    assert "delta rule, float32 on cpu" in out
    assert "chunked (auto)" in out
    (path,) = tmp_path.glob("benchmarks/*-smoke.json")
    assert f"Written to benchmarks/{path.name}" in out
    content = json.loads(path.read_text())
    assert [entry["rule"] for entry in content["results"]] == ["delta", "delta", "sum", "sum"]
    assert content["results"][0]["left_out"]["fast-transformers"]


@pytest.mark.parametrize(
    ("which", "key"), [("layers", "layers"), ("fwl", "fwl"), ("lm", "lm"), ("decode", "decode"), ("lab", "lab")]
)
def test_other_benches_print_tables_and_write_json(run, tmp_path, which, key):
    path = tmp_path / "numbers.json"
    code, out, err = run("bench", which, "--smoke", "--json", str(path))
    assert (code, err) == (0, "")
    assert f"Written to {path}" in out
    assert json.loads(path.read_text())[key]


def test_bench_lm_compares_only_what_agrees(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from fastweights.bench import lm

    monkeypatch.setattr(lm, "TOLERANCE", -1.0)
    path = tmp_path / "numbers.json"
    code, out, err = run("bench", "lm", "--smoke", "--json", str(path))
    assert (code, out) == (1, "")
    assert "with our delta rule" in err
    assert "Nothing is reported" in err
    assert not path.exists()


def test_bench_refuses_when_a_contestant_deviates(run, monkeypatch, tmp_path):
    def enter(case: Case, name: str) -> Contestant:
        right = our_method("chunked", case)

        def call(*inputs):
            o, state = right.call(*inputs)
            return 1.5 * o, state

        return Contestant(name, call)

    monkeypatch.setattr(peers, "PEERS", (peers.Peer("impostor", "json", "impostor", enter),))
    path = tmp_path / "x.json"
    code, out, err = run("bench", "memory", "--smoke", "--json", str(path))
    assert (code, out) == (1, "")
    assert "impostor deviates from the exact memory (delta rule, 1,48,2,8,8" in err
    assert "o by 5.0e-01" in err
    assert not path.exists()


CHECK = "import sys; print([name for name in {heavy} if name in sys.modules])"


def test_the_program_starts_without_frameworks():
    code = "import fastweights.cli; " + CHECK.format(heavy=HEAVY)
    assert python("-c", code).stdout == "[]\n"
    assert python("-c", "import numpy; " + code).stdout == "['numpy']\n"  # the check can fail


def test_help_is_light():
    code = (
        "import sys; sys.argv = ['fastweights', '--help']\n"
        "from fastweights.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
    ) + CHECK.format(heavy=HEAVY)
    assert python("-c", code).stdout.endswith("[]\n")


@pytest.mark.skipif(not hasattr(os, "times"), reason="needs processor times")
def test_help_is_fast():
    def seconds():
        before = os.times()
        assert python("-m", "fastweights", "--help").returncode == 0
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # processor time of the child: load does not count

    assert any(seconds() < 0.3 for _ in range(5))
