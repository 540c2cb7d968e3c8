"""Generation: one token at a time from a memory."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.models.decoding import Decoder
from fastweights.models.evaluation import carried
from fastweights.models.language_model import LanguageModel
from fastweights.models.memory import Memory
from fastweights.text.streams import Stream
from fastweights.torch.cache import CacheState, NeuralCache, recorded

LEAST = 1e-6  # temperature above 0: logits divided by much less are infinite
DRAWS = 4096  # random numbers drawn at once


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

        >>> Sampling(temperature=0).draw(torch.tensor([0.1, 2.0, 0.3]), torch.Generator())
        1

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token, 1 draws as the model says.
        top_k: number of likeliest tokens to choose among; 0 for all.
        top_p: probability that these have together, the likeliest first.
        min_p: probability that a token needs, as a share of the likeliest one's; 0 for any.
        seed: the same seed writes the same text.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LEAST <= self.temperature < math.inf):
            raise FastWeightError(
                f"temperature is {self.temperature}; expected 0, which takes the likeliest token, or at least {LEAST}"
            )
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise FastWeightError(f"top_k is {self.top_k}; expected the number of tokens to choose from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise FastWeightError(f"top_p is {self.top_p}; expected above 0 and at most 1: the probability to keep")
        if not 0 <= self.min_p <= 1:
            raise FastWeightError(f"min_p is {self.min_p}; expected from 0 to 1: a share of the likeliest token's")
        if not isinstance(self.seed, Integral) or not -(2**63) <= self.seed < 2**64:
            raise FastWeightError(f"seed is {self.seed}; expected a whole number of at most 64 bits")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token for logits (V,), with this source of chance."""
        return int(self.pick(logits[None], torch.rand(1, generator=generator).to(logits.device)))

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Draw a token for each row of logits (B, V): the one at which the cumulative probability passes noise (B,).

        The noise is uniform in [0, 1), so that each token is drawn as often as its probability says.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits, order = logits.float() / self.temperature, None
        if self.top_k or self.top_p < 1:
            logits, order = logits.sort(descending=True)
            logits = logits[:, : self.top_k] if self.top_k else logits
        p = logits.softmax(-1)
        if order is not None and self.top_p < 1:
            p = torch.where(p.cumsum(-1) - p < self.top_p, p, 0.0)  # the likeliest always stays
        if self.min_p:
            p = torch.where(p >= self.min_p * p.amax(-1, keepdim=True), p, 0.0)
        total = p.cumsum(-1)
        found = torch.searchsorted(total, noise[:, None].to(total) * total[:, -1:], right=True)
        found = found.clamp(max=p.shape[-1] - 1)  # noise that rounds up to 1
        return (found if order is None else order.gather(1, found))[:, 0]


def read_into(
    cache: NeuralCache, model: LanguageModel, prompt: bytes | str, memory: Memory | None, *, learn: bool = True
) -> CacheState:
    """What a cache holds of a prompt that follows `memory`; a memory itself has no cache.

    Args:
        cache: to fill.
        model: that reads.
        prompt: text.
        memory: what was read before it, or None.
        learn: whether a Fast Weight Layer learns from the prompt on the way.
    """
    state = model.init_state(1) if memory is None else model._take(memory).fork().state
    kept = carried(model, model._tokens(prompt, memory), state, learn=learn, cache=cache)[2]
    assert kept is not None
    return kept


