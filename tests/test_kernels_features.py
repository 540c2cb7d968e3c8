"""Feature maps as one kernel, against the plain form in float64; in Triton's interpreter where there is no GPU."""

import pytest
import torch
from interpreter import DEVICE, runs

from fastweights import features
from fastweights.core import Spec
from fastweights.torch.kernels import features as fused
from fastweights.torch.methods import map_plainly


def both(x, name, norm, dy):
    """(features, gradient) of the kernel, of the plain form, and of the plain form in float64."""
    phi = features.parse(name)
    eager = lambda x: map_plainly(x, Spec(features=phi, norm=norm))  # noqa: E731
    found = []
    for run, y in ((lambda x: fused.feature_map(x, phi, norm), x), (eager, x), (eager, x.double())):
        y = y.detach().requires_grad_()
        out = run(y)
        found.append((out.detach(), *torch.autograd.grad(out, y, dy.to(out.dtype))))
    return found


@runs
@pytest.mark.parametrize("norm", ["none", "sum", "l2"])
@pytest.mark.parametrize("name", ["identity", "relu", "silu", "elu+1", "dpfp-1", "dpfp-3"])
def test_features_and_gradients(name, norm):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 12, device=DEVICE)
    x[0, 0, 0] = 0.0  # no feature at all, or all alike
    dy = torch.randn(2, 5, 3, features.parse(name).width(12), device=DEVICE)
    for got, plain, exact in zip(*both(x, name, norm, dy), strict=True):
        allowed = 2 * (plain - exact).abs().max() + 1e-7 * exact.abs().max()
        assert (got - exact).abs().max() <= allowed


@runs
def test_where_a_projection_left_them():
    """Queries are a slice of one projection: read in place, whatever lies between."""
    torch.manual_seed(0)
    whole = torch.randn(2, 5, 40, device=DEVICE).half()
    q = whole[..., 16:32].unflatten(-1, (2, 8))
    got, plain, _ = both(q, "dpfp-2", "sum", torch.randn(2, 5, 2, 32, device=DEVICE))
    torch.testing.assert_close(got, plain, rtol=2e-3, atol=2e-3)
    assert fused.as_rows(q).data_ptr() == q.data_ptr()


@runs
def test_transforms():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 6, device=DEVICE, requires_grad=True)
    phi = features.parse("dpfp-2")
    eager = lambda x: map_plainly(x, Spec(features=phi, norm="l2"))  # noqa: E731
    call = lambda x: fused.feature_map(x, phi, "l2")  # noqa: E731
    per_sample = lambda run: torch.func.vmap(torch.func.grad(lambda x: run(x).sin().sum()))(x.detach())  # noqa: E731
    torch.testing.assert_close(per_sample(call), per_sample(eager), rtol=1e-4, atol=1e-5)
    second = []
    for run in (call, eager):
        (once,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.features_op, (x.detach(), "dpfp", 2, "sum"), test_utils=tests)


def test_what_is_left_to_the_plain_form():
    x = torch.zeros(2, 4)
    assert fused.takes(features.parse("dpfp-3"), "sum", x)
    assert not fused.takes(features.parse("favor-8"), "sum", x)
    assert not fused.takes(features.parse("relu"), "max", x)
    assert not fused.takes(features.parse("relu"), "sum", x.double())
