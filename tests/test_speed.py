"""What makes models fast changes nothing else: compiled blocks, and a stream of known steps."""

import json
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastweights.lm.generation import Sampling
from fastweights.lm.training import train
from fastweights.models import flex, mixers
from fastweights.models.compiled import compile_blocks, decide
from fastweights.models.config import Config
from fastweights.models.decoding import Decoder
from fastweights.models.documents import Documents
from fastweights.models.language_model import LanguageModel
from fastweights.torch import graphs
from fastweights.torch.learning import training_loss
from fastweights.torch.tree import flatten
from fastweights.training import log, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
SMALL = dict(dim=16, heads=2, depth=2, length=16, batch=4, eval_every=8, steps=20)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Train on short texts, so that documents start everywhere: the lines of the log."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_bytes(b"The %d quick brown foxes.\n" % i * (2 + 3 * i))
    monkeypatch.setattr(trainer, "compile_blocks", partial(compile_blocks, backend="aot_eager"))

    def call(name, resume=False, **changes):
        run = train(
            Config(data=str(texts), **(SMALL | changes)), tmp_path / name, resume=resume, cache=tmp_path / "cache"
        )
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    return call


@pytest.mark.parametrize("head", ["linear", "fwl"])
def test_compiled_blocks_train_as_eager_ones_and_are_compiled_once(go, head):
    """One graph for both blocks, wherever documents start, through validations, and when the run goes on."""
    eager = go("eager", head=head, compile=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = go("compiled", head=head, compile=True)
    assert dict(torch._dynamo.utils.counters["graph_break"]) == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [x["loss"] for x in compiled] == pytest.approx([x["loss"] for x in eager], abs=1e-6, rel=0)
    assert {x["ran"] for x in compiled if "ran" in x} == {"compiled"}
    assert all(0 < x["share_of_peak"] < 1 for x in compiled if "ran" in x)


def test_speed_is_that_of_the_steps_after_the_first(monkeypatch):
    """Steps that compile are told apart, and validation takes no time."""
    now = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    clock = log.Clock(tokens=10, flop=2.0, peak=100.0, first=2)
    for seconds in (30.0, 5.0):  # compiled and captured
        assert clock.ready is None
        now[0] += seconds
        clock.count()
    assert clock.ready == 35
    assert clock.values()["tokens_per_second"] == pytest.approx(20 / 35)
    for _ in range(3):
        now[0] += 0.5
        clock.count()
        with clock.stopped():
            now[0] += 100
    assert clock.ready is None
    assert clock.values() == pytest.approx(dict(tokens_per_second=20.0, share_of_peak=0.4))


def test_kernels_of_a_rehearsal_are_compiled_once_and_not_launched(monkeypatch):
    """Kernels that look alike to Triton are compiled together before the first launch; the next time nothing is."""
    launch = pytest.importorskip("fastweights.torch.kernels.launch")
    made = []

    class Kernel:
        params = tuple(SimpleNamespace(is_constexpr=constant) for constant in (False, False, True))

        def run(self, *arguments, grid, warmup, **options):
            made.append((warmup, len(arguments), options))
            return self  # stands for what was compiled, which is asked for its launcher

        def warmup(self, *arguments, grid, **options):
            return self.run(*arguments, grid=grid, warmup=True, **options)

        def __getitem__(self, grid):
            return lambda *arguments, **options: self.run(*arguments, grid=grid, warmup=False, **options)

    monkeypatch.setattr(launch, "JITFunction", Kernel)
    for name in ("current_device", "is_current_stream_capturing", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel, x, y = Kernel(), torch.zeros(4), torch.zeros(4, dtype=torch.float64)

    def work():
        for z, number in ((x, 3), (x, 5), (y, 3)):
            kernel[(1,)](z, number, BLOCK=4)

    launch.rehearse("test", work)
    assert made == [(True, 2, dict(BLOCK=4))] * 2  # one for each dtype
    launch.rehearse("test", work)
    assert len(made) == 2
    work()
    assert made[2:] == [(False, 2, dict(BLOCK=4))] * 3


class Again:
    """What a CUDA graph of a call does: the same work on the same tensors, into the same results."""

    def __init__(self, work, inputs, outputs):
        self.work, self.inputs, self.outputs = work, inputs, outputs

    def replay(self):
        for old, new in zip(self.outputs, self.work(*self.inputs), strict=True):
            old.copy_(new)

    def pool(self):
        return None


def captured(work, inputs, pool=None):
    """In the place of `graphs.capture`, which needs a GPU; like it, it draws no random numbers."""
    random = torch.get_rng_state()
    with torch.no_grad():
        own = tuple(x.clone() for x in inputs)
        outputs = tuple(x.detach().clone() for x in work(*own))
    torch.set_rng_state(random)
    return graphs.Graph(Again(work, own, outputs), own, outputs)


@pytest.mark.parametrize("changes", [dict(head="linear", layers="gated-delta,softmax", dropout=0.1), dict(head="fwl")])
def test_captured_steps_train_as_compiled_ones(go, monkeypatch, changes):
    """Other documents in every step, other states, rates and dropout; the graph has seen those of the second alone."""
    monkeypatch.setattr(training_loss, "WALK_DEVICES", ())  # the form of a GPU
    wanted = go("compiled", compile=True, **changes)
    monkeypatch.setattr(trainer, "uncaptured", lambda *run: None)
    monkeypatch.setattr(graphs, "capture", captured)
    got = go("captured", compile=True, **changes)
    assert [x["loss"] for x in got] == pytest.approx([x["loss"] for x in wanted], abs=1e-6, rel=0)
    assert {x["ran"] for x in got if "ran" in x} == {"captured"}


@pytest.mark.parametrize("road", ["compiled", "captured"])
def test_a_run_goes_on_exactly(go, monkeypatch, road):
    if road == "captured":
        monkeypatch.setattr(trainer, "uncaptured", lambda *run: None)
        monkeypatch.setattr(graphs, "capture", captured)
    wanted = go("whole", head="linear", compile=True)
    real = trainer.Trainer.step

    def killed(self, at, *arguments):
        if at == 12:
            raise RuntimeError("killed")
        return real(self, at, *arguments)

    monkeypatch.setattr(trainer.Trainer, "step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        go("killed", head="linear", compile=True)
    monkeypatch.setattr(trainer.Trainer, "step", real)
    if road == "captured":  # a graph that cannot be made changes nothing, and is said
        monkeypatch.setattr(graphs, "capture", lambda *call: "no memory")
    rest = go("killed", resume=True)
    assert [x["loss"] for x in rest] == [x["loss"] for x in wanted]
    assert [x["ran"] for x in rest if "ran" in x] == [road, "compiled", "compiled"]


def test_what_runs_has_a_reason():
    assert str(decide(Config(compile=False), "cuda")) == "eager (as --no-compile says)"
    assert decide(Config(compile=True), "cpu").compiled
    assert not decide(Config(), "cpu").compiled
    for changes in (dict(layers="lstm,delta"), dict(parallel="fsdp")):
        assert decide(Config(**changes), "cuda").name == "eager"


@pytest.mark.parametrize("changes", [dict(head="linear"), dict(), dict(within="cumulative"), dict(refresh=0)])
def test_a_decoder_writes_what_the_model_writes_step_by_step(changes):
    """Past two refreshes of the layer, which the decoder counts and the model looks up."""
    torch.manual_seed(0)
    model = LanguageModel(Config(**(SMALL | dict(refresh=4) | changes)), vocab=30).eval()
    how, noise = Sampling(temperature=1.0), torch.rand(11, 2)
    decoder = Decoder(model, model.init_state(2), torch.tensor([29, 3]), how.pick)
    token, state = torch.tensor([29, 3]), model.init_state(2)
    for u in noise:
        logits, state = model.step(token, state)
        token = how.pick(logits, u)
        assert torch.equal(decoder(u), token)


class Replay:
    """What a CUDA graph does to a decoder: a step that reads and overwrites token and state."""

    def __init__(self, decoder, wrong=False):
        self.decoder, self.wrong, self.first = decoder, wrong, decoder.token.clone()

    def replay(self):
        d = self.decoder
        token, state = d._step(self.first if self.wrong else d.token, d.state, torch.zeros(2), None)
        d.token = token
        for (_, old), (_, new) in zip(flatten(d.state), flatten(state), strict=True):
            old.copy_(new)


@torch.no_grad()
def test_a_graph_that_replays_something_else_is_not_used():
    torch.manual_seed(0)
    model = LanguageModel(Config(**SMALL, head="linear"), vocab=30).eval()
    decoder = Decoder(model, model.init_state(2), torch.tensor([29, 3]), lambda logits, _: logits.argmax(-1))
    decoder.noise, before = torch.zeros(2), [x.clone() for _, x in flatten(decoder.state)]
    assert decoder._agrees(Replay(decoder), None)
    assert not decoder._agrees(Replay(decoder, wrong=True), None)  # the token of the capture, recorded by mistake
    assert decoder.token.tolist() == [29, 3]
    assert all(torch.equal(x, y) for (_, x), y in zip(flatten(decoder.state), before, strict=True))


def test_flex_attention_sees_what_masked_attention_sees():
    """A carried window, rows that hold different numbers of its tokens, and a document that starts inside."""
    torch.manual_seed(0)
    B, H, T, W = 2, 2, 5, 4
    q, k, v = (torch.randn(B, H, n, 8) for n in (T, W + T, W + T))
    held, starts = torch.tensor([2, 4]), torch.zeros(B, T, dtype=torch.bool)
    starts[1, 3] = True
    seen = torch.zeros(B, 1, T, W + T, dtype=torch.bool)
    for b, i, j in product(range(B), range(T), range(W + T)):
        same = j >= W - held[b] and not starts[b, max(0, j - W + 1) : i + 1].any() if j < W + i else j == W + i
        seen[b, 0, i, j] = bool(same) and i + W - j <= W
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FlexAttention says that it is not compiled here
        got = flex.attend(q, k, v, flex.look(W, held, starts, 8))
    torch.testing.assert_close(got, want)


def test_compiled_blocks_of_a_transformer_share_what_they_see(monkeypatch):
    """The way that a GPU takes, here: windows carried from step to step, documents that start inside a row."""
    monkeypatch.setattr(mixers, "LONG", 1)
    monkeypatch.setattr(mixers, "HAS_TRITON", False)
    monkeypatch.setattr(mixers, "on_gpu", lambda x: True)
    monkeypatch.setattr(flex, "BLOCK", 4)
    torch.manual_seed(0)
    model = LanguageModel(Config(model="transformer", head="linear", dim=16, heads=2, depth=2, length=12), 9)
    rows, starts = torch.randint(0, 8, (3, 2, 13)), np.zeros((3, 2, 12), bool)
    starts[0, :, 0] = starts[1, 1, 7] = starts[2, 0, 2] = True
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        state = model.init_state(2)
        if compiled:
            compile_blocks(model, backend="eager")
        for row, start in zip(rows, starts, strict=True):
            documents = Documents.of(start, even=compiled)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # FlexAttention says that it is not compiled here
                found = model.score(row[:, :-1], row[:, 1:], state, documents=documents)
            state = found.state
            losses.setdefault(compiled, []).append(float(found.loss.sum()))
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


def test_a_token_is_drawn_as_often_as_it_is_likely():
    logits = torch.tensor([0.5, 0.2, 0.0, 0.3]).log()
    grid = (torch.arange(1000) + 0.5) / 1000
    for how, want in (
        (Sampling(temperature=1.0), [0.5, 0.2, 0.0, 0.3]),
        (Sampling(temperature=1.0, top_k=2), [0.625, 0.0, 0.0, 0.375]),
        (Sampling(temperature=1.0, top_p=0.6), [0.625, 0.0, 0.0, 0.375]),
        (Sampling(temperature=1.0, min_p=0.5), [0.625, 0.0, 0.0, 0.375]),
        (Sampling(temperature=0.0), [1.0, 0.0, 0.0, 0.0]),
    ):
        drawn = how.pick(logits.expand(1000, 4), grid)
        assert (torch.bincount(drawn, minlength=4) / 1000).tolist() == pytest.approx(want, abs=2e-3)
