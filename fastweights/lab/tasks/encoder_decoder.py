"""An encoder-decoder for translation whose attention, self and cross, is softmax or linear attention.

Linear attention of a query q with a feature map phi, over keys k_s and values v_s:

    o = sum_s (phi(q) . phi(k_s)) v_s / (sum_s phi(q) . phi(k_s) + EPS)

Shapes: B sentences, T target words, S source words, D width of the model, H heads, K width of a head, V words of the
target's vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import features
from fastweights.lab.engine.training_step import autocast
from fastweights.lab.tasks.sentence_pairs import END, LENGTHS, PAD, START, Pairs, encode
from fastweights.torch.ops import fast_weight, feature_map

EPS = 1e-6  # added to the sum of weights, which is positive
TRANSLATED = 512  # sentences that are translated at a time


class MultiHeadAttention(nn.Module):
    """Attention of x to a source, or to itself.

    Args:
        dim, heads: width and heads.
        kind: "softmax", or the feature map of linear attention, such as "elu+1" or "dpfp-2".
    """

    projection: Tensor | None  # FAVOR+'s random directions

    def __init__(self, dim: int, heads: int, kind: str):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        phi = None if kind == "softmax" else features.parse(kind)
        projection = features.favor_projection(phi.size, dim // heads, 0) if phi is not None and phi.random else None
        self.register_buffer(
            "projection", None if projection is None else torch.tensor(projection, dtype=torch.float32)
        )

    def forward(
        self, x: Tensor, source: Tensor | None = None, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """y (B, T, D).

        Args:
            x: (B, T, D), of which queries are made.
            source: (B, S, D), of which keys and values are made; x when absent.
            mask: (B, S), True where the source has a word; all of it when absent.
            causal: whether a position sees only those up to its own.
        """
        source = x if source is None else source
        q = self.query(x).unflatten(-1, (self.heads, -1))  # (B, T, H, K)
        k, v = self.key_value(source).unflatten(-1, (2, self.heads, -1)).unbind(2)  # (B, S, H, K)
        if self.kind == "softmax":
            softmax_mask = None if mask is None else mask[:, None, None, :]
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, softmax_mask, is_causal=causal)
            return self.out(o.transpose(1, 2).flatten(2))
        # A common factor of phi(q) cancels between the sum and its weights, so FAVOR+'s may be scaled by its largest.
        query_norm: Any = "none" if self.projection is None else "max"
        q = feature_map(q, self.kind, norm=query_norm, projection=self.projection)
        k = feature_map(k, self.kind, norm="none", projection=self.projection)
        if mask is not None:
            k = k * mask[..., None, None].to(k.dtype)
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column sums the weights
        if causal:
            o, _ = fast_weight(q, k, v, rule="sum")
        else:
            o = torch.einsum("bthk,bshk,bshv->bthv", q, k, v)
        return self.out((o[..., :-1] / (o[..., -1:] + EPS)).flatten(2).to(x.dtype))


class Layer(nn.Module):
    """Self-attention, in a decoder attention to the source, then a feed-forward; norms come first.

    Args:
        dim, heads: width and heads.
        kind: of attention, as for `MultiHeadAttention`.
        dropout: after each part.
        decoder: whether the layer attends to a source, and to no later word of its own.
    """

    def __init__(self, dim: int, heads: int, kind: str, dropout: float, decoder: bool):
        super().__init__()
        self.self_attention = MultiHeadAttention(dim, heads, kind)
        self.cross_attention = MultiHeadAttention(dim, heads, kind) if decoder else None
        self.forward_in, self.forward_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, source: Tensor | None = None) -> Tensor:
        """y (B, T, D).

        Args:
            x: (B, T, D).
            mask: (B, S), True where the source has a word; in an encoder x is the source.
            source: (B, S, D), what the encoder made of the source; in a decoder only.
        """
        decoder = self.cross_attention is not None
        x = x + self.dropout(self.self_attention(self.norms[0](x), mask=None if decoder else mask, causal=decoder))
        if self.cross_attention is not None:
            x = x + self.dropout(self.cross_attention(self.norms[1](x), source, mask=mask))
        return x + self.dropout(self.forward_out(self.dropout(F.relu(self.forward_in(self.norms[2](x))))))


class Translator(nn.Module):
    """An encoder and a decoder.

    Args:
        source, target: sizes of the two vocabularies.
        dim, heads, depth: of encoder and decoder.
        kind: of all attention, as for `MultiHeadAttention`.
        dropout: in training.
    """

    def __init__(self, source: int, target: int, *, dim: int, heads: int, depth: int, kind: str, dropout: float):
        super().__init__()
        self.source, self.target = nn.Embedding(source, dim), nn.Embedding(target, dim)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=dim**-0.5)
        self.encoder = nn.ModuleList(Layer(dim, heads, kind, dropout, decoder=False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(dim, heads, kind, dropout, decoder=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder makes of source words (B, S): x (B, S, D), and a mask (B, S), True where there is a word."""
        mask = source != PAD
        x = self.dropout(_embed(self.source, source))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norms[0](x), mask

    def decode(self, target: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, T, V) of the word that follows each word of the target.

        Args:
            target: (B, T) words of the translation so far.
            encoded: (B, S, D), what the encoder made of the source.
            mask: (B, S), True where the source has a word.
        """
        x = self.dropout(_embed(self.target, target))
        for layer in self.decoder:
            x = layer(x, mask, encoded)
        return self.norms[1](x) @ self.target.weight.mT

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) of the word that follows each word of the target (B, T), given the source (B, S)."""
        return self.decode(target, *self.encode(source))

    @torch.no_grad()
    def greedy(self, source: Tensor, length: int) -> Tensor:
        """Translations (B, length) of source (B, S), word after word the likeliest; END ends one."""
        encoded, mask = self.encode(source)
        target = torch.full((len(source), length + 1), PAD, device=source.device)
        target[:, 0] = START
        for t in range(length):
            target[:, t + 1] = self.decode(target[:, : t + 1], encoded, mask)[:, -1].argmax(-1)
        return target[:, 1:]


def _embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Embeddings (B, T, D) of tokens (B, T), plus sinusoids of their positions."""
    D = embedding.embedding_dim
    rates = torch.exp(torch.arange(0, D, 2, device=tokens.device) * (-math.log(10_000.0) / D))
    angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
    return embedding(tokens) * D**0.5 + torch.cat([angles.sin(), angles.cos()], -1)


@torch.no_grad()
def translate(model: Translator, pairs: Pairs, split: str, device: str) -> tuple[list[str], list[str]]:
    """Greedy translations of the sentences of a split, and their references, words joined by spaces.

    Args:
        model: a trained translator.
        pairs: the sentences and their vocabularies.
        split: "train", "valid" or "test".
        device: "cpu" or "cuda".
    """
    model.eval()
    words = {i: word for word, i in pairs.target.items()}
    hypotheses, references = [], []
    sentences = pairs.splits[split]
    for start in range(0, len(sentences), TRANSLATED):
        batch = sentences[start : start + TRANSLATED]
        source = torch.full((len(batch), max(len(english) for english, _ in batch) + 1), PAD)
        for i, (english, _) in enumerate(batch):
            source[i, : len(english) + 1] = torch.tensor(encode(english, pairs.source))
        with autocast(device):
            rows = model.greedy(source.to(device), LENGTHS[-1]).cpu().tolist()
        for row, (_, german) in zip(rows, batch, strict=True):
            row = row[: row.index(END)] if END in row else row
            hypotheses.append(" ".join(words.get(i, "<unk>") for i in row))
            references.append(" ".join(german))
    return hypotheses, references
