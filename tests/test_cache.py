"""The neural cache: Bayes' rule over a grid, by a loop in NumPy, and what a cache is for."""

import itertools
import math

import numpy as np
import pytest
import torch

from fastweights.core import FastWeightError
from fastweights.torch import CacheState, NeuralCache
from fastweights.torch.cache_sight import BLOCK, Sight

V, D, WINDOW = 7, 5, 9
GRID = dict(temperatures=(2.0, 8.0), shares=(0.1, 0.4))


def oracle(x, labels, losses, *, window, temperatures, shares):
    """Losses (T,) of the mixture for one text, token by token, as the module's docstring says."""
    keys = x / np.linalg.norm(x, axis=-1, keepdims=True)
    likelihood = np.zeros(1 + len(temperatures) * len(shares))  # log, of each expert so far
    found = []
    for t in range(len(x)):
        past = np.arange(max(0, t - window), t)
        p = np.exp(-losses[t])
        experts = [p]
        for c in temperatures:
            attention = np.exp(c * keys[past] @ keys[t])
            hit = attention[labels[past] == labels[t]].sum() / attention.sum() if len(past) else p
            experts += [(1 - s) * p + s * hit for s in shares]
        weights = np.exp(likelihood - likelihood.max())
        found.append(-np.log(weights @ experts / weights.sum()))
        likelihood += np.log(experts)
    return np.array(found)


def text(rng, T, B=1):
    """Features that say something of the label, labels that repeat, and a model's logits."""
    labels = rng.integers(V, size=(B, T))
    x = np.eye(V, D)[labels] + 0.5 * rng.standard_normal((B, T, D))
    return x, labels, 2 * rng.standard_normal((B, T, V))


def losses_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def tensors(*arrays):
    return [torch.from_numpy(a) for a in arrays]


def problem(rng, T, B=1):
    x, labels, logits = tensors(*text(rng, T, B))
    return x, labels, logits, losses_of(logits, labels)


def want(x, labels, losses):
    return np.stack([
        oracle(*row, window=WINDOW, **GRID)
        for row in zip(x.numpy(), labels.numpy(), losses.numpy(), strict=True)
    ])  # fmt: skip


def close(got, wanted):
    np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)


cache = NeuralCache(WINDOW, **GRID)


