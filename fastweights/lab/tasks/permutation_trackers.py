"""Models that track the product of permutations, several copies side by side, and how often they are right.

Letters: R copies, B words, T tokens, D width, H heads, n writes per token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.lab.engine.training_step import autocast
from fastweights.lab.tasks.permutation_words import words
from fastweights.models.rotary import angles, rotate
from fastweights.torch import fast_weight

MIXERS = ("delta", "gated-delta", "softmax")
TESTED = 256  # words per copy


class Trackers(nn.Module):
    """R models of one block each: a mixer and a feed-forward, then logits of the product.

    mixer: "delta", the delta rule with `writes` per token and, for each copy, a largest write rate of `beta_max`;
    "gated-delta", with a learned decay; "softmax", causal attention with rotary positions.
    """

    def __init__(
        self, elements: int, mixer: str, *, beta_max: list[float], writes: int, dim: int, heads: int, key_dim: int
    ):
        super().__init__()
        R, K = len(beta_max), key_dim
        self.mixer, self.heads, self.writes, self.key_dim = mixer, heads, writes, key_dim
        self.register_buffer("beta_max", torch.tensor(beta_max).view(R, 1, 1, 1))
        widths = dict(q=heads * K, k=writes * heads * K, v=writes * heads * K)
        if mixer != "softmax":
            widths["beta"] = writes * heads
        if mixer == "gated-delta":
            widths["decay"] = heads
        self.widths = widths
        matrix = lambda i, o: nn.Parameter(torch.empty(R, i, o).uniform_(-1, 1) * i**-0.5)  # noqa: E731
        self.embedding = nn.Parameter(torch.randn(R, elements + 1, dim))
        self.into, self.out = matrix(dim, sum(widths.values())), matrix(heads * K, dim)
        self.hidden, self.back = matrix(dim, 4 * dim), matrix(4 * dim, dim)
        self.logits = matrix(dim, elements)
        if mixer == "gated-delta":
            self.decay_bias = nn.Parameter(torch.full((R, 1, 1, heads), -4.0))  # softplus of it: 0.02 per token
        self.norms = nn.Parameter(torch.ones(3, R, 1, 1, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (R, B, T) -> logits (R, B, T, G)."""
        R, size, _ = self.embedding.shape
        row = tokens + size * torch.arange(R, device=tokens.device)[:, None, None]
        x = F.embedding(row, self.embedding.flatten(0, 1))
        x = x + _linear(self._mix(self._norm(x, 0)), self.out)
        x = x + _linear(_linear(self._norm(x, 1), self.hidden).relu(), self.back)
        return _linear(self._norm(x, 2), self.logits)

    def _norm(self, x: Tensor, i: int) -> Tensor:
        """RMS norm of the last axis, with the i-th weights of each copy."""
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.norms[i]

    def _mix(self, x: Tensor) -> Tensor:
        """(R, B, T, D) -> (R, B, T, H K).

        Several writes per token are so many rows of k, v and beta for one of q; copies share one call as rows of the
        batch.
        """
        R, B, T, _ = x.shape
        parts = dict(zip(self.widths, _linear(x, self.into).split(list(self.widths.values()), -1), strict=True))
        q, k, v = (parts[name].reshape(R * B, -1, self.heads, self.key_dim) for name in "qkv")
        if self.mixer == "softmax":
            turns = angles(x, T, q.shape[-1] // 2)
            q, k, v = (y.transpose(1, 2) for y in (rotate(q, turns), rotate(k, turns), v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(R, B, T, -1)
        beta = (self.beta_max * parts["beta"].float().sigmoid()).to(v.dtype).reshape(R * B, -1, self.heads)
        decay = None
        if self.mixer == "gated-delta":
            decay = -F.softplus(parts["decay"].float() + self.decay_bias).reshape(R * B, T, self.heads).to(v.dtype)
        o, _ = fast_weight(q, k, v, beta=beta, log_decay=decay, norm="l2", writes=self.writes)
        return o.reshape(R, B, T, -1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (R, B, T, in) by each copy's own matrix (R, in, out)."""
    return torch.bmm(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])


def losses(model: Trackers, tokens: Tensor, products: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """(R,), of each copy: cross entropy, mean over the tokens that are counted, (R, T) of 0 and 1.

    The labels are smoothed, so that a confident answer does not end the learning: what is wanted are the same logits
    however long the word was.
    """
    logits = model(tokens).float().flatten(1, 2).transpose(1, 2)
    each = F.cross_entropy(logits, products.flatten(1), reduction="none", label_smoothing=smoothing)
    return (each.view(products.shape).mean(1) * counted).sum(1) / counted.sum(1)


@torch.no_grad()
def accuracy(model: Trackers, table: Tensor, lengths: list[int], generator: torch.Generator) -> list[list[float]]:
    """Per copy: the share of right products in the later half of words of so many tokens.

    The later half alone: early products are easy, and would hide that late ones are wrong. A model that guesses has 1 /
    G.

    Args:
        model: of R copies.
        table: of the group.
        lengths: of the words to report; the longest are read, and shorter ones are their beginnings.
        generator: seeded so that words are not those of training.
    """
    model.eval()
    R = model.embedding.shape[0]
    tokens, products = words(table, R, TESTED, max(lengths), generator)
    with autocast(table.device.type):
        right = torch.cat([model(some).argmax(-1) for some in tokens.split(32, 1)], 1) == products
    shares = [right[..., length // 2 : length].float().mean((1, 2)) for length in lengths]
    return torch.stack(shares, 1).tolist()
