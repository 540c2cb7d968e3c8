"""The program end to end: train, eval, read, generate, and what it says when something is wrong."""

import json
import sys
from dataclasses import fields
from inspect import signature
from typing import get_args

import pytest

from fastweights import cli
from fastweights.models.config import PRESETS, Config

TEXT = b"The quick brown fox jumps over the lazy dog, and %d other animals look on.\n"
TINY = ["--dim", "16", "--heads", "2", "--depth", "1", "--length", "16", "--batch", "2", "--warmup", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and room for runs."""
    place = tmp_path_factory.mktemp("place")
    (place / "texts").mkdir()
    for i in range(12):
        (place / "texts" / f"{i}.txt").write_bytes(TEXT % i * (3 + i))
    return place


@pytest.fixture
def run(monkeypatch, capsys, place):
    """Run the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.chdir(place)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def trained(run, place):
    """A run with a Fast Weight Layer, trained once."""
    if not (place / "trained" / "config.json").exists():
        arguments = ["--data", "texts", "--steps", "20", "--eval-every", "10", "--head", "fwl"]
        code, out, err = run("train", "trained", *arguments, *TINY)
        assert code == 0, err
        assert "Next: fastweights eval trained" in out
    return "trained"


def test_demo_says_in_words_what_it_showed(run, place, monkeypatch):
    monkeypatch.setitem(PRESETS, "laptop", dict(dim=16, heads=2, depth=1, length=16))  # not a million weights
    small = ["--steps", "2", "--minutes", "1", "--limit", "400", "--tokens", "5", "--data", "texts"]
    small += ["--tokenizer", "bytes"]  # too little text for pieces of words
    code, out, err = run("demo", "shown", "--prompt", "The quick", *small)
    assert code == 0, err
    rows = json.loads((place / "shown" / "eval.json").read_text())["modes"]
    words = out.partition("What you have just seen")[2]
    for row in rows:
        assert f"{row['bits_per_byte']:.2f}" in words, row["mode"]
    assert "however long the text is" in words
    assert "The quick" in out
    code, _, err = run("demo", "shown", *small)
    assert code == 2
    assert "run shown exists; expected a new folder" in err


def test_the_options_of_train_are_the_fields_of_the_configuration(run):
    own = {"ctx", "run", "preset", "resume"}
    options = signature(cli.COMMANDS["train"]).parameters
    assert set(options) - own == {f.name for f in fields(Config)}
    for f in fields(Config):
        assert get_args(options[f.name].annotation)[0] == f.type | None, f.name
    _, out, _ = run("train", "--help")
    assert "--weight-decay" in out
    assert "[default: 0.1]" in out


def test_eval_scores_in_all_modes(run, trained, place):
    code, out, err = run("eval", trained, "--min-bytes", "10")
    assert code == 0, err
    for name in ("static windows", "carried memory", "Fast Weight Layer", "dynamic evaluation", "gzip -9", "xz -9"):
        assert name in out
    found = json.loads((place / trained / "eval.json").read_text())
    assert [m["mode"] for m in found["modes"]] == ["static", "memory", "cache", "fast", "both", "dynamic"]
    assert all(0 < m["bits_per_byte"] < 9 for m in found["modes"])
    assert "peak" in out
    assert all(sys.platform != "linux" or m["peak_bytes"] >= 0 for m in found["modes"])
    assert (place / trained / "eval.png").read_bytes()[:4] == b"\x89PNG"


def test_eval_of_files_from_a_memory(run, trained, place):
    code, _, err = run("read", trained, "texts/3.txt", "-o", "three.memory")
    assert code == 0, err
    code, out, err = run(
        "eval", trained, "texts/4.txt", "--mode", "fast", "--memory", "three.memory", "--json", "m.json"
    )
    assert code == 0, err
    assert "1 document," in out
    run("eval", trained, "texts/4.txt", "--mode", "fast", "--json", "plain.json")
    with_memory, without = (json.loads((place / f"{n}.json").read_text())["modes"][0] for n in ("m", "plain"))
    assert with_memory["bits_per_byte"] != without["bits_per_byte"]


def test_generate(run, trained):
    code, first, err = run("generate", trained, "--prompt", "The ", "--tokens", "30", "--seed", "3")
    assert code == 0, err
    assert first.startswith("The ")
    assert run("generate", trained, "--prompt", "The ", "--tokens", "30", "--seed", "3")[1] == first
    assert run("generate", trained, "--prompt", "The ", "--tokens", "30", "--seed", "4")[1] != first
    code, cached, err = run("generate", trained, "--prompt", "The ", "--tokens", "30", "--seed", "3", "--cache")
    assert code == 0, err
    assert cached.startswith("The ")
    assert cached != first
    _, whole, _ = run("generate", trained, "--prompt", "The ", "--tokens", "60", "--no-learn")
    stop = next(c for c in whole[14:] if c.isascii() and c.isprintable())
    _, out, _ = run("generate", trained, "--prompt", "The ", "--tokens", "60", "--no-learn", "--until", stop)
    assert out == whole[: whole.index(stop, 4) + 1] + "\n"
    _, lines, _ = run("generate", trained, "--prompt", "The ", "--tokens", "60", "--no-learn", "--whole", "lines")
    assert lines == (whole[: whole[:-1].rindex("\n") + 1] if "\n" in whole[:-1] else whole)


def test_generate_goes_on_from_a_memory(run, trained):
    run("read", trained, "texts/5.txt")
    code, out, err = run("generate", trained, "--memory", "texts/5.txt.memory", "--tokens", "20", "--temperature", "0")
    assert code == 0, err
    assert len(out) > 1


def test_generate_begins_a_document_of_its_own(run, trained):
    """Neither prompt nor memory: the empty text is read, of which a Fast Weight Layer that waits learns nothing."""
    code, out, err = run("generate", trained, "--tokens", "20")
    assert code == 0, err
    assert len(out) > 1


def test_a_resumed_run_takes_no_changes(run, trained):
    code, _, err = run("train", trained, "--resume", "--lr", "1")
    assert (code, "--resume with lr; expected no changes" in err) == (2, True)
    code, _out, err = run("train", trained, "--resume")
    assert code == 0, err


@pytest.mark.parametrize("arguments, message", [
    (["train", "new", "--data", "nowhere"], "data is 'nowhere'; expected stdlib, stdlib-modules, hf:NAME or an"),
    (["train", "new", "--lr", "-1"], "lr is -1.0; expected 0 or more"),
    (["train", "new", "--heads", "0"], "heads is 0; expected at least 1"),
    (["train", "new", "--forget", "2"], "forget is 2.0; expected a share, from 0 to 1"),
    (["train", "new", "--data", "texts", "--layers", "gpt*2"], "layers is 'gpt*2'; expected names"),
    (["train", "new", "--data", "texts", "--batch", "5000"], "expected at least 1280001: a batch is 5000 rows"),
    (["train", "new", "--layers", "delta*2", "--depth", "3"], "--layers with --model or --depth; expected one"),
    (["train", "trained"], "run trained exists; expected a new folder, or --resume"),
    (["eval", "nowhere"], "run nowhere does not exist"),
    (["eval", "trained", "missing.txt"], "cannot read missing.txt: No such file or directory"),
    (["eval", "trained", "--mode", "magic"], "mode is 'magic'; expected one of 'static'"),
    (["eval", "trained", "--min-bytes", "1000000"], "no test document has 1000000 bytes"),
    (["generate", "trained", "--memory", "texts/1.txt"], "texts/1.txt cannot be read"),
    (["read", "trained", "empty.txt"], "empty.txt is empty; expected a file with at least one byte"),
])  # fmt: skip
def test_mistakes_are_one_line(run, trained, place, arguments, message):
    (place / "empty.txt").write_bytes(b"")
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (place / "new").exists()  # so that the same command, corrected, runs


def test_the_same_from_python(trained):
    from fastweights.lm import Memory, generate, load

    model = load(trained)
    memory = model.read("The quick ")
    memory.save("quick.memory")
    texts = [model.tokenizer.decode(generate(model, m, 10)) for m in (memory, Memory.load("quick.memory", model))]
    assert texts[0] == texts[1]
    assert len(texts[0]) <= 10
