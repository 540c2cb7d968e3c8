"""Fast Weight Layers of Flax and Keras are those of PyTorch: same weights, same logits, losses, states and gradients.

Keras takes one backend per process, so test_keras.py runs this file once for each. One of them, here and now:
`KERAS_BACKEND=jax pytest --frameworks keras tests/test_fwl_frameworks.py`.
"""

import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
from fwl_backends import (  # noqa: F401
    NAMES,
    ROOT,
    SIZE,
    B,
    T,
    Torch,
    V,
    any_framework,
    flat,
    head_with_all_logits,
    problem,
    skip_on_keras_jax,
)
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.fwl_config import FWLState


def learned(printed):
    """Whether an example says that learning from the document lowers the loss."""
    before, after = (float(line.split(": ")[1]) for line in printed.splitlines())
    return after < before - 0.2


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_examples_run(pytestconfig, capsys, name):
    """Keras on torch, which has nothing to compile; on its other backends test_fwl_keras.py trains a model."""
    on_keras = "keras" in pytestconfig.getoption("--frameworks").split(",")
    if on_keras != (name == "keras") or (on_keras and os.environ["KERAS_BACKEND"] != "torch"):
        pytest.skip("run by another process")
    runpy.run_path(str(ROOT / f"examples/fwl_{name}.py"))["main"](steps=40)
    assert learned(capsys.readouterr().out)


def test_example_of_jax_runs(pytestconfig):
    """In a process of its own: here float64 may be on."""
    if "keras" in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("once is enough")
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "examples/fwl_jax.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert learned(run.stdout)


def compare(framework, rng, *, dtype="float64", carried=0, cu_seqlens=None, **arguments):
    """Torch's block and this framework's on the same weights.  carried: tokens read before, whose state is given."""
    reference = Torch(dtype, **arguments)
    rows = B if cu_seqlens is None else 1
    x, labels, weights = problem(rng, rows, 9 if cu_seqlens is None else cu_seqlens[-1], dtype)
    state = None
    if carried:
        before = problem(rng, B if cu_seqlens is None else len(cu_seqlens) - 1, carried, dtype)
        state = reference.run(*before)[3:]
    cotangents = [rng.standard_normal(a.shape).astype(dtype) for a in reference.run(x, labels, weights, state,
                                                                                   cu_seqlens=cu_seqlens)]  # fmt: skip
    want, want_gradients = reference.run(x, labels, weights, state, cotangents, cu_seqlens)
    block = framework.make(reference.weights, dtype, **arguments)

    def run(block, x, *state):
        state = FWLState(*state) if state else None
        how = {} if cu_seqlens is None else dict(cu_seqlens=framework.array(np.asarray(cu_seqlens)))
        return flat(block.run(x, framework.array(labels), framework.array(weights), state, **how))

    got, gradients = framework.pull_block(block, run, [x, *(state or ())], cotangents)
    tolerance = {"float64": 1e-9, "float32": 1e-5}[dtype]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, tolerance, name=name)
    names = ["x", *(FWLState._fields if carried else ()), *reference.weights]
    for name, a, b in zip(names, gradients, want_gradients, strict=True):
        assert_close(a, b.astype(dtype), tolerance, name=f"gradient of {name}")
    assert any(np.abs(g).max() > 1e-3 for g in want_gradients)


def test_is_torchs(framework, rng):
    compare(framework, rng)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(fast_bias=False, shared_norm_step=True, normalizer="sequence", attn_chunks=None, hidden=6, bias=False,
             first_order=True, dtype="float32"),
        dict(normalizer=5.0, decay=0.8, clip=0.2, rule="delta", carried=3, attn_chunks=4),
    ],
    ids=["published", "delta"],
)  # fmt: skip
def test_arguments(framework, rng, arguments):
    skip_on_keras_jax(framework)
    compare(framework, rng, **arguments)


@pytest.mark.parametrize("normalizer", ["sequence", 6.0])
def test_packed(framework, rng, normalizer):
    """Documents of five tokens, one, none and eight; with a number as normaliser, from states of their own."""
    skip_on_keras_jax(framework)
    compare(framework, rng, normalizer=normalizer, decay=0.9, cu_seqlens=[0, 5, 6, 6, 14],
            carried=3 if normalizer == 6.0 else 0)  # fmt: skip


def test_packed_documents_do_not_leak(framework, rng):
    """Another first document leaves the others' logits and states as they were."""
    skip_on_keras_jax(framework)
    block = framework.make(Torch(normalizer="sequence").weights, normalizer="sequence")
    x, labels, weights = problem(rng, 1, 14)
    cu = np.array([0, 5, 6, 6, 14])
    run = framework.compiled(lambda *a: flat(block.run(*a, cu_seqlens=cu)))
    one = [framework.numpy(a) for a in run(x, labels, weights)]
    x, labels = np.concatenate([-x[:, :5], x[:, 5:]], 1), np.concatenate([4 - labels[:, :5], labels[:, 5:]], 1)
    two = [framework.numpy(a) for a in run(x, labels, weights)]
    for name, a, b in zip(NAMES, one, two, strict=True):
        a, b = (a[0, 5:], b[0, 5:]) if name in NAMES[:3] else (a[1:], b[1:])
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert np.abs(one[0][0, 1:5] - two[0][0, 1:5]).max() > 0.01


