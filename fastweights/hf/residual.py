"""The head that `attach` puts on a model: a small residual layer whose weights learn from the text, chunk by chunk.

With x the features on their way into the output embedding, u = x / rms(x), and W1, W2 the trained weights:

    features   n = x + relu(u (W1 + S1))^2 (W2 + S2)
    learning   after every C = refresh tokens, with g the gradient of their mean loss at W + S and e the steps,
               S <- S - e g min(1, clip / |g|)

S is what the text has taught, one per row, and starts at 0; W2 starts at 0, so that a head which has learned nothing
changes nothing, and needs no training to be of use. It is dynamic evaluation of these two matrices, gradients by hand.

Features of a token and the token after it are a pair; a chunk is C pairs, and is learned when its last token arrives.
Until then its tokens wait in the state, each with m, the mean of the output embedding's rows under its prediction: the
gradient at its features is m less the row of the token that came. A stream may be cut anywhere.

Shapes: B rows, T tokens, C tokens of a chunk, D width of the features, F hidden width, V vocabulary.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.torch import cross_entropy, watching
from fastweights.torch.cache_sight import rows_at
from fastweights.torch.dtypes import accumulation_dtype

RMS_EPS = 1e-6


@dataclass(frozen=True)
class HeadSettings:
    """Everything a residual head is, but its weights; `attach` makes it from its arguments.

    Attributes:
        width: D, of the features.
        size: F, the hidden width of the layer.
        refresh: C, tokens between two steps of gradient descent.
        step_size: that these steps start with, before training.
        clip: the largest length of a gradient.

    Examples:
        >>> HeadSettings(width=64, size=128).to_dict()
        {'width': 64, 'size': 128, 'refresh': 64, 'step_size': 0.01, 'clip': 1.0}
    """

    width: int
    size: int
    refresh: int = 64
    step_size: float = 0.01
    clip: float = 1.0

    def __post_init__(self):
        for name in ("width", "size", "refresh"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise FastWeightError(f"{name} is {getattr(self, name)!r}; expected a whole number, 1 or more")
        for name in ("step_size", "clip"):
            if not isinstance(getattr(self, name), (int, float)) or not 0 < getattr(self, name) < math.inf:
                raise FastWeightError(f"{name} is {getattr(self, name)}; expected a positive number")

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return asdict(self)


class HeadState(NamedTuple):
    """What a head knows after some tokens; batch first.

    Attributes:
        dense1, dense2: (B, D, F) and (B, F, D), S1 and S2: what the text has taught.
        x, means: (B, C, D), of the chunk that is being read, the features and the m of each.
        tokens: (B, C), the tokens that they came from.
        waiting: (B,), how many of the C there are.
    """

    dense1: Tensor
    dense2: Tensor
    x: Tensor
    means: Tensor
    tokens: Tensor
    waiting: Tensor


class Answers(NamedTuple):
    """What a head says to a call, and what a cache needs of it.

    Attributes:
        logits: (B, K, V) of the last K tokens.
        log_sums: (B, K), logarithms of their summed exponentials.
        losses: (B, T) of each token, as the one before it predicted it in this call; 0 where that one is not of this
            call.
    """

    logits: Tensor
    log_sums: Tensor
    losses: Tensor


class Layer(NamedTuple):
    """The layer applied to a chunk: unit inputs u, before and after the squared ReLU h and a, the change n of x."""

    u: Tensor
    h: Tensor
    a: Tensor
    n: Tensor


class ResidualHead(nn.Module):
    r"""answers, state = head(x, tokens, embedding): x (B, T, D) of a causal body, tokens (B, T) that it read.

    A residual layer whose two matrices take a step of gradient descent after every `refresh` tokens of the text. With
    u = x / rms(x) and S what the text has taught so far,

    $$ n = x + \mathrm{relu}(u (W_1 + S_1))^2 (W_2 + S_2), \qquad
       S \leftarrow S - e\, g \min(1, \mathrm{clip} / |g|) $$

    where g is the gradient of the mean loss of those tokens and e the learned steps. W2 starts at 0, so a head that has
    learned nothing changes nothing.

        >>> head, embedding = ResidualHead(HeadSettings(8, 16, refresh=4)), nn.Linear(8, 20)
        >>> x, tokens = torch.randn(1, 10, 8), torch.randint(20, (1, 10))
        >>> answers, state = head(x, tokens, embedding)
        >>> answers.logits.shape, state.waiting.tolist()  # two chunks are learned, and two tokens wait
        (torch.Size([1, 10, 20]), [2])

    `embedding`, the output embedding, is an `nn.Linear` or the like that belongs to the model: called, and not held.

    Args:
        settings: a `HeadSettings`.
        device, dtype: of the parameters.
    """

    def __init__(self, settings: HeadSettings, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.settings = settings
        self.adapting = True  # False: the model attached to answers from what is known so far
        to = dict(device=device, dtype=dtype or torch.get_default_dtype())
        self.dense1 = nn.Parameter(torch.empty(settings.width, settings.size, **to))
        self.dense2 = nn.Parameter(torch.empty(settings.size, settings.width, **to))
        self.log_steps = nn.Parameter(torch.empty(2, **to))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights anew: the second matrix is 0, so that the layer starts as nothing."""
        nn.init.normal_(self.dense1, std=self.settings.width**-0.5)
        nn.init.zeros_(self.dense2)
        nn.init.constant_(self.log_steps, math.log(self.settings.step_size))

    def init_state(self, batch: int) -> HeadState:
        """What the head knows before the first token."""
        c, like = self.settings, self.dense1
        zeros = lambda *shape: torch.zeros(batch, *shape, device=like.device, dtype=like.dtype)  # noqa: E731
        tokens = torch.zeros(batch, c.refresh, device=like.device, dtype=torch.long)
        return HeadState(
            zeros(c.width, c.size),
            zeros(c.size, c.width),
            zeros(c.refresh, c.width),
            zeros(c.refresh, c.width),
            tokens,
            tokens[:, 0].clone(),
        )

    def features(self, x: Tensor, state: HeadState | None = None) -> Tensor:
        """Features (B, T, D) from what is known so far; nothing is learned."""
        S1, S2 = (0.0, 0.0) if state is None else (state.dense1, state.dense2)
        return x + self._layer(self.dense1 + S1, self.dense2 + S2, x.to(self.dense1.dtype)).n.to(x.dtype)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        embedding: Any,
        *,
        mask: Tensor | None = None,
        state: HeadState | None = None,
        keep: int = 0,
    ) -> tuple[Answers, HeadState]:
        """Read tokens and learn from them: answers for the last K of them, and the state after all.

        Args:
            x: (B, T, D) features.
            tokens: (B, T).
            embedding: from features to logits.
            mask: (B, T), False for padding.
            state: of an earlier call; `init_state(B)` when absent.
            keep: K, or 0 for all T.

        Logits of padding are 0.
        """
        C, (B, T) = self.settings.refresh, tokens.shape
        K = keep or T
        before = self.init_state(B) if state is None else state
        if len(before.x) != B or before.x.shape[1] != C:
            raise FastWeightError(
                f"state holds {len(before.x)} rows and a refresh of {before.x.shape[1]}; expected "
                f"{B} and {C}: a stream goes on with the head and batch that began it"
            )
        row = _Row.of(x.to(self.dense1.dtype), tokens, before, mask)
        S1, S2, means = before.dense1, before.dense2, row.means
        make = torch.empty if row.aligned else torch.zeros  # padding is never answered
        logits = make(B, K, embedding.weight.shape[0], dtype=x.dtype, device=x.device)
        sums = torch.zeros(B, K, dtype=accumulation_dtype(x), device=x.device)
        losses = torch.zeros_like(row.tokens, dtype=sums.dtype)
        # Chunk by chunk: answer its tokens, keep what their gradient needs, and learn once it is full.
        for a in range(0, row.x.shape[1], C):
            b = min(a + C, row.x.shape[1])
            W1, W2 = self.dense1 + S1, self.dense2 + S2
            layer = self._layer(W1, W2, row.x[:, a:b])
            s = max(a, row.old)
            z = embedding.forward((row.x[:, s:b] + layer.n[:, s - a :]).to(x.dtype))
            with torch.no_grad():
                log_sum, mean = _mean(z, embedding.weight, sums.dtype)
                means = torch.cat([means[:, :s], mean.to(means.dtype), means[:, b:]], 1)
                labels = row.tokens[:, s + 1 : b + 1, None]
                own = log_sum[:, : labels.shape[1]] - z[:, : labels.shape[1]].gather(2, labels)[..., 0]
                losses[:, s + 1 : b + 1] = own
            row.put(slice(s, b), T - K, (logits, z), (sums, log_sum))
            closing = row.lengths > b
            if b - a == C and bool(closing.any()):
                dn = means[:, a:b] - embedding.weight[row.tokens[:, a + 1 : b + 1]].to(means.dtype)
                S1, S2 = self._learn(S1, S2, layer, W2, dn * (closing / C)[:, None, None].to(dn.dtype))
        found = torch.zeros_like(tokens, dtype=losses.dtype)
        if row.x.shape[1] == 0:  # nothing but padding, and nothing waited
            return Answers(logits, sums, found), before
        row.put(slice(0, row.x.shape[1]), 0, (found, losses))
        return Answers(logits, sums, found), row.after(C, means, S1, S2)

    def score(
        self, x: Tensor, labels: Tensor, unembed: Tensor, bias: Tensor, learned: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Losses (B, T) of known labels, for training: gradients reach weights and steps, first order.

        learned: S1 and S2.  mask (B, T): padding at the end alone. T is a multiple of the refresh, or ends the text.
        """
        C, losses = self.settings.refresh, []
        S1, S2 = learned
        for a in range(0, x.shape[1], C):
            part = slice(a, a + C)
            W1, W2 = self.dense1 + S1, self.dense2 + S2
            layer = self._layer(W1, W2, x[:, part].to(self.dense1.dtype))
            loss, dn = cross_entropy.head((x[:, part] + layer.n).to(unembed.dtype), unembed.mT, bias, labels[:, part])
            losses.append(loss)
            whole = mask[:, part].sum(1) == C
            S1, S2 = self._learn(S1, S2, layer, W2, (dn.detach() * (whole / C)[:, None, None]).to(S1.dtype))
        return torch.cat(losses, 1), (S1, S2)

    def _layer(self, W1, W2, x):
        """The layer with weights W1 and W2 applied to x (B, T, D), and what its gradient needs."""
        u = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS)
        h = u @ W1
        a = torch.relu(h).square()
        return Layer(u, h, a, a @ W2)

    def _learn(self, S1, S2, layer, W2, dn):
        """S1 and S2 after a chunk with the gradients dn (B, C, D) at its features; only the steps see gradients."""
        with torch.no_grad():
            dW2 = layer.a.mT @ dn
            dW1 = layer.u.mT @ (2 * torch.relu(layer.h) * (dn @ W2.mT))
            norm = (dW1.square().sum((1, 2)) + dW2.square().sum((1, 2))).sqrt()
            shorter = (self.settings.clip / (norm + 1e-12)).clamp(max=1.0)[:, None, None]
            dW1, dW2 = dW1 * shorter, dW2 * shorter
        steps = self.log_steps.exp()
        change1, change2 = steps[0] * dW1, steps[1] * dW2
        if watching.steps:
            square = change1.square().sum((1, 2)) + change2.square().sum((1, 2))
            watching.steps[-1].append(square.detach().sqrt())
        return S1 - change1, S2 - change2

    def extra_repr(self) -> str:
        c = self.settings
        return f"{c.width}, {c.size}, refresh={c.refresh}"


def _mean(z: Tensor, words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(log sum exp z (B, n), mean of the words under softmax z (B, n, D)) of logits z (B, n, V)."""
    log_sum = torch.logsumexp(z.to(dtype), -1)
    p = (z.to(dtype) - log_sum[..., None]).exp_().to(words.dtype)
    return log_sum, p @ words


class _Row(NamedTuple):
    """The tokens that waited and the new ones, side by side from the left, padding at the end.

    x, means (B, L, D), tokens (B, L);  lengths (B,);  old: columns that hold none but tokens that waited;
    place (B, L): of each among the T new tokens, less than 0 for one that waited and for padding;  aligned: whether the
    new tokens of all rows stand in the same columns.
    """

    x: Tensor
    means: Tensor
    tokens: Tensor
    lengths: Tensor
    old: int
    place: Tensor
    aligned: bool

    @classmethod
    def of(cls, x, tokens, state, mask):
        """From new x (B, T, D) and tokens (B, T), of which mask says what is padding, and those that wait in the
        state.
        """
        (B, T), C = tokens.shape, state.x.shape[1]
        counts = state.waiting.tolist()
        new, place = torch.zeros_like(x), torch.arange(-C, T, device=x.device).expand(B, -1)
        if mask is None and len(set(counts)) <= 1:
            n = counts[0] if counts else 0
            join = lambda old, new: torch.cat([old[:, :n], new], 1)  # noqa: E731
            return cls(
                join(state.x, x),
                join(state.means, new),
                join(state.tokens, tokens),
                state.waiting + T,
                n,
                place[:, C - n :],
                True,
            )
        there = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        x = torch.where(there[..., None], x, 0.0)
        there = torch.cat([torch.arange(C, device=x.device) < state.waiting[:, None], there], 1)
        order, lengths = torch.argsort(~there, dim=1, stable=True), there.sum(1)
        order = order[:, : int(lengths.max())]
        pairs = ((state.x, x), (state.means, new), (state.tokens, tokens))
        x, means, tokens = (rows_at(torch.cat(pair, 1), order) for pair in pairs)
        place = torch.where(torch.arange(order.shape[1], device=x.device) < lengths[:, None], order - C, -1)
        return cls(x, means, tokens, lengths, 0, place, False)

    def put(self, part: slice, first: int, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy columns `part` to where their tokens are among the new ones, from token `first` on."""
        if self.aligned:
            begin = min(max(part.start, self.old + first), part.stop)
            for to, values in pairs if begin < part.stop else ():
                to[:, begin - self.old - first : part.stop - self.old - first] = values[:, begin - part.start :]
            return
        place = self.place[:, part] - first
        there = (place >= 0) & (self.place[:, part] >= 0)
        row, column = there.nonzero(as_tuple=True)
        at = place[row, column]
        for to, values in pairs:
            to[row, at] = values[row, column].to(to.dtype)

    def after(self, C: int, means: Tensor, S1: Tensor, S2: Tensor) -> HeadState:
        """The state after these tokens: S1, S2, and the tokens of the chunk that is not full."""
        begin = (self.lengths - 1).clamp(min=0) // C * C
        at = (begin[:, None] + torch.arange(C, device=begin.device)).clamp(max=self.x.shape[1] - 1)
        x, means, tokens = (rows_at(y, at) for y in (self.x, means, self.tokens))
        return HeadState(S1, S2, x, means, tokens, self.lengths - begin)
