"""An encoder-decoder whose attention, self and cross, is softmax or a sum of features; pairs to translate; BLEU.

Shapes: B sentences, T tokens, D width, H heads, K key width.
"""

import functools
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import features
from fastweights.torch.ops import fast_weight, feature_map

PAD, START, END, UNKNOWN = range(4)
LENGTHS = (16, 24, 32, 48)  # sentences are padded to one of these
EPS = 1e-6  # added to the sum of weights, which is positive


@dataclass(frozen=True)
class Pairs:
    """Sentences as words, by split, and the numbers of words of both languages."""

    name: str
    splits: dict[str, list[tuple[list[str], list[str]]]]
    source: dict[str, int]
    target: dict[str, int]


@functools.lru_cache(2)
def load(data: Path | None, limit: int = 0) -> Pairs:
    """Multi30k English to German from `data`, or made-up sentences whose verb goes to the end."""
    folder = None if data is None else data / "multi30k"
    if folder is not None and folder.is_dir():
        names = dict(train="train", valid="val", test="test_2016_flickr")
        splits = {s: list(zip(_read(folder / f"{n}.en"), _read(folder / f"{n}.de"), strict=True))[: limit or None]
                  for s, n in names.items()}  # fmt: skip
    else:
        rng = random.Random(0)
        sizes = dict(train=limit or 4000, valid=64, test=64)
        splits = {s: [_made_up(rng) for _ in range(n)] for s, n in sizes.items()}
    splits["train"] = [(a, b) for a, b in splits["train"] if max(len(a), len(b)) < LENGTHS[-1] - 1]
    source, target = (_numbers(pair[i] for pair in splits["train"]) for i in (0, 1))
    return Pairs("multi30k" if folder is not None and folder.is_dir() else "made up", splits, source, target)


def _read(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text("utf-8").splitlines()]


def _made_up(rng: random.Random) -> tuple[list[str], list[str]]:
    noun = lambda: rng.randrange(6)  # noqa: E731
    a, verb, b, adjective = noun(), rng.randrange(4), noun(), rng.randrange(3)
    return (["the", f"noun{a}", f"verb{verb}", "a", f"adjective{adjective}", f"noun{b}"],
            ["das", f"wort{a}", "ein", f"eigen{adjective}", f"wort{b}", f"tun{verb}"])  # fmt: skip


def _numbers(sentences: Any) -> dict[str, int]:
    """Of words seen at least twice."""
    counts = Counter(w for s in sentences for w in s)
    return {w: i + 4 for i, w in enumerate(w for w, n in counts.items() if n > 1)}


