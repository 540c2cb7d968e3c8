"""Kernels of the refreshed Fast Weight Layer's training loss, against their plain forms; on a GPU or interpreted."""

import pytest
import torch
from interpreter import DEVICE, runs

from fastweights.torch import FWLBlock, cross_entropy
from fastweights.torch.learning import dual, loss_form, training_loss


@runs
@pytest.mark.parametrize("how", [dict(), dict(first_order=True, decay=0.9)], ids=str)
def test_objective_of_a_refreshed_layer(monkeypatch, how):
    monkeypatch.setattr(training_loss, "WALK_DEVICES", ())  # the form for GPUs
    monkeypatch.setattr(dual, "TOKENS_PER_GROUP", 6)  # two chunks
    torch.manual_seed(0)
    B, T, D = 2, 7, 5
    block = FWLBlock(6, 20, inputs=D, hidden=9, step_size=0.3, normalizer=2.0, refresh=3, **how).to(DEVICE)
    x, labels = torch.randn(B, T, D, device=DEVICE, requires_grad=True), torch.randint(20, (B, T), device=DEVICE)
    weights, starts = torch.rand(B, T, device=DEVICE), torch.zeros(B, T, dtype=torch.bool, device=DEVICE)
    starts[1, 4] = True
    with torch.no_grad():
        state = block.run(x[:, :5].flip(1), labels[:, :5], weights[:, :5]).state
    used = []

    def run(kernels):
        monkeypatch.setattr(cross_entropy, "on_gpu", lambda z: kernels)
        out = training_loss.objective(
            block.config, block._weights(), x, labels, weights, state, starts=starts, documents=2, slow_share=0.3
        )
        return out.value, out.loss, *out.state, *torch.autograd.grad(out.value, [x, *block.parameters()])

    plain = run(False)
    passes_for = loss_form.passes_for
    monkeypatch.setattr(loss_form, "passes_for", lambda *a: used.append(passes_for(*a).__name__) or passes_for(*a))
    for a, b in zip(run(True), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert used == ["fastweights.torch.kernels.fwl_dual"]


@pytest.mark.parametrize("C", [24, 32, 64, 80])
def test_objective_in_16_bits(C, monkeypatch):
    """On a CPU in plain form."""
    monkeypatch.setattr(training_loss, "WALK_DEVICES", ())
    torch.manual_seed(0)
    B, T, D = 3, 700, 64
    block = FWLBlock(D, 50, inputs=D, hidden=2 * D, step_size=0.1, normalizer=1.0, refresh=C).to(DEVICE)
    x, labels = torch.randn(B, T, D, device=DEVICE), torch.randint(50, (B, T), device=DEVICE)
    weights, starts = torch.ones(B, T, device=DEVICE), torch.zeros(B, T, dtype=torch.bool, device=DEVICE)
    starts[1, 300] = starts[2, 5] = True
    block.start_steps(x, 0.1)

    def run(dtype, state):
        if state is not None:
            state = type(state)(*(y.to(dtype) if y.is_floating_point() else y for y in state))
        here = x.to(dtype).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
            out = training_loss.objective(
                block.config, block._weights(), here, labels, weights.to(dtype), state, starts=starts, documents=2
            )
        return out.state, [out.loss, *out.state[:3], *torch.autograd.grad(out.value, [here, *block.parameters()])]

    state, _ = run(torch.float32, None)
    _, got = run(torch.float32, state)
    block.double()
    _, want = run(torch.float64, state)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.015 * b.norm()
