"""Scores of long texts by models of the ecosystem, each token with at most a window of text before it.

static     windows slide over the text; nothing is remembered of what has left them
still      the same windows, and an attached head that learns nothing: what its training alone is worth
fast       the same windows, and the head learns from every token of the text
cache      the same windows, mixed with what a neural cache expects
both       the head and the cache together
dynamic    the same windows, and the model's weights are trained on each stride after it is scored
dynamic+cache    the same, mixed with what a neural cache expects
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.attach import NAME, WINDOW, using
from fastweights.hf.loading import read_corpus, row_of
from fastweights.text.scores import Score, Text
from fastweights.torch.cache import NeuralCache
from fastweights.torch.devices import watch_memory
from fastweights.torch.dynamic import DynamicEvaluation, GradientStatistics, token_losses
from fastweights.torch.tree import tensor_bytes

ROWS = 8  # windows of a static score at a time
CLIP = 1.0  # largest norm of a stride's gradient
STATISTICS = 24  # windows of training text, for the step of each weight in dynamic evaluation
EPS = 1e-5  # added to the root mean squared gradient that divides a weight's step


@dataclass(frozen=True)
class Reading:
    """How a long text is read, window by window.

    Attributes:
        window: tokens a model sees at once.
        stride: tokens scored at a time, between two updates.
        lr, parameters, statistics: of dynamic evaluation; with statistics its rule is "rms", else "sgd".
    """

    window: int = 1024
    stride: int = 256
    lr: float = 1e-3
    parameters: tuple[str, ...] = ("*",)
    statistics: GradientStatistics | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.window:
            raise FastWeightError(f"stride is {self.stride}; expected from 1 to the window of {self.window} tokens")

    def spans(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(first, start, stop): inputs from `first` are read, those from `start` to `stop` answered."""
        for start in range(0, tokens, self.stride):
            yield max(0, start + self.stride - self.window), start, min(start + self.stride, tokens)


PARTS = {  # of an attachment, by mode
    "still": dict(cache=False, learn=False),
    "fast": dict(cache=False),
    "cache": dict(head=False),
    "both": dict(),
}


DOWN = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h", "mlp.fc_out", "fc2", "feed_forward.out")
THIRDS = ("first", "middle", "last", "all")


