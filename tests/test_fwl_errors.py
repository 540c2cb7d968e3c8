"""What Fast Weight Layers of Flax and Keras refuse, in the words of PyTorch's."""

import numpy as np
import pytest
from fwl_backends import SIZE, B, D, T, Torch, V, any_framework, problem  # noqa: F401

from fastweights import FastWeightError

CALLS = [
    (lambda x, y, w: (x, y + V, w), "labels has .*; expected 0 to 4: vocab_size is 5"),
    (lambda x, y, w: (x, y - V, w), "labels has -5; expected 0 to 4"),
    (lambda x, y, w: (x, np.zeros((B, T, 6)), w), r"labels has shape \(2, 9, 6\); expected \(B, T, 5\) for one-hot"),
    (lambda x, y, w: (x, y[:, :3], w), r"labels has shape \(2, 3\); expected \(2, 9\): one per token of x"),
    (lambda x, y, w: (x, y[:, 0], w), r"labels has shape \(2,\); expected \(2, 9\): one per token of x"),
    (lambda x, y, w: (x, y, w[:1]), r"weights has shape \(1, 9\); expected \(2, 9\)"),
    (lambda x, y, w: (x, y, -w), "weights has -.*; expected finite numbers of at least 0"),
    (lambda x, y, w: (x, y, w * np.nan), "weights has nan; expected finite numbers of at least 0"),
    (lambda x, y, w: (x[:0], y[:0], w[:0]), r"x has shape \(0, 9, 3\); expected at least one"),
    (lambda x, y, w: (x[..., :2], y, w), r"x has shape \(2, 9, 2\); expected \(B, T, 3\)"),
]


@pytest.mark.parametrize(("change", "message"), CALLS)
def test_call_errors(framework, rng, change, message):
    block = framework.make(Torch().weights)
    with pytest.raises(FastWeightError, match=message):
        block.run(*change(*problem(rng)))


def test_other_errors(framework, rng):
    make, weights, cls = framework.make, Torch().weights, framework.fw.FWLBlock
    block = make(weights, normalizer=4.0)
    with pytest.raises(FastWeightError, match=r"state.dense1 has shape \(3, 1, 4, 16\); expected \(2, 1, 4, 16\): x"):
        block.run(*problem(rng), state=block.init_state(3))
    with pytest.raises(FastWeightError, match=r"expected \(2, 1, 5, 16\): the state of another block"):
        block.step(rng.standard_normal((B, D + 1)), None, block.init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number of tokens for step"):
        make(weights).step(rng.standard_normal((B, D)), None, block.init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'mean'; expected 'batch', 'sequence' or a number"):
        cls(SIZE, V, normalizer="mean")
    with pytest.raises(FastWeightError, match="inputs is not known yet; expected FWLBlock"):
        cls(SIZE, V).init_state(2)
    assert repr(cls(SIZE, V)) == "FWLBlock(4, 5, attn_chunks=None, normalizer='batch', rule='sum')"
