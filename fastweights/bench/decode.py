"""`fastweights bench decode`: tokens per second of a language model that writes B texts at once, token by token.

On a GPU also as a CUDA graph, which replays the launches of a whole step; both must write the same tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fastweights.bench.agree import Disagreement
from fastweights.bench.report import new_table
from fastweights.bench.timing import Advance
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.tree import map_tensors

BATCHES = (1, 64, 512)
VOCAB = 16_384
FULL = Config.of("paper-small")  # 16 blocks of width 128, DPFP-3 and the delta rule
SMOKE = Config.of("paper-small", dim=16, heads=2, depth=2, hidden=32)

Step = Callable[[], None]


@dataclass
class Result:
    """How fast B texts grow.

    Attributes:
        batch: B.
        how: "step by step" or "CUDA graph".
        tokens_per_second: of all texts together.
        ms_per_step: milliseconds for one token of each.
    """

    batch: int
    how: str  # "step by step" or "CUDA graph"
    tokens_per_second: float
    ms_per_step: float


class Writer:
    """B texts that grow by their likeliest token; everything a step needs stays in the same tensors."""

    def __init__(self, model: LanguageModel, batch: int, device: str):
        self.model = model
        self.token = torch.arange(batch, device=device) % model.vocab
        self.state = map_tensors(torch.clone, model.init_state(batch))

    def step(self) -> None:
        """Write the likeliest token to each text, in place."""
        logits, after = self.model.step(self.token, self.state)
        self.token.copy_(logits.argmax(-1))
        _overwrite(self.state, after)

    def restart(self) -> None:
        """Back to the first token and an empty memory, in the same tensors."""
        self.token.copy_(torch.arange(len(self.token), device=self.token.device) % self.model.vocab)
        _overwrite(self.state, self.model.init_state(len(self.token)))


def _overwrite(state: State, by: State) -> None:
    """Copy a state into the tensors of another one, which a CUDA graph knows by their address."""
    fresh = _tensors(by)
    map_tensors(lambda x: x.copy_(next(fresh)), state)


def _tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor of a state, in the order of `map_tensors`."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from _tensors(part)


def captured(writer: Writer) -> Step:
    """A step as a CUDA graph: recorded once, after a few steps that compile and allocate, then replayed without the
    host.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate outside the graph
        for _ in range(3):
            writer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.step()
    return graph.replay


def write(writer: Writer, step: Step, tokens: int) -> Tensor:
    """(B, tokens) from the start: what `step` makes the writer write, to compare two ways of stepping.

    Args:
        writer: holds the model, the states and the last tokens.
        step: one token of every text, eager or a replayed CUDA graph.
        tokens: to write in each text.
    """
    writer.restart()
    text = []
    for _ in range(tokens):
        step()
        text.append(writer.token.clone())
    return torch.stack(text, 1)


def seconds(step: Step, tokens: int, device: str) -> float:
    """Seconds that so many steps take, once the first one has warmed up.

    Args:
        step: one token of every text.
        tokens: number of steps.
        device: to wait for before the clock stops.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step()
    wait()
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def run(config: Config, batches: Sequence[int], device: str, *, tokens: int, advance: Advance) -> list[Result]:
    """Time each batch, step by step and, on a GPU, as a graph; both must write the same tokens.

    Args:
        config: of the model.
        batches: numbers of texts.
        device: "cpu" or "cuda"; the model is bfloat16 on a GPU.
        tokens: steps to time.
        advance: moves the progress bar.
    """
    torch.manual_seed(0)
    model = LanguageModel(config, VOCAB).to(device).eval()
    if device == "cuda":
        model = model.bfloat16()
    results = []
    for batch in batches:
        writer = Writer(model, batch, device)
        ways: dict[str, Step] = {"step by step": writer.step}
        if device == "cuda":
            ways["CUDA graph"] = captured(writer)
        # Both ways must write the same tokens before either is timed.
        want = write(writer, writer.step, 8)
        for how, step in ways.items():
            if not torch.equal(write(writer, step, 8), want):
                raise Disagreement(f"{how} writes other tokens than the model step by step. Nothing is reported.")
            took = seconds(step, tokens, device)
            results.append(Result(batch, how, batch * tokens / took, 1e3 * took / tokens))
        advance(f"{batch} texts", 1)
    return results


def show(results: Sequence[Result], config: Config, device: str, console: Console) -> None:
    """Print the results as a table."""
    table = new_table(f"decoding, {config.depth} blocks of width {config.dim}, {config.model}, on {device}")
    for heading in ("texts", "", "tokens/s", "ms per step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for r in results:
        table.add_row(str(r.batch), r.how, f"{r.tokens_per_second:,.0f}", f"{r.ms_per_step:.2f}")
    console.print(table)


def payload(results: Sequence[Result], config: Config) -> dict[str, object]:
    """The results, for JSON."""
    model = {name: getattr(config, name) for name in ("model", "depth", "dim", "heads", "ff", "hidden")}
    return {"model": model, "vocabulary": VOCAB, "results": [asdict(r) for r in results]}
