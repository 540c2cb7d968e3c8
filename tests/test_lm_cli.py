"""The program end to end: train, eval, read, generate, and what it says when something is wrong."""

import io
import json
import sys
from dataclasses import fields
from inspect import signature
from typing import get_args

import pytest
from rich.console import Console

from fastweights import cli
from fastweights.cli import evaluate
from fastweights.models.config import PRESETS, Config
from fastweights.models.run_documents import corpus_of
from fastweights.text import corpus, report

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
    assert "run shown exists; expected a new folder, as in: fastweights demo shown-2" in err  # it has no --resume


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
    assert [m["mode"] for m in found["modes"]] == list(evaluate.MODES)
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
    code, _, err = run("train", trained, "--resume", "--preset", "gpu")
    assert (code, "--resume with preset; expected no changes" in err) == (2, True)
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
    (["train", "new", "--from", "trained", "--preset", "gpu"], "--from with --preset; expected one of them"),
    (["train", "new", "--head", "linear", "--refresh", "8"], "--refresh is 8; expected it with a Fast Weight Layer"),
    (["train", "new", "--refresh", "0", "--within", "held"], "--within is held; expected it with a layer that is"),
    (["train", "new", "--window", "8"], "--window is 8; expected it with softmax attention among the blocks alone"),
    (["generate", "trained", "--temperature", "nan"], "temperature is nan; expected 0, which takes the likeliest"),
    (["generate", "trained", "--temperature", "1e-45"], "temperature is 1e-45; expected 0, which takes the likeliest"),
    (["generate", "trained", "--seed", str(2**64)], "seed is 18446744073709551616; expected a whole number of at most"),
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


def test_eval_of_short_texts_takes_them_all(run, trained, place):
    """The command that `train` names next works as it is, also where no document has the usual length."""
    code, _, err = run("eval", trained, "--mode", "static", "--mode", "memory", "--mode", "static", "--json", "a.json")
    assert code == 0, err
    numbers = json.loads((place / "a.json").read_text())
    split = corpus_of(place / trained).splits["test"]
    assert numbers["bytes"] == int(split.bytes.sum())
    assert [m["mode"] for m in numbers["modes"]] == ["static", "memory"]  # named twice, scored once


def test_eval_says_that_it_takes_a_part_and_cuts_files(run, trained, place):
    code, out, err = run("eval", trained, "--mode", "static", "--limit", "100", "--json", "a.json")
    assert code == 0, err
    count = len(corpus_of(place / trained).splits["test"])
    assert (f"Scoring 1 of {count} held-out documents" in out) == (count > 1)
    code, out, err = run("eval", trained, "texts/9.txt", "texts/8.txt", "--mode", "static", "--limit", "150")
    assert code == 0, err
    assert "1 document, 150 bytes, 150 tokens" in out
    code, _, err = run("eval", trained, "texts/9.txt", "--min-bytes", "5")
    assert (code, "--min-bytes with FILES; expected one of them" in err) == (2, True)


def test_scores_are_kept_where_nobody_reads_the_table(run, trained, place, monkeypatch):
    """`fastweights eval | head -1`: rich ends the program when the pipe is gone."""

    def gone(*_):
        raise SystemExit(1)

    monkeypatch.setattr(report, "show", gone)
    assert run("eval", trained, "texts/9.txt", "--mode", "static", "--json", "kept.json")[0] == 1
    assert json.loads((place / "kept.json").read_text())["modes"]


