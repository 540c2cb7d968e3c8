"""`fastweights bench train`: whole training steps (data, forward, backward, clipping, AdamW) as `fastweights train` makes them.

Every model is the application's own, with the same blocks but for its mixer. Texts are random, cut into documents as long
as those of the default corpus, so that batches are packed as they are in training. Eager and compiled steps must reach
the same loss.
"""  # noqa: E501

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from fastweights.bench import parts
from fastweights.bench.agree import Disagreement
from fastweights.bench.report import new_table
from fastweights.bench.timing import Advance
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.text.corpus_files import Corpus, Split
from fastweights.text.tokenizer import Bytes
from fastweights.training.gradients import Gradients
from fastweights.training.parallel import Ranks
from fastweights.training.trainer import Trainer

# Shape and batch of each size; "0.9 M" is the application's default on a laptop.
SIZES: dict[str, dict[str, Any]] = {
    "0.9 M": {},
    "8 x 512": dict(depth=8, dim=512, heads=8, length=1024, batch=32),
    "12 x 768": dict(depth=12, dim=768, heads=12, length=1024, batch=32),
}
# The paper's models, timed where they are named: the presets of `fastweights train`, with mixers of their own.
PAPER: dict[str, dict[str, Any]] = {name: dict(preset=name) for name in ("paper-small", "paper-medium")}
SMOKE: dict[str, dict[str, Any]] = {"smoke": dict(depth=2, dim=16, heads=2, length=32, batch=2)}
MODELS, HEADS = ("gated-delta", "transformer"), ("linear", "fwl")
DOCUMENT = 15_000  # tokens
TOLERANCE = 0.02  # relative, of the loss after the first steps, between eager and compiled in bfloat16
WARM = 3
PEERS = {"deltanet": "DeltaNet", "gated-delta": "GatedDeltaNet"}  # FLA's layers with the parameters of ours


@dataclass
class Result:
    """One model at one size.  ready: seconds until the first steps were done;  loss: after them, per token.

    size: name in SIZES;  model, head: as in a configuration, or the peer's name;  how: "captured" where a step is one
    CUDA graph, else "compiled" or "eager", with "+captured" where a Fast Weight Layer is one;  share_of_peak: the
    arithmetic that the model needs over what the device could do in that time;  peak_bytes: the most GPU memory that
    was held at once;  host_ms: until the host has queued a step;  parts: milliseconds by part of the model, where they
    were asked for;  flop_per_token: of a step.
    """

    size: str
    model: str
    head: str
    how: str
    parameters: int
    tokens_per_second: float
    share_of_peak: float
    ms_per_step: float
    ready: float
    loss: float
    peak_bytes: int
    host_ms: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    flop_per_token: int = 0


def corpus(tokens: int, vocab: int) -> Corpus:
    """Random documents of DOCUMENT tokens, each after its start token.

    Random tokens cost what real ones cost, and no corpus has to be on the machine.

    Args:
        tokens: in all.
        vocab: size of the vocabulary; its last token starts documents.
    """
    rng = np.random.default_rng(0)
    text = rng.integers(0, vocab - 1, tokens).astype(np.uint16 if vocab <= 2**16 else np.uint32)
    at = np.arange(0, tokens, DOCUMENT)
    text[at] = vocab - 1
    at = np.r_[at, tokens]
    split = Split(text, at, [str(i) for i in range(len(at) - 1)], np.diff(at))
    return Corpus({"train": split, "valid": split}, Bytes(), Path())


