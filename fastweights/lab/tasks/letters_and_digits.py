"""The letters-and-digits task and the networks that are trained on it (see papers/associative.py).

Shapes: A copies of a network (seeds), B sequences of T = 2 pairs + 3 symbols, R hidden units.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from fastweights.lab.engine.training import adam, descend
from fastweights.torch import FastWeightRNN

LETTERS, DIGITS, PAIRS = 26, 10, 4
VOCABULARY = LETTERS + DIGITS + 1  # and the question mark
TESTED = 4096  # sequences per evaluation
# A ReLU network is one with fast weights that never reads them.
RECURRENT: dict[str, dict[str, Any]] = {
    "rnn": dict(rate=0.0, inner_steps=0, layer_norm=False),
    "fast": dict(rate=0.5),
    "fast, rate 0": dict(rate=0.0),
    "fast, no norm": dict(rate=0.5, layer_norm=False),
}


def sequences(A: int, B: int, device: str) -> tuple[Tensor, Tensor]:
    """Symbols (A, B, T) and the digit asked for (A, B): pairs of different letters and digits, `??`, a letter."""
    letters = torch.rand(A, B, LETTERS, device=device).argsort(-1)[..., :PAIRS]
    digits = torch.randint(DIGITS, (A, B, PAIRS), device=device)
    asked = torch.randint(PAIRS, (A, B, 1), device=device)
    pairs = torch.stack([letters, digits + LETTERS], -1).flatten(-2)
    marks = torch.full_like(letters[..., :2], VOCABULARY - 1)
    return torch.cat([pairs, marks, letters.gather(-1, asked)], -1), digits.gather(-1, asked)[..., 0]


class LSTM(nn.Module):
    """torch's own, step by step, so that copies of it can be stacked."""

    def __init__(self, inputs: int, R: int):
        super().__init__()
        self.cell = nn.LSTMCell(inputs, R)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Hidden vectors (B, T, R) for x (B, T, inputs), and no state."""
        drive = F.linear(x, self.cell.weight_ih, self.cell.bias_ih + self.cell.bias_hh)
        h = c = torch.zeros_like(drive[:, 0, : self.cell.hidden_size])
        past = []
        for t in range(x.shape[1]):
            i, f, g, o = F.linear(h, self.cell.weight_hh).add(drive[:, t]).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            past.append(h)
        return torch.stack(past, 1), None


class Network(nn.Module):
    """Symbols -> 100 ReLU units -> a recurrent network of R units -> 100 ReLU units -> digits."""

    def __init__(self, model: str, R: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 100)
        nn.init.uniform_(self.embedding.weight, -1 / math.sqrt(VOCABULARY), 1 / math.sqrt(VOCABULARY))
        self.out = nn.Sequential(nn.Linear(R, 100), nn.ReLU(), nn.Linear(100, DIGITS))
        body: Any = LSTM(100, R) if model == "lstm" else FastWeightRNN(100, R, decay=0.95, **RECURRENT[model])
        if model == "rnn":
            nn.init.eye_(body.W)  # starts by remembering (IRNN)
        self.body = body

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits (B, digits) after the last symbol of (B, T)."""
        return self.out(self.body(F.relu(self.embedding(symbols)))[0][:, -1])


class Learner:
    """Copies of a network, stacked with `torch.func`, their optimiser and their data (see engine/training.py).

    Args:
        model: "lstm", or a key of RECURRENT.
        R: hidden units.
        copies: seeds, which train together.
        device: "cpu" or "cuda".
        batch: sequences per step and copy.
    """

    def __init__(self, model: str, R: int, copies: int, device: str, batch: int = 128):
        self.copies, self.device, self.batch = copies, device, batch
        networks = []
        for seed in range(copies):
            torch.manual_seed(seed)
            networks.append(Network(model, R).to(device))
        self.network = networks[0]
        self.weights, _ = stack_module_state(networks)
        self.optimizer = adam(list(self.weights.values()), 1e-3)

    def __call__(self, symbols: Tensor) -> Tensor:
        """Logits (A, B, digits)."""
        return vmap(lambda weights, x: functional_call(self.network, weights, (x,)))(self.weights, symbols)

    def step(self) -> None:
        """One step of Adam on fresh sequences, for all copies at once."""
        symbols, digits = sequences(self.copies, self.batch, self.device)
        loss = F.cross_entropy(self(symbols).flatten(0, 1), digits.flatten()) * self.copies
        descend(loss, self.optimizer)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """(A, 2): error in percent, and loss."""
        symbols, digits = sequences(self.copies, TESTED, self.device)
        logits = self(symbols)
        wrong = 100 * (logits.argmax(-1) != digits).float().mean(1)
        loss = F.cross_entropy(logits.flatten(0, 1), digits.flatten(), reduction="none").view(digits.shape).mean(1)
        return torch.stack([wrong, loss], 1)
