"""`fastweights bench lm`: a training step of the application's models, and what longer documents cost to read.

The step is timed beside the same model with Hugging Face's delta rule in place of ours, and beside Hugging Face's whole
model where it has one. All must give the same loss, from the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fastweights.bench.agree import Disagreement
from fastweights.bench.qwen import their_model, their_rule
from fastweights.bench.report import explain_noise, milliseconds, new_table, timing_dict
from fastweights.bench.timing import Call, Timing, interleave
from fastweights.files import replacing
from fastweights.models.config import Config
from fastweights.models.evaluation import SEGMENT
from fastweights.models.language_model import LanguageModel
from fastweights.torch.tree import tensor_bytes
from fastweights.training.optimizer import make_optimizer

MODELS = ("delta", "gated-delta")
OURS, RULE, WHOLE = "ours", "Hugging Face's rule", "Hugging Face's model"
TRAIN: dict[str, Any] = dict(head="linear")
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
SMOKE_TRAIN: dict[str, Any] = TRAIN | dict(dim=16, heads=2, depth=1, length=32, batch=2)
SMOKE_LENGTHS = (64, 128)
SMOKE_READ: dict[str, Any] = dict(dim=16, heads=2, depth=1)
TOLERANCE = 1e-4  # of the loss
VOCAB = 257


@dataclass
class Reading:
    """A model that reads documents of growing length: milliseconds and bytes of what it carries, per length.

    Attributes:
        model: its mixer.
        timings: by number of tokens.
        carried: bytes of its state after so many tokens; constant for a fast-weight memory, growing for attention.
    """

    model: str
    timings: dict[int, Timing]
    carried: dict[int, int]

    @property
    def ratio(self) -> float:
        """Time of the longest over time of the shortest."""
        return self.timings[max(self.timings)].median / self.timings[min(self.timings)].median


@dataclass
class Training:
    """A model's training step, timed: ours, and the same step by other means.

    Attributes:
        model: its mixer.
        parameters: how many it has.
        timings: milliseconds by contestant.
    """

    model: str
    parameters: int
    timings: dict[str, Timing]


def training(settings: dict[str, Any], repeats: int) -> list[Training]:
    """Steps of each of MODELS, all in turns.

    Args:
        settings: fields of `Config` that differ from the preset laptop.
        repeats: samples per contestant.
    """
    steps: dict[str, dict[str, Call]] = {}
    counts = {}
    # Each model is made once; all ways of computing its step work on the same weights.
    for name in MODELS:
        config = Config.of("laptop", **settings, model=name)
        torch.manual_seed(0)
        model = LanguageModel(config, VOCAB)
        steps[name] = _steps(model)
        counts[name] = sum(p.numel() for p in model.parameters())
    found = interleave({f"{m}: {n}": call for m in steps for n, call in steps[m].items()}, repeats=repeats)
    return [Training(m, counts[m], {n: found[f"{m}: {n}"] for n in steps[m]}) for m in steps]


def _steps(model: LanguageModel) -> dict[str, Call]:
    """The step of a model in every way there is, once all are known to give the same loss.

    Ours; ours with Hugging Face's delta rule in the place of ours; and, for gated-delta, Hugging Face's whole model.

    Args:
        model: of the application.

    Raises:
        Disagreement: two ways give losses that differ by more than TOLERANCE.
    """
    config = model.config
    rows = torch.randint(VOCAB, (config.batch, config.length + 1))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    losses = {OURS: lambda: model.score(tokens, labels).loss.mean()}

    def with_their_rule() -> Tensor:
        with their_rule():
            return losses[OURS]()

    losses[RULE] = with_their_rule
    modules: dict[str, Any] = {OURS: model, RULE: model}
    if config.model == "gated-delta":
        modules[WHOLE] = theirs = their_model(model)
        flat = lambda x: x.flatten(0, 1)  # noqa: E731
        losses[WHOLE] = lambda: torch.nn.functional.cross_entropy(flat(theirs(tokens).logits), flat(labels))
    # All ways of computing the step must give the same loss before any is timed.
    values = {name: loss().item() for name, loss in losses.items()}
    for name, value in values.items():
        if not abs(value - values[OURS]) <= TOLERANCE:
            raise Disagreement(
                f"a step's loss is {values[OURS]} with our delta rule and {value} with {name}; allowed "
                f"{TOLERANCE:.0e}. Nothing is reported."
            )
    return {name: _step(modules[name], loss, config) for name, loss in losses.items()}


def _step(model: Any, loss: Callable[[], Tensor], config: Config) -> Call:
    """A whole training step as a function: loss, gradients, clipping and AdamW, with a learning rate of 0.

    Args:
        model: whose parameters are trained.
        loss: computes the loss of a fixed batch.
        config: of the optimiser.
    """
    optimizer = make_optimizer(model, replace(config, lr=0.0))  # all keep working on the same weights

    def step() -> None:
        value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()

    return step


def reading(lengths: tuple[int, ...], repeats: int, sizes: dict[str, Any], advance: Callable) -> list[Reading]:
    """Documents read in segments, memory carried: delta, and a transformer that sees all of the document.

    Args:
        lengths: of the documents, in tokens.
        repeats: samples.
        sizes: fields of `Config` that differ from its defaults.
        advance: moves the progress bar.
    """
    found = []
    for name in ("delta", "transformer"):
        calls, carried = {}, {}
        for T in lengths:
            call, state = _reader(Config.of("laptop", **sizes | dict(model=name, window=T, head="linear")), T)
            calls[str(T)], carried[T] = call, tensor_bytes(state)
        timings = interleave(calls, repeats=repeats, tick=lambda: advance("reading", 1))
        found.append(Reading(name, {int(T): t for T, t in timings.items()}, carried))
    return found


def _reader(config: Config, T: int) -> tuple[Call, Any]:
    """(a function that reads a document of T tokens in segments, the state that it carries)."""
    torch.manual_seed(0)
    model = LanguageModel(config, VOCAB).eval()
    row = torch.randint(VOCAB, (1, T + 1))

    @torch.no_grad()
    def call() -> None:
        state = model.init_state(1)
        for at in range(0, T, SEGMENT):
            part = row[:, at : at + SEGMENT + 1]
            state = model.score(part[:, :-1], part[:, 1:], state).state

    return call, model.init_state(1).blocks


def show(trainings: list[Training], readings: list[Reading], console: Console) -> None:
    """Print the training steps and the readings, a table each."""
    table = new_table("training step, milliseconds: forward, backward, clipping and AdamW, all from the same weights")
    table.add_column("")
    for heading in ("parameters", "step", "x ours"):
        table.add_column(heading, justify="right")
    for t in trainings:
        for name, timing in t.timings.items():
            times = f"{timing.median / t.timings[OURS].median:.2f}"
            table.add_row(f"{t.model}, {name}", f"{t.parameters:,}", milliseconds(timing), times)
    console.print(table)
    explain_noise((timing for t in trainings for timing in t.timings.values()), console)
    # Then the readings: one column per model, one row per length, and how time grew with length.
    table = new_table("reading a document with carried memory, milliseconds (KiB carried)")
    table.add_column("tokens", justify="right")
    for reading in readings:
        table.add_column(reading.model, justify="right")
    for T in readings[0].timings:
        cells = [f"{milliseconds(r.timings[T])} ({r.carried[T] / 1024:,.0f})" for r in readings]
        table.add_row(f"{T:,}", *cells)
    lengths = list(readings[0].timings)
    table.add_row(f"x{max(lengths) // min(lengths)} tokens", *[f"x{r.ratio:.1f} time" for r in readings])
    console.print(table)
    explain_noise((timing for r in readings for timing in r.timings.values()), console)


def payload(trainings: list[Training], readings: list[Reading]) -> dict[str, Any]:
    """Training steps and readings, for JSON."""
    return dict(
        training=[
            dict(model=t.model, parameters=t.parameters, milliseconds={n: timing_dict(x) for n, x in t.timings.items()})
            for t in trainings
        ],
        reading=[
            dict(
                model=r.model,
                ratio=r.ratio,
                carried=r.carried,
                milliseconds={T: timing_dict(t) for T, t in r.timings.items()},
            )
            for r in readings
        ],
    )


def plot(readings: list[Reading], path: Any) -> bool:
    """Draw seconds against tokens, with dotted lines for what is linear; False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for reading, colour in zip(readings, ("#1f6fb4", "#d1495b"), strict=True):
        lengths = list(reading.timings)
        seconds = [reading.timings[T].median / 1000 for T in lengths]
        axes.plot(lengths, seconds, "o-", color=colour, linewidth=2, label=f"{reading.model} (x{reading.ratio:.1f})")
        axes.plot(lengths, [seconds[0] * T / lengths[0] for T in lengths], ":", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_xlabel("tokens in the document")
    axes.set_ylabel("seconds to read it")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("Reading a document with all of it remembered (dotted: linear)", loc="left", fontsize=10)
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return True
