"""Our loop for `generate` of transformers: the tokens and the cache of its own loop, which serves all other cases."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from recorded_graphs import emulate
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

import fastweights
from fastweights.hf import FastWeightCache, FastWeightConfig, FastWeightForCausalLM, generation
from fastweights.models import decoding
from fastweights.torch.tree import flatten

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, sliding_window=6, pad_token_id=0)
KINDS = [
    ("gated-delta*2", "fwl", {}), ("delta,softmax", "linear", {}), ("softmax,lstm", "fwl", {}),
    ("retnet,performer", "linear", {}), ("delta", "fwl", dict(refresh=5)),
    ("delta", "fwl", dict(refresh=5, within="cumulative")),
]  # fmt: skip
THEIRS = dict(custom_generate=GenerationMixin._sample)
HOWS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, top_k=0),
    "warped": dict(do_sample=True, temperature=0.7, top_k=12, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
    "likeliest of some": dict(do_sample=False, repetition_penalty=1.5, suppress_tokens=[7], min_new_tokens=12),
    "at least": dict(do_sample=True, eos_token_id=[3, 5, 8], min_length=18, min_new_tokens=12),
    "ends": dict(do_sample=True, eos_token_id=5, renormalize_logits=True, exponential_decay_length_penalty=(9, 1.1)),
    "rows": dict(do_sample=True, eos_token_id=3, num_return_sequences=2, typical_p=0.9, epsilon_cutoff=1e-3),
}  # fmt: skip


def make(mixers="gated-delta*2", head="fwl", fast=None, **changes):
    torch.manual_seed(0)
    fast = dict(normalizer=4.0) | (fast or {})
    config = FastWeightConfig(**(SMALL | dict(mixers=mixers, head=head, fast=fast) | changes))
    return FastWeightForCausalLM(config).eval()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "+".join(map(str, kind)))
def model(request):
    return make(*request.param)


@pytest.fixture(params=["eager", "recorded"])
def way(request, monkeypatch):
    """Our loop as on a CPU, and as on a GPU: with recorded steps, of which several are queued at once."""
    generation._kept.clear()
    if request.param == "recorded":
        emulate(monkeypatch)
        monkeypatch.setattr(generation, "_ahead", lambda tokens: 8)
    yield request.param
    generation._kept.clear()


@pytest.fixture
def said(caplog):
    """Which loops ran, and why."""
    caplog.set_level(logging.DEBUG, logger="fastweights.generate")
    return lambda: [m.removeprefix("generate: ") for m in caplog.messages if m.startswith("generate: ")]


def random_tokens(*shape):
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(1))


def both(model, *given, **how):
    """What our loop and that of transformers return, and that they leave the same random numbers to others."""
    found = []
    for loop in ({}, THEIRS):
        torch.manual_seed(3)
        found.append((model.generate(*given, **how, **loop), torch.rand(1)))
    (ours, next_random), (theirs, then) = found
    assert torch.equal(next_random, then)
    return ours, theirs


def check_tokens(model, how, said):
    tokens = random_tokens(3, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [5]])).long()
    for new in (30, 30, 21):  # later calls find the graph of the first
        ours, theirs = both(model, tokens, attention_mask=mask, max_new_tokens=new, **how)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert [x.partition(",")[0] for x in said()] == ["our loop"] * 3


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_tokens_are_those_of_transformers(way, how, said):
    check_tokens(make("gated-delta,softmax"), how, said)


def test_the_tokens_of_every_kind_of_model(model, way, said):
    check_tokens(model, HOWS["rows"], said)


@pytest.mark.parametrize("end", [1, 9, 13])
def test_the_cache_is_that_of_the_tokens_returned(model, way, end):
    tokens = random_tokens(2, 9)
    how = dict(do_sample=True, top_k=0, max_new_tokens=30, return_dict_in_generate=True)
    torch.manual_seed(3)
    free = model.generate(tokens, **how).sequences[:, 9:]
    ends = sorted({int(free[0, end - 1]), int(free[1, end // 2])})
    ours, theirs = both(model, tokens, eos_token_id=ends, **how)
    assert torch.equal(ours.sequences, theirs.sequences)
    a, b = ours.past_key_values, theirs.past_key_values
    assert a.seen == b.seen == ours.sequences.shape[1] - 1
    torch.testing.assert_close(dict(flatten(a.state)), dict(flatten(b.state)), rtol=0, atol=0)
    more = dict(do_sample=False, max_new_tokens=20, eos_token_id=None)
    again, want = (
        model.generate(out.sequences, past_key_values=copy.copy(out.past_key_values), **more) for out in (ours, theirs)
    )
    assert torch.equal(again, want)


def test_a_cache_of_the_caller_goes_on(way):
    model, tokens = make(), random_tokens(2, 9)
    whole = model.generate(tokens, max_new_tokens=40, do_sample=False)
    cache = FastWeightCache()
    part = model.generate(tokens, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert cache.seen == 28
    assert torch.equal(model.generate(part, past_key_values=cache, max_new_tokens=20, do_sample=False), whole)
    assert cache.seen == 48


@pytest.mark.parametrize("how", [
    dict(max_length=30), dict(max_length=10), dict(max_new_tokens=1), dict(max_new_tokens=2), dict(max_new_tokens=300),
    dict(max_new_tokens=20, min_length=15), dict(max_new_tokens=20, forced_eos_token_id=4),
    dict(max_new_tokens=20, cache_implementation="static"), dict(max_new_tokens=20, prefill_chunk_size=4),
    dict(max_new_tokens=20, disable_compile=True), dict(max_new_tokens=20, begin_suppress_tokens=[3]),
])  # fmt: skip
def test_lengths_and_settings(way, how):
    model, tokens = make("delta,softmax"), random_tokens(2, 9)
    for ends in (None, [3, 11]):
        assert torch.equal(*both(model, tokens, do_sample=True, eos_token_id=ends, **how))


def test_embeddings_and_inference_mode(way, said):
    model, tokens = make(), random_tokens(2, 9)
    how = dict(max_new_tokens=20, do_sample=False)
    x = model.get_input_embeddings()(tokens).detach()
    assert torch.equal(*both(model, inputs_embeds=x, **how))
    with torch.inference_mode():
        inside = model.generate(tokens, **how)
    assert torch.equal(inside, model.generate(tokens, **how))
    assert all(x.startswith("our loop") for x in said())


class Kept(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("ends", [None, [3, 11, 17]])
def test_a_streamer_gets_every_token(way, ends, said):
    model, tokens, streamer = make(), random_tokens(1, 9), Kept()
    how = dict(do_sample=True, max_new_tokens=30, eos_token_id=ends, pad_token_id=0)
    torch.manual_seed(3)
    model.generate(tokens, streamer=streamer, **how)
    _, theirs = both(model, tokens, **how)
    assert streamer.tokens == [tokens.tolist(), *([int(x)] for x in theirs[0, 9:])]
    assert streamer.ended == 1
    assert said()[0].startswith("our loop")


def test_time_runs_out(way, said):
    model, tokens = make(), random_tokens(1, 9)
    out = model.generate(tokens, max_time=1e-9, max_new_tokens=1000, do_sample=False)
    assert out.shape == (1, 10)
    assert said()[0].startswith("our loop")
    assert model.generate(tokens, max_time=1e4, max_new_tokens=30, do_sample=False).shape == (1, 39)


class OtherScores(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class OtherEnd(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("how,why", [
    (dict(use_cache=False), "there is no cache"),
    (dict(output_scores=True, return_dict_in_generate=True), "output_scores is asked for"),
    (dict(output_logits=True, return_dict_in_generate=True), "output_logits is asked for"),
    (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states is asked for"),
    (dict(no_repeat_ngram_size=2), "NoRepeatNGramLogitsProcessor may look at more"),
    (dict(logits_processor=LogitsProcessorList([OtherScores()])), "OtherScores may look at more"),
    (dict(stopping_criteria=StoppingCriteriaList([OtherEnd()])), "OtherEnd looks at every token"),
])  # fmt: skip
def test_what_is_left_to_transformers(way, how, why, said):
    model, tokens = make(), random_tokens(2, 9)
    ours, theirs = both(model, tokens, max_new_tokens=20, do_sample=False, **how)
    if "return_dict_in_generate" in how:
        ours, theirs = ours.sequences, theirs.sequences
    assert torch.equal(ours, theirs)
    (line,) = said()
    assert line.startswith(f"the loop of transformers, since {why}")


def test_models_that_are_left_to_transformers(way, said):
    tokens, how = random_tokens(2, 9), dict(max_new_tokens=20, do_sample=False)
    model, seen = make("delta"), []
    want = model.generate(tokens, **how)
    handle = model.model.norm.register_forward_hook(lambda *given: seen.append(1))
    assert torch.equal(model.generate(tokens, **how), want)
    assert len(seen) == 20
    handle.remove()
    model.forward = model.forward  # as those who compile or offload a model set it
    assert torch.equal(model.generate(tokens, **how), want)
    del model.forward
    with fastweights.debug():
        assert torch.equal(model.generate(tokens, **how), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(tokens, **how)
    model.train().generate(tokens, **how)
    assert [x.partition(" since ")[2] or x.partition(",")[0] for x in said()] == [
        "our loop", "a hook looks at RMSNorm", "a hook looks at FastWeightForCausalLM",
        "the model is trained, compiled or looked into",
        "autocast is on, or tokens and weights are on different devices",
        "the model is trained, compiled or looked into",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["recorded"], indirect=True)
def test_graphs_are_kept_for_the_next_call(way, said, monkeypatch):
    model, tokens, how = make("delta"), random_tokens(2, 9), dict(max_new_tokens=20, do_sample=False)
    short = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert said()[-1] == "the loop of transformers, since the tokens are too few to record a graph for"
    model.generate(tokens, **how)
    (kept,) = generation._kept[model].values()
    first = kept.decoder
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), short)  # once there is one
    assert said()[-1].startswith("our loop, captured")
    assert kept.decoder is first
    with kept.busy:
        model.generate(tokens, **how)
    assert said()[-1] == "the loop of transformers, since another thread generates with this model"
    for rows in range(3, 9):
        model.generate(random_tokens(rows, 9), **how)
    assert [key[1] for key in generation._kept[model]] == [5, 6, 7, 8]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for p in changed.parameters():
            p.mul_(1.5)
    want = changed.generate(tokens, **how)
    assert len(generation._kept[changed]) == 1
    for p, q in zip(model.parameters(), changed.parameters(), strict=True):
        p.data = q.data.clone()  # elsewhere: what was recorded reads other weights
    assert torch.equal(model.generate(tokens, **how), want)
    assert len(generation._kept[model]) == 1
    (last,) = generation._kept[model].values()
    monkeypatch.setattr(generation, "LARGE", 10)
    assert torch.equal(model.generate(tokens, **how), want)
    assert last.decoder is None
    gone = weakref.ref(model)
    del model, p, kept, first, last
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("way", ["recorded"], indirect=True)
def test_a_step_that_cannot_be_recorded(way, said, monkeypatch):
    monkeypatch.setattr(decoding.Decoder, "_capture", lambda *given: "no")
    model, tokens, how = make("delta"), random_tokens(2, 9), dict(max_new_tokens=20, do_sample=False)
    with pytest.warns(UserWarning, match="without a CUDA graph; capturing failed: no"):
        ours = model.generate(tokens, **how)
    assert torch.equal(ours, model.generate(tokens, **how))
    assert said()[1] == "the loop of transformers, since a step is eager (capturing failed: no)"
