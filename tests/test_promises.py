"""docs/reliability.md is true: the tests that it names exist, and its figures are those of the files."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
FIGURES = ROOT / "benchmarks" / "reliability"


def named_tests(page):
    """(file, test) of every test that a table names; a name alone is of the file named before it."""
    file = None
    for at, name in re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", page):
        file = at or file
        yield file, name


def test_every_promise_has_its_test():
    found = list(named_tests(PAGE))
    assert len(found) > 20
    missing = [(f, n) for f, n in found if f"def {n}(" not in (ROOT / "tests" / f).read_text()]
    assert missing == []


def test_every_command_exists():
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"`make (\w+)`", PAGE + (ROOT / "SECURITY.md").read_text())):
        assert re.search(rf"^[\w ]*\b{name}\b[\w ]*:", makefile, re.M), name


@pytest.mark.parametrize("name, keys", [
    ("fuzz", ("files", "failed")), ("properties", ("cases", "failed")),
    ("layers", ("cases", "failed")), ("soak", ("tokens",)), ("steps", ("steps",)),
])  # fmt: skip
def test_figures_are_those_of_the_files(name, keys):
    figures = json.loads((FIGURES / f"{name}.json").read_text())
    for key in keys:
        assert f"{figures[key]:,}" in PAGE, (name, key)


UNSAFE = (
    r"\bpickle\b|torch\.load\(|trust_remote_code|allow_pickle|(?<![.\w])(?:eval|exec)\("
    r"|torch\.save\(|\bmarshal\b|\bshelve\b|\burllib\.request\b|\brequests\.get"
)


def test_nothing_is_unpickled_executed_or_fetched():
    found = [(p.name, m[0]) for p in (ROOT / "fastweights").rglob("*.py") for m in re.finditer(UNSAFE, p.read_text())]
    assert found == []
    assert re.search(UNSAFE, "x = eval(text)")  # the check can fail
    assert not re.search(UNSAFE, "model.eval()")


def test_no_network_is_asked_for(tmp_path, monkeypatch):
    """Train, load, read and generate where no name can be looked up and nothing be connected to."""
    import socket

    from fastweights.lm.generation import Sampling, generate
    from fastweights.lm.training import train
    from fastweights.models import run_folder
    from fastweights.models.config import Config

    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked for {args[1:]}")

    for where, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(where, name, refuse)
    with pytest.raises(AssertionError, match="the network was asked"), socket.socket() as one:
        one.connect(("127.0.0.1", 9))  # the check can fail
    (tmp_path / "a.txt").write_text("one fish two fish red fish blue fish\n" * 20)
    small = dict(dim=8, heads=1, depth=1, length=8, batch=1, steps=2, eval_every=2, warmup=1, device="cpu")
    config = Config(data=str(tmp_path / "a.txt"), tokenizer="bpe:260", **small)
    model = run_folder.load(train(config, tmp_path / "run", cache=tmp_path / "cache"), device="cpu")
    assert len(list(generate(model, model.read(b"one fish"), 3, Sampling(seed=0)))) == 3


def test_the_allocator_is_left_alone():
    """Its settings belong to the program, but in a process of a bench's own; results are plain tensors."""
    import torch

    from fastweights.torch import fast_weight

    named = {str(p.relative_to(ROOT)) for p in (ROOT / "fastweights").rglob("*.py")
             if re.search(r"mallopt|M_MMAP|M_TRIM|resize_\(", p.read_text())}  # fmt: skip
    assert named <= {"fastweights/bench/lengths.py"}
    k = torch.randn(1, 3000, 2, 16)
    first, _ = fast_weight(k, k, k, beta=torch.full((1, 3000, 2), 0.01))
    kept = first.clone()
    again, _ = fast_weight(k, 2 * k, k, beta=torch.full((1, 3000, 2), 0.01))
    assert torch.equal(first, kept)  # no later call writes into an earlier result
    assert first.data_ptr() != again.data_ptr()
    assert first.resize_(1, 6000, 2, 16).shape[1] == 6000
