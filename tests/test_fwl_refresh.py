"""Fast Weight Layers whose gradients are taken at the current weights: the oracles, streams, packing and errors."""

from itertools import pairwise

import pytest
import torch
from fwl_oracle import FAST, SIZE, B, D, T, V, double, make, problem, refreshed, slow_forward, steps_of  # noqa: F401
from oracle import assert_close
from safetensors.torch import load_file, save_file
from torch import nn

from fastweights import FastWeightError
from fastweights.refresh import RefreshState
from fastweights.torch import DynamicEvaluation, FWLBlock, graphs, make_labels
from fastweights.torch.learning import held, held_single
from fastweights.torch.learning import refresh as refreshing

WITHIN = ["held", "cumulative"]
OPTIONS = [dict(), dict(decay=0.9), dict(clip=0.05), dict(fast_bias=False, shared_norm_step=True)]


def numpy(x):
    return x.detach().numpy()


@pytest.mark.parametrize("how", [o for o in OPTIONS if "clip" not in o], ids=str)
@pytest.mark.parametrize("refresh", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("within", WITHIN)
def test_is_explicit_updates_at_the_current_weights(within, refresh, how):
    block = make(normalizer=3.0, refresh=refresh, within=within, **how)
    x, labels, weights = problem()
    out = block.run(x, labels, weights)
    assert_close(numpy(out.loss), refreshed(block, x, labels, weights).numpy())
    want = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, T)
    assert_close(numpy(out.loss), numpy(want))
    slow = nn.functional.cross_entropy(block.slow_logits(x).flatten(0, 1), labels.flatten(), reduction="none")
    assert_close(numpy(out.slow_loss), numpy(slow.view(B, T)))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.body, self.block = nn.Embedding(V, D), block

    def forward(self, tokens):
        return self.block.slow_logits(self.body(tokens))


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("refresh", [1, 3, 8])
def test_held_is_dynamic_evaluation_of_the_block(refresh, decay):
    """Segments of C tokens, the mean loss of each: the same steps, and decay a^C towards the trained weights."""
    block = make(normalizer=float(refresh), refresh=refresh, decay=decay)
    with torch.no_grad():
        block.steps.fill_(0.7)
    model, tokens = Model(block), torch.randint(V, (1, 40))
    names = [f"block.{n}" for n in FAST]
    pull = 0.0 if decay is None else 1 - decay**refresh
    with DynamicEvaluation(model, lr=0.7, decay=pull, segment=refresh, parameters=names) as dynamic:
        want = dynamic.run(tokens).losses
    out = block.run(model.body(tokens[:, :-1]), tokens[:, 1:], torch.ones(1, 39))
    assert_close(numpy(out.loss), want.numpy())
    assert (out.loss - out.slow_loss).abs().max() > 0.1


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("refresh", [T, 50])
def test_cumulative_in_one_chunk_is_the_published_layer(refresh, how):
    block, published = make(normalizer=3.0, refresh=refresh, within="cumulative", **how), make(normalizer=3.0, **how)
    published.load_state_dict(block.state_dict())
    x, labels, weights = problem()
    got, want = (b.run(x, labels, weights) for b in (block, published))
    for name in ("logits", "loss", "slow_loss"):
        assert_close(numpy(getattr(got, name)), numpy(getattr(want, name)), name=name)


def test_both_forms_meet_at_one_token():
    held, cumulative = (make(normalizer=3.0, refresh=1, within=w, decay=0.9, clip=0.05) for w in WITHIN)
    cumulative.load_state_dict(held.state_dict())
    x, labels, weights = problem()
    assert_close(numpy(held(x, labels, weights)), numpy(cumulative(x, labels, weights)))


@pytest.mark.parametrize("normalizer", ["batch", "sequence", 3.0])
@pytest.mark.parametrize("within", WITHIN)
def test_the_normalizer_divides_every_step(within, normalizer):
    block = make(normalizer=normalizer, refresh=4, within=within)
    x, labels, weights = problem()
    other = make(normalizer=1.0, refresh=4, within=within)
    other.load_state_dict(block.state_dict())
    total = {"batch": weights.sum(), "sequence": weights.sum(1, keepdim=True)}.get(normalizer, 3.0)
    assert_close(numpy(block.run(x, labels, weights).loss), numpy(other.run(x, labels, weights / total).loss))


