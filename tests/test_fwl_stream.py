"""Fast Weight Layers with a carried state: token by token, in parts, forked and resumed."""

import pytest
import torch
from fwl_oracle import B, D, T, V, double, make, problem  # noqa: F401
from oracle import assert_close
from safetensors.torch import load_file, save_file

from fastweights import FastWeightError
from fastweights.fwl_config import FWLState
from fastweights.torch import make_labels

STREAMING = [dict(), dict(decay=0.9), dict(rule="delta"), dict(decay=0.8, clip=0.1, rule="delta")]


@pytest.mark.parametrize("how", STREAMING, ids=str)
def test_token_by_token_equals_the_parallel_pass(how):
    block = make(normalizer=6.0, **how)
    x, labels, weights = problem()
    weights = (weights > 0).double()
    want = block.run(x, labels, weights)
    state, logits = block.init_state(B), []
    for t in range(T):
        y, state = block.step(x[:, t], labels[:, t - 1] if t else None, state)
        logits.append(y)
    assert_close(torch.stack(logits, 1).detach().numpy(), want.logits.detach().numpy())
    for name, a, b in zip(FWLState._fields, state, want.state, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy(), name=name)


@pytest.mark.parametrize("how", STREAMING, ids=str)
def test_states_go_on_fork_and_resume(how, tmp_path):
    """Prefill five tokens in parallel, save the state, then stream the rest from two copies of it."""
    block = make(normalizer=6.0, **how)
    x, labels, _ = problem()
    whole = block.run(x, labels, torch.cat([torch.ones(B, T - 1), torch.zeros(B, 1)], 1)).logits
    known = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]).expand(B, 5)  # the label of the fifth is not known yet
    state = block.run(x[:, :5], labels[:, :5], known).state
    save_file({n: t.detach().contiguous() for n, t in state._asdict().items()}, tmp_path / "state.safetensors")
    for copy in (state, FWLState(**load_file(tmp_path / "state.safetensors"))):
        fork = copy
        for t in range(5, T):
            y, fork = block.step(x[:, t], labels[:, t - 1], fork)
            assert_close(y.detach().numpy(), whole[:, t].detach().numpy())
    rest = block.run(x[:, 5:], labels[:, 5:], torch.ones(B, T - 5),
                     state=block.run(x[:, :5], labels[:, :5], torch.ones(B, 5)).state)  # fmt: skip
    assert_close(rest.logits.detach().numpy(), whole[:, 5:].detach().numpy())


@pytest.mark.parametrize("cut", range(1, T))
@pytest.mark.parametrize("how", STREAMING, ids=str)
def test_a_stream_cut_anywhere_is_the_whole(how, cut):
    """The last label of the first part is the first token of the second: `previous_label`."""
    block = make(normalizer=6.0, **how)
    tokens, x = torch.randint(V, (B, T)), torch.randn(B, T, D)
    want = block.run(x, *make_labels(tokens))
    first = block.run(x[:, :cut], *make_labels(tokens[:, :cut]))
    second = block.run(x[:, cut:], *make_labels(tokens[:, cut:]), first.state, previous_label=tokens[:, cut])
    logits = torch.cat([first.logits, second.logits], 1)
    assert_close(logits.detach().numpy(), want.logits.detach().numpy())
    for name, a, b in zip(FWLState._fields, second.state, want.state, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy(), name=name)
    forgot = block.run(x[:, cut:], *make_labels(tokens[:, cut:]), first.state).logits
    assert (forgot - second.logits).abs().max() > 1e-3  # the label matters here


def test_packed_streams_cut_are_the_whole():
    """Two documents of seven and nine tokens, packed, cut after three and four."""
    block = make(normalizer=6.0, decay=0.9)
    tokens, x = torch.randint(V, (1, 16)), torch.randn(1, 16, D)
    whole = torch.tensor([0, 7, 16])
    want = block.run(x, *make_labels(tokens, cu_seqlens=whole), cu_seqlens=whole)
    parts = [0, 1, 2, 7, 8, 9, 10], [3, 4, 5, 6, 11, 12, 13, 14, 15]
    cus = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 9])
    state, label, logits = None, None, torch.empty_like(want.logits)
    for part, cu in zip(parts, cus, strict=True):
        labels = make_labels(tokens[:, part], cu_seqlens=cu)
        out = block.run(x[:, part], *labels, state, previous_label=label, cu_seqlens=cu)
        logits[:, part], state, label = out.logits, out.state, tokens[0, [3, 11]]
    assert_close(logits.detach().numpy(), want.logits.detach().numpy())
    for name, a, b in zip(FWLState._fields, state, want.state, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy(), name=name)


def test_gradients_pass_through_the_cut():
    block = make(normalizer=6.0)
    tokens, x = torch.randint(V, (B, T)), torch.randn(B, T, D, requires_grad=True)
    first = block.run(x[:, :4], *make_labels(tokens[:, :4]))
    second = block.run(x[:, 4:], *make_labels(tokens[:, 4:]), first.state, previous_label=tokens[:, 4])
    of = [x, *block.parameters()]
    got = torch.autograd.grad(torch.cat([first.logits, second.logits], 1).sin().sum(), of)
    want = torch.autograd.grad(block.run(x, *make_labels(tokens)).logits.sin().sum(), of)
    for a, b in zip(got, want, strict=True):
        assert_close(a.numpy(), b.numpy())


def test_previous_label_errors():
    x, labels, weights = problem()
    block, label = make(normalizer=6.0), labels[:, 0]
    with pytest.raises(FastWeightError, match="previous_label is given without a state; expected both"):
        block.run(x, labels, weights, previous_label=label)
    with pytest.raises(FastWeightError, match=r"previous_label has shape \(1,\); expected \(2,\): one per sequence"):
        block.run(x, labels, weights, block.init_state(B), previous_label=label[:1])
    with pytest.raises(FastWeightError, match="labels has 7; expected 0 to 4"):
        block.run(x, labels, weights, block.init_state(B), previous_label=label * 0 + 7)
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number of tokens for previous_label"):
        make().run(x, labels, weights, block.init_state(B), previous_label=label)
