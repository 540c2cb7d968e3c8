"""Refreshed Fast Weight Layers of Flax and Keras are those of PyTorch: outputs, states, streams and gradients."""

import numpy as np
import pytest
from fwl_backends import SIZE, B, T, Torch, V, any_framework, problem, skip_on_keras_jax  # noqa: F401
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.refresh import RefreshState

NAMES = ["logits", "loss", "slow_loss", "dense1", "dense2", "norm", "pending", "shares"]  # those with gradients
HOW = dict(normalizer=5.0, refresh=4)
FORMS = [dict(), dict(within="cumulative", decay=0.9, clip=0.2), dict(log_steps=True, first_order=True)]


def floats(out):
    """An FWLOutput as a list, without labels and counts."""
    s = out.state
    return [out.logits, out.loss, out.slow_loss, s.dense1, s.dense2, s.norm, s.pending, s.shares]


def reference_run(reference, x, labels, weights, state=None, cu_seqlens=None):
    tensor = reference.torch.tensor
    x = tensor(x).requires_grad_()
    cu = None if cu_seqlens is None else tensor(cu_seqlens)
    return x, reference.block.run(x, tensor(labels), tensor(weights), state, cu_seqlens=cu)


@pytest.mark.parametrize(("form", "packed"), [(form, False) for form in FORMS] + [(FORMS[1], True)],
                         ids=["held", "cumulative", "log", "packed"])  # fmt: skip
def test_is_torchs(framework, rng, form, packed):
    """From nothing and from a state in which tokens wait; gradients of x and of all parameters."""
    if packed or form:
        skip_on_keras_jax(framework)
    if "first_order" in form and hasattr(framework, "keras"):
        pytest.skip("Flax runs the same code, and TensorFlow is slow to trace it")
    how = HOW | form
    reference = Torch(**how)
    cu = np.array([0, 5, 6, 6, 14]) if packed else None
    first, second = (problem(rng, *((1, 14) if packed else (B, T))) for _ in range(2))
    if packed:
        first[2][:], second[2][:] = 1, 1
    _, before = reference_run(reference, *first, cu_seqlens=cu)
    x, after = reference_run(reference, *second, before.state, cu)
    want = [*floats(before), *floats(after)]
    cotangents = [rng.standard_normal(a.shape) for a in want]
    total = sum((a * reference.torch.tensor(c)).sum() for a, c in zip(want, cotangents, strict=True))
    of = [x, *reference.block.parameters()]
    want_gradients = [g.numpy() for g in reference.torch.autograd.grad(total, of)]
    block = framework.make(reference.weights, **how)
    arrays = [[framework.array(a) for a in part[1:]] for part in (first, second)]
    more = {} if cu is None else dict(cu_seqlens=framework.array(cu))

    def run(block, x):
        one = block.run(framework.array(first[0]), *arrays[0], **more)
        two = block.run(x, *arrays[1], one.state, **more)
        return [*floats(one), *floats(two)]

    got, gradients = framework.pull_block(block, run, [second[0]], cotangents)
    for name, a, b in zip(NAMES * 2, got, want, strict=True):
        assert_close(a, b.detach().numpy(), name=name)
    for name, a, b in zip(["x", *reference.weights], gradients, want_gradients, strict=True):
        assert_close(a, b, name=f"gradient of {name}")


def test_streams(framework, rng):
    """Token by token, and cut in two with the label of the last token unknown until the second part."""
    skip_on_keras_jax(framework)
    how = HOW | dict(within="cumulative", decay=0.9)
    block = framework.make(Torch(**how).weights, **how)
    x, labels, _ = problem(rng)
    weights = np.ones((B, T))
    weights[:, -1] = 0
    run, step = framework.compiled(block.run), framework.compiled(block.step)
    want = run(x, labels, weights)
    state = block.init_state(B)
    for t in range(T):
        label = framework.array(labels[:, t - 1]) if t else None
        logits, state = step(framework.array(x[:, t]), label, state)
        assert_close(framework.numpy(logits), framework.numpy(want.logits)[:, t])
    cut = framework.compiled(lambda x, y, w, state, label: block.run(x, y, w, state, previous_label=label))
    known = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]] * B)
    first = run(x[:, :5], labels[:, :5], known)
    rest = cut(x[:, 5:], labels[:, 5:], weights[:, 5:], first.state, framework.array(labels[:, 4]))
    assert_close(framework.numpy(rest.logits), framework.numpy(want.logits)[:, 5:])
    for name, a, b, c in zip(RefreshState._fields, state, rest.state, want.state, strict=True):
        for got in (a, b):
            if name == "labels":  # one that is unknown may be anything
                got, c = (y * (framework.numpy(want.state.shares) > 0) for y in map(framework.numpy, (got, c)))
            np.testing.assert_allclose(framework.numpy(got), framework.numpy(c), atol=1e-9, rtol=0, err_msg=name)


def test_errors(framework, rng):
    block = framework.make(Torch(**HOW).weights, **HOW)
    with pytest.raises(FastWeightError, match="refresh is 0; expected a whole number of tokens, at least 1"):
        framework.fw.FWLBlock(SIZE, V, refresh=0)
    other = framework.make(Torch(**HOW | dict(refresh=8)).weights, **HOW | dict(refresh=8))
    with pytest.raises(FastWeightError, match="stream with refresh=8; expected refresh=4"):
        block.run(*problem(rng), other.init_state(B))
    with pytest.raises(FastWeightError, match=r"state.dense1 has shape \(3, 1, 4, 16\); .* x has 2 sequences"):
        block.run(*problem(rng), block.init_state(3))
    for offsets, why in (
        ([0, 5, 3, 9], "falls from 5 to 3"),
        ([0, 8], "ends at 8; expected T = 9"),
        ([[0, 9]], "shape"),
    ):
        with pytest.raises(FastWeightError, match=f"cu_seqlens .*{why}"):
            block.run(*problem(rng, 1, 9), cu_seqlens=framework.array(np.array(offsets)))
    plain = framework.make(Torch(normalizer=5.0).weights, normalizer=5.0)
    with pytest.raises(FastWeightError, match="stream with refresh=4; expected one of refresh=None"):
        plain.run(*problem(rng), block.init_state(B))
    assert repr(framework.fw.FWLBlock(SIZE, V, refresh=4)).endswith("refresh=4, within='held')")
