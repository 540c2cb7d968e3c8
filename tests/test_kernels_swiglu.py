"""The gradient of a gated feed-forward layer in one pass, against float64; interpreted where there is no GPU."""

import pytest
import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture
from torch.nn import functional as F

from fastweights.torch.kernels import swiglu


def plain(h, weight):
    a, b = h.chunk(2, -1)
    return F.linear(F.silu(a) * b, weight)


@runs
@pytest.mark.parametrize("width", [16, 24])
def test_outputs_and_gradients(width):
    torch.manual_seed(0)
    given = torch.randn(2, 3, 2 * width, device=DEVICE), torch.randn(8, width, device=DEVICE)
    found = []
    compiled = torch.compile(swiglu.projected, fullgraph=True, backend="aot_eager")
    for run, dtype in ((plain, torch.float64), (plain, torch.float32), (compiled, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        y = run(*leaves)
        found.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for want, usual, got in zip(*found, strict=True):
        rounding = (usual.double() - want).abs().max()
        assert (got.double() - want).abs().max() <= 2 * rounding + 1e-6 * want.abs().max()


@runs
def test_autocast_keeps_its_dtypes():
    """Weights in float32, products in bfloat16, which the interpreter cuts off instead of rounding."""
    lost = 2**-8 if DEVICE == "cuda" else 2**-6  # of the largest number
    torch.manual_seed(0)
    h = torch.randn(6, 32, device=DEVICE).bfloat16()
    weight, found = torch.randn(8, 16, device=DEVICE).bfloat16().float(), []
    compiled = torch.compile(swiglu.projected, fullgraph=True, backend="aot_eager")
    for run, low in ((plain, False), (plain, True), (compiled, True)):
        leaves = [(x if low else x.double()).requires_grad_() for x in (h.clone(), weight.clone())]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            y = run(*leaves)
        found.append([y, *torch.autograd.grad(y.float().sum(), leaves)])
    for want, usual, got in zip(*found, strict=True):
        assert got.dtype == usual.dtype
        rounding = (usual.double() - want).abs().max()
        assert (got.double() - want).abs().max() <= 2 * rounding + lost * want.abs().max()
