"""`fastweights bench decode`: how fast language models write, token by token, in the way of `fastweights generate`.

Many texts at once, or one text after prompts of growing length. On a GPU a step is also replayed as a CUDA graph, and
many texts are written by `generate` of transformers, too, where that is installed. All must write the same tokens.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fastweights.bench import parts
from fastweights.bench.agree import Disagreement
from fastweights.bench.report import new_table
from fastweights.bench.timing import Advance
from fastweights.models.config import OTHERS, Config
from fastweights.models.decoding import Decoder
from fastweights.models.language_model import LanguageModel
from fastweights.torch.tree import tensor_bytes

BATCHES = (1, 64, 512)
VOCAB = 16_384
FULL = Config.of("paper-small")  # 16 blocks of width 128, DPFP-3 and the delta rule
SMOKE = Config.of("paper-small", dim=16, heads=2, depth=2, hidden=32)
MODELS = ("gated-delta", "transformer")
# shapes of the models that read a prompt
SIZES: dict[str, dict[str, Any]] = {
    "0.9 M": {},  # the application's default on a laptop
    "16 x 128": dict(depth=16, dim=128, heads=8),
    "12 x 768": dict(depth=12, dim=768, heads=12),
}
SMOKE_SIZE = dict(depth=2, dim=16, heads=2)
SAME = 8  # tokens that every way must write alike before it is timed
EAGER, CAPTURED = "eager", "captured"  # step by step, or replayed as a CUDA graph
OURS, THEIRS = "transformers, our loop", "transformers, its loop"  # `generate` of transformers for the same model


@dataclass
class Result:
    """How fast B texts grow.

    Attributes:
        batch: B.
        how: "eager", step by step, "captured", a CUDA graph, or what `generate` of transformers ran.
        tokens_per_second: of all texts together.
        ms_per_step: milliseconds for one token of each.
    """

    batch: int
    how: str
    tokens_per_second: float
    ms_per_step: float


@dataclass
class Prompt:
    """A model that has read a prompt, and writes after it.

    Attributes:
        model: name of its mixer, with its head where that is a Fast Weight Layer.
        tokens: of the prompt; a transformer looks back at all of them.
        seconds: from the prompt to the first token.
        carried: bytes of what the model keeps of the prompt.
        peak: the most bytes of GPU memory held at once while reading, weights included; 0 on a CPU.
        tokens_per_second: of the text that follows.
        how: "eager", step by step, or "captured", a CUDA graph.
        parts: milliseconds of a token by part of the model, step by step, where they were asked for.
    """

    model: str
    tokens: int
    seconds: float
    carried: int
    peak: int
    tokens_per_second: float
    how: str
    parts: dict[str, float] = field(default_factory=dict)


def likeliest(logits: Tensor, noise: Tensor) -> Tensor:
    """The likeliest token of each row of logits (B, V); there is no chance in it."""
    return logits.argmax(-1)


def write(decoder: Decoder, tokens: int) -> Tensor:
    """(B, tokens): what a decoder writes next."""
    noise = torch.zeros(len(decoder.token), device=decoder.token.device)
    return torch.stack([decoder(noise) for _ in range(tokens)], 1)


def seconds(decoder: Decoder, tokens: int) -> float:
    """Seconds in which a decoder that is warm writes so many tokens of each text."""
    device = decoder.token.device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    noise = torch.zeros(len(decoder.token), device=device)
    wait()
    start = time.perf_counter()
    for _ in range(tokens):
        decoder(noise)
    wait()
    return time.perf_counter() - start


def ways(token: Tensor) -> tuple[bool, ...]:
    """Whether to capture a step: both on a GPU."""
    return (False, True) if token.is_cuda else (False,)


def writers(model: LanguageModel, state: Any, token: Tensor) -> list[tuple[str, Decoder]]:
    """Every way to write after `state` and `token` on this device, warm; they have written the same SAME tokens."""
    found: list[tuple[str, Decoder]] = []
    want = None
    for capture in ways(token):
        decoder = Decoder(model, state, token, likeliest, capture=capture)
        text = write(decoder, SAME)
        if want is not None and not torch.equal(text, want):
            raise Disagreement("a CUDA graph writes other tokens than the model step by step. Nothing is reported.")
        want = text
        found.append((CAPTURED if decoder.captured else EAGER, decoder))
    return found


def of_transformers(model: LanguageModel, token: Tensor, tokens: int) -> dict[str, tuple[Tensor, float]]:
    """What `generate` of transformers writes after token (B,) with the same weights, and in how many seconds.

    Its first call, which records CUDA graphs on a GPU, is not timed.

    Args:
        model: as the program has it; `generate` gets a copy.
        token: (B,), the prompts.
        tokens: to write.

    Returns:
        (text (B, tokens), seconds) by our loop and by that of transformers; nothing where transformers is missing.
    """
    try:
        from transformers.generation import GenerationMixin
    except ImportError:
        return {}
    from fastweights.hf.export import from_language_model

    copied: Any = from_language_model(model)
    copied.to(token.device, model.embedding.weight.dtype)
    wait = torch.cuda.synchronize if token.is_cuda else lambda: None
    settings: dict[str, Any] = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    found = {}
    for name, loop in ((OURS, {}), (THEIRS, dict(custom_generate=GenerationMixin._sample))):
        for _ in range(2):
            wait()
            start = time.perf_counter()
            text = copied.generate(token[:, None], attention_mask=torch.ones_like(token[:, None]), **settings, **loop)
            wait()
            found[name] = text[:, 1:], time.perf_counter() - start
    return found


def new_model(config: Config, device: str, vocab: int = VOCAB) -> LanguageModel:
    """A model with random weights; bfloat16 on a GPU, but for one with a Fast Weight Layer."""
    torch.manual_seed(0)
    model = LanguageModel(config, vocab).to(device).eval()
    return model.bfloat16() if device == "cuda" and config.head == "linear" else model


@torch.no_grad()
def run(config: Config, batches: Sequence[int], device: str, *, tokens: int, advance: Advance) -> list[Result]:
    """Time each batch, step by step and, on a GPU, as a graph.

    Args:
        config: of the model.
        batches: numbers of texts.
        device: "cpu" or "cuda".
        tokens: steps to time.
        advance: moves the progress bar.
    """
    model, results = new_model(config, device), []
    for batch in batches:
        token = torch.arange(batch, device=device) % model.vocab
        for how, decoder in writers(model, model.init_state(batch), token):
            took = seconds(decoder, tokens)
            results.append(Result(batch, how, batch * tokens / took, 1e3 * took / tokens))
        want = write(Decoder(model, model.init_state(batch), token, likeliest, capture=False), SAME)
        for how, (text, took) in of_transformers(model, token, tokens).items():
            if not torch.equal(text[:, :SAME], want[:, :tokens]):
                raise Disagreement("generate of transformers writes other tokens than the model. Nothing is reported.")
            results.append(Result(batch, how, batch * tokens / took, 1e3 * took / tokens))
        advance(f"{batch} texts", 1)
    return results


def prompts(
    models: Sequence[str], heads: Sequence[str], lengths: Sequence[int], size: dict[str, Any]
) -> list[tuple[Config, int]]:
    """(configuration, tokens of the prompt) of everything to time; a transformer looks back at its whole prompt.

    Args:
        models: names of mixers.
        heads: output layers, "linear" or "fwl"; a transformer has the first alone.
        lengths: of prompts, in tokens.
        size: depth, dim and heads.
    """
    return [
        (Config.of("laptop", **size, model=model, head=head, window=n if model in OTHERS else 0), n)
        for model in models
        for head in (heads[:1] if model in OTHERS else heads)
        for n in lengths
    ]


@torch.no_grad()
def after_prompts(
    asked: Sequence[tuple[Config, int]],
    device: str,
    *,
    tokens: int,
    advance: Advance,
    warm: int = 2,
    vocab: int = VOCAB,
    profile: bool = False,
) -> list[Prompt]:
    """Read each prompt, then write after it. The prompt is read `warm` times before it is timed, if it is short.

    Args:
        asked: what `prompts` returned.
        device: "cpu" or "cuda".
        tokens: to write.
        advance: moves the progress bar.
        warm: readings of at most 20,000 tokens that compile kernels.
        vocab: words of the vocabulary.
        profile: also say where the time of a token goes, step by step.
    """
    found = []
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for config, n in asked:
        model = new_model(config, device, vocab)
        text = torch.arange(n).mul_(7919).remainder_(vocab - 1).numpy()
        for _ in range(warm):
            memory = model.read(text[: min(n, 20_000)])
            model.step(torch.tensor([memory.last], device=device), memory.state)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        memory = model.read(text)
        token = torch.tensor([memory.last], device=device)
        int(likeliest(model.step(token, memory.state)[0], token))
        wait()
        took = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        (_, eager), *_ = known = writers(model, memory.state, token)
        how, decoder = known[-1]
        rate = tokens / seconds(decoder, tokens)
        name = config.model if config.head == "linear" else f"{config.model}, {config.head}"
        where = dict[str, float]()
        if profile:
            where = parts.parts(model, partial(eager, torch.zeros(1, device=device)), device, steps=tokens)
            if device == "cpu":  # of the tokens that were timed: those beside the profiler were others
                where = {part: ms * 1e3 / rate / sum(where.values()) for part, ms in where.items()}
        found.append(Prompt(name, n, took, tensor_bytes(memory.state), peak, rate, how, where))
        advance(f"{name}, {n:,} tokens", 1)
        del model, memory, decoder, eager, known
    return found


def show(results: Sequence[Result], config: Config, device: str, console: Console) -> None:
    """Print the results as a table."""
    table = new_table(f"decoding, {config.depth} blocks of width {config.dim}, {config.model}, on {device}")
    for heading in ("texts", "how", "tokens/s", "ms per step"):
        table.add_column(heading, justify="left" if heading == "how" else "right")
    for r in results:
        table.add_row(str(r.batch), r.how, f"{r.tokens_per_second:,.0f}", f"{r.ms_per_step:.2f}")
    console.print(table)


def show_prompts(results: Sequence[Prompt], size: str, device: str, console: Console) -> None:
    """Print what came after prompts as a table."""
    table = new_table(f"one text after a prompt, {size}, on {device}")
    for heading in ("model", "how", "prompt", "first token, s", "carried, MiB", "peak, MiB", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("model", "how") else "right", no_wrap=heading == "how")
    for r in results:
        table.add_row(
            r.model,
            r.how,
            f"{r.tokens:,}",
            f"{r.seconds:.3f}",
            f"{r.carried / 2**20:.2f}",
            f"{r.peak / 2**20:,.0f}",
            f"{r.tokens_per_second:,.0f}",
        )
    console.print(table)
    columns = [(f"{r.model}\n{r.tokens:,}", r.parts, sum(r.parts.values())) for r in results if r.parts]
    if columns:
        parts.show(f"{size}: milliseconds of a token by part, step by step", columns, "a token", console)


def payload(results: Sequence[Result], config: Config) -> dict[str, object]:
    """The results, for JSON."""
    model = {name: getattr(config, name) for name in ("model", "depth", "dim", "heads", "ff", "hidden")}
    return {"model": model, "vocabulary": VOCAB, "results": [asdict(r) for r in results]}


def prompts_payload(results: Sequence[Prompt], size: str, vocab: int = VOCAB) -> dict[str, object]:
    """What came after prompts, for JSON."""
    return {"size": size, "vocabulary": vocab, "prompts": [asdict(r) for r in results]}