@pytest.mark.parametrize("hits", [Sight._sparse, Sight._dense])  # the second is what a GPU runs
@pytest.mark.parametrize("T", [1, 2, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_matches_the_oracle(rng, monkeypatch, T, hits):
    monkeypatch.setattr(Sight, "_sparse", hits)
    x, labels, _, losses = problem(rng, T, B=2)
    got, state = cache.score(x, labels, losses)
    close(got, want(x, labels, losses))
    assert state.keys.shape == (2, min(T, WINDOW), D)
    assert state.filled.tolist() == [min(T, WINDOW)] * 2


@pytest.mark.parametrize("cuts", [[1] * 40, [5, 0, 30, 5], [20, 20]])
def test_any_split_is_the_whole(rng, cuts):
    x, labels, _, losses = problem(rng, 40)
    parts, state = [], None
    for part in zip(*(a.split(cuts, 1) for a in (x, labels, losses)), strict=True):
        got, state = cache.score(*part, state)
        parts.append(got)
    close(torch.cat(parts, 1), want(x, labels, losses))
    for got, whole in zip(state, cache.score(x, labels, losses)[1], strict=True):
        torch.testing.assert_close(got, whole)


def test_padding_may_hold_anything_anywhere(rng):
    x, labels, _, losses = problem(rng, 33, B=3)
    mask = torch.from_numpy(rng.random((3, 33)) < 0.6)
    mask[2] = False
    x = torch.where(mask[..., None], x, torch.nan)
    half = lambda part, state=None: cache.score(x[:, part], labels[:, part], losses[:, part], state, mask=mask[:, part])  # noqa: E731
    first, state = half(slice(14))
    second, state = half(slice(14, None), state)
    got = torch.cat([first, second], 1)
    for row in range(2):
        real = mask[row]
        close(got[row, real][None], want(x[row, real][None], labels[row, real][None], losses[row, real][None]))
    assert torch.equal(got[~mask], losses[~mask])
    assert state.filled.tolist() == [min(WINDOW, int(n)) for n in mask.sum(1)]


def test_packed_texts_are_each_alone(rng):
    x, labels, _, losses = problem(rng, 2 * BLOCK + 60)
    ends = [0, 7, 7, BLOCK + 9, BLOCK + 10, 2 * BLOCK + 60]  # one of them empty, two longer than a block
    got, state = cache.score(x, labels, losses, cu_seqlens=torch.tensor(ends))
    more, after = cache.score(x, labels, losses, state, cu_seqlens=torch.tensor(ends))
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        part = [array[:, a:b] for array in (x, labels, losses)]
        twice = [torch.cat([array, array], 1) for array in part]
        whole = want(*twice) if b > a else np.zeros((1, 0))
        close(torch.cat([got[:, a:b], more[:, a:b]], 1), whole)
        assert after.filled[n] == min(WINDOW, 2 * (b - a))


def test_probabilities_sum_to_one(rng):
    """Of all labels that the next token may have, given the same past."""
    x, labels, logits, losses = problem(rng, 30)
    _, state = cache.score(x[:, :-1], labels[:, :-1], losses[:, :-1])
    every = torch.arange(V)[None]
    chances = []
    for label in every[0]:
        own = losses_of(logits[:, -1:], label[None, None])
        chances.append(float(cache.score(x[:, -1:], label[None, None], own, state)[0].neg().exp()))
    assert abs(sum(chances) - 1) < 1e-12


def test_is_causal_and_scores_before_it_writes(rng):
    x, labels, _, losses = problem(rng, 30)
    got, _ = cache.score(x, labels, losses)
    labels[:, 20] = (labels[:, 20] + 1) % V
    x[:, 21:] = rng.standard_normal()
    other, _ = cache.score(x, labels, losses)
    assert torch.equal(got[:, :20], other[:, :20])
    assert not torch.allclose(got[:, 21:], other[:, 21:])


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 32]])
def test_a_stream_answers_what_scoring_finds(rng, cuts):
    """answer() pairs the features of a token with the next token; its logits are the mixture's."""
    x, labels, logits, losses = problem(rng, 40, B=2)
    tokens = torch.cat([labels[:, -1:], labels[:, :-1]], 1)  # what precedes each label; the first is anything
    parts, state = [], None
    for part in zip(*(a.split(cuts, 1) for a in (x, tokens, logits)), strict=True):
        got, state = cache.answer(*part, state)
        parts.append(got)
    close(losses_of(torch.cat(parts, 1), labels), want(x, labels, losses))
    assert torch.equal(parts[0][:, 0], logits[:, 0])  # nothing is known yet: the very same logits


def test_a_stream_goes_on_after_a_text(rng):
    x, labels, logits, losses = problem(rng, 40)
    tokens = torch.cat([labels[:, -1:], labels[:, :-1]], 1)
    _, state = cache.score(x[:, :30], labels[:, :30], losses[:, :30])
    got, _ = cache.answer(x[:, 30:], tokens[:, 30:], logits[:, 30:], state)
    close(losses_of(got, labels[:, 30:]), want(x, labels, losses)[:, 30:])