class PeersMixer(nn.Module):
    """FLA's layer of the same kind, which reads whole rows: it takes no notice of pieces and carries nothing."""

    def __init__(self, model: str, dim: int, heads: int):
        super().__init__()
        from fla import layers

        more = dict(use_gate=False) if model == "deltanet" else dict(head_dim=dim // heads, expand_v=1)
        self.layer = getattr(layers, PEERS[model])(hidden_size=dim, num_heads=heads, conv_size=4, **more)

    def forward(self, x: Tensor, state: Any, pieces: Any, mask: Any = None) -> tuple[Tensor, Any]:
        """x (B, T, D) through the layer; state, pieces and mask belong to our layers and are not used."""
        return self.layer(x)[0], state

    def init_state(self, batch: int) -> tuple[()]:
        """Nothing is carried."""
        return ()


def _trainer(config: Config, vocab: int, device: str, peer: bool, texts: Corpus) -> Trainer:
    """A trainer of the application around a model of this configuration, without a folder for its run.

    peer: put FLA's layer into every block.  texts: what it trains on.
    """
    torch.manual_seed(0)
    model = LanguageModel(config.in_training, vocab)
    if peer:
        for block in model.blocks:
            block.mixer = PeersMixer(config.model, config.dim, config.heads)
    return Trainer(config, Path(), texts, model.to(device), Ranks(device=device))


class Steps:
    """Training steps of one model, one per call, as `fastweights train` makes them.

    Args:
        config: of the model and its training.
        vocab: size of the vocabulary.
        device: "cpu" or "cuda".
        most: steps that there will be, for which there are texts.
        peer: put FLA's layer in the place of ours.
    """

    def __init__(self, config: Config, vocab: int, device: str, most: int, *, peer: bool = False):
        self.trainer = _trainer(config, vocab, device, peer, corpus(most * config.batch * config.length + 1, vocab))
        self.states, self.losses = self.trainer.start()[0], list[Tensor]()
        self.wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self) -> None:
        """One step, which on a GPU may still be on its way."""
        loss, self.states = self.trainer.step(len(self.losses), 0.1, self.states)
        self.losses.append(loss)

    def seconds(self, steps: int) -> float:
        """Of so many steps together, until the device has nothing left to do."""
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            self()
        self.wait()
        return time.perf_counter() - started


