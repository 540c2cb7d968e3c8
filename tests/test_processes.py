"""Threads and processes do not disturb one another, and the same seed gives the same bits in all of them."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reliability import soak

import fastweights.torch as fw
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.torch.tree import flatten

ROUNDS = 12


def together(work, texts):
    """work(text) of each text in a thread of its own, all starting at once."""
    ready = threading.Barrier(len(texts))

    def start(text):
        ready.wait(timeout=30)
        return work(text)

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(start, texts))


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("how", [dict(), dict(rule="sum", features="elu+1", norm="attention")])
def test_two_threads_with_states_of_their_own_share_a_layer(how):
    torch.manual_seed(0)
    layer = fw.FastWeightAttention(16, heads=2, **how)

    def read(x):
        with torch.no_grad():
            state, outputs = None, []
            for part in x.split(3, 1):
                y, state = layer(part, state)
                outputs.append(y)
        return [*outputs, *(s for _, s in flatten(state))]

    texts = list(torch.randn(2, 1, 3 * ROUNDS, 16))
    assert_equal(together(read, texts), [read(x) for x in texts])


def test_two_threads_share_a_language_model_that_learns_as_it_reads():
    torch.manual_seed(0)
    model = LanguageModel(Config(dim=16, heads=2, layers="delta,softmax", head="fwl", refresh=4, window=8), 257).eval()

    def read(row):
        state, losses = model.init_state(1), []
        with torch.no_grad():
            for part in row.split(8, 1):
                scores = model.score(part, part.roll(-1, 1), state)
                state = scores.state
                losses.append(scores.loss)
        return [*losses, *(s for _, s in flatten(state))]

    texts = list(torch.randint(0, 257, (2, 1, 8 * ROUNDS)))
    assert_equal(together(read, texts), [read(x) for x in texts])


def test_two_threads_share_a_model_with_an_attached_head():
    """Each has its own state, in a call of its own; gradients of one thread are not the other's either."""
    transformers = pytest.importorskip("transformers")
    from fastweights.hf import attach, using

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    attach(model, refresh=4)

    def read(given):
        row, learn = given
        outputs, state = [], None
        with torch.no_grad(), using(model, learn=learn):  # the switch is the thread's own too
            for part in row.split(8, 1):
                out = model(part, fast_state=state)
                state = out.fast_state
                outputs.append(out.logits)
        return outputs

    texts = [(row, learn) for row, learn in zip(torch.randint(0, 32, (2, 1, 8 * ROUNDS)), (True, False), strict=True)]
    wanted = [read(x) for x in texts]
    assert not torch.equal(wanted[0][-1], read((texts[0][0], False))[-1])  # learning changes something
    assert_equal(together(read, texts), wanted)


def test_the_same_seed_gives_the_same_bits_in_every_process():
    """Here, spawned and forked; and batches through 0, 1, 2 and 4 workers of a DataLoader."""
    done = subprocess.run([sys.executable, "-m", "reliability.processes"], capture_output=True, text=True,
                          cwd=Path(__file__).parent, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["made"]) == ["here", "spawn", "fork"]
    for what in ("made", "batches"):
        first, *rest = found[what].values()
        assert all(x == first for x in rest), what
    assert len(found["made"]["here"][1]) > 0


def test_a_long_text_takes_no_more_memory_than_a_short_one():
    """40,000 tokens; ten million are `make soak`."""
    torch.manual_seed(0)
    model = LanguageModel(Config(**soak.SMALL), 257).eval()
    found = soak.soak(model, b"one fish two fish red fish blue fish\n" * 40, 40_000, points=20)
    figures = soak.summary(found)
    assert figures["finite"]
    assert abs(figures["resident_growth"]) < 0.01
