"""The program: what it prints, how it fails, and how fast it starts."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
import typer

import fastweights
from fastweights import cli
from fastweights.bench import lengths, peers
from fastweights.bench.case import Case, Contestant, our_method
from fastweights.cli import options
from fastweights.core import FastWeightError

ROOT = Path(fastweights.__file__).parents[1]
PROGRAM = typer.main.get_command(cli.app)
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


def test_alone_it_says_what_to_do_next(run, monkeypatch):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "fastweights train runs/first" in out
    assert "not installed" not in out
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert "PyTorch is not installed, which most commands need: pip install 'fastweights[lm]'" in run()[1]


@pytest.mark.parametrize("command", [*cli.COMMANDS, *cli.GROUPS])
def test_every_help_ends_with_an_example(run, command):
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert out.strip().splitlines()[-1].strip().startswith(f"For example: fastweights {command}")


def leaves(command, words=()):
    """(words, click command) of every command that does something."""
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from leaves(child, (*words, name))
    else:
        yield " ".join(words), command


def test_every_command_is_in_the_table_once():
    assert sorted(words for words, _ in leaves(PROGRAM)) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_options_stands_alone(command):
    """Every option says what it is about, as a sentence; "Its width" and "Of matrices" do not."""
    for option in dict(leaves(PROGRAM))[command].params:
        text = getattr(option, "help", None)
        assert text, f"{command} {option.name}"
        assert text[0].isupper(), text
        assert not re.match(r"(Its?|Their|Of|The same|This|Them)\b", text), text


def parse(line):
    """Parse a command line as the program would, without running it."""
    command, arguments = PROGRAM, shlex.split(line, comments=True)[1:]
    context = command.make_context("fastweights", list(arguments), resilient_parsing=not arguments)
    while hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)


def documented():
    """Command lines in the documents' code blocks and in the help."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"):
        for line in path.read_text().splitlines():
            if found := re.match(r"(?:    |\t\$\(BIN\)/)(fastweights .*)", line):
                yield found[1]
            yield from re.findall(r"`(fastweights [a-z]+ [^`]*-[^`]*)`", line)
    for function in cli.COMMANDS.values():
        yield from re.findall(r"`(fastweights [^`]+)`", function.__doc__.rpartition("For example:")[2])


@pytest.mark.parametrize("line", sorted(set(documented())))
def test_documented_commands_are_understood(line):
    parse(line.partition(" > ")[0])


def test_the_check_of_documents_can_fail():
    with pytest.raises(Exception, match="No such option: --hf"):
        parse("fastweights eval --hf SmolLM2.gguf book.txt")
    assert len(set(documented())) > 20


