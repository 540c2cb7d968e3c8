"""The short convolution's kernels against its plain form in float64; in Triton's interpreter where there is no GPU."""

from itertools import pairwise

import pytest
import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture

from fastweights.torch.kernels import convolution, packed_convolution


def problem(B, T, N, W, before, extra=0):
    torch.manual_seed(0)
    x = torch.randn(B, T, N + extra, device=DEVICE)[..., extra:]  # a slice of a projection
    weight = torch.randn(W, N, device=DEVICE)
    return x, weight, torch.randn(B, W - 1, N, device=DEVICE) if before else None


@runs
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("T, N, W, extra", [(1, 5, 4, 0), (2, 130, 4, 8), (40, 130, 3, 4), (65, 16, 2, 0)])
def test_outputs_and_gradients(T, N, W, extra, before):
    given = problem(2, T, N, W, before, extra)
    results = []
    for run, dtype in ((convolution.convolve, torch.float32), (convolution.in_pytorch, torch.float64)):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in given]
        y, last = run(*leaves)
        up = torch.arange(y.numel(), dtype=dtype, device=DEVICE).view(y.shape).cos()
        up_last = torch.arange(last.numel(), dtype=dtype, device=DEVICE).view(last.shape).sin()
        grads = torch.autograd.grad([y, last], [t for t in leaves if t is not None], [up, up_last])
        results.append([y, last, *grads])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@runs
def test_the_last_inputs_need_no_gradient_and_get_one_alone():
    for which in (0, 1):
        leaves = [t.requires_grad_() for t in problem(1, 9, 7, 4, True)]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        got = torch.autograd.grad(convolution.convolve(*leaves)[which].sin().sum(), leaves, allow_unused=True)
        want = torch.autograd.grad(convolution.in_pytorch(*exact)[which].sin().sum(), exact, allow_unused=True)
        for a, b in zip(got, want, strict=True):
            b = torch.zeros_like(a).double() if b is None else b
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@runs
def test_second_derivatives():
    x, weight, before = problem(1, 6, 5, 3, True)
    second = []
    for run in (convolution.convolve, convolution.in_pytorch):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, before)]
        once = torch.autograd.grad(run(*leaves)[0].sin().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in once), leaves))
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


@runs
def test_a_stream_cut_anywhere_equals_the_whole():
    x, weight, before = problem(2, 20, 9, 4, True)
    y, last = convolution.convolve(x, weight, before)
    for cut in (1, 2, 7, 19):
        y_1, state = convolution.convolve(x[:, :cut], weight, before)
        y_2, state = convolution.convolve(x[:, cut:], weight, state)
        torch.testing.assert_close((torch.cat([y_1, y_2], 1), state), (y, last), rtol=0, atol=0)


@runs
@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_precision_sums_in_float32(dtype):
    x, weight, _ = problem(1, 30, 16, 4, False)
    y, last = convolution.convolve(x.to(dtype), weight.to(dtype), None)
    exact, _ = convolution.in_pytorch(x.to(dtype).double(), weight.to(dtype).double(), None)
    assert (y.dtype, last.dtype) == (dtype, dtype)
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert convolution.convolve(x.to(dtype), weight, None)[0].dtype == torch.float32  # as torch promotes


CUT = torch.tensor([0, 3, 3, 4, 40, 45, 45])  # sequences of 3, 0, 1, 36, 5 and 0 tokens


@runs
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("N, W, extra", [(130, 4, 8), (16, 2, 0)])
def test_packed_sequences(N, W, extra, before):
    """Each is convolved as if it stood alone, whether it is empty, shorter than the taps or longer than a block."""
    x, weight, _ = problem(1, 45, N, W, False, extra)
    given = x, weight, torch.randn(len(CUT) - 1, W - 1, N, device=DEVICE) if before else None
    results = []
    for run, dtype in ((packed_convolution.convolve, torch.float32), (apart, torch.float64)):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in given]
        y, last = run(*leaves, CUT.to(DEVICE))
        up, up_last = (torch.arange(o.numel(), dtype=dtype, device=DEVICE).view(o.shape).cos() for o in (y, last))
        grads = torch.autograd.grad([y, last], [t for t in leaves if t is not None], [up, up_last])
        results.append([y, last, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def apart(x, weight, before, cu):
    """The plain form of one sequence after the other."""
    found = [
        convolution.in_pytorch(x[:, a:b], weight, None if before is None else before[n : n + 1])
        for n, (a, b) in enumerate(pairwise(cu.tolist()))
    ]
    return torch.cat([y for y, _ in found], 1), torch.cat([last for _, last in found])


@runs
def test_packed_second_derivatives_and_operators():
    x, weight, _ = problem(1, 45, 5, 3, False)
    leaves = [t.requires_grad_() for t in (x, weight, torch.randn(len(CUT) - 1, 2, 5, device=DEVICE))]
    cu, second = CUT.to(DEVICE), []
    for run in (packed_convolution.convolve, apart):
        once = torch.autograd.grad(run(*leaves, cu)[0].sin().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in once), leaves))
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(packed_convolution.convolve, fullgraph=True, backend="aot_eager")
    both = [torch.autograd.grad(run(*leaves, cu)[0].sin().sum(), leaves) for run in (compiled, apart)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
