"""Associative retrieval (papers/associative.py): letters with digits, a question, and the networks that answer it.

Shapes: A copies of a network (seeds), B sequences of T = 2 PAIRS + 3 symbols, R hidden units.
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
VOCABULARY = LETTERS + DIGITS + 1  # the last symbol is the question mark
WIDTH = 100  # of the layers before and after the recurrent one
TESTED = 4096  # sequences in an evaluation
# Arguments of FastWeightRNN by model. A ReLU network is one with fast weights that never reads them.
FAST_WEIGHTS: dict[str, dict[str, Any]] = {
    "rnn": dict(rate=0.0, inner_steps=0, layer_norm=False),
    "fast": dict(rate=0.5),
    "fast, rate 0": dict(rate=0.0),
    "fast, no norm": dict(rate=0.5, layer_norm=False),
}


def sequences(A: int, B: int, device: str) -> tuple[Tensor, Tensor]:
    """Symbols (A, B, T) and the digit that is asked for (A, B).

    A sequence is PAIRS pairs of a letter and a digit, all letters different, then `??` and one of the letters.
    """
    letters = torch.rand(A, B, LETTERS, device=device).argsort(-1)[..., :PAIRS]
    digits = torch.randint(DIGITS, (A, B, PAIRS), device=device)
    pair = torch.randint(PAIRS, (A, B, 1), device=device)  # the pair that is asked for
    pairs = torch.stack([letters, digits + LETTERS], -1).flatten(-2)
    question_marks = torch.full_like(letters[..., :2], VOCABULARY - 1)
    symbols = torch.cat([pairs, question_marks, letters.gather(-1, pair)], -1)
    return symbols, digits.gather(-1, pair)[..., 0]


class LSTM(nn.Module):
    """PyTorch's LSTM, computed step by step, so that `vmap` can run stacked copies."""

    def __init__(self, inputs: int, R: int):
        super().__init__()
        self.cell = nn.LSTMCell(inputs, R)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Hidden vectors (B, T, R) for x (B, T, inputs), and no state."""
        from_inputs = F.linear(x, self.cell.weight_ih, self.cell.bias_ih + self.cell.bias_hh)
        h = c = torch.zeros_like(from_inputs[:, 0, : self.cell.hidden_size])
        hidden = []
        for t in range(x.shape[1]):
            i, f, g, o = F.linear(h, self.cell.weight_hh).add(from_inputs[:, t]).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            hidden.append(h)
        return torch.stack(hidden, 1), None


class Network(nn.Module):
    """Symbols -> WIDTH ReLU units -> a recurrent network of R units -> WIDTH ReLU units -> digits.

    Args:
        model: "lstm", or a key of FAST_WEIGHTS.
        R: hidden units.
    """

    def __init__(self, model: str, R: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.uniform_(self.embedding.weight, -1 / math.sqrt(VOCABULARY), 1 / math.sqrt(VOCABULARY))
        self.out = nn.Sequential(nn.Linear(R, WIDTH), nn.ReLU(), nn.Linear(WIDTH, DIGITS))
        if model == "lstm":
            self.recurrent: Any = LSTM(WIDTH, R)
        else:
            self.recurrent = FastWeightRNN(WIDTH, R, decay=0.95, **FAST_WEIGHTS[model])
        if model == "rnn":
            nn.init.eye_(self.recurrent.W)  # starts by remembering (IRNN)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits (B, DIGITS) after the last of the symbols (B, T)."""
        hidden, _ = self.recurrent(F.relu(self.embedding(symbols)))
        return self.out(hidden[:, -1])


class RetrievalLearner:
    """Copies of a network, their optimiser and their data, for `engine.training.train`.

    Args:
        model: "lstm", or a key of FAST_WEIGHTS.
        R: hidden units.
        copies: number of seeds, which train together.
        device: "cpu" or "cuda".
        batch: sequences in a step of each copy.
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
        """Logits (A, B, DIGITS) of symbols (A, B, T), each copy on its own sequences."""
        return vmap(lambda weights, x: functional_call(self.network, weights, (x,)))(self.weights, symbols)

    def step(self) -> None:
        """One step of Adam on fresh sequences, for all copies at once."""
        symbols, digits = sequences(self.copies, self.batch, self.device)
        loss = F.cross_entropy(self(symbols).flatten(0, 1), digits.flatten()) * self.copies
        descend(loss, self.optimizer)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Scores (A, 2) on fresh sequences: the error in percent, and the loss."""
        symbols, digits = sequences(self.copies, TESTED, self.device)
        logits = self(symbols)
        error = 100 * (logits.argmax(-1) != digits).float().mean(1)
        loss = F.cross_entropy(logits.flatten(0, 1), digits.flatten(), reduction="none").view(digits.shape).mean(1)
        return torch.stack([error, loss], 1)
