"""`fastweights bench lab`: training steps per second of the overwriting experiment, beside the published algorithm.

Setting 2 of Schlag et al. 2021 at S = 100: 200 pairs per sequence, DPFP-1, delta rule, batches of 32. The baseline is
the published algorithm: sequences drawn one by one with NumPy, and a loop over tokens that autograd follows. A step is
the batch, forward, backward and Adam. Both must have the same loss and gradients before any time is reported.
"""

from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fastweights.bench.agree import Disagreement, deviation
from fastweights.bench.report import explain_noise, milliseconds, new_table, timing_dict
from fastweights.bench.timing import Advance, Timing, interleave
from fastweights.lab.tasks.key_value_pairs import Task
from fastweights.lab.tasks.key_value_retrieval import EPS, D, Model

KEYS, BATCH = 100, 32
SMOKE = dict(keys=8, batch=4)
TOLERANCE = 1e-4  # float32, 200 writes deep


class Result(NamedTuple):
    """A training step of the experiment, ours and the published algorithm's.

    Attributes:
        keys, batch: size of the task.
        threads: that PyTorch had.
        error: largest deviation of loss and gradients between the two.
        timings: milliseconds by contestant.
    """

    keys: int
    batch: int
    threads: int
    error: float
    timings: dict[str, Timing]

    @property
    def speedup(self) -> float:
        """How many times as fast ours is."""
        return self.timings["published algorithm"].median / self.timings["fastweights"].median


class Plain:
    """The published algorithm, with the weights of a Model of one copy."""

    def __init__(self, model: Model):
        self.S, self.batch = model.task.keys, model.batch
        self.parameters = [p[0].detach().clone().requires_grad_() for p in model.parameters]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3)
        self.rng = np.random.default_rng(0)

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values (B, L), the key asked for and its last value (B,), one sequence after the other."""
        found: list[tuple] = []
        for _ in range(self.batch):
            k, v = self.rng.choice(self.S, 2 * self.S), self.rng.choice(self.S, 2 * self.S)
            last = np.where(k == self.rng.choice(k))[0][-1]
            found.append((k, v, k[last], v[last]))
        keys, values, asked, answers = (torch.from_numpy(np.stack(x)) for x in zip(*found, strict=True))
        return keys, values, asked, answers

    def loss(self, keys: Tensor, values: Tensor, asked: Tensor, answers: Tensor) -> Tensor:
        """The mean loss of a batch: the delta rule token by token, as the paper writes it, for autograd to follow."""
        embedding, key_of_value, key_of_key, key_bias, query_bias, query, beta_of_value, beta_of_key, beta_bias = (
            self.parameters
        )
        v = torch.nn.functional.one_hot(values, self.S).float()
        x = torch.cat([v, embedding[keys]], -1)
        k = dpfp(x @ torch.cat([key_of_value, key_of_key]) + key_bias)
        q = dpfp(embedding[asked] @ query + query_bias)
        beta = torch.sigmoid(x @ torch.cat([beta_of_value, beta_of_key]) + beta_bias)
        W = torch.zeros(len(keys), self.S, 2 * D)
        # The paper's own three lines per token: retrieve, remove, write a mixture of old and new.
        for t in range(keys.shape[1]):
            key = k[:, t] / k[:, t].sum(-1, keepdim=True)
            old = torch.einsum("bdp,bp->bd", W, key)
            W = W - torch.einsum("bd,bp->bdp", old, key)
            new = beta[:, t] * v[:, t] + (1 - beta[:, t]) * old
            W = W + torch.einsum("bd,bp->bdp", new, key)
        y = torch.einsum("bdp,bp->bd", W, q / (q.sum(-1, keepdim=True) + EPS))
        return 0.5 * (torch.nn.functional.one_hot(answers, self.S) - y).square().sum(-1).mean()

    def step(self) -> None:
        """Draw a batch, and take a step of Adam on it."""
        loss = self.loss(*self.draw())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def dpfp(x: Tensor) -> Tensor:
    """DPFP-1 of x (..., d), width 2 d."""
    u = torch.cat([torch.relu(x), torch.relu(-x)], -1)
    return u * u.roll(1, -1)


def check(model: Model, plain: Plain) -> float:
    """How far loss and gradients are apart on one batch; raise when they are not the same.

    Both models have the same weights; the batch is drawn by the published algorithm.
    """
    keys, values, asked, answers = batch = plain.draw()
    want = plain.loss(*batch)
    got = model.loss(keys[..., None], values[..., None], asked[:, None], answers[:, None]).sum()
    pairs = [
        (got, want),
        *zip(torch.autograd.grad(got, model.parameters), torch.autograd.grad(want, plain.parameters), strict=True),
    ]
    error = max(deviation(a.detach().view(b.shape), b.detach()) for a, b in pairs)
    if not error <= TOLERANCE:
        raise Disagreement(
            f"the lab's model deviates from the published algorithm by {error:.1e} of the largest "
            f"number; allowed {TOLERANCE:.0e}. Nothing is reported."
        )
    return error


def run(repeats: int, advance: Advance, *, keys: int = KEYS, batch: int = BATCH) -> Result:
    """Check that both compute the same, then time their steps in turns.

    Args:
        repeats: samples of each.
        advance: called after each sample, for a progress bar.
        keys: in a sequence.
        batch: sequences per step.
    """
    torch.manual_seed(0)
    model = Model(Task(keys, replace=True), "dpfp-1", "delta", "sum", batch=batch)
    plain = Plain(model)
    error = check(model, plain)
    contestants = {"published algorithm": plain.step, "fastweights": model.step}
    timings = interleave(contestants, repeats=repeats, tick=lambda: advance("training steps", 1))
    return Result(keys, batch, torch.get_num_threads(), error, timings)


def show(result: Result, console: Console) -> None:
    """Print the result as a table."""
    title = f"A training step of setting 2, S = {result.keys}, DPFP-1, delta rule, batch {result.batch}, CPU"
    table = new_table(f"{title}, {result.threads} threads")
    for heading in ("", "ms", "steps per second", "times as fast"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, timing in result.timings.items():
        ratio = result.timings["published algorithm"].median / timing.median
        table.add_row(name, milliseconds(timing), f"{1e3 / timing.median:.2f}", f"{ratio:.1f}")
    console.print(table)
    explain_noise(result.timings.values(), console)
    console.print(f"loss and gradients agree to {result.error:.0e}", style="dim", highlight=False)


def payload(result: Result) -> dict[str, object]:
    """The result, for JSON."""
    return {
        "keys": result.keys,
        "batch": result.batch,
        "threads": result.threads,
        "error": result.error,
        "speedup": result.speedup,
        **{name: timing_dict(t) for name, t in result.timings.items()},
    }
