"""Kernels of the refreshed Fast Weight Layer's training loss, against their plain forms; on a GPU or interpreted."""

import pytest
import torch
from interpreter import DEVICE, runs

from fastweights.torch import FWLBlock, cross_entropy, fwl_dual, fwl_train


@runs
@pytest.mark.parametrize("how", [dict(), dict(first_order=True, decay=0.9)], ids=str)
def test_objective_of_a_refreshed_layer(monkeypatch, how):
    monkeypatch.setattr(fwl_train, "WALKED", ())  # the form for GPUs
    monkeypatch.setattr(fwl_dual, "GROUP", 6)  # two chunks
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
        out = fwl_train.objective(
            block.config, block._weights(), x, labels, weights, state, starts=starts, documents=2, slow_share=0.3
        )
        return out.value, out.loss, *out.state, *torch.autograd.grad(out.value, [x, *block.parameters()])

    plain = run(False)
    passes_for = fwl_dual.passes_for
    monkeypatch.setattr(fwl_dual, "passes_for", lambda *a: used.append(passes_for(*a).__name__) or passes_for(*a))
    for a, b in zip(run(True), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert used == ["fastweights.torch.kernels.fwl_dual"]
