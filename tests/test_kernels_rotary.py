"""The gradient of turned queries and keys in one pass, against plain operators; interpreted where there is no GPU."""

import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture

from fastweights.models.rotary import angles, rotate
from fastweights.torch.kernels import rotary


@runs
def test_gradient():
    torch.manual_seed(0)
    B, T, W, H, K = 2, 37, 5, 3, 12
    p, k, v = (torch.randn(shape, device=DEVICE) for shape in ((B, T, 3, H, K), (B, W, H, K), (B, W, H, K)))
    turns, found = angles(p, W + T, K // 2), []
    compiled = torch.compile(rotary.turned, fullgraph=True, backend="aot_eager")
    for run, dtype in ((rotary.Turned.forward, torch.float64), (compiled, torch.float32)):
        leaf = p.to(dtype).requires_grad_()
        outputs = run(leaf, k.to(dtype), v.to(dtype), turns, rotate)
        found.append([*outputs, torch.autograd.grad(sum(y.sin().sum() for y in outputs), leaf)[0]])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