def arrays(pairs: list, found: Pairs, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of about `tokens` words: source (B, T) ending in END, target (B, T + 1) from START to END; PAD after."""
    groups: dict[int, list] = {}
    for a, b in pairs:
        groups.setdefault(next(n for n in LENGTHS if max(len(a), len(b)) < n), []).append((a, b))
    made = []
    for length, group in sorted(groups.items()):
        rows = max(1, tokens // length)
        for at in range(0, len(group), rows):
            source, target = np.full((rows, length), PAD), np.full((rows, length + 1), PAD)
            for i, (a, b) in enumerate(group[at : at + rows]):
                source[i, : len(a) + 1] = [found.source.get(w, UNKNOWN) for w in a] + [END]
                target[i, : len(b) + 2] = [START, *(found.target.get(w, UNKNOWN) for w in b), END]
            source[len(group[at : at + rows]) :, 0] = END  # attention over nothing has no value
            made.append((source, target))
    return made


class Attend(nn.Module):
    """Attention of x to a source, or to itself.  kind: "softmax", or a feature map such as "elu+1" or "dpfp-2"."""

    projection: Tensor | None

    def __init__(self, dim: int, heads: int, kind: str):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        phi = None if kind == "softmax" else features.parse(kind)
        drawn = features.favor_projection(phi.size, dim // heads, 0) if phi is not None and phi.random else None
        self.register_buffer("projection", None if drawn is None else torch.tensor(drawn, dtype=torch.float32))

    def forward(
        self, x: Tensor, source: Tensor | None = None, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """mask (B, S): True where the source has a word."""
        source = x if source is None else source
        q = self.query(x).unflatten(-1, (self.heads, -1))  # (B, T, H, K)
        k, v = self.key_value(source).unflatten(-1, (2, self.heads, -1)).unbind(2)
        if self.kind == "softmax":
            seen = None if mask is None else mask[:, None, None, :]
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal)
            return self.out(o.transpose(1, 2).flatten(2))
        # a common factor of q's features cancels between the sum and its weights, so they may be scaled
        phi = lambda z, norm: feature_map(z, self.kind, norm=norm, projection=self.projection)  # noqa: E731
        q, k = phi(q, "none" if self.projection is None else "max"), phi(k, "none")
        if mask is not None:
            k = k * mask[..., None, None].to(k.dtype)
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # its last column sums the weights
        if causal:
            o, _ = fast_weight(q, k, v, rule="sum")
        else:
            o = torch.einsum("bthk,bshk,bshv->bthv", q, k, v)
        return self.out((o[..., :-1] / (o[..., -1:] + EPS)).flatten(2).to(x.dtype))


class Layer(nn.Module):
    """Self-attention, attention to a source in a decoder, feed-forward; norms come first."""

    def __init__(self, dim: int, heads: int, kind: str, dropout: float, decoder: bool):
        super().__init__()
        self.own, self.cross = Attend(dim, heads, kind), Attend(dim, heads, kind) if decoder else None
        self.forward_in, self.forward_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, source: Tensor | None = None) -> Tensor:
        decoder = self.cross is not None
        x = x + self.dropout(self.own(self.norms[0](x), mask=None if decoder else mask, causal=decoder))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[1](x), source, mask=mask))
        return x + self.dropout(self.forward_out(self.dropout(F.relu(self.forward_in(self.norms[2](x))))))


class Translator(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, V) of the words that follow the target's."""

    def __init__(self, source: int, target: int, *, dim: int, heads: int, depth: int, kind: str, dropout: float):
        super().__init__()
        self.source, self.target = nn.Embedding(source, dim), nn.Embedding(target, dim)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=dim**-0.5)
        self.encoder = nn.ModuleList(Layer(dim, heads, kind, dropout, False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(dim, heads, kind, dropout, True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        mask = source != PAD
        x = self.dropout(self._embed(self.source, source))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norms[0](x), mask

    def decode(self, target: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self._embed(self.target, target))
        for layer in self.decoder:
            x = layer(x, mask, encoded)
        return self.norms[1](x) @ self.target.weight.mT

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        D = embedding.embedding_dim
        rates = torch.exp(torch.arange(0, D, 2, device=tokens.device) * (-math.log(10_000.0) / D))
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        return embedding(tokens) * D**0.5 + torch.cat([angles.sin(), angles.cos()], -1)

    @torch.no_grad()
    def greedy(self, source: Tensor, longest: int) -> Tensor:
        """The most likely next word again and again: (B, longest) after START, END and what follows it included."""
        encoded, mask = self.encode(source)
        target = torch.full((len(source), longest + 1), PAD, device=source.device)
        target[:, 0] = START
        for t in range(longest):
            target[:, t + 1] = self.decode(target[:, : t + 1], encoded, mask)[:, -1].argmax(-1)
        return target[:, 1:]


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """BLEU of tokenised text and who computed it: sacrebleu, or the same formula here where it is not installed."""
    try:
        import sacrebleu
    except ImportError:
        return corpus_bleu(hypotheses, references), "own formula"
    score = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True).score
    return float(score), f"sacrebleu {sacrebleu.__version__}"


def corpus_bleu(hypotheses: list[str], references: list[str]) -> float:
    """Geometric mean of the precisions of 1 to 4 words, smoothed like sacrebleu's, times the brevity penalty; in %."""
    right, total, ours, theirs = [0] * 4, [0] * 4, 0, 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        a, b = hypothesis.split(), reference.split()
        ours, theirs = ours + len(a), theirs + len(b)
        for n in range(4):
            x, y = (Counter(tuple(w[i : i + n + 1]) for i in range(len(w) - n)) for w in (a, b))
            right[n], total[n] = right[n] + sum((x & y).values()), total[n] + sum(x.values())
    if not all(total) or not right[0]:
        return 0.0
    logs, smooth = 0.0, 1.0
    for r, t in zip(right, total, strict=True):
        smooth = smooth if r else smooth * 2
        logs += math.log(100 * r / t if r else 100 / (smooth * t))
    return math.exp(logs / 4) * min(1.0, math.exp(1 - theirs / ours))