def measure(
    size: str, config: Config, vocab: int, device: str, *, repeats: int, peer: bool = False, profile: bool = False
) -> Result:
    """Whole steps of one model, as `fastweights train` makes them.

    Three steps first, which compile and fill caches; then three rounds, of which the median counts. A round ends when
    the device has nothing left to do.

    Args:
        size: name of the size, for the result.
        config: of the model and its training.
        vocab: size of the vocabulary.
        device: "cpu" or "cuda".
        repeats: steps that are timed, in all rounds together.
        peer: time FLA's layer in the place of ours.
        profile: also say where the time goes.
    """
    torch.compiler.reset()  # a process may compile one function for few models
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = Steps(config, vocab, device, repeats + 20, peer=peer)
    trainer = step.trainer
    ready = step.seconds(WARM)
    step.seconds(min(6, repeats))  # of what is kept between steps, the last comes to be
    steps = max(1, repeats // 3)
    seconds = sorted(step.seconds(steps) / steps for _ in range(3))[1]
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    step.wait()
    rate, ran, where = config.batch * config.length / seconds, trainer.ran, dict[str, float]()
    if ran != "captured" and "captured" in trainer.fast_form():
        ran += "+captured"
    if profile:
        # A graph is one launch to the profiler: steps are launched one by one to see their parts.
        trainer.gradients = Gradients(trainer.objective, trainer.autocast, "to see its parts")
        where = parts.parts(trainer.model, step, device)
        if device == "cuda":
            where[parts.HOST] = max(0.0, 1e3 * seconds - sum(ms for part, ms in where.items() if part != parts.HOST))
        else:  # of the steps that were timed: those beside the profiler were others
            where = {part: ms * 1e3 * seconds / sum(where.values()) for part, ms in where.items()}
    return Result(
        size,
        f"FLA {PEERS[config.model]}" if peer else config.model,
        config.head,
        ran,
        sum(p.numel() for p in trainer.model.parameters()),
        rate,
        rate * trainer.flop_per_token() / trainer.peak(),
        1e3 * seconds,
        ready,
        float(step.losses[WARM - 1]),
        torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        1e3 * host,
        where,
        trainer.flop_per_token(),
    )


def cases(
    sizes: dict[str, dict[str, Any]],
    models: Sequence[str] | None,
    heads: Sequence[str] | None,
    device: str,
    peers: bool,
) -> list[tuple[str, Config, bool]]:
    """(size, configuration, whether a peer's block takes the mixer's place) of everything to time.

    Args:
        sizes: settings by name of the size, with a preset where they do not start from the laptop's.
        models: names of models; a transformer is timed with the first head only. None: MODELS, or the preset's own.
        heads: output layers, "linear" or "fwl". None: both, or the preset's own.
        device: on "cuda" each is timed eager and compiled.
        peers: also time FLA's layers, after ours of the same kind.
    """
    found = []
    for size, settings in sizes.items():
        base = Config.of(**dict(preset="laptop") | settings)
        laptop = "preset" not in settings
        mine, outputs = models or (MODELS if laptop else [base.model]), heads or (HEADS if laptop else [base.head])
        for model in mine:
            for head in outputs if model != "transformer" else outputs[:1]:
                for compiled in (False, True) if device == "cuda" else (False,):
                    found.append((size, replace(base, model=model, head=head, compile=compiled), False))
            if peers and model in PEERS:  # with the first head, eager: the peer's layer reads no packed documents
                found.append((size, replace(base, model=model, head=outputs[0], compile=False), True))
    return found


def run(
    asked: Sequence[tuple[str, Config, bool]],
    vocab: int,
    device: str,
    *,
    repeats: int,
    profile: bool,
    advance: Advance,
    tell: Callable[[Result], None] = lambda result: None,
    leave: Callable[[str], None] = lambda why: None,
) -> list[Result]:
    """Everything, one after the other; raises where eager and compiled disagree.

    Args:
        asked: what `cases` returned.
        vocab: size of the vocabulary.
        device: "cpu" or "cuda".
        repeats: timed steps of each.
        profile: also by part of the model.
        advance: moves a progress bar.
        tell: called with each result as it comes.
        leave: called with the reason where a peer's layer does not run.
    """
    results: list[Result] = []
    for size, config, peer in asked:
        try:
            result = measure(size, config, vocab, device, repeats=repeats, peer=peer, profile=profile)
        except Exception as why:
            if not peer:
                raise
            leave(f"{size}, FLA {PEERS[config.model]} is left out: {type(why).__name__}: {why}")
            advance(f"{size}, {config.model}", 1)
            continue
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        for other in results:
            same = (other.size, other.model, other.head) == (size, result.model, result.head)
            if same and not abs(other.loss - result.loss) <= TOLERANCE * other.loss:
                raise Disagreement(
                    f"{result.model} at {size} reaches a loss of {other.loss} {other.how} and {result.loss} "
                    f"{result.how}; allowed {TOLERANCE:.0%}. Nothing is reported."
                )
        results.append(result)
        tell(result)
        advance(f"{size}, {result.model}", 1)
    return results


def show(results: Sequence[Result], device: str, console: Console) -> None:
    """Print for each size the speeds as one table, and the milliseconds by part as another where there are any."""
    for size in dict.fromkeys(r.size for r in results):
        mine = [r for r in results if r.size == size]
        table = new_table(f"{size}: training steps on {device} (data, forward, backward, clipping, AdamW)")
        table.add_column("model")
        table.add_column("ran", no_wrap=True)
        for heading in ("params", "tokens/s", "% of peak", "ms", "host ms", "GiB", "ready s"):
            if device == "cuda" or heading not in ("host ms", "GiB"):
                table.add_column(heading, justify="right")
        for r in mine:
            on_gpu = [f"{r.host_ms:.1f}", f"{r.peak_bytes / 2**30:.1f}"] if device == "cuda" else []
            table.add_row(
                f"{r.model}, {r.head}",
                r.how,
                f"{r.parameters / 1e6:.1f} M",
                f"{r.tokens_per_second:,.0f}",
                f"{100 * r.share_of_peak:.1f}",
                f"{r.ms_per_step:.1f}",
                *on_gpu,
                f"{r.ready:.1f}",
            )
        console.print(table)
        profiled = [(f"{r.model}\n{r.head}\n{r.how}", r.parts, r.ms_per_step) for r in mine if r.parts]
        if profiled:
            parts.show(f"{size}: milliseconds of a step by part", profiled, "a step", console)


def payload(results: Sequence[Result], vocab: int) -> dict[str, object]:
    """What goes to the JSON file."""
    return {"vocabulary": vocab, "results": [asdict(r) for r in results]}