@pytest.mark.parametrize("cuts", [[30], [4, 26], [1] * 30])
def test_a_padded_stream(rng, cuts):
    x, labels, logits, losses = problem(rng, 30, B=3)
    mask = torch.from_numpy(rng.random((3, 30)) < 0.6)
    tokens = torch.full_like(labels, 0)
    for row in range(3):
        tokens[row, mask[row]] = torch.cat([labels[row, mask[row]][-1:], labels[row, mask[row]][:-1]])
    parts, state = [], None
    for a, b, c, m in zip(*(a.split(cuts, 1) for a in (x, tokens, logits, mask)), strict=True):
        got, state = cache.answer(a, b, c, state, mask=m)
        parts.append(got)
    got = torch.cat(parts, 1)
    assert torch.equal(got[~mask], logits[~mask])
    for row in range(3):
        real = [array[row, mask[row]][None] for array in (x, labels, losses)]
        close(losses_of(got[row, mask[row]][None], real[1]), want(*real))


def test_only_the_last_logits_are_needed(rng):
    """With the losses of the tokens beside them, as after a long prompt."""
    x, labels, logits, losses = problem(rng, 25)
    tokens = torch.cat([labels[:, -1:], labels[:, :-1]], 1)
    whole, end = cache.answer(x, tokens, logits)
    before = torch.cat([losses[:, -1:] * torch.nan, losses[:, :-1]], 1)  # of the tokens; the first counts for nothing
    got, state = cache.answer(x, tokens, logits[:, -3:], losses=before)
    torch.testing.assert_close(got, whole[:, -3:])
    for one, other in zip(state, end, strict=True):
        torch.testing.assert_close(one, other)


def test_answers_without_learning(rng):
    x, labels, logits, _ = problem(rng, 25)
    _, state = cache.answer(x, labels, logits)
    more, _, their, _ = problem(rng, 4)
    got, same = cache.answer(more, labels[:, :4], their, state, learn=False)
    assert same is state
    for t in range(4):
        alone, _ = cache.answer(more[:, t : t + 1], labels[:, :1], their[:, t : t + 1], state, learn=False)
        torch.testing.assert_close(got[:, t], alone[:, 0])
    assert not torch.allclose(got, their, atol=1e-3)
    assert torch.equal(cache.answer(more, labels[:, :4], their, learn=False)[0], their)


def test_logits_of_words_not_seen_are_left_alone(rng):
    x, labels, logits, _ = problem(rng, 25)
    wider = torch.cat([logits, logits], -1)
    got, _ = cache.answer(x, labels, wider)
    assert torch.equal(got[..., V:], wider[..., V:])
    assert bool((got[:, 5:, :V] >= wider[:, 5:, :V]).all())
    half, _ = cache.answer(x.bfloat16(), labels, wider.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[..., V:], wider[..., V:].bfloat16())


def test_finds_its_own_numbers(rng):
    """A mixture is as good as the best pair of its grid, up to the logarithm of their number, on any text."""
    x, labels, _, losses = problem(rng, 300)
    found, _ = NeuralCache(300).score(x, labels, losses)
    pairs = [NeuralCache(300, temperatures=[c], shares=[s]) for c in (5.0, 20.0, 60.0) for s in (0.01, 0.1, 0.3)]
    alone = [oracle(x[0].numpy(), labels[0].numpy(), losses[0].numpy(), window=300, temperatures=[c], shares=[s]).sum()
             for c in (5.0, 20.0, 60.0) for s in (0.01, 0.1, 0.3)]  # fmt: skip
    assert len(pairs) == len(alone)
    assert float(found.sum()) < min([*alone, float(losses.sum())]) + math.log(50)
    assert float(found.sum()) < float(losses.sum()) - 50  # such text repeats itself


def test_random_text_costs_next_to_nothing(rng):
    labels = torch.from_numpy(rng.integers(1000, size=(1, 500)))
    x = torch.from_numpy(rng.standard_normal((1, 500, 16)))
    losses = torch.full((1, 500), math.log(1000), dtype=torch.float64)
    found, _ = NeuralCache(500).score(x, labels, losses)
    assert float(found.sum()) < float(losses.sum()) + math.log(50)