@pytest.mark.parametrize(("words", "dtype"), [(1, "float64"), (2, "float64"), (3, "float32"), (V, "float64")])
def test_head_in_blocks_is_the_head_with_all_logits(framework, rng, monkeypatch, words, dtype):
    """Also where blocks do not divide the vocabulary; gradients of the loss's gradient too."""
    framework.cut(monkeypatch, words, B * T)
    n, E, c = (rng.standard_normal(s).astype(dtype) for s in ((B, T, SIZE), (SIZE, V), (V,)))
    labels = framework.array(rng.integers(V, size=(B, T)).astype("int32"))
    cotangents = [rng.standard_normal(s).astype(dtype) for s in ((B, T), (B, T, SIZE), (B, T))]
    both = lambda n, E, c: [*framework.head.head(n, E, c, labels), framework.head.loss(n, E, c, labels)]  # noqa: E731

    def plain(n, E, c):
        loss, r = head_with_all_logits(framework.ops, n, E, c, labels)
        return loss, r, loss

    got, want = (framework.pull(f, [n, E, c], cotangents) for f in (both, plain))
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert_close(a, b, {"float64": 1e-9, "float32": 1e-5}[dtype])


def test_loss_is_the_mean_without_logits(framework, rng, monkeypatch):
    framework.cut(monkeypatch, 2, B * T)
    block = framework.make(Torch().weights)
    x, labels, weights = problem(rng)

    def all_losses(*a):
        without = block.run(*a, logits=False)
        assert without.logits is None
        return block.run(*a).loss, without.loss, block.loss(*a)

    want, got, mean = map(framework.numpy, framework.compiled(all_losses)(x, labels, weights))
    assert_close(got, want)
    assert_close(mean, (want * weights).sum() / weights.sum())


def test_slow_logits_and_one_hot_labels(framework, rng):
    reference = Torch()
    block = framework.make(reference.weights)
    x, labels, weights = problem(rng)
    want = reference.block.slow_logits(reference.torch.tensor(x)).detach().numpy()
    assert_close(framework.numpy(framework.compiled(block.slow_logits)(x)), want)
    hot = framework.numpy(framework.compiled(lambda *a: block(*a))(x, np.eye(V)[labels], weights))
    assert_close(hot, reference.run(x, labels, weights)[0])


def test_token_by_token_equals_the_parallel_pass(framework, rng):
    """From nothing, and from the state of a parallel pass over the first tokens."""
    block = framework.make(Torch().weights, normalizer=6.0, decay=0.8, clip=0.1, rule="delta")
    x, labels, weights = problem(rng)
    weights = (weights > 0).astype("float64")
    run, step = framework.compiled(block.run), framework.compiled(block.step)
    want = [framework.numpy(a) for a in flat(run(x, labels, weights))]
    known = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]] * B)  # the label of the fifth is not known yet
    for first, state in ((0, block.init_state(B)), (5, run(x[:, :5], labels[:, :5], known).state)):
        for t in range(first, T):
            label = framework.array(labels[:, t - 1]) if t else None
            logits, state = step(framework.array(x[:, t]), label, state)
            assert_close(framework.numpy(logits), want[0][:, t])
        for name, a, b in zip(FWLState._fields, state, want[3:], strict=True):
            assert_close(framework.numpy(a), b, name=name)


def test_a_stream_cut_in_two_is_the_whole(framework, rng):
    """The last label of the first part is the first token of the second."""
    skip_on_keras_jax(framework)
    block = framework.make(Torch().weights, normalizer=6.0, decay=0.8, clip=0.1, rule="delta")
    x, labels, _ = problem(rng)
    weights = np.ones((B, T))
    weights[:, -1] = 0
    cut = framework.compiled(lambda x, y, w, state, label: block.run(x, y, w, state, previous_label=label))
    run = framework.compiled(block.run)
    want = [framework.numpy(a) for a in flat(run(x, labels, weights))]
    known = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]] * B)  # the label of the fifth is not known yet
    first = run(x[:, :5], labels[:, :5], known)
    got = flat(cut(x[:, 5:], labels[:, 5:], weights[:, 5:], first.state, framework.array(labels[:, 4])))
    assert_close(framework.numpy(got[0]), want[0][:, 5:])
    for name, a, b in zip(FWLState._fields, got[3:], want[3:], strict=True):
        assert_close(framework.numpy(a), b, name=name)
    with pytest.raises(FastWeightError, match="previous_label is given without a state; expected both"):
        block.run(x, labels, weights, previous_label=labels[:, 0])


def test_make_labels(framework, rng):
    reference = Torch()
    tokens = np.array([[3, 1, 2, 0, 0], [1, 1, 2, 3, 4]])
    for pad_id, cu in ((None, None), (0, None), (None, [0, 2, 5]), (0, [0, 0, 2, 2, 5, 5])):
        rows = tokens if cu is None else tokens[1:]
        how = {} if cu is None else dict(cu_seqlens=np.array(cu))
        got = framework.fw.make_labels(rows, pad_id, **how)
        want = reference.make_labels(reference.torch.tensor(rows), pad_id,
                                     **{n: reference.torch.tensor(a) for n, a in how.items()})  # fmt: skip
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(framework.numpy(a), b.numpy())