def test_numbers_fit_a_terminal_of_80_columns(run, trained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = dict(gain=0.1234, learning=0.1234, perplexity=1234.56, seconds=123.4, by_position=[1.0] * 5)
    sizes = dict(state_bytes=3_500_000, peak_bytes=9_999_999)
    modes = [dict(mode="dynamic", bits_per_byte=1.5, **row, **sizes)]
    found = dict(texts=[1], bytes=65_536, tokens=65_536, modes=modes, compressors={})
    out = io.StringIO()
    report.show(found, Console(file=out, width=80))
    (line,) = [line for line in out.getvalue().splitlines() if "3.3 MiB" in line]
    assert line.split()[-4:] == ["3.3", "MiB", "9.5", "MiB"]


def test_a_prompt_may_be_any_bytes(run, trained):
    """A shell passes bytes that are no UTF-8; Python hands them on as surrogates, which cannot be printed."""
    code, out, err = run("generate", trained, "--prompt", "caf\udce9 ", "--tokens", "5", "--cache")
    assert code == 0, err
    assert out.startswith("caf\ufffd ")


def test_text_is_written_where_the_output_knows_few_characters(run, trained, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    code, _, err = run("generate", trained, "--prompt", "é", "--tokens", "3")
    assert code == 0, err
    output.flush()
    assert output.buffer.getvalue().startswith(b"?")


def test_commands_that_are_named_next_can_be_typed(run, place):
    code, out, err = run("train", "my run", "--data", "texts", "--steps", "2", *TINY)
    assert code == 0, err
    assert "Next: fastweights eval 'my run'\n" in out
    (place / "a b.txt").write_bytes(TEXT)
    code, out, err = run("read", "my run", "a b.txt")
    assert code == 0, err
    assert "fastweights generate 'my run' --memory 'a b.txt.memory'" in out


def test_read_counts_the_tokens_of_the_file(run, trained, place):
    size = (place / "texts" / "5.txt").stat().st_size
    assert f"texts/5.txt: {size:,} tokens, in" in run("read", trained, "texts/5.txt", "-o", "five.memory")[1]
    _, out, _ = run("read", trained, "texts/5.txt", "-o", "ten.memory", "--memory", "five.memory")
    assert f"texts/5.txt: {size:,} tokens, after {size:,} before, in" in out


def test_train_says_what_text_there_is(run, place):
    texts = place / "mixed"
    texts.mkdir()
    for i in range(6):
        (texts / f"{i}.txt").write_bytes(TEXT % i * 9)
    (texts / "windows.txt").write_bytes((TEXT % 7).decode().encode("utf-16"))
    (texts / "nothing.txt").write_bytes(b"\n")
    code, out, err = run("train", "mixed-run", "--data", "mixed", "--steps", "2", *TINY)
    assert code == 0, err
    splits = corpus_of(place / "mixed-run").splits
    total = f"{int(splits['train'].bytes.sum()):,} bytes in {len(splits['train'])} documents to train on"
    assert f"Text: {total}, " in out
    assert "left out: 1 empty file, 1 binary file; a zero byte makes a file binary: convert UTF-16 to UTF-8" in out
    about = json.loads((place / "mixed-run" / "config.json").read_text())
    assert f"Model: {about['parameters']:,} weights, a vocabulary of 257 tokens." in out
    code, out, _ = run("train", "mixed-again", "--data", "mixed", "--steps", "2", *TINY)  # from the encoded corpus
    assert "left out: 1 empty file, 1 binary file" in out


@pytest.mark.filterwarnings("always")  # `main` shows them
def test_a_text_that_is_mostly_held_out_is_said(run, place):
    texts = place / "lopsided"
    texts.mkdir()
    for name in ("a.md", "b.md", "c.md"):
        (texts / name).write_bytes(TEXT % 1 * 4)
    held = next(name for name in ("a.md", "b.md", "c.md") if name not in _training_names(texts))
    (texts / held).write_bytes(TEXT % 1 * 400)
    code, _, err = run("train", "lopsided-run", "--data", "lopsided", "--steps", "2", *TINY)
    assert code == 0, err
    assert "Warning: 1% of the text of lopsided is for training" in err
    assert "A file that is named alone is cut in three" in err


def _training_names(folder):
    found = list(corpus.documents(str(folder)))
    return {d.name for d in corpus.split(found, str(folder))["train"]}


def test_one_of_several_processes_speaks(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, out, err = run("train", "second", "--data", "texts", "--steps", "2", *TINY)
    assert code == 0, err
    assert "second: gated-delta" not in out
    assert "Next:" not in out