def down_projections(model: Any, third: str = "middle") -> tuple[str, ...]:
    """Names of the matrices that end the feed-forward layers in a third of a model: `parameters` of dynamic evaluation.

    They are few, and what is below them needs no gradient.

    Args:
        model: a causal language model.
        third: "first", "middle" or "last" third of the blocks, or "all".

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> down_projections(LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)))
        ('model.layers.1.mlp.down_proj.weight',)
    """
    if third not in THIRDS:
        raise FastWeightError(f"third is {third!r}; expected one of {', '.join(map(repr, THIRDS))}")
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and n.removesuffix(".weight").endswith(DOWN)]
    if not names:
        raise FastWeightError(f"no feed-forward layer of the {type(model).__name__} ends in one of {', '.join(DOWN)}; "
                              "expected one per block: name the parameters themselves")  # fmt: skip
    n, i = len(names), THIRDS.index(third)
    return tuple(names) if third == "all" else tuple(names[-(-i * n // 3) : -(-(i + 1) * n // 3)])


def modes(model: Any) -> list[str]:
    """Those this model can be scored in; all but static and dynamic need `attach`."""
    return ["static", *(PARTS if hasattr(model, NAME) else ()), "dynamic", "dynamic+cache"]


def score(model: Any, tokenizer: Any, texts: list[Text], mode: str, how: Reading, *,
          advance: Callable[[int], Any] = lambda n: None) -> Score:  # fmt: skip
    """Score texts in one mode; the model is as before afterwards.

    Args:
        model, tokenizer: as `load_model` returns them.
        texts: what to score.
        mode: one of `modes(model)`; the list above says what each does.
        how: window and stride.
        advance: advance(bytes) after every text, for a progress bar.
    """
    if mode not in modes(model):
        why = "; attach a head first" if mode in PARTS else ""
        raise FastWeightError(f"mode is {mode!r}; expected one of {', '.join(map(repr, modes(model)))}{why}")
    model.eval()
    peak = watch_memory(model.device)
    started, held = time.perf_counter(), 0
    losses = []
    for text in texts:
        row = row_of(tokenizer, text).to(model.device)
        if mode in PARTS:
            loss, held = _attached(model, row, how, PARTS[mode])
        else:
            with using(model, head=False, cache=False):
                loss, held = _static(model, row, how) if mode == "static" else _dynamic(model, row, how, mode)
        losses.append(loss.double().cpu().numpy())
        advance(len(text.data))
    return Score(mode, losses, time.perf_counter() - started, held, peak())


@torch.no_grad()
def _static(model: Any, row: Tensor, how: Reading) -> tuple[Tensor, int]:
    """Losses (T,) of a text (1, T + 1), windows of equal lengths several at a time; nothing is carried."""
    losses = []
    alike = lambda span: (span[2] - span[0], span[2] - span[1])  # noqa: E731
    for _, group in itertools.groupby(how.spans(row.shape[1] - 1), alike):
        spans = list(group)
        losses += [_windows(model, row, spans[i : i + ROWS]) for i in range(0, len(spans), ROWS)]
    return torch.cat(losses), 0


def _windows(model: Any, row: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
    """Losses of windows of equal lengths, one after the other."""
    keep = spans[0][2] - spans[0][1]
    tokens = torch.cat([row[:, first:stop] for first, _, stop in spans])
    labels = torch.cat([row[:, start + 1 : stop + 1] for _, start, stop in spans])
    logits = model(tokens, use_cache=False, logits_to_keep=keep).logits[:, -keep:]
    return token_losses(logits, labels).flatten()


@torch.no_grad()
def _attached(model: Any, row: Tensor, how: Reading, parts: dict[str, bool]) -> tuple[Tensor, int]:
    """Losses of a text with these parts of the attachment, and the bytes of what they know at its end."""
    losses, state = [], None
    with using(model, **parts):
        for first, start, stop in how.spans(row.shape[1] - 1):
            out = model(row[:, first:stop], use_cache=False, logits_to_keep=stop - start, fast_state=state,
                        fast_context=start - first)  # fmt: skip
            state = out.fast_state
            losses.append(token_losses(out.logits, row[:, start + 1 : stop + 1])[0])
    return torch.cat(losses), tensor_bytes(state)


def _dynamic(model: Any, row: Tensor, how: Reading, mode: str) -> tuple[Tensor, int]:
    """Losses of a text while the model's weights train on it, and the bytes of those weights."""
    rule = "sgd" if how.statistics is None else "rms"
    cache = NeuralCache(WINDOW) if mode == "dynamic+cache" else None
    with DynamicEvaluation(model, rule=rule, lr=how.lr, eps=EPS, segment=how.stride, context=how.window - how.stride,
                           parameters=how.parameters, statistics=how.statistics, clip=CLIP, call=call_body,
                           cache=cache) as dynamic:  # fmt: skip
        held = sum(p.numel() * p.element_size() for p in dynamic.named.values())
        return dynamic.run(row).losses[0], held


def call_body(model: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Logits of a model without its cache, as `DynamicEvaluation` calls it."""
    return model(tokens, use_cache=False).logits, None


def gradient_statistics(model: Any, tokenizer: Any, data: str, window: int) -> GradientStatistics:
    """Of windows of training text, the same each time."""
    documents = [row_of(tokenizer, text) for text in read_corpus(tokenizer, data)]
    rng, rows = np.random.default_rng(0), []
    for _ in range(STATISTICS):
        row = documents[int(rng.integers(len(documents)))]
        at = int(rng.integers(max(1, row.shape[1] - window)))
        rows.append(row[:, at : at + window + 1].to(model.device))
    return GradientStatistics.collect(model, rows, call=call_body)
