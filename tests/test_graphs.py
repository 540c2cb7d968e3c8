"""Captured code on a CPU, where a recording stands in for a CUDA graph: what is replayed is what the call does."""

import pytest
import torch
from recorded_graphs import NotWhileRecording, emulate

from fastweights.torch import graphs


@pytest.fixture
def made(monkeypatch):
    return emulate(monkeypatch)


def test_a_recording_runs_nothing_until_it_is_replayed(made):
    x, total, graph = torch.arange(4.0), torch.zeros(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2).relu()
        total += y
    assert y.isnan().all()
    assert torch.equal(total, torch.zeros(4))
    for _ in range(2):
        graph.replay()
    assert torch.equal(total, 4 * torch.arange(4.0))
    x.neg_()
    graph.replay()
    assert torch.equal(y, torch.zeros(4))


@pytest.mark.parametrize("ask", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: x.nonzero(),
    lambda x: torch.equal(x, x), lambda x: x.cpu(), lambda x: torch.repeat_interleave(x.long()),
])  # fmt: skip
def test_what_waits_for_the_device_cannot_be_recorded(made, ask):
    with pytest.raises(NotWhileRecording), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ask(torch.ones(3))


def test_a_call_is_captured_the_second_time(made):
    weight = torch.randn(5, 5)

    def f(x, S):
        S = S + x[:, None] * x
        return weight @ S @ x, S

    for i in range(5):
        x, S = torch.randn(5), torch.randn(5, 5)
        for got, want in zip(graphs.call("f", f, (x, S)), f(x, S), strict=True):
            torch.testing.assert_close(got, want)
        assert len(made) == (i > 0)
        weight.mul_(2)  # a graph reads it where it is
    assert made[0].replays == 5  # one of them to compare


def test_a_call_that_waits_for_the_device_goes_on_as_it_is(made):
    f = lambda x: (x * x.sum().item(),)  # noqa: E731
    x = torch.ones(3)
    graphs.call("waits", f, (x,))
    with pytest.warns(UserWarning, match="without a CUDA graph; capturing failed: CUDA error"):
        graphs.call("waits", f, (x,))
    assert torch.equal(graphs.call("waits", f, (x,))[0], 3 * x)


def test_a_recording_that_replays_something_else_is_not_used(made):
    calls, x = [], torch.ones(3)

    def f(x):  # what the host counts, a replay does not
        calls.append(x)
        return (x * len(calls),)

    graphs.call("host", f, (x,))
    with pytest.warns(UserWarning, match="a replay gave other numbers than the call itself"):
        graphs.call("host", f, (x,))
    assert torch.equal(graphs.call("host", f, (x,))[0], 6 * x)
