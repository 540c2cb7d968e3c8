"""Kernels of a Fast Weight Layer's loss and of cross-entropy, against their plain forms; on a GPU or interpreted."""

import pytest
import torch
from interpreter import DEVICE, runs

from fastweights.torch import FWLBlock, cross_entropy
from fastweights.torch.learning import held, held_overlapped


def compare(monkeypatch, run, numbers, least):
    """`run` with kernels, in blocks of so many logits, equals `run` without; more than `least` times they were used."""
    monkeypatch.setattr(cross_entropy, "on_gpu", lambda z: False)
    plain, used = run(), []
    monkeypatch.setitem(cross_entropy.BLOCK, DEVICE, numbers)
    monkeypatch.setattr(cross_entropy, "on_gpu", lambda z: used.append(1) or True)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert len(used) > least


@runs
@pytest.mark.parametrize("how", [dict(attn_chunks=3), dict(attn_chunks=1, first_order=True, normalizer=4.0)], ids=str)
def test_loss_of_a_fast_weight_layer(monkeypatch, how):
    torch.manual_seed(0)
    x = torch.randn(2, 21, 6, device=DEVICE, requires_grad=True)
    labels, weights = torch.randint(300, (2, 21), device=DEVICE), torch.rand(2, 21, device=DEVICE)
    block = FWLBlock(10, 300, inputs=6, step_size=0.5, **how).to(DEVICE)

    def run():
        loss = block.loss(x, labels, weights)
        return loss, *torch.autograd.grad(loss, [x, *block.parameters()])

    compare(monkeypatch, run, 20 * 300, 10)  # blocks of tokens and of words


@runs
@pytest.mark.parametrize("how", [{}, dict(log_steps=True, fast_bias=False)], ids=str)
def test_chunks_of_a_held_layer(monkeypatch, how):
    """In float32: seven chunks, of which five tokens are left over, with more inputs and hidden units than one tile."""
    torch.manual_seed(0)
    x, labels = torch.randn(2, 127, 70, device=DEVICE), torch.randint(90, (2, 127), device=DEVICE)
    weights = torch.rand(2, 127, device=DEVICE)
    block = FWLBlock(10, 90, inputs=70, hidden=66, refresh=20, normalizer=4.0, step_size=0.02, **how).to(DEVICE)

    def run():
        with torch.no_grad():
            first = block.run(x[:, :11], labels[:, :11], weights[:, :11], logits=False, slow=False)
            out = block.run(x[:, 11:], labels[:, 11:], weights[:, 11:], first.state, logits=False, slow=False)
        return first.loss, out.loss, *out.state

    monkeypatch.setattr(held, "CHUNKS_PER_GRAPH", 4)  # one group without a rest and one with it
    monkeypatch.setattr(held_overlapped, "can_read", lambda *given: False)
    plain, used = run(), []
    monkeypatch.setattr(held_overlapped, "can_read", lambda *given: used.append(1) or True)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert used
    assert (plain[2] != 0).any()


@runs
def test_cross_entropy(monkeypatch):
    torch.manual_seed(0)
    n, E, c = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((13, 8), (8, 3001), (3001,)))
    labels = torch.randint(3001, (13,), device=DEVICE)

    def run():
        loss, r = cross_entropy.head(n, E, c, labels)
        both = torch.autograd.grad((loss * torch.arange(13, device=DEVICE)).sum() + r.sin().sum(), (n, E, c))
        expanded = cross_entropy.head(n, E, c, labels)[1].sum()  # whose gradient is expanded, not stored
        alone = torch.autograd.grad(cross_entropy.loss(n, E, c, labels).sum(), (n, E, c))
        return loss, r, *both, *torch.autograd.grad(expanded, (n, E, c)), *alone

    compare(monkeypatch, run, 13 * 1500, 10)  # three blocks, the last one of a single word
