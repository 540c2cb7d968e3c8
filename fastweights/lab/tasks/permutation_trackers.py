"""Models that track the product of permutations, several copies side by side, and how often they are right.

Shapes: R copies, B words, T tokens, D width, H heads, K key width, G elements of the group, n writes per token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.lab.engine.training_step import autocast
from fastweights.lab.tasks.permutation_words import words
from fastweights.models.rotary import angles, rotate
from fastweights.torch import fast_weight

TESTED = 256  # words of each copy
DECAY_BIAS = -4.0  # softplus of it is a decay of 0.02 per token


class Trackers(nn.Module):
    """R models of one block each: a mixer and a feed-forward, then logits of the product.

    Args:
        elements: G.
        mixer: "delta", the delta rule with `writes` per token; "gated-delta", the same with a learned decay; "softmax",
            causal attention with rotary positions.
        beta_max: the largest write rate of each copy; its length is R.
        writes: n, writes per token.
        dim, heads, key_dim: D, H and K.
    """

    def __init__(
        self, elements: int, mixer: str, *, beta_max: list[float], writes: int, dim: int, heads: int, key_dim: int
    ):
        super().__init__()
        R, K = len(beta_max), key_dim
        self.mixer, self.heads, self.writes, self.key_dim = mixer, heads, writes, key_dim
        self.register_buffer("beta_max", torch.tensor(beta_max).view(R, 1, 1, 1))
        self.widths = dict(q=heads * K, k=writes * heads * K, v=writes * heads * K)  # of parts of one projection
        if mixer != "softmax":
            self.widths["beta"] = writes * heads
        if mixer == "gated-delta":
            self.widths["decay"] = heads

        def matrix(inputs: int, outputs: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(R, inputs, outputs).uniform_(-1, 1) * inputs**-0.5)

        self.embedding = nn.Parameter(torch.randn(R, elements + 1, dim))
        self.into, self.out = matrix(dim, sum(self.widths.values())), matrix(heads * K, dim)
        self.hidden, self.back = matrix(dim, 4 * dim), matrix(4 * dim, dim)
        self.logits = matrix(dim, elements)
        if mixer == "gated-delta":
            self.decay_bias = nn.Parameter(torch.full((R, 1, 1, heads), DECAY_BIAS))
        self.norms = nn.Parameter(torch.ones(3, R, 1, 1, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (R, B, T, G) of the products up to each of the tokens (R, B, T)."""
        R, size, _ = self.embedding.shape
        row = tokens + size * torch.arange(R, device=tokens.device)[:, None, None]
        x = F.embedding(row, self.embedding.flatten(0, 1))
        x = x + _linear(self._mix(self._norm(x, 0)), self.out)
        x = x + _linear(_linear(self._norm(x, 1), self.hidden).relu(), self.back)
        return _linear(self._norm(x, 2), self.logits)

    def _norm(self, x: Tensor, i: int) -> Tensor:
        """RMS norm of the last axis of x (R, B, T, D), with the i-th weights of each copy."""
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.norms[i]

    def _mix(self, x: Tensor) -> Tensor:
        """What the mixer makes of x (R, B, T, D): (R, B, T, H K).

        The copies share one call, as rows of its batch. Several writes per token are as many rows of k, v and beta for
        one row of q.
        """
        R, B, T, _ = x.shape
        parts = dict(zip(self.widths, _linear(x, self.into).split(list(self.widths.values()), -1), strict=True))
        q, k, v = (parts[name].reshape(R * B, -1, self.heads, self.key_dim) for name in "qkv")
        if self.mixer == "softmax":
            turns = angles(x, T, q.shape[-1] // 2)
            q, k, v = (y.transpose(1, 2) for y in (rotate(q, turns), rotate(k, turns), v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(R, B, T, -1)
        beta = (self.beta_max * parts["beta"].float().sigmoid()).to(v.dtype).reshape(R * B, -1, self.heads)
        log_decay = None
        if self.mixer == "gated-delta":
            log_decay = -F.softplus(parts["decay"].float() + self.decay_bias).reshape(R * B, T, self.heads).to(v.dtype)
        o, _ = fast_weight(q, k, v, beta=beta, log_decay=log_decay, norm="l2", writes=self.writes)
        return o.reshape(R, B, T, -1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (R, B, T, inputs) times each copy's own matrix of weight (R, inputs, outputs)."""
    return torch.bmm(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])


def losses(model: Trackers, tokens: Tensor, products: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """The cross entropy (R,) of each copy, mean over its words and over the tokens that count.

    Args:
        model: of R copies.
        tokens, products: (R, B, T), of `permutation_words.words`.
        mask: (R, T), 1 for the tokens that count and 0 for the others.
        smoothing: of the labels, so that a confident answer does not end the learning: the logits should be the same
            however long the word was.
    """
    logits = model(tokens).float().flatten(1, 2).transpose(1, 2)
    each = F.cross_entropy(logits, products.flatten(1), reduction="none", label_smoothing=smoothing)
    return (each.view(products.shape).mean(1) * mask).sum(1) / mask.sum(1)


@torch.no_grad()
def accuracy(model: Trackers, table: Tensor, lengths: list[int], generator: torch.Generator) -> list[list[float]]:
    """For each copy and length, the share of right products in the later half of words of so many tokens.

    Early products are easy, and would hide that late ones are wrong. A model that guesses gets 1 / G.

    Args:
        model: of R copies; is put into evaluation mode.
        table: of the group.
        lengths: of words. Words of the longest length are read, and the shorter ones are their beginnings.
        generator: seeded so that words are not those of training.
    """
    model.eval()
    R = model.embedding.shape[0]
    tokens, products = words(table, R, TESTED, max(lengths), generator)
    with autocast(table.device.type):
        right = torch.cat([model(batch).argmax(-1) for batch in tokens.split(32, 1)], 1) == products
    shares = [right[..., length // 2 : length].float().mean((1, 2)) for length in lengths]
    return torch.stack(shares, 1).tolist()
