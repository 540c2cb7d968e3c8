"""The benchmark: turns are fair, wrong contestants are refused, results are kept whole."""

import io
import json
import subprocess
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console

from fastweights.bench import agree, host, lengths, machine, memory, peers, report, timing
from fastweights.bench.case import INPUTS, Case, Contestant, our_method, parse_shape
from fastweights.bench.timing import Timing, interleave
from fastweights.files import write_json

TINY = Case("delta", (1, 20, 2, 4, 3))


def test_contestants_take_turns_and_each_leads_a_round():
    calls = []
    names = ["a", "b", "c"]
    timings = interleave({name: lambda name=name: calls.append(name) for name in names}, repeats=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"  # one call each to warm up, then the rounds
    assert list(timings) == names
    assert all(timing.repeats == 3 for timing in timings.values())


def test_the_timer_needs_a_sample():
    with pytest.raises(ValueError, match="repeats is 0; expected at least 1"):
        interleave({"a": int}, repeats=0)


def test_noise_is_marked():
    assert not Timing.of([1.0, 1.01, 1.02]).noisy
    assert Timing.of([1.0, 1.01, 2.0, 2.0]).noisy


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,x", "1,2,3,0", "1,2,3,4,5,6"])
def test_a_shape_that_is_none_is_explained(text):
    with pytest.raises(ValueError, match="expected B,T,H,K or B,T,H,K,V"):
        parse_shape(text)


def test_a_case_is_always_the_same_numbers():
    first, again = TINY.tensors(), TINY.tensors()
    assert all(torch.equal(first[name], again[name]) for name in ("q", "k", "v", "beta", "do"))
    torch.testing.assert_close(first["k"].norm(dim=-1), torch.ones(1, 20, 2))
    assert "beta" not in replace(TINY, rule="sum").tensors()


def distort(part):
    """Our own method, wrong in one place."""
    right = our_method("chunked", TINY)

    def call(q, k, *others):
        if part == "dk":
            k = k + 0.01 * (k - k.detach())  # the same output, another gradient
        o, state = right.call(q, k, *others)
        if part == "o":
            o = 1.001 * o
        if part == "state":
            state = 1.001 * state
        if part == "nan":
            o = torch.where(torch.arange(o.shape[1])[:, None, None] == 7, float("nan"), o)
        return o, state

    return replace(right, name="impostor", call=call, peer=True)


@pytest.mark.parametrize("part", ["o", "state", "dk", "nan"])
def test_a_wrong_contestant_is_refused(part):
    found = part if part != "nan" else "o"
    with pytest.raises(agree.Disagreement, match=f"impostor deviates .*{found} by"):
        agree.check(TINY, [our_method("chunked", TINY), distort(part)], TINY.tensors())


def test_the_check_passes_what_is_right():
    errors, failed = agree.check(TINY, [distort("nothing")], TINY.tensors())
    assert not failed
    assert sorted(errors["impostor"]) == ["dbeta", "dk", "dq", "dv", "o", "state"]
    assert all(error < 1e-5 for error in errors["impostor"].values())


@pytest.mark.parametrize("T", [agree.LOOP_TOKENS, agree.LOOP_TOKENS + 70])
def test_long_sequences_are_checked_to_the_end(T):
    """A fault in the very last token is found, on either side of the length that the loop covers."""
    case = replace(TINY, shape=(2, T, 1, 4, 3))
    right = our_method("chunked", case)

    def call(*inputs):
        o, state = right.call(*inputs)
        return torch.cat([o[:, :-1], o[:, -1:] + 0.1], 1), state

    with pytest.raises(agree.Disagreement, match="late deviates"):
        agree.check(case, [replace(right, name="late", call=call)], case.tensors())


def test_a_peer_that_crashes_is_left_out_but_our_crash_is_raised():
    def call(*inputs):
        raise RuntimeError("no kernel")

    peer = Contestant("peer", call)
    assert agree.check(TINY, [peer], TINY.tensors()) == ({}, {"peer": "fails here: RuntimeError: no kernel"})
    with pytest.raises(RuntimeError, match="no kernel"):
        agree.check(TINY, [replace(peer, peer=False)], TINY.tensors())


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("features", ["identity", "dpfp-1"])
def test_decays_are_a_part_of_the_case(decay, features):
    """Drawn once, of the memory's width, with a gradient that is compared; what a contestant makes of them counts."""
    case = replace(TINY, decay=decay, features=features)
    width = [case.key_width] if decay == "channel" else []
    log_decay = case.tensors()["log_decay"]
    assert log_decay.shape == (1, 20, 2, *width)
    assert (log_decay < 0).all()
    assert torch.equal(case.tensors()["q"], replace(case, decay="none").tensors()["q"])
    right = our_method("chunked", case)
    errors, _ = agree.check(case, [right], case.tensors())
    assert "dlog_decay" in errors["chunked"]
    ignorant = replace(right, call=lambda q, k, v, beta, log_decay: right.call(q, k, v, beta, 0.9 * log_decay))
    with pytest.raises(agree.Disagreement, match=r"deviates from the exact memory .*one decay per"):
        agree.check(case, [ignorant], case.tensors())
    assert memory.enter(case, only=["none"])[0][0].name == "chunked"


def test_decays_that_are_none_are_refused():
    with pytest.raises(ValueError, match="--decay is 'token'; expected one of none, head, channel"):
        memory.cases([TINY.shape], ["sum"], "cpu", "float32", decays=["token"])


def test_a_peer_without_a_backward_pass_here_is_timed_forward(monkeypatch):
    """Its outputs are compared, a wrong one is refused, and the reason is given."""
    right = our_method("chunked", TINY)

    def call(*inputs):
        if torch.is_grad_enabled():
            raise RuntimeError("no backward on this card")
        o, state = right.call(*inputs)
        return factor * o, state

    monkeypatch.setattr(peers, "PEERS", (peers.Peer("half", "json", "half", lambda *_: Contestant("half", call)),))
    factor = 1.0
    told = []
    (result,) = memory.run([TINY], repeats=2, tell=lambda results: told.append(len(results)))
    assert told == [1]
    assert result.left_out["half, backward"] == "fails here: RuntimeError: no backward on this card"
    assert "half" not in result.left_out
    assert sorted(result.errors["half"]) == ["o", "state"]
    assert list(result.passes["forward"]) == ["chunked", "half"]
    assert list(result.passes["forward_backward"]) == ["chunked"]
    assert result.speedup("chunked", "forward") is not None
    assert result.speedup("chunked", "forward_backward") is None
    console = Console(width=120, file=io.StringIO())
    report.show([result], console)
    assert "left out: half, backward: fails here" in console.file.getvalue()
    json.dumps(report.payload("cpu", [result]))
    factor = 1.1
    with pytest.raises(agree.Disagreement, match="half deviates"):
        memory.run([TINY], repeats=2)


def test_one_thread_is_timed_by_the_processors_clock():
    """What other programs take does not count: here sleep."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = interleave({"": lambda: time.sleep(0.2)}, repeats=2, by=timing.clock("cpu")).values()
        torch.set_num_threads(2)
        (wall,) = interleave({"": lambda: time.sleep(0.2)}, repeats=2, by=timing.clock("cpu")).values()
    finally:
        torch.set_num_threads(threads)
    assert alone.median < 100
    assert wall.median > 199


def test_a_peers_layer_that_does_not_run_is_left_out_of_bench_train(monkeypatch):
    from fastweights.bench import train

    def broken(*sizes):
        raise RuntimeError("Triton is too old")

    monkeypatch.setattr(train, "PeersMixer", broken)
    asked = train.cases(train.SMOKE, ["gated-delta"], ["linear"], "cpu", peers=True)
    said: list[str] = []
    how = dict(repeats=3, profile=False, advance=lambda *done: None, leave=said.append)
    assert [r.model for r in train.run(asked, 257, "cpu", **how)] == ["gated-delta"]
    assert said == ["smoke, FLA GatedDeltaNet is left out: RuntimeError: Triton is too old"]


def test_bench_train_has_the_papers_models_with_layers_of_their_own():
    from fastweights.bench import train

    (_, small, _), (_, compiled, _) = train.cases(
        {"paper-small": train.PAPER["paper-small"]}, None, None, "cuda", False
    )
    assert (small.model, small.head, small.depth, small.dim, small.batch) == ("delta-network", "linear", 16, 128, 96)
    assert (small.compile, compiled.compile) == (False, True)


def test_peers_say_why_they_do_not_take_part(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for peer in peers.PEERS:
        assert peer.contestant(TINY) == f"not installed (pip install {peer.package})"
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    hugging_face, fla, fast_transformers = peers.PEERS
    assert hugging_face.contestant(replace(TINY, rule="sum")) == "delta rule only"
    assert fla.contestant(TINY) == "CUDA only"
    assert fla.contestant(replace(TINY, device="cuda")) == "its delta rule refuses float32"
    assert fast_transformers.contestant(TINY) == "sum rule only"
    assert fast_transformers.contestant(replace(TINY, rule="sum", decay="head")) == "no decay"


@pytest.mark.parametrize(("rule", "decay"), peers.FLA)
def test_fla_is_called_as_the_case_is(monkeypatch, rule, decay):
    """The function of its own for every rule and decay, and the arguments it has there."""
    asked, given = [], {}

    def function(q, k, v, **named):
        given.update(named)
        return v, None

    monkeypatch.setattr(peers, "_load", lambda module, name: asked.append(f"{module}.{name}") or function)
    case = replace(TINY, rule=rule, decay=decay, device="cuda", dtype="bfloat16")
    x = replace(case, device="cpu").tensors()
    peers.PEERS[1].enter(case, "FLA").call(*(x.get(name) for name in INPUTS))
    assert asked == [".".join(peers.FLA[rule, decay])]
    assert given.pop("scale") == 1.0
    assert given.pop("output_final_state")
    assert given.pop("normalize", False) is False
    assert {name: x.shape for name, x in given.items()} == {
        name: x[ours].shape for name, ours in (("g", "log_decay"), ("beta", "beta")) if ours in x
    }


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_hugging_face_computes_the_delta_rule(decay):
    case = replace(TINY, decay=decay)
    contestant = peers.PEERS[0].contestant(case)
    if isinstance(contestant, str) and not find_spec("transformers.models.kimi_linear"):
        pytest.skip(contestant)
    assert isinstance(contestant, Contestant), contestant
    errors, failed = agree.check(case, [contestant], case.tensors())
    assert not failed
    assert len(errors["Hugging Face"]) == 6 + (decay != "none")


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_hugging_faces_model_is_ours_by_another_hand():
    """Loss and gradients of weights that are not where training starts."""
    from fastweights.bench.qwen import their_model
    from fastweights.models.config import Config
    from fastweights.models.language_model import LanguageModel

    torch.manual_seed(0)
    ours = LanguageModel(Config(model="gated-delta", head="linear", dim=16, heads=2, depth=2), 31)
    for p in ours.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    theirs = their_model(ours)
    rows = torch.randint(31, (2, 71))
    loss = ours.score(rows[:, :-1], rows[:, 1:]).loss.mean()
    other = torch.nn.functional.cross_entropy(theirs(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    other.backward()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    norms = [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (ours, theirs)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)


def test_softmax_is_timed_but_not_compared(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", ())
    (result,) = memory.run([replace(TINY, rule="sum")], repeats=1, softmax=True)
    assert list(result.passes["forward"]) == ["chunked", "softmax"]
    assert "softmax" not in result.errors
    assert result.speedup("chunked", "forward") is None  # there is no peer to compare with


def test_peers_get_their_own_layout_outside_the_clock():
    """A heads-first contestant is timed on contiguous inputs and a contiguous gradient."""
    seen = []

    def call(q, k, v):
        seen.extend([q, k, v])
        return q.sum() * v + k.sum(), None

    contestant = peers.SOFTMAX.contestant(TINY)
    assert isinstance(contestant, Contestant)
    memory.forward_backward(replace(contestant, call=call), replace(TINY, rule="sum").tensors())()
    assert [tuple(x.shape) for x in seen] == [(1, 2, 20, 4), (1, 2, 20, 4), (1, 2, 20, 3)]
    assert all(x.is_contiguous() and x.is_leaf and x.requires_grad for x in seen)


def test_progress_ends_at_the_announced_number_of_steps(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", ())
    steps = []
    memory.run([TINY, replace(TINY, rule="sum")], repeats=2, advance=lambda what, n: steps.append(n))
    assert sum(steps) == pytest.approx(2 * memory.STEPS)


def test_length_scaling_reports_doublings(monkeypatch):
    monkeypatch.setattr(lengths, "peak_bytes", lambda case, method: 1024 * case.shape[1])
    (asked,) = lengths.cases(lengths.SMOKE, ["sum"], ["auto"], "cpu", "float32")
    steps = []
    scaling = lengths.run(*asked, repeats=1, advance=lambda what, n: steps.append(n))
    assert sum(steps) == pytest.approx(lengths.STEPS)
    assert scaling.lengths == lengths.SMOKE
    assert len(scaling.ratios()) == len(lengths.SMOKE) - 1
    assert scaling.bytes_per_token() == [1024, 1024]
    console = Console(width=100, file=io.StringIO())
    report.show_lengths([scaling], console)
    assert "KiB per token" in console.file.getvalue()


def test_peak_memory_counts_what_is_held_at_once():
    """Output and gradients alone are 4 (T, H, D) tensors; a hundred of them would be a leak."""
    case = Case("sum", (1, 4096, 4, 64, 64))
    tensor = 4096 * 4 * 64 * 4
    assert 3 * tensor < lengths.peak_bytes(case, "chunked") < 100 * tensor


def test_results_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", ())
    results = memory.run([TINY], repeats=3)
    path = tmp_path / "deep" / "result.json"
    write_json(path, report.payload("cpu", results))
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]
    content = json.loads(path.read_text())
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["versions"]["torch"]
    (entry,) = content["results"]
    assert entry["shape"] == [1, 20, 2, 4, 3]
    for which in memory.PASSES:
        timing = entry[which]["chunked"]
        assert timing["repeats"] == 3
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]


def test_the_commit_is_that_of_our_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.fastweights, "__file__", str(tmp_path / "__init__.py"))
    source = tmp_path / "__init__.py"
    source.write_text("")

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    assert machine.commit() == "nogit"
    git("init")
    assert machine.commit() == "nogit"  # somebody's repository, but our file is not theirs
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    assert len(machine.commit()) == 7
    source.write_text("changed = True")
    assert machine.commit().endswith("-dirty")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_clock_measures_the_gpu():
    x = torch.randn(4096, 4096, device="cuda")
    timings = interleave({"one": lambda: x @ x, "four": lambda: x @ x @ x @ x @ x}, repeats=5, device="cuda")
    assert 2 < timings["four"].median / timings["one"].median < 6


def test_noisy_times_are_marked_and_the_mark_is_explained():
    out = io.StringIO()
    steady, noisy = Timing.of([10.0, 10.1, 10.2]), Timing.of([10.0, 20.0, 90.0])
    host.show([host.Result("layer", steady, noisy)], (1, 2, 3, 4), "cpu", torch.float32, Console(file=out, width=80))
    assert "~20" in out.getvalue()
    assert report.NOISY in out.getvalue()
    quiet = io.StringIO()
    host.show([host.Result("layer", steady, steady)], (1, 2, 3, 4), "cpu", torch.float32, Console(file=quiet, width=80))
    assert "~" not in quiet.getvalue()
