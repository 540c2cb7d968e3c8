"""The neural cache of constant size, by a loop in NumPy."""

import itertools

import numpy as np
import pytest
import torch
from test_cache import losses_of, problem

from fastweights.core import FastWeightError
from fastweights.torch import FeatureCache

V, DECAYS, SHARES = 7, (1.0, 0.8), (0.1, 0.4)
cache = FeatureCache(V, features="relu", decays=DECAYS, shares=SHARES)


def oracle(x, labels, losses):
    """Losses (T,) of the mixture for one text, token by token."""
    phi = np.maximum(x / np.linalg.norm(x, axis=-1, keepdims=True), 0)
    S = np.zeros((len(DECAYS), x.shape[1], V))
    likelihood, found = np.zeros(1 + len(DECAYS) * len(SHARES)), []
    for k, y, loss in zip(phi, labels, losses, strict=True):
        p = np.exp(-loss)
        experts = [p]
        for a in range(len(DECAYS)):
            answer = k @ S[a]
            hit = answer[y] / answer.sum() if answer.sum() else p
            experts += [(1 - s) * p + s * hit for s in SHARES]
        weights = np.exp(likelihood - likelihood.max())
        found.append(-np.log(weights @ experts / weights.sum()))
        likelihood += np.log(experts)
        S = np.array(DECAYS)[:, None, None] * S
        S[:, :, y] += k
    return np.array(found)


def want(x, labels, losses):
    return np.stack([oracle(*row) for row in zip(x.numpy(), labels.numpy(), losses.numpy(), strict=True)])


def close(got, wanted):
    np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [[300], [7, 0, 293], [1] * 40])
def test_any_split_matches_the_oracle(rng, cuts):
    x, labels, _, losses = problem(rng, sum(cuts), B=2)
    parts, state = [], None
    for part in zip(*(a.split(cuts, 1) for a in (x, labels, losses)), strict=True):
        got, state = cache.score(*part, state)
        parts.append(got)
        assert state.memory.shape == (2, 2, 5, V + 1)  # of one size, whatever was read
    close(torch.cat(parts, 1), want(x, labels, losses))


def test_padding_and_packing(rng):
    x, labels, _, losses = problem(rng, 40, B=2)
    mask = torch.from_numpy(rng.random((2, 40)) < 0.6)
    got, _ = cache.score(torch.where(mask[..., None], x, torch.nan), labels, losses, mask=mask)
    assert torch.equal(got[~mask], losses[~mask])
    for row in range(2):
        real = [a[row, mask[row]][None] for a in (x, labels, losses)]
        close(got[row, mask[row]][None], want(*real))
    ends = [0, 9, 9, 40]
    got, _ = cache.score(x[:1], labels[:1], losses[:1], cu_seqlens=torch.tensor(ends))
    for a, b in itertools.pairwise(ends):
        if b > a:
            close(got[:, a:b], want(x[:1, a:b], labels[:1, a:b], losses[:1, a:b]))


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 32]])
def test_a_stream_answers_what_scoring_finds(rng, cuts):
    x, labels, logits, losses = problem(rng, 40, B=2)
    tokens = torch.cat([labels[:, -1:], labels[:, :-1]], 1)
    parts, state = [], None
    for part in zip(*(a.split(cuts, 1) for a in (x, tokens, logits)), strict=True):
        got, state = cache.answer(*part, state)
        parts.append(got)
    close(losses_of(torch.cat(parts, 1), labels), want(x, labels, losses))
    assert torch.equal(parts[0][:, 0], logits[:, 0])
    before = torch.cat([losses[:, -1:], losses[:, :-1]], 1)
    last, _ = cache.answer(x, tokens, logits[:, -2:], losses=before)
    torch.testing.assert_close(last, torch.cat(parts, 1)[:, -2:])


def test_probabilities_sum_to_one(rng):
    x, labels, logits, losses = problem(rng, 30)
    _, state = cache.score(x[:, :-1], labels[:, :-1], losses[:, :-1])
    own = lambda y: losses_of(logits[:, -1:], y)  # noqa: E731
    every = [torch.tensor([[label]]) for label in range(V)]
    chances = [float(cache.score(x[:, -1:], y, own(y), state)[0].neg().exp()) for y in every]
    assert abs(sum(chances) - 1) < 1e-12


def test_mistakes_are_told(rng):
    x, labels, logits, losses = problem(rng, 6)
    wrong = {
        "vocab_size is 49152; expected 1 to 8192.*use NeuralCache": lambda: FeatureCache(49152),
        "features is 'identity'; expected 'relu', 'elu": lambda: FeatureCache(9, features="identity"),
        r"decays is \(1.5,\); expected numbers in \(0, 1\]": lambda: FeatureCache(9, decays=(1.5,)),
        r"shares is \(\); expected numbers in": lambda: FeatureCache(9, shares=()),
        "state is a int; expected a FeatureCacheState": lambda: cache.score(x, labels, losses, 3),
        r"state holds a memory of \(1, 2, 5, 8\); expected \(2, 2, 5, 8\)":
            lambda: cache.score(*(torch.cat([a, a]) for a in (x, labels, losses)), cache.score(x, labels, losses)[1]),
        "state is that of a stream": lambda: cache.score(x, labels, losses, cache.answer(x, labels, logits)[1]),
        r"logits has shape \(1, 6, 6\); expected \(1, K, 7\)": lambda: cache.answer(x, labels, logits[..., 1:]),
        "losses is missing with logits of 2 of 6": lambda: cache.answer(x, labels, logits[:, -2:]),
    }  # fmt: skip
    for message, call in wrong.items():
        with pytest.raises(FastWeightError, match=message):
            call()
