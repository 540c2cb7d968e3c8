"""Random calls of `FWLBlock` in three frameworks: as explicit updates of each document alone, in float64; or refused.

A case is a function of its number: the block's arguments (published or refreshed, held or cumulative, steps, decay,
clipping, normaliser, chunks), shapes, dtype, labels as numbers or one-hot, weights, packing, a cut into two calls or
into single tokens. One in six is spoiled on purpose.

The reference updates explicit parameters by autograd's gradients, token by token (fwl_oracle.py). It knows no clipping
and no delta rule; those, and the published layer's decay, are compared with the same block read token by token.
"""

import itertools
import os

import numpy as np
import torch
from fwl_backends import SIZE, D, V
from fwl_oracle import oracle, refreshed, steps_of
from torch import nn

from fastweights.core import FastWeightError
from fastweights.torch import FWLBlock, export_parameters, import_parameters
from reliability.attention_cases import relative
from reliability.properties import EPS

ARGUMENTS = dict(attn_chunks=0, normalizer="text", rule="deltas", decay=1.5, clip=0.0, refresh=0, within="between")
CALLS = ("width", "labels", "weights", "vocabulary", "negative weight", "state", "previous label")


class Torch:
    def make(self, arguments, dtype, weights):
        """(block, array): its `run` and `step` as every framework has them, and what makes its arrays."""
        block = FWLBlock(SIZE, V, **arguments, inputs=D, dtype=getattr(torch, dtype))
        import_parameters(block, weights)
        return block, torch.tensor

    def numpy(self, x):
        return x.detach().numpy()


class Other:
    """Flax or Keras, as the tests of Fast Weight Layers reach them."""

    def __init__(self, name):
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import fwl_backends

        self.inner = fwl_backends.FRAMEWORKS[name]()
        self.numpy = self.inner.numpy

    def make(self, arguments, dtype, weights):
        return self.inner.make({n: w.astype(dtype) for n, w in weights.items()}, dtype, **arguments), self.inner.array


FRAMEWORKS = dict(torch=Torch, jax=lambda: Other("jax"), keras=lambda: Other("keras"))


def choose(rng):
    """Arguments of a block; a refreshed one with the delta rule is refused."""
    one = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    refresh = one(None, None, 1, 2, 3, 5, 30)
    how = dict(refresh=refresh, within=one("held", "cumulative")) if refresh else dict(rule=one("sum", "sum", "delta"))
    if refresh and not rng.integers(8):
        how["rule"] = "delta"
    return how | dict(
        attn_chunks=one(None, 1, 2, 3, 100), normalizer=one(1.0, 3.0, 7.5, "batch", "sequence"),
        decay=one(None, None, 0.9, 1.0), clip=one(None, None, 0.1), fast_bias=one(True, True, False),
        shared_norm_step=one(False, False, True), log_steps=one(False, False, True), hidden=one(None, None, 3),
        step_size=one(0.05, 0.3), first_order=one(False, True),
    )  # fmt: skip


def make_block(rng, arguments, dtype):
    """A float64 block whose numbers are those of the dtype; every step and bias its own."""
    block = FWLBlock(SIZE, V, **arguments, inputs=D, dtype=torch.float64)
    with torch.no_grad():
        for name in ("bias1", "bias2", "shift", "unembed_bias"):
            getattr(block, name).copy_(torch.tensor(rng.standard_normal(getattr(block, name).shape) / 2))
        block.steps.add_(torch.tensor(0.02 * rng.random(6)))
    return block.to(getattr(torch, dtype)).double()


def expected(arguments, weights, x, labels, share, totals, texts):
    """Losses (B, T) of every document by itself.  totals: what the losses of each document are divided by."""
    losses = np.zeros(labels.shape)
    for (row, at), total in zip(texts, totals, strict=True):
        if not len(at):
            continue
        block = FWLBlock(SIZE, V, **arguments | dict(normalizer=total), inputs=D, dtype=torch.float64)
        import_parameters(block, weights)
        own = [torch.tensor(a[row : row + 1, at]) for a in (x, labels, share)]
        c = block.config
        if c.refresh is not None and c.clip is None:
            found = refreshed(block, *own)
        elif c.refresh is None and (c.rule, c.decay, c.clip) == ("sum", None, None):
            found = cross_entropy(oracle(block, *own, [total], steps_of(block)), own[1])
        else:
            found = cross_entropy(token_by_token(block, *own), own[1])
        losses[row, at] = found[0].detach().numpy()
    return losses


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def token_by_token(block, x, labels, share):
    """Logits (B, T, V) of a stream, in which each label is told with the next token."""
    state, found = block.init_state(x.shape[0]), []
    for t in range(x.shape[1]):
        label, weight = (None, None) if not t else (labels[:, t - 1], share[:, t - 1])
        logits, state = block.step(x[:, t], label, state, weight)
        found.append(logits)
    return torch.stack(found, 1)


def check(framework, number):
    """Try one case; returns what became of it, or raises AssertionError."""
    rng = np.random.default_rng([number, 2])
    one = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    torch.manual_seed(number)
    torch.set_default_dtype(torch.float64)  # as the oracle expects
    try:
        arguments, dtype = choose(rng), one("float64", "float32")
        B, T, how = int(rng.integers(1, 4)), int(rng.integers(1, 13)), {}
        if not rng.integers(3):
            B, N = 1, int(rng.integers(1, 5))
            how["cu_seqlens"] = np.r_[0, np.sort(rng.integers(0, T + 1, N - 1)), T].astype(np.int64)
        x, labels = rng.standard_normal((B, T, D)), rng.integers(V, size=(B, T))
        share = rng.choice([0.0, 0.5, 1.0, 1.0, 1.0], (B, T))
        if not rng.integers(6):
            return _refused(framework, number, rng, arguments, dtype, x, labels, share, how)
        return _equal(framework, number, rng, arguments, dtype, x, labels, share, how)
    finally:
        torch.set_default_dtype(torch.float32)