@pytest.mark.parametrize("how", [dict(log_steps=True), dict(decay=0.9, clip=0.05)], ids=str)
@pytest.mark.parametrize("within", WITHIN)
def test_training_gradients_are_exact_to_second_order(within, how):
    block = make(normalizer=2.0, refresh=2, within=within, **how)
    x, labels, weights = problem(1, 4)
    names = [n for n, _ in block.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in block.parameters()]
    run = lambda x, *p: torch.func.functional_call(block, dict(zip(names, p, strict=True)), (x, labels, weights))  # noqa: E731
    torch.autograd.gradcheck(run, [x.requires_grad_(), *values])


def test_first_order_cuts_the_gradient_of_the_updates_alone():
    x, labels, weights = problem()
    full, cut = make(normalizer=3.0, refresh=5), make(normalizer=3.0, refresh=5, first_order=True)  # one update
    cut.load_state_dict(full.state_dict())
    assert torch.equal(full(x, labels, weights), cut(x, labels, weights))
    gradients = []
    for block in (full, cut):
        block.loss(x, labels, weights).backward()
        gradients.append({n: p.grad for n, p in block.named_parameters()})
    assert_close(numpy(gradients[0]["steps"]), numpy(gradients[1]["steps"]))
    assert (gradients[0]["dense2"] - gradients[1]["dense2"]).abs().max() > 1e-4


@pytest.mark.parametrize("cut", range(1, T))
@pytest.mark.parametrize("refresh", [1, 3, 4])
@pytest.mark.parametrize("within", WITHIN)
def test_a_stream_cut_anywhere_is_the_whole(within, refresh, cut):
    """With the last label of a part known, and with it unknown until the next part: `previous_label`."""
    block = make(normalizer=3.0, refresh=refresh, within=within, decay=0.9)
    tokens, x = torch.randint(V, (B, T)), torch.randn(B, T, D)
    want = block.run(x, *make_labels(tokens))
    first = block.run(x[:, :cut], *make_labels(tokens[:, :cut]))
    second = block.run(x[:, cut:], *make_labels(tokens[:, cut:]), first.state, previous_label=tokens[:, cut])
    same_stream(torch.cat([first.logits, second.logits], 1), second.state, want)
    labels, weights = make_labels(tokens)
    first = block.run(x[:, :cut], labels[:, :cut], weights[:, :cut])
    second = block.run(x[:, cut:], labels[:, cut:], weights[:, cut:], first.state)
    same_stream(torch.cat([first.logits, second.logits], 1), second.state, want)


def same_stream(logits, state, want):
    assert_close(numpy(logits), numpy(want.logits))
    for name, a, b in zip(RefreshState._fields, state, want.state, strict=True):
        assert_close(numpy(a), numpy(b), name=name)


@pytest.mark.parametrize("refresh", [1, 3, 20])
@pytest.mark.parametrize("within", WITHIN)
def test_token_by_token_save_and_fork(within, refresh, tmp_path):
    block = make(normalizer=3.0, refresh=refresh, within=within, decay=0.9, clip=0.05)
    tokens, x = torch.randint(V, (B, T)), torch.randn(B, T, D)
    labels, weights = make_labels(tokens)
    want = block.run(x, labels, weights)
    state, logits = block.init_state(B), []
    for t in range(T):
        y, state = block.step(x[:, t], labels[:, t - 1] if t else None, state)
        logits.append(y)
        if t == 4:
            save_file({n: a.detach().contiguous() for n, a in state._asdict().items()}, tmp_path / "state.safetensors")
    same_stream(torch.stack(logits, 1), state, want)
    fork = RefreshState(**load_file(tmp_path / "state.safetensors"))
    rest = block.run(x[:, 5:], labels[:, 5:], weights[:, 5:], fork, previous_label=labels[:, 4])
    same_stream(torch.cat([*(y[:, None] for y in logits[:5]), rest.logits], 1), rest.state, want)


