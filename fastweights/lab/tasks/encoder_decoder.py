"""An encoder-decoder whose attention, self and cross, is softmax or a sum of features.

Shapes: B sentences, T tokens, D width, H heads, K key width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import features
from fastweights.lab.engine import training_step
from fastweights.lab.tasks.sentence_pairs import END, LENGTHS, PAD, START, UNKNOWN, Pairs
from fastweights.torch.ops import fast_weight, feature_map

EPS = 1e-6  # added to the sum of weights, which is positive


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
    """Self-attention, attention to a source in a decoder, feed-forward; norms come first.

    Args:
        dim, heads: width and heads.
        kind: of attention: "softmax" or a feature map.
        dropout: after each part.
        decoder: whether it attends to a source, and to its own past alone.
    """

    def __init__(self, dim: int, heads: int, kind: str, dropout: float, decoder: bool):
        super().__init__()
        self.own, self.cross = Attend(dim, heads, kind), Attend(dim, heads, kind) if decoder else None
        self.forward_in, self.forward_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, source: Tensor | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D); mask (B, S) says where the source has a word."""
        decoder = self.cross is not None
        x = x + self.dropout(self.own(self.norms[0](x), mask=None if decoder else mask, causal=decoder))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[1](x), source, mask=mask))
        return x + self.dropout(self.forward_out(self.dropout(F.relu(self.forward_in(self.norms[2](x))))))


class Translator(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, V) of the words that follow the target's.

    Args:
        source, target: sizes of the two vocabularies.
        dim, heads, depth: of encoder and decoder.
        kind: of all attention: "softmax" or a feature map.
        dropout: in training.
    """

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
        """Features of the source (B, S, D), and where it has a word (B, S)."""
        mask = source != PAD
        x = self.dropout(self._embed(self.source, source))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norms[0](x), mask

    def decode(self, target: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, T, V) of the word after each of the target's, given the encoded source.

        Args:
            target: (B, T) words of the translation so far.
            encoded: (B, S, D), what the encoder made of the source.
            mask: (B, S), True where the source has a word.
        """
        x = self.dropout(self._embed(self.target, target))
        for layer in self.decoder:
            x = layer(x, mask, encoded)
        return self.norms[1](x) @ self.target.weight.mT

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) of the word after each of the target's."""
        return self.decode(target, *self.encode(source))

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        """Embeddings of tokens plus sinusoids of their positions."""
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


@torch.no_grad()
def translate(model: Translator, found: Pairs, split: str, device: str) -> tuple[list[str], list[str]]:
    """Greedy translations of a split, and what they should be: (hypotheses, references), words joined by spaces.

    Args:
        model: a trained translator.
        found: sentence pairs.
        split: whose sources are translated.
        device: device to run on.
    """
    model.eval()
    words = {i: w for w, i in found.target.items()}
    hypotheses, references = [], []
    pairs = found.splits[split]
    for at in range(0, len(pairs), 512):
        some = pairs[at : at + 512]
        longest = max(len(a) for a, _ in some) + 1
        source = torch.full((len(some), longest), PAD)
        for i, (a, _) in enumerate(some):
            source[i, : len(a) + 1] = torch.tensor([found.source.get(w, UNKNOWN) for w in a] + [END])
        with training_step.autocast(device):
            out = model.greedy(source.to(device), LENGTHS[-1]).cpu().tolist()
        for row, (_, b) in zip(out, some, strict=True):
            row = row[: row.index(END)] if END in row else row
            hypotheses.append(" ".join(words.get(w, "<unk>") for w in row))
            references.append(" ".join(b))
    return hypotheses, references
