"""The sequential networks: Ba 2016 and the classic programmer are the recurrences of their papers."""

import pytest
import torch
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.torch import FastWeightProgrammer, FastWeightRNN


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("T", [1, 6, 7, 20])
@pytest.mark.parametrize("inner_steps", [0, 1, 3])
def test_fast_weight_rnn_is_the_paper_s_recurrence(inner_steps, T):
    """Both forms, attention over the past and the matrix, against the equations written out with A."""
    torch.set_default_dtype(torch.float64)
    try:
        rnn = FastWeightRNN(3, 7, inner_steps=inner_steps, decay=0.9, rate=0.5)
        x = torch.randn(2, T, 3)
        h, A, want = torch.zeros(2, 7), torch.zeros(2, 7, 7), []
        for t in range(T):
            b = h @ rnn.W + x[:, t] @ rnn.C + rnn.bias
            h = torch.relu(b)
            for _ in range(inner_steps):
                h = torch.relu(rnn.norm(b + torch.einsum("bij,bj->bi", A, h)))
            A = 0.9 * A + 0.5 * torch.einsum("bi,bj->bij", h, h)
            want.append(h)
        got, state = rnn(x)
        assert_close(got.detach().numpy(), torch.stack(want, 1).detach().numpy())
        assert_close(state.A.detach().numpy(), A.detach().numpy())
        first, middle = rnn(x[:, : T // 2])
        rest, last = rnn(x[:, T // 2 :], middle)
        assert_close(torch.cat([first, rest], 1).detach().numpy(), got.detach().numpy())
        assert_close(last.A.detach().numpy(), A.detach().numpy())
    finally:
        torch.set_default_dtype(torch.float32)


def test_short_rnn_calls_keep_no_matrix_per_step():
    """What autograd saves for T = 8 tokens at width 128 is less than one matrix per token."""
    rnn, x = FastWeightRNN(4, 128), torch.randn(2, 8, 4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        rnn(x)[0].sum()
    assert max(saved) <= 128 * 128  # W; a batch of matrices would be twice that
    assert sum(n for n in saved if n == 2 * 128 * 128) == 0


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("activation", ["tanh", "identity", "relu", "sigmoid", torch.sin])
def test_programmer_is_the_classic_recurrence(activation, width):
    """W_t = sigma(W_{t-1} + a_t (x) b_t), y_t = W_t x_t with the same x, or with another projection of it."""
    programmer = FastWeightProgrammer(3, 4, width=width, activation=activation, dtype=torch.float64)
    f = activation if callable(activation) else getattr(torch, activation, lambda x: x)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    projected = x @ programmer.slow.weight.mT
    a, b, fast = projected.split([4, 2, 2], -1) if width else (*projected.split([4, 3], -1), x)
    W, want = torch.zeros(2, 4, width or 3, dtype=x.dtype), []
    for t in range(6):
        W = f(W + torch.einsum("bi,bj->bij", a[:, t], b[:, t]))
        want.append(torch.einsum("bij,bj->bi", W, fast[:, t]))
    got, final = programmer(x)
    assert_close(got.detach().numpy(), torch.stack(want, 1).detach().numpy())
    first, middle = programmer(x[:, :2])
    rest, last = programmer(x[:, 2:], middle)
    assert_close(torch.cat([first, rest], 1).detach().numpy(), got.detach().numpy())
    assert_close(last.detach().numpy(), final.detach().numpy())


def test_sequential_layer_errors():
    with pytest.raises(FastWeightError, match="activation is 'gelu'; expected 'identity', 'relu', 'tanh'"):
        FastWeightProgrammer(3, 4, activation="gelu")
    with pytest.raises(FastWeightError, match=r"decay is 1.5; expected a number in \[0, 1\]"):
        FastWeightRNN(3, 4, decay=1.5)
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 5, 4\); expected \(B, T, 3\)"):
        FastWeightRNN(3, 4)(torch.zeros(2, 5, 4))


@pytest.mark.parametrize("make", [lambda: FastWeightRNN(3, 4), lambda: FastWeightProgrammer(3, 4)])
def test_a_state_of_another_batch_or_network_is_refused(make):
    """Batches of 1 and 2 would broadcast without a word."""
    network = make()
    _, state = network(torch.zeros(2, 5, 3))
    with pytest.raises(FastWeightError, match=r"state\.\w has shape \(2, .*expected \(1, .*of the same batch"):
        network(torch.zeros(1, 5, 3), state)
    with pytest.raises(FastWeightError, match=r"state.* expected"):
        network(torch.zeros(2, 5, 3), torch.zeros(2, 4))