@pytest.mark.parametrize("refresh", [1, 3, 4, 30])
@pytest.mark.parametrize("within", WITHIN)
def test_packed_documents_are_each_alone(within, refresh):
    block = make(normalizer=3.0, refresh=refresh, within=within)
    ends = [0, 7, 7, 8, 20, 24]
    cu = torch.tensor(ends)
    tokens, x = torch.randint(V, (1, 24)), torch.randn(1, 24, D)
    labels, weights = make_labels(tokens, cu_seqlens=cu)
    out = block.run(x, labels, weights, cu_seqlens=cu)
    for i, (a, b) in enumerate(pairwise(ends)):
        if a == b:
            assert out.state.waiting[i] == 0
            continue
        alone = block.run(x[:, a:b], labels[:, a:b], weights[:, a:b])
        for name in ("logits", "loss", "slow_loss"):
            assert_close(numpy(getattr(out, name)[:, a:b]), numpy(getattr(alone, name)), name=name)
        for name, s, t in zip(RefreshState._fields, out.state, alone.state, strict=True):
            assert_close(numpy(s[i : i + 1]), numpy(t), name=name)


@pytest.mark.parametrize("within", WITHIN)
def test_streams_at_different_places_go_on_together(within):
    """Rows that wait with 2, 3, 0 and 3 tokens, and the same packed with parts of different lengths."""
    block = make(normalizer=3.0, refresh=3, within=within)
    x, labels, weights = torch.randn(4, 12, D), torch.randint(V, (4, 12)), torch.ones(4, 12)
    cuts = [5, 3, 0, 6]
    states = [block.run(x[i : i + 1, :c], labels[i : i + 1, :c], weights[i : i + 1, :c]).state if c
              else block.init_state(1) for i, c in enumerate(cuts)]  # fmt: skip
    state = RefreshState(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    assert state.waiting.tolist() == [2, 3, 0, 3]
    alone = [block.run(x[i : i + 1], labels[i : i + 1], weights[i : i + 1]) for i in range(4)]
    parts = [torch.arange(c, c + 6) for c in cuts]
    rows = [torch.stack([y[i, p] for i, p in enumerate(parts)]) for y in (x, labels, weights)]
    out = block.run(*rows, state)
    for i, (c, want) in enumerate(zip(cuts, alone, strict=True)):
        assert_close(numpy(out.loss[i]), numpy(want.loss[0, c : c + 6]))
    ends = [12, 4, 1, 7]
    packed = [torch.cat([y[i, c:e] for i, (c, e) in enumerate(zip(cuts, ends, strict=True))])[None]
              for y in (x, labels, weights)]  # fmt: skip
    cu = torch.tensor([0, 7, 8, 9, 10])
    out = block.run(*packed, state, cu_seqlens=cu)
    for i, (c, e) in enumerate(zip(cuts, ends, strict=True)):
        assert_close(numpy(out.loss[0, cu[i] : cu[i + 1]]), numpy(alone[i].loss[0, c:e]))
        want = block.run(x[i : i + 1, :e], labels[i : i + 1, :e], weights[i : i + 1, :e]).state
        for name, s, t in zip(RefreshState._fields, out.state, want, strict=True):
            assert_close(numpy(s[i : i + 1]), numpy(t), name=name)


@pytest.mark.parametrize("within", WITHIN)
def test_streams_at_different_places_of_one_chunk(within):
    """Nothing is learned yet, and the new tokens of one row stand where others still have old ones."""
    block = make(normalizer=3.0, refresh=8, within=within)
    x, labels, weights = torch.randn(3, 8, D), torch.randint(V, (3, 8)), torch.ones(3, 8)
    cuts, want = [1, 5, 0], block.run(x, labels, weights)
    states = [block.run(x[i : i + 1, :c], labels[i : i + 1, :c], weights[i : i + 1, :c]).state if c
              else block.init_state(1) for i, c in enumerate(cuts)]  # fmt: skip
    state = RefreshState(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    rows = [torch.stack([y[i, c : c + 2] for i, c in enumerate(cuts)]) for y in (x, labels, weights)]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = block.run(*rows, state)
        for i, c in enumerate(cuts):
            assert_close(numpy(out.logits[i]), numpy(want.logits[i, c : c + 2]))


@pytest.mark.parametrize("case", ["documents", "documents, vocabulary in blocks", "one document"])
@pytest.mark.parametrize("how", [*OPTIONS, dict(log_steps=True, decay=0.9, clip=0.05)], ids=str)
def test_reading_by_hand_equals_the_differentiable_pass(how, case, monkeypatch):
    """Without gradients the chunk step is another piece of code, in place, and for one document yet another."""
    if "blocks" in case:
        monkeypatch.setattr(held, "MAX_LOGITS", 0)
    block = make(normalizer=3.0, refresh=3, **how)
    x, labels, weights = problem(1, 24)
    cu = torch.tensor([0, 24] if case == "one document" else [0, 7, 7, 8, 20, 24])
    used, read = [], held_single.read
    monkeypatch.setattr(held_single, "read", lambda *given, score: used.append(1) or read(*given, score=score))
    first = block.run(x, labels, weights, cu_seqlens=cu)
    before = [s.clone() for s in first.state]
    want = block.run(x, labels, weights, first.state, cu_seqlens=cu)
    with torch.no_grad():
        got = block.run(x, labels, weights, first.state, cu_seqlens=cu)
    assert bool(used) == (case == "one document" and block.config.within == "held" and block.config.clip is None)
    for name in ("logits", "loss", "slow_loss"):
        assert_close(numpy(getattr(got, name)), numpy(getattr(want, name)), name=name)
    for name, a, b in zip(RefreshState._fields, got.state, want.state, strict=True):
        assert_close(numpy(a), numpy(b), name=name)
    for name, a, b in zip(RefreshState._fields, first.state, before, strict=True):
        assert torch.equal(a, b), name  # the state that was given is as it was


def test_losses_alone_are_read_in_groups_of_chunks(monkeypatch):
    monkeypatch.setattr(held, "CHUNKS_PER_GRAPH", 2)
    block = make(normalizer=3.0, refresh=3, decay=0.9)
    x, labels, weights = problem(2, 24)
    first = block.run(x, labels, weights).state
    want = block.run(x, labels, weights, first)
    with torch.no_grad():
        got = block.run(x, labels, weights, first, logits=False, slow=False)
    assert_close(numpy(got.loss), numpy(want.loss))
    assert got.logits is None
    assert got.slow_loss is None
    with torch.no_grad():
        none = block.run(x[:, :0], labels[:, :0], weights[:, :0], got.state, logits=False, slow=False)
    assert none.loss.shape == (2, 0)
    for name, a, b in zip(RefreshState._fields, got.state, want.state, strict=True):
        assert_close(numpy(a), numpy(b), name=name)


def test_how_many_tokens_wait_is_known_without_asking_the_device():
    block = make(normalizer=3.0, refresh=3)
    waiting = block.run(*problem(2, 8)).state.waiting
    known = refreshing._waiting_counts(waiting)
    assert known == [2, 2]
    assert refreshing._waiting_counts(waiting) is known
    waiting.fill_(1)  # somebody else's hand
    assert refreshing._waiting_counts(waiting) == refreshing._waiting_counts(waiting.clone()) == [1, 1]


def test_why_a_call_is_no_cuda_graph():
    assert graphs.refuses(torch.zeros(1)) == "x is not on a GPU"
    doubled = graphs.call("key", lambda x: (2 * x,), (torch.ones(2),))
    assert doubled[0].tolist() == [2, 2]


def test_reading_by_hand_in_bfloat16_keeps_wide_weights():
    torch.set_default_dtype(torch.float32)
    block = FWLBlock(16, 50, inputs=8, refresh=16, normalizer=4.0, step_size=0.2)
    x, tokens = torch.randn(2, 70, 8), torch.randint(50, (2, 70))
    want = block.run(x, *make_labels(tokens))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = block.run(x, *make_labels(tokens))
    assert got.state.dense1.dtype == torch.float32
    torch.testing.assert_close(got.loss, want.loss, rtol=0.1, atol=0.1)


def test_rows_of_a_batch_are_each_alone():
    block = make(normalizer=3.0, refresh=4)
    x, labels, weights = problem()
    out = block.run(x, labels, weights)
    for i in range(B):
        alone = block.run(x[i : i + 1], labels[i : i + 1], weights[i : i + 1])
        assert_close(numpy(out.loss[i]), numpy(alone.loss[0]))


def test_no_token_sees_its_own_label_and_probabilities_sum_to_one():
    for within in WITHIN:
        block = make(normalizer=1.0, refresh=3, within=within)
        x, labels, weights = problem()
        logits = block(x, labels, weights)
        for t in range(T):
            later = labels.clone()
            later[:, t:] = (later[:, t:] + 1) % V
            assert torch.equal(block(x, later, weights)[:, : t + 1], logits[:, : t + 1])
        assert_close(numpy(logits.softmax(-1).sum(-1)), torch.ones(B, T).numpy())


def test_gradients_pass_through_the_cut():
    block = make(normalizer=3.0, refresh=3)
    tokens, x = torch.randint(V, (B, T)), torch.randn(B, T, D, requires_grad=True)
    first = block.run(x[:, :5], *make_labels(tokens[:, :5]))
    second = block.run(x[:, 5:], *make_labels(tokens[:, 5:]), first.state, previous_label=tokens[:, 5])
    of = [x, *block.parameters()]
    got = torch.autograd.grad(torch.cat([first.logits, second.logits], 1).sin().sum(), of)
    want = torch.autograd.grad(block.run(x, *make_labels(tokens)).logits.sin().sum(), of)
    for a, b in zip(got, want, strict=True):
        assert_close(a.numpy(), b.numpy())


def test_tied_output_learns_through_every_chunk():
    embedding = nn.Embedding(V, SIZE)
    block = FWLBlock(SIZE, V, inputs=D, unembed=embedding.weight, refresh=2, normalizer=1.0, step_size=0.5)
    x, labels, weights = problem()
    out = block.run(x, labels, weights)
    assert_close(numpy(block.loss(x, labels, weights)), numpy((out.loss * weights).sum() / weights.sum()))
    block.loss(x, labels, weights).backward()
    assert embedding.weight.grad.abs().sum() > 0


def test_bfloat16_autocast_stays_close():
    torch.set_default_dtype(torch.float32)
    block = FWLBlock(16, 50, inputs=8, refresh=16, normalizer=4.0, step_size=0.2)
    x, tokens = torch.randn(2, 70, 8), torch.randint(50, (2, 70))
    labels, weights = make_labels(tokens)
    want = block(x, labels, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, loss = block.run(x, labels, weights), block.loss(x, labels, weights)
    loss.backward()
    assert got.state.dense1.dtype == torch.float32
    torch.testing.assert_close(got.logits.float(), want, rtol=0.1, atol=0.1)


def test_errors():
    x, labels, weights = problem()
    block = make(normalizer=3.0, refresh=4)
    for refresh, got in ((0, "0"), (-3, "-3"), (2.5, "2.5")):
        with pytest.raises(FastWeightError, match=f"refresh is {got}; expected a whole number of tokens, at least 1"):
            FWLBlock(SIZE, V, refresh=refresh)
    with pytest.raises(FastWeightError, match="within is 'kept'; expected one of 'held', 'cumulative'"):
        FWLBlock(SIZE, V, refresh=4, within="kept")
    with pytest.raises(FastWeightError, match="rule is 'delta' with refresh=4; expected 'sum'"):
        FWLBlock(SIZE, V, refresh=4, rule="delta")
    with pytest.raises(FastWeightError, match=r"step_size is 0\.0; expected above 0 for log_steps"):
        FWLBlock(SIZE, V, log_steps=True, step_size=0.0)
    with pytest.raises(FastWeightError, match="stream with refresh=8; expected refresh=4"):
        block.run(x, labels, weights, make(normalizer=3.0, refresh=8).init_state(B))
    with pytest.raises(FastWeightError, match="stream with refresh=None; expected one of refresh=4"):
        block.run(x, labels, weights, make(normalizer=3.0).init_state(B))
    with pytest.raises(FastWeightError, match="stream with refresh=4; expected one of refresh=None"):
        make(normalizer=3.0).run(x, labels, weights, block.init_state(B))
    with pytest.raises(FastWeightError, match=r"state.dense1 has shape \(3, 1, 4, 16\); .* x has 2 sequences"):
        block.run(x, labels, weights, block.init_state(3))
    with pytest.raises(FastWeightError, match=r"expected \(2, 1, 4, 16\): the state of another block"):
        block.run(x, labels, weights, FWLBlock(SIZE, V, inputs=D + 1, refresh=4).init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number of tokens for step"):
        make(refresh=4).step(x[:, 0], None, block.init_state(B))
