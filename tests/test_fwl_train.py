"""The training loss of a refreshed Fast Weight Layer: the general form's value, losses, state and every gradient."""

import numpy as np
import pytest
import torch
from fwl_oracle import D, V, double, make  # noqa: F401
from oracle import assert_close

from fastweights.models import config, language_model
from fastweights.models.documents import Documents
from fastweights.refresh import RefreshState
from fastweights.torch.learning import dual, training_loss, walk
from fastweights.torch.tree import map_tensors

ROWS = 3
CASES = [  # options, tokens, tokens of a chunk, documents start at, carried, share of the slow loss
    (dict(), 9, 4, [], False, 0.5),
    (dict(), 12, 4, [], True, 0.0),
    (dict(), 9, 20, [(1, 4)], True, 0.5),
    (dict(), 1, 3, [(0, 0)], True, 0.5),
    (dict(), 11, 3, [(0, 3), (0, 6), (2, 10), (1, 0)], True, 0.5),
    (dict(decay=0.9), 11, 3, [(0, 3), (0, 7), (2, 10)], True, 0.5),
    (dict(clip=0.05), 10, 3, [(2, 5)], True, 0.5),
    (dict(clip=0.05, decay=0.9, first_order=True), 10, 3, [(2, 5)], True, 0.5),
    (dict(log_steps=True, first_order=True), 9, 4, [], True, 0.0),
    (dict(fast_bias=False, shared_norm_step=True, log_steps=True), 9, 2, [(0, 4)], False, 0.5),
    (dict(normalizer="batch"), 9, 4, [(0, 4)], False, 0.3),
    (dict(normalizer="sequence"), 9, 4, [], False, 0.3),
]


def problem(block, T, starts, carried):
    x, labels, weights = torch.randn(ROWS, T, D), torch.randint(V, (ROWS, T)), torch.rand(ROWS, T)
    weights[0, 0], begins = 0.0, np.zeros((ROWS, T), bool)
    for row, t in starts:
        begins[row, t] = True
    state = block.init_state(ROWS)
    if carried:
        with torch.no_grad():
            state = block.run(torch.randn(ROWS, 7, D), torch.randint(V, (ROWS, 7)), torch.ones(ROWS, 7)).state
    return x.requires_grad_(), labels, weights, state, Documents.of(begins)


