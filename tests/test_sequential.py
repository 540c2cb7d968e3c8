"""The sequential networks: Ba 2016 and the classic programmer are the recurrences of their papers."""

import pytest
import torch
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.torch import FastWeightProgrammer, FastWeightRNN
from fastweights.torch.tree import map_tensors


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


def alone(network, tokens, state=None):
    """Outputs (T, width) and the state of one sequence (T, inputs), token by token, with `step`."""
    outputs = [torch.zeros(0, network(tokens[None, :0])[0].shape[-1], dtype=tokens.dtype)]
    state = network(tokens[None, :0], state)[1]
    for token in tokens:
        y, state = network.step(token[None], state)
        outputs.append(y)
    return torch.cat(outputs), state


def row(state, i):
    """The state of one sequence."""
    return tuple(part[i : i + 1] for part in state) if isinstance(state, tuple) else state[i : i + 1]


def same(got, want):
    for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy())


NETWORKS = [
    lambda: FastWeightRNN(3, 40, inner_steps=2, decay=0.8, rate=0.3, dtype=torch.float64),  # attends to its past
    lambda: FastWeightRNN(3, 4, inner_steps=2, decay=0.8, dtype=torch.float64),
    lambda: FastWeightProgrammer(3, 4, dtype=torch.float64),
    lambda: FastWeightProgrammer(3, 4, width=5, activation="sigmoid", dtype=torch.float64),
]


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("carried", [False, True])
def test_padding_and_packing_are_each_sequence_alone(make, carried):
    network, lengths, T = make(), [4, 0, 7, 1], 9
    before = network(torch.randn(4, 3, 3).double())[1] if carried else None
    texts = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    want = [alone(network, text, None if before is None else row(before, i)) for i, text in enumerate(texts)]
    x, mask = torch.full((4, T, 3), torch.nan, dtype=torch.float64), torch.zeros(4, T, dtype=torch.bool)
    for i, n in enumerate(lengths):  # padding on both sides and inside
        mask[i, torch.randperm(T)[:n].sort().values] = True
        x[i, mask[i]] = texts[i]
    x.requires_grad_()
    y, state = network(x, before, mask=mask)
    assert (y[~mask] == 0).all()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed, packed_state = network(torch.cat(texts)[None], before, cu_seqlens=cu)
    for i, (outputs, last) in enumerate(want):
        same(y[i, mask[i]], outputs)
        same(packed[0, cu[i] : cu[i + 1]], outputs)
        same(row(state, i), last)
        same(row(packed_state, i), last)
    grads = torch.autograd.grad(y.sin().sum() + sum(a.sum() for a in state), [x, *network.parameters()])
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][~mask] == 0).all()
    low, at = network.to(torch.bfloat16), lambda s: None if s is None else map_tensors(lambda a: a.bfloat16(), s)
    assert low(x.detach().bfloat16(), at(before), mask=mask)[0].dtype == torch.bfloat16
    network.to(torch.float64)
    empty, same_state = network(torch.zeros(1, 0, 3).double(), before, cu_seqlens=torch.zeros(5, dtype=torch.long))
    assert empty.shape == (1, 0, y.shape[-1])
    if carried:
        same(same_state, before)


def test_sequential_layer_errors():
    with pytest.raises(FastWeightError, match="activation is 'gelu'; expected 'identity', 'relu', 'tanh'"):
        FastWeightProgrammer(3, 4, activation="gelu")
    with pytest.raises(FastWeightError, match=r"decay is 1.5; expected a number in \[0, 1\]"):
        FastWeightRNN(3, 4, decay=1.5)
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 5, 4\); expected \(B, T, 3\)"):
        FastWeightRNN(3, 4)(torch.zeros(2, 5, 4))
    for network in (FastWeightRNN(3, 4), FastWeightProgrammer(3, 4)):
        x = torch.zeros(2, 5, 3)
        with pytest.raises(FastWeightError, match=r"mask is float32 \(2, 5\); expected bool \(2, 5\)"):
            network(x, mask=torch.ones(2, 5))
        with pytest.raises(FastWeightError, match="x has batch 2 with cu_seqlens; expected 1"):
            network(x, cu_seqlens=torch.tensor([0, 5]))
        with pytest.raises(FastWeightError, match="cu_seqlens ends at 4; expected T = 5"):
            network(x[:1], cu_seqlens=torch.tensor([0, 4]))
        with pytest.raises(FastWeightError, match="mask is given together with cu_seqlens; expected one"):
            network(x[:1], cu_seqlens=torch.tensor([0, 5]), mask=torch.ones(1, 5, dtype=torch.bool))
        with pytest.raises(FastWeightError, match=r"state\.\w has shape \(2, .*expected \(1, "):
            network(x[:1], network(x)[1], cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize("make", [lambda: FastWeightRNN(3, 4), lambda: FastWeightProgrammer(3, 4)])
def test_a_state_of_another_batch_or_network_is_refused(make):
    """Batches of 1 and 2 would broadcast without a word."""
    network = make()
    _, state = network(torch.zeros(2, 5, 3))
    with pytest.raises(FastWeightError, match=r"state\.\w has shape \(2, .*expected \(1, .*of the same batch"):
        network(torch.zeros(1, 5, 3), state)
    with pytest.raises(FastWeightError, match=r"state.* expected"):
        network(torch.zeros(2, 5, 3), torch.zeros(2, 4))