def _refused(framework, number, rng, arguments, dtype, x, labels, share, how):
    names = [*ARGUMENTS, *CALLS]
    what = names[int(rng.integers(len(names)))]
    arguments = arguments | dict(rule="sum", normalizer=3.0)
    weights = export_parameters(make_block(rng, arguments, dtype))
    more = {}
    if what in ARGUMENTS:
        arguments |= {what: ARGUMENTS[what]}
    elif what == "width":
        x = np.concatenate([x, x], -1)
    elif what == "labels":
        labels = labels[:, None]
    elif what == "weights":
        share = share[:, :0]
    elif what == "vocabulary":
        labels = labels + V
    elif what == "negative weight":
        share = share - 2
    try:
        block, array = framework.make(arguments, dtype, weights)
        if what == "state":
            more["state"] = block.init_state(len(x) + 7)
        elif what == "previous label":
            more["previous_label"] = array(labels[:, 0])
        how = {n: array(a) for n, a in how.items()}
        block.run(array(x.astype(dtype)), array(labels), array(share.astype(dtype)), **more, **how)
    except FastWeightError:
        return "refused"
    raise AssertionError(f"case {number}: {what} was spoiled and nothing was said: {arguments} {how}")


def _equal(framework, number, rng, arguments, dtype, x, labels, share, how):
    T = x.shape[1]
    cut = int(rng.integers(1, T)) if T > 1 and not how and not isinstance(arguments["normalizer"], str) else None
    stream = cut is not None and not rng.integers(3)
    if cut is not None and not stream:
        share[:, cut - 1] = 1.0  # the label that is told with the second part
    try:
        block = make_block(rng, arguments, dtype)
    except FastWeightError:  # then by everyone
        block = None
    if block is None:
        try:
            framework.make(arguments, dtype, export_parameters(make_block(rng, arguments | dict(rule="sum"), dtype)))
        except FastWeightError:
            return "refused"
        raise AssertionError(f"case {number}: a combination was refused by PyTorch alone: {arguments}")
    weights, x = export_parameters(block), x.astype(dtype).astype(np.float64)
    if "cu_seqlens" in how:
        texts = [(0, np.arange(a, b)) for a, b in itertools.pairwise(how["cu_seqlens"])]
    else:
        texts = [(i, np.arange(T)) for i in range(len(x))]
    normalizer = arguments["normalizer"]
    sums = dict(batch=lambda row, at: share.sum(), sequence=lambda row, at: share[row, at].sum())
    total = sums.get(normalizer, lambda row, at: normalizer)
    totals = [max(float(total(*text)), 1e-8) for text in texts]
    wanted = expected(arguments, weights, x, labels, share, totals, texts)
    far = 0.0
    for _ in range(2):
        moved = {n: relative(rng, w, dtype) for n, w in weights.items()}
        near = expected(arguments, moved, relative(rng, x, dtype), labels, share, totals, texts)
        far = max(far, np.abs(near - wanted).max())
    made, array = framework.make(arguments, dtype, weights)
    given = [array(x.astype(dtype)), array(labels), array(share.astype(dtype))]
    number_of = lambda a: np.asarray(framework.numpy(a), np.float64)  # noqa: E731
    if stream:
        known, state = [framework.numpy(a) for a in given], made.init_state(len(x))
        got = []
        for t in range(T):
            told = (None, state, None) if not t else (array(known[1][:, t - 1]), state, array(known[2][:, t - 1]))
            logits, state = made.step(array(known[0][:, t]), *told)
            got.append(number_of(logits))
        got = cross_entropy(torch.tensor(np.stack(got, 1)), torch.tensor(labels)).numpy()
    elif cut is not None:
        first = [a[:, :cut] for a in (x.astype(dtype), labels, share.astype(dtype))]
        first[2] = np.concatenate([first[2][:, :-1], 0 * first[2][:, -1:]], 1)  # not known yet
        one = made.run(*map(array, first))
        rest = [array(a[:, cut:]) for a in (x.astype(dtype), labels, share.astype(dtype))]
        two = made.run(*rest, one.state, previous_label=array(labels[:, cut - 1]))
        got = np.concatenate([number_of(one.loss), number_of(two.loss)], 1)
    else:
        if not rng.integers(3):
            given[1] = array(np.eye(V)[labels].astype(dtype))
        out = made.run(*given, **{n: array(a) for n, a in how.items()})
        got = number_of(out.loss)
        logits = torch.tensor(number_of(out.logits))
        assert np.abs(cross_entropy(logits, torch.tensor(labels)).numpy() - got).max() <= 64 * EPS[dtype] * max(
            1.0, np.abs(got).max()
        ), f"case {number}: the loss is not that of the logits"
    allowed = 16 * far + 64 * EPS[dtype] * max(1.0, np.abs(wanted).max())
    error = np.abs(got - wanted).max()
    assert error <= allowed, f"case {number}: loss is {error:.3g} off, allowed {allowed:.3g}; {dtype} {arguments} {how}"
    return dtype