def general(block, x, labels, weights, state, documents, share):
    """Through refresh.py and autograd, as packed documents."""
    if documents.whole:
        out = block.run(x, labels, weights, map_tensors(documents.kept, state), logits=False)
    else:
        rows = (y.reshape(1, -1, *y.shape[2:]) for y in (x, labels, weights))
        state = map_tensors(documents.enter, state)
        out = block.run(*rows, state, cu_seqlens=documents.cu_seqlens, logits=False)
        out = out._replace(state=map_tensors(documents.leave, out.state))
    loss, slow = (y.view(labels.shape) for y in (out.loss, out.slow_loss))
    value = ((1 - share) * loss * weights + share * slow * weights).sum()
    return training_loss.Trained(value, loss, slow, out.state)


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory is NaN, so that nothing may be read before it is written."""
    for of, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(of, name)
        fill = lambda *a, _make=make, **kw: (lambda y: y.fill_(torch.nan) if y.is_floating_point() else y)(  # noqa: E731
            _make(*a, **kw)
        )
        monkeypatch.setattr(of, name, fill)


@pytest.mark.parametrize(
    "form", ["walked", "walked, much", "products", "products, groups of 1", "products, groups of 2"]
)
@pytest.mark.parametrize(("how", "T", "C", "starts", "carried", "share"), CASES, ids=str)
def test_is_the_general_form(how, T, C, starts, carried, share, form, poison, monkeypatch):
    monkeypatch.setattr(training_loss, "WALK_DEVICES", ("cpu",) if "walked" in form else ())
    monkeypatch.setattr(walk, "MAX_KEPT_PROBABILITIES", 0 if "much" in form else 2**24)
    monkeypatch.setattr(dual, "TOKENS_PER_GROUP", int(form[-1]) * C if "groups" in form else 256)
    block = make(**dict(normalizer=3.0, refresh=C) | how)
    x, labels, weights, state, documents = problem(block, T, starts, carried)
    want = general(block, x, labels, weights, state, documents, share)
    got = training_loss.objective(
        block.config, block._weights(), x, labels, weights, state if carried else None, starts=documents.starts,
        keep=documents.keep, documents=documents.most, slow_share=share,
    )  # fmt: skip
    numpy = lambda y: y.detach().numpy()  # noqa: E731
    assert_close(numpy(got.value), numpy(want.value))
    assert_close(numpy(got.loss), numpy(want.loss))
    if share:
        assert_close(numpy(got.slow_loss), numpy(want.slow_loss))
    for name, a, b in zip(RefreshState._fields, got.state, want.state, strict=True):
        assert_close(numpy(a), numpy(b), name=name)
    of = [x, *block.parameters()]
    found = zip(*(torch.autograd.grad(2.0 * y.value, of, allow_unused=True) for y in (got, want)), strict=True)
    for name, (a, b) in zip(["x", *dict(block.named_parameters())], found, strict=True):
        assert_close(numpy(a), numpy(torch.zeros_like(a) if b is None else b), name=name)


def test_what_it_does_not_serve_goes_the_general_way(monkeypatch):
    x, weights = torch.randn(2, 9, D), torch.ones(2, 9)
    reason = lambda block, weights=weights, state=None, packed=False: training_loss.refuses(  # noqa: E731
        block.config, x, weights, state, packed=packed
    )
    assert reason(make(refresh=4)) is None
    assert reason(make()) == "the layer is not refreshed"
    assert "cumulative" in reason(make(refresh=4, within="cumulative"))
    assert "sequence" in reason(make(refresh=4, normalizer="sequence"), packed=True)
    assert "gradients" in reason(make(refresh=4), weights.clone().requires_grad_())
    with torch.no_grad():
        assert reason(make(refresh=4)) == "nothing is differentiated"
    monkeypatch.setattr(training_loss, "WALK_DEVICES", ())
    monkeypatch.setattr(training_loss, "MAX_ROW_TOKENS", 9)
    assert "longer" in reason(make(refresh=4))
    monkeypatch.setattr(training_loss, "DEVICES", ())
    assert "cpu" in reason(make(refresh=4))


def test_the_loss_of_a_block_is_the_same_either_way(monkeypatch):
    block, found = make(refresh=4, normalizer="batch"), []
    x, labels, weights, _, _ = problem(block, 9, [], False)
    for devices in (("cpu",), ()):
        monkeypatch.setattr(training_loss, "DEVICES", devices)
        loss = block.loss(x, labels, weights)
        found.append([loss, *torch.autograd.grad(loss, [x, *block.parameters()])])
    for a, b in zip(*found, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy())


def test_a_model_trains_the_same_either_way(monkeypatch):
    """Three steps of plain descent with carried memory: the same losses, and the same state at the end."""
    settings = config.Config(dim=16, heads=2, depth=1, head="fwl", refresh=4, length=11, batch=2)
    rows, found = torch.randint(17, (3, 2, 12)), []
    starts = np.zeros((2, 11), bool)
    starts[1, 5] = True
    for devices in (("cpu",), ()):
        monkeypatch.setattr(training_loss, "DEVICES", devices)
        torch.manual_seed(1)
        model = language_model.LanguageModel(settings, vocab=17).double()
        state, losses = model.init_state(2), []
        for part in rows:
            batch = part[:, :-1], part[:, 1:], torch.ones(2, 11), state, Documents.of(starts)
            value, loss, state = model.train_loss(*batch, 0.5)
            for p, g in zip(model.parameters(), torch.autograd.grad(value, list(model.parameters())), strict=True):
                p.data -= 1e-3 * g
            state = map_tensors(torch.Tensor.detach, state)
            losses.append(loss.detach())
        found.append([torch.stack(losses), *state.fast])
    for a, b in zip(*found, strict=True):
        assert_close(a.numpy(), b.numpy())


def test_a_layer_may_learn_less_often_in_training():
    of = config.Config.of
    assert (of().refresh, of().in_training.refresh) == (32, 64)
    assert of(refresh=16).in_training.refresh == config.Config(refresh=16).in_training.refresh == 16
    assert of(refresh=16, train_refresh=8).in_training.refresh == 8
    assert of(refresh=0, train_refresh=8).in_training.refresh == 0  # the published layer
    assert [of().starting_from("run", **how).in_training.refresh for how in ({}, dict(refresh=16))] == [64, 16]
