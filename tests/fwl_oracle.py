"""The brute-force oracle of Fast Weight Layers, a slow forward with explicitly updated parameters, and its problem."""

import pytest
import torch
from torch import nn

from fastweights.fwl_config import STEPS
from fastweights.torch import FWLBlock, make_labels

B, T, D, SIZE, V = 2, 9, 3, 4, 5
FAST = STEPS  # parameter tensors that adapt, in the order of `steps`


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(B=B, T=T):
    tokens = torch.randint(V, (B, T))
    labels, weights = make_labels(tokens)
    weights[0, 2] = 0.5  # weights need not be 0 or 1
    return torch.randn(B, T, D), labels, weights


def make(**how):
    block = FWLBlock(SIZE, V, how.pop("attn_chunks", 2), inputs=D, step_size=0.5, **how)
    with torch.no_grad():  # every step its own
        block.steps.mul_(torch.linspace(0.6, 1.4, len(STEPS)))
        block.bias1.normal_()
        block.bias2.normal_()
        block.shift.normal_()
    return block


def slow_forward(block, p, x):
    h = torch.relu(x @ p["dense1"] + p["bias1"]) ** 2 @ p["dense2"] + p["bias2"]
    n = nn.functional.layer_norm(h, (SIZE,), p["scale"], p["shift"], block.config.eps)
    return n @ block.unembed + block.unembed_bias


def oracle(block, x, labels, weights, normalizer, steps):
    """Logits of token t: the slow forward with parameters minus steps times gradients of the losses before t."""
    out = torch.empty(*x.shape[:2], V)
    for i in range(x.shape[0]):
        p = {n: getattr(block, n).detach().requires_grad_() for n in FAST}
        losses = nn.functional.cross_entropy(slow_forward(block, p, x[i]), labels[i], reduction="none")
        for t in range(x.shape[1]):
            total = (losses[:t] * weights[i, :t]).sum() / normalizer[i]
            grads = torch.autograd.grad(total, list(p.values()), retain_graph=True, allow_unused=True)
            now = {n: q if g is None else q - steps[n] * g for (n, q), g in zip(p.items(), grads, strict=True)}
            out[i, t] = slow_forward(block, now, x[i, t : t + 1])[0]
    return out.detach()


def refreshed(block, x, labels, weights):
    """Losses (B, T) by explicit updates of explicit parameters, token by token, with autograd's gradients."""
    c, steps, losses = block.config, steps_of(block), torch.empty(labels.shape)
    decay = 1.0 if c.decay is None else c.decay
    for i in range(len(x)):
        trained = {n: getattr(block, n).detach() for n in FAST}
        start, change = trained, {n: torch.zeros_like(w) for n, w in trained.items()}
        for t in range(x.shape[1]):
            if t % c.refresh == 0:
                start = {n: (w + change[n]).requires_grad_() for n, w in trained.items()}
                summed = {n: torch.zeros_like(w) for n, w in trained.items()}
            now = start if c.within == "held" else {n: w + change[n] for n, w in trained.items()}
            loss = lambda p: nn.functional.cross_entropy(slow_forward(block, p, x[i, t : t + 1]), labels[i, t : t + 1])  # noqa: E731, B023
            losses[i, t] = loss(now).detach()
            grads = torch.autograd.grad(loss(start) * weights[i, t] / c.normalizer, list(start.values()))
            for n, g in zip(FAST, grads, strict=True):
                summed[n] = summed[n] - steps[n] * g
                if c.within == "cumulative":
                    change[n] = decay * change[n] - steps[n] * g
            if c.within == "held" and (t + 1) % c.refresh == 0:
                change = {n: decay**c.refresh * change[n] + summed[n] for n in FAST}
    return losses


def steps_of(block):
    steps = dict(zip(FAST, block.steps.detach().exp() if block.config.log_steps else block.steps.detach(), strict=True))
    if not block.config.fast_bias:
        steps |= dict(bias1=torch.zeros(()), bias2=torch.zeros(()))
    if block.config.shared_norm_step:
        steps["shift"] = steps["scale"]
    return steps