def test_the_shell_completes_commands_and_options():
    def complete(line):
        words = {"_FASTWEIGHTS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        arguments = [sys.executable, "-m", "fastweights"]
        done = subprocess.run(arguments, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert complete("fastweights gen") == ["generate"]
    assert complete("fastweights hf e") == ["eval", "export"]
    assert complete("fastweights read --dev") == ["--device"]
    assert complete("fastweights train --preset paper-s") == ["paper-small"]
    assert complete("fastweights train --parallel f") == ["fsdp"]
    assert complete("fastweights train --model trans") == ["transformer"]
    assert complete("fastweights eval runs/first --mode st") == ["static"]
    assert complete("fastweights reproduce over") == ["overwrite"]


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
    assert found["auto"]["decay per channel, cpu"] == "chunked"
    assert found["why"]["a sequence, cpu"] == "kernels need a CUDA device, and q is on cpu"


def test_info_as_text_without_torch(run, monkeypatch):
    monkeypatch.setattr(cli.info, "find_spec", lambda name: None)
    code, out, _ = run("info")
    assert code == 0
    assert "fastweights" in out
    assert "auto" not in out


def test_bench_without_torch_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    code, out, err = run("bench", "memory", "--smoke")
    assert (code, out) == (2, "")
    assert err == "Error: bench memory needs PyTorch, which is not installed; pip install 'fastweights[torch]'\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "1,2"], "--shape is '1,2'; expected B,T,H,K"),
        (["--method", "magic"], "--method is 'magic'; expected one of recurrent, chunked"),
        (["--peer", "nobody"], "--peer is 'nobody'; expected one of"),
        (["--features", "dpfp"], "features is 'dpfp'; expected"),
        (["--json", "/dev/null/x.json"], "cannot write to /dev/null"),
    ],
)
def test_mistakes_are_one_line(run, alone, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("bench", "memory", "--smoke", *arguments)
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


def test_a_full_disk_behind_the_output_is_one_line(run, monkeypatch):
    def app(**how):
        raise OSError(errno.ENOSPC, "No space left on device")  # of a write to standard output, which has no name

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    code, _, err = run()
    assert (code, err) == (2, "Error: cannot write the output: No space left on device\n")


def test_a_file_called_torch_is_not_pytorch(run, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("")
    found = spec_from_file_location("torch", tmp_path / "torch.py")
    monkeypatch.setattr(options, "find_spec", lambda name: found)
    code, _, err = run("bench", "memory", "--smoke")
    assert code == 2
    assert f"bench memory needs PyTorch, but Python finds {tmp_path / 'torch.py'} under that name" in err


def test_ctrl_c_waits_for_an_import_to_end():
    done = []
    with pytest.raises(KeyboardInterrupt), options.interrupted_later():
        signal.raise_signal(signal.SIGINT)
        done.append("imported")
    assert done == ["imported"]
    with pytest.raises(KeyboardInterrupt):  # from here on as ever
        signal.raise_signal(signal.SIGINT)


def test_our_errors_are_caught_wherever_they_are_raised(run, monkeypatch):
    def app(**how):
        raise FastWeightError("beta has shape [1]; expected [2]")  # brackets are not markup

    monkeypatch.setattr(cli, "app", app)
    assert run() == (2, "", "Error: beta has shape [1]; expected [2]\n")


def test_bench_smoke_prints_tables_and_writes_json(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "PEERS", tuple(peer for peer in peers.PEERS if peer.name == "fast-transformers"))
    code, out, err = run("bench", "memory", "--smoke")
    assert code == 0, err
    assert "delta rule, float32 on cpu" in out
    assert "chunked (auto)" in out
    (path,) = tmp_path.glob("benchmarks/*-smoke.json")
    assert f"Written to benchmarks/{path.name}" in out
    content = json.loads(path.read_text())
    assert [entry["rule"] for entry in content["results"]] == ["delta", "delta", "sum", "sum"]
    assert content["results"][0]["left_out"]["fast-transformers"]


@pytest.mark.parametrize(
    ("which", "key"),
    [
        ("lengths", "lengths"),
        ("layers", "layers"),
        ("fwl", "fwl"),
        ("lm", "lm"),
        ("decode", "decode"),
        ("train", "train"),
        ("lab", "lab"),
    ],
)
def test_other_benches_print_tables_and_write_json(run, tmp_path, monkeypatch, which, key):
    monkeypatch.setattr(lengths, "peak_bytes", lambda case, method: case.shape[1])  # test_bench.py measures one
    path = tmp_path / "numbers.json"
    extra = ["--framework", "jax"] if which == "fwl" else []
    code, out, err = run("bench", which, "--smoke", "--json", str(path), *extra)
    assert (code, err) == (0, "")
    assert f"Written to {path}" in out
    found = json.loads(path.read_text())
    assert found[key]
    if which == "fwl":
        assert [set(r["timings"]) for r in found["fwl_frameworks"]] == [{"torch", "jax"}] * 2
        assert all(r["error"] < 1e-5 for r in found["fwl_frameworks"])


def test_bench_says_which_decays_and_products_there_are(run):
    code, out, err = run("bench", "memory", "--smoke", "--decay", "token")
    assert (code, out, err) == (2, "", "Error: --decay is 'token'; expected one of none, head, channel\n")
    code, out, err = run("bench", "fwl", "--smoke", "--precision", "tf32")
    assert (code, out, err) == (2, "", "Error: --precision is 'tf32'; expected one of float32 on cpu\n")


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