@torch.no_grad()
def generate(
    model: LanguageModel,
    memory: Memory,
    tokens: int,
    how: Sampling | None = None,
    *,
    learn: bool = True,
    cache: NeuralCache | None = None,
    cached: CacheState | None = None,
) -> Iterator[int]:
    """Tokens that follow what `memory` has read, up to the end of the document or `tokens` of them.

    Every token takes the same time and memory, however long the text before it is.

    Args:
        model: of a run, as `load` returns it.
        memory: what was read, as `model.read` returns it.
        tokens: to write at most.
        how: a `Sampling`; its defaults when absent.
        learn: whether a Fast Weight Layer goes on learning, from what it generates. What it has learned from the text
            before it keeps either way.
        cache: a `NeuralCache` that is mixed into the prediction, and goes on reading too.
        cached: what it holds of the text before.

    Examples:
        >>> from fastweights.models.config import Config
        >>> from fastweights.text.tokenizer import Bytes
        >>> model = LanguageModel(Config(dim=16, heads=2, depth=1), vocab=257)
        >>> model.tokenizer = Bytes()
        >>> memory = model.read("def ")
        >>> written = bytes(generate(model, memory, 5))  # an untrained model writes noise
        >>> len(written) <= 5
        True
    """
    how = how or Sampling()
    if not isinstance(tokens, Integral) or tokens < 0:
        raise FastWeightError(f"tokens is {tokens}; expected the number of tokens to write at most")
    model.eval()
    state = model._take(memory).state
    device: Any = model.embedding.weight.device
    noise, token = _noise(tokens, how.seed, device), torch.tensor([memory.last], device=device)
    if cache is not None:
        yield from _with_cache(model, state, token, noise, how, learn, cache, cached)
        return
    decoder, found = Decoder(model, state, token, how.pick, learn=learn), None
    for i in range(tokens):
        found = decoder(next(noise)) if found is None else found
        following = decoder(next(noise)) if decoder.captured and i + 1 < tokens else None  # queued before we wait
        number = int(found)
        if number == model.vocab - 1:  # the start of another document
            return
        yield number
        found = following


def _noise(tokens: int, seed: int, device: Any) -> Iterator[Tensor]:
    """A number (1,) in [0, 1) for each token, the same however many there are; only a few are held at a time."""
    generator = torch.Generator().manual_seed(seed)
    for at in range(0, tokens, DRAWS):
        yield from torch.rand(min(DRAWS, tokens - at), 1, generator=generator).to(device)


def _with_cache(
    model: LanguageModel,
    state: Any,
    token: Tensor,
    noise: Iterator[Tensor],
    how: Sampling,
    learn: bool,
    cache: NeuralCache,
    cached: CacheState | None,
) -> Iterator[int]:
    """`generate` with a neural cache mixed in."""
    for u in noise:
        with recorded(model.norm) as seen:
            logits, state = model.step(token, state, learn=learn)
        mixed, cached = cache.answer(seen[-1], token[None], logits[:, None], cached)
        token = how.pick(mixed[:, 0], u)
        if int(token) == model.vocab - 1:
            return
        yield int(token)


def text_of(model: LanguageModel, tokens: Iterator[int], until: str = "", before: Iterable[int] = ()) -> Iterator[str]:
    """Text as it becomes known: a character is given when all its bytes are there.

    Args:
        model: whose tokenizer to use.
        tokens: as they are generated.
        until: text after which to stop; it is given, and nothing after it.
        before: tokens before them, as far as they are known: they may decide whether a blank follows.
    """
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    stream = Stream(model.tokenizer, before)
    seen = ""
    for token in tokens:
        piece = decoder.decode(stream.add(token))
        seen = (seen + piece)[-len(until) - len(piece) :] if until else ""
        if until and until in seen:
            yield piece[: len(piece) - (len(seen) - seen.index(until) - len(until))]
            return
        if piece:
            yield piece
    rest = decoder.decode(stream.rest(), final=True)
    if rest:
        yield rest


def parts_of(pieces: Iterable[str], end: str) -> Iterator[str]:
    """Whole parts of a text, each when its end is there; what follows the last end is left out, unless there is none.

    Args:
        pieces: of the text, as it becomes known.
        end: what a part ends with, such as a line break.

    Examples:
        >>> list(parts_of(["def f", "():\\n    re", "turn 1\\n    x ="], "\\n"))
        ['def f():\\n', '    return 1\\n']
    """
    rest, written = "", False
    for piece in pieces:
        *parts, rest = (rest + piece).split(end)
        yield from (part + end for part in parts)
        written = written or bool(parts)
    if not written:
        yield rest