def test_states_fork_and_inputs_stay(rng):
    x, labels, logits, losses = problem(rng, 20)
    _, state = cache.score(x, labels, losses)
    before = [None if part is None else part.clone() for part in state]
    first = cache.score(x, labels, losses, state)[0]
    assert torch.equal(first, cache.score(x, labels, losses, state)[0])
    for part, kept in zip(state, before, strict=True):
        assert part is None or torch.equal(part, kept)
    kept = logits.clone()
    wanted, state = cache.answer(x, labels, logits)
    assert torch.equal(logits, kept)
    got, same = cache.answer(x, labels, logits, log_sums=logits.logsumexp(-1), overwrite=True)
    assert got is logits
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(same.logits, state.logits)


def test_float32_and_half(rng):
    x, labels, _, losses = problem(rng, 60)
    wanted = want(x, labels, losses)
    got, state = cache.score(x.float(), labels, losses.float())
    assert state.keys.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)
    half, state = cache.score(x.bfloat16(), labels, losses.float())
    assert half.dtype == state.keys.dtype == torch.float32
    np.testing.assert_allclose(half.numpy(), wanted, atol=0.1)


@pytest.mark.parametrize("hits", [Sight._sparse, Sight._dense])
def test_gradients_reach_the_features(rng, monkeypatch, hits):
    monkeypatch.setattr(Sight, "_sparse", hits)
    x, labels, _, losses = problem(rng, 6)
    run = lambda x, losses: cache.score(x, labels, losses)[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), losses.requires_grad_()))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(window=0), "window is 0; expected a whole number of tokens, 1 or more"),
        (dict(temperatures=()), r"temperatures is \(\); expected positive numbers"),
        (dict(temperatures=(5.0, -1.0)), r"temperatures is \(5.0, -1.0\); expected positive"),
        (dict(shares=(0.0, 0.1)), r"shares is \(0.0, 0.1\); expected numbers in \(0, 1\).*: the model alone"),
    ],
)
def test_constructor_errors(how, message):
    with pytest.raises(FastWeightError, match=message):
        NeuralCache(**how)


def test_call_errors(rng):
    x, labels, logits, losses = problem(rng, 6, B=2)
    wrong = {
        r"labels has shape \(2, 5\); expected \(2, 6\): one per token": lambda: cache.score(x, labels[:, 1:], losses),
        "labels has dtype torch.float64; expected integers": lambda: cache.score(x, losses, losses),
        "mask has dtype torch.int64; expected bool": lambda: cache.score(x, labels, losses, mask=labels),
        r"x has shape \(2, 6\)": lambda: cache.score(x[..., 0], labels, losses),
        r"cu_seqlens is \[0, 3\]": lambda: cache.score(x, labels, losses, cu_seqlens=torch.tensor([0, 3])),
        "state is a tuple; expected a CacheState": lambda: cache.score(x, labels, losses, (1, 2)),
        r"state holds keys of shape \(2, 6, 5\); expected \(1, 6, 5\): it belongs to another batch or model":
            lambda: cache.score(x[:1], labels[:1], losses[:1], cache.score(x, labels, losses)[1]),
        "state holds 6 tokens and 5 experts; expected at most 4 and 5: a stream goes on with the cache that began it":
            lambda: NeuralCache(4, **GRID).score(x, labels, losses, cache.score(x, labels, losses)[1]),
        "state is that of a stream, whose last token waits": lambda: cache.score(x, labels, losses, stream),
        r"logits has shape \(2, 7\); expected \(2, K, V\) with K from 1 to 6":
            lambda: cache.answer(x, labels, logits[:, 0]),
        "losses is missing with logits of 2 of 6 tokens": lambda: cache.answer(x, labels, logits[:, -2:]),
        "logits are missing for the last real token of a row": lambda: cache.answer(
            x, labels, logits[:, -2:], losses=losses, mask=torch.tensor([[True] * 3 + [False] * 3] * 2)),
    }  # fmt: skip
    _, stream = cache.answer(x, labels, logits)
    assert isinstance(stream, CacheState)
    for message, call in wrong.items():
        with pytest.raises(FastWeightError, match=message):
            call()
