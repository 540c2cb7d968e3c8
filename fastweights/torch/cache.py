"""A neural cache that needs no tuning (Grave et al. 2017, with its two numbers mixed online).

The cache is a memory whose key is a unit feature vector and whose value is the token that came next. The features of
the present token ask it, with a softmax over similarity at temperature c; its answer gets a share of the prediction:

    p_cs(y) = (1 - s) p(y) + s sum_j [y_j = y] exp(c k_j . q) / sum_j exp(c k_j . q)

over the last `window` tokens j before the present one. Nobody knows c and s beforehand, so every pair of a grid makes
its own prediction, and the model alone (s = 0) is one more. Their mixture weighs each by the likelihood it has given to
the text so far, which is Bayes' rule with a uniform prior; all of it is one cumulative sum per block of tokens:

    P(y_t) = sum_e w_te p_e(y_t),      w_te = softmax_e(sum_{i<t} log p_e(y_i))

Shapes: R sequences, L tokens of the longest, D width of the features, N keys in sight, V vocabulary, G temperatures,
E experts (1 + G times the shares). Log likelihoods are kept relative to the model's own, so they stay small.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.torch.cache_sight import (
    BLOCK,
    CacheState,
    Held,
    Sight,
    Stream,
    against_model,
    blocks,
    check,
    log_sum,
    pieces,
    places,
    unit,
    weigh,
)
from fastweights.torch.dtypes import accumulation_dtype

TEMPERATURES = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


@contextmanager
def recorded(module: nn.Module, *, inputs: bool = False) -> Iterator[list[Tensor]]:
    """A list to which every call of the module adds its output, or its first input: the features of a model.

    Examples:
        >>> norm = nn.LayerNorm(4)
        >>> with recorded(norm) as seen:
        ...     _ = nn.Sequential(norm, nn.Linear(4, 9))(torch.zeros(1, 2, 4))
        >>> seen[0].shape
        torch.Size([1, 2, 4])
    """
    seen: list[Tensor] = []
    if inputs:
        handle = module.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    else:
        handle = module.register_forward_hook(lambda module, given, out: seen.append(out))
    try:
        yield seen
    finally:
        handle.remove()


class NeuralCache:
    r"""Predict the tokens that followed similar features earlier in the text; temperature and share tune themselves.

    $$ P(y_t) = \sum_e w_{te}\, p_e(y_t), \qquad
       p_{cs}(y_t) = (1 - s)\, p(y_t) + s \sum_{j<t,\, y_j = y_t} \mathrm{softmax}_j(c\, k_j^\top q_t) $$

    p is the model's own prediction, k_j and q_t are unit features, and w_te the share of expert e = (c, s) in the
    likelihood of the text before t. Nothing is trained. The loss of a whole text exceeds that of the best expert by at
    most the logarithm of their number, 3.9 nats for the 49 pairs and the model alone.

        >>> cache = NeuralCache(window=100)
        >>> x, labels = torch.eye(4).repeat(1, 3, 1), torch.arange(4).repeat(1, 3)      # (1, 12, 4), (1, 12)
        >>> losses, state = cache.score(x, labels, torch.full((1, 12), math.log(4)))    # a model that knows nothing
        >>> [round(float(part.mean()), 2) for part in losses[0].split(4)]               # three times the same four
        [1.51, 1.07, 0.65]

    `score` is for a text whose labels are known, `answer` for a stream, token by token or in pieces of any length. Both
    take a state and return one; any split of a text, any batch and any padding give the same result. A token is scored
    before it is written.

    Args:
        window: tokens that the cache holds. Work per token and memory grow with it.
        temperatures: c of the grid; features have length 1, so c is what a perfect match gains over an orthogonal key.
        shares: s of the grid, each in (0, 1).
    """

    def __init__(
        self,
        window: int = 2048,
        *,
        temperatures: Sequence[float] = TEMPERATURES,
        shares: Sequence[float] = SHARES,
    ):
        if not isinstance(window, int) or window < 1:
            raise FastWeightError(f"window is {window!r}; expected a whole number of tokens, 1 or more")
        if not temperatures or not all(0 < c < math.inf for c in temperatures):
            raise FastWeightError(f"temperatures is {tuple(temperatures)}; expected positive numbers, at least one")
        if not shares or not all(0 < s < 1 for s in shares):
            raise FastWeightError(
                f"shares is {tuple(shares)}; expected numbers in (0, 1), at least one: the model "
                "alone, a share of 0, is always in the mixture"
            )
        self.window, self.temperatures, self.shares = window, tuple(temperatures), tuple(shares)

    def __repr__(self) -> str:
        return f"NeuralCache({self.window}, temperatures={self.temperatures}, shares={self.shares})"

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this cache again."""
        return dict(window=self.window, temperatures=list(self.temperatures), shares=list(self.shares))

    @property
    def experts(self) -> int:
        """Number of predictions that are mixed: one per temperature and share, and the model alone."""
        return 1 + len(self.temperatures) * len(self.shares)

    def init_state(self, batch: int, width: int, *, device: Any = None, dtype: Any = None) -> CacheState:
        """The empty cache of `batch` sequences with features of this width.

        Examples:
            >>> NeuralCache().init_state(2, 8).keys.shape  # no keys yet, each as wide as the features
            torch.Size([2, 0, 8])
        """
        new = dict(device=device, dtype=dtype or torch.get_default_dtype())
        whole = dict(device=device, dtype=torch.long)
        return CacheState(
            torch.zeros(batch, 0, width, **new),
            torch.zeros(batch, 0, **whole),
            torch.zeros(batch, **whole),
            torch.zeros(batch, self.experts, **new),
        )

    def score(
        self,
        x: Tensor,
        labels: Tensor,
        losses: Tensor,
        state: CacheState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, CacheState]:
        """Losses (B, T) of the mixture, and the state after the last token.

        Args:
            x: (B, T, D) features from which the model predicts the labels.
            labels: (B, T) the token that follows each.
            losses: (B, T) the model's own loss of each label in nats.
            state: what `score` returned for the text so far; an empty cache when absent.
            mask: (B, T) bool, False for padding on any side: it is not written, and its loss is returned as it is.
            cu_seqlens: (N + 1,) offsets of N texts packed into one row (B = 1); the state is then that of N sequences.
        """
        check(x, dict(labels=(labels, x.shape[:2]), losses=(losses, x.shape[:2]), mask=(mask, x.shape[:2])), cu_seqlens)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = self._state(state, x, sequences)
        if state.waiting is not None:
            raise FastWeightError(
                "state is that of a stream, whose last token waits for its label; expected answer(), "
                "or a state that score() returned"
            )
        wide = state.keys.dtype
        if mask is None and cu_seqlens is None:
            return self._score_rows(unit(x.to(wide)), labels, losses.to(wide), state)
        place, lengths = places(x, mask, cu_seqlens)
        flat = losses.to(wide).flatten()
        x = x.to(wide) if mask is None else torch.where(mask[..., None], x.to(wide), 0.0)  # whatever padding holds
        q = unit(x).flatten(0, 1)[place]
        y, own = labels.flatten()[place], flat[place]
        held = Held(self, state, q, y)
        out, scores = flat.clone(), state.scores
        # A block of tokens at a time: score with the weights of before, then let the block change them.
        for part, rows in blocks(lengths):
            real = torch.arange(place.shape[1], device=x.device)[part] < lengths[rows, None]
            mixed, scores = self._weighed(held, y, own, scores, part, rows, real)
            out = out.index_put((place[rows, part][real],), mixed[real])
        return out.view(losses.shape), held.after(lengths, scores)

    def _score_rows(self, q, y, own, state):
        """`score` of rows that are whole, (R, L): nothing is asked of the device, so a CUDA graph can hold it."""
        held, scores, found = Held(self, state, q, y), state.scores, [own[:, :0]]
        for part in pieces(q.shape[1], q.is_cuda):
            mixed, scores = self._weighed(held, y, own, scores, part, slice(None), True)
            found.append(mixed)
        return torch.cat(found, 1), held.after(q.shape[1], scores)

    def _weighed(self, held, y, own, scores, part, rows, real):
        """Losses of a block of tokens by the weights of before it, and the scores after it."""
        sight, own = held.look(rows, part), own[rows, part]
        relative = against_model(sight.log_hits(y[rows, part]), own, real & ~sight.empty, self.shares)
        weights, scores = weigh(scores, rows, relative)
        return own - torch.logsumexp(weights + relative, -1), scores

    def answer(
        self,
        x: Tensor,
        tokens: Tensor,
        logits: Tensor,
        state: CacheState | None = None,
        *,
        losses: Tensor | None = None,
        log_sums: Tensor | None = None,
        mask: Tensor | None = None,
        learn: bool = True,
        overwrite: bool = False,
    ) -> tuple[Tensor, CacheState]:
        """Logits (B, K, V) of the mixture, in a stream that may be cut anywhere, and the state after its last token.

        Only logits of tokens that the cache has seen change, so that an empty cache changes nothing at all; their
        softmax is the mixture.

        Args:
            x: (B, T, D) features of the tokens.
            tokens: (B, T) the tokens themselves; each is the label of the token before it, also of the last token of
                the call before.
            logits: (B, K, V) the model's own logits of the token after each of the last K tokens, K <= T.
            state: what `answer` returned for the stream so far, or `score` for the text before it; an empty cache when
                absent.
            losses: (B, T) the model's own loss of each token, which is needed where K < T. The first token of a stream
                has none, and whatever stands there is ignored.
            log_sums: (B, K) log of the summed exponentials of the logits, where they are known already.
            mask: (B, T) bool, False for padding on any side.
            overwrite: write the mixture's logits into `logits`, without gradients, instead of a copy.
            learn: whether the tokens are written into the cache; without, the state is returned as it was.
        """
        B, T = x.shape[:2]
        check(x, dict(tokens=(tokens, (B, T)), losses=(losses, (B, T)), mask=(mask, (B, T))))
        if logits.dim() != 3 or logits.shape[0] != B or not 0 < logits.shape[1] <= T:
            raise FastWeightError(
                f"logits has shape {tuple(logits.shape)}; expected ({B}, K, V) with K from 1 to {T}: "
                f"those of the last K tokens, x is {tuple(x.shape)}"
            )
        K = logits.shape[1]
        if losses is None and K < T and learn:
            raise FastWeightError(
                f"losses is missing with logits of {K} of {T} tokens; expected the model's own loss "
                "of each token: the mixture is weighed by them"
            )
        state = self._state(state, x, B)
        wide = state.keys.dtype
        if log_sums is None:
            log_sums = torch.cat([log_sum(part, wide) for part in logits.split(BLOCK, 1)], 1)
        out = logits if overwrite else logits.clone()
        if not learn:
            self._read_only(x, out, log_sums, state, mask)
            return out, state
        # The token that waited learns its label now: it is the first of this call's tokens.
        stream = Stream.of(x.to(wide), tokens, state, mask, T - K)
        own = stream.losses(logits, log_sums, losses, state)
        held = Held(self, state, stream.keys, stream.labels)
        last, scores = stream.last(logits, state), state.scores
        for part, rows in blocks(stream.lengths):
            sight, at = held.look(rows, part), torch.arange(T + 1, device=x.device)[part]
            left = stream.lengths[rows, None] - at  # tokens from here to the last, whose label is not known yet
            hits, known = sight.log_hits(stream.labels[rows, part]), (left > 1) & ~sight.empty
            relative = against_model(hits, own[rows, part], known, self.shares)
            weights, scores = weigh(scores, rows, relative)
            self._mix(out, log_sums, sight, weights, rows, torch.where(left > 0, stream.place[rows, part], -1))
        after = held.after((stream.lengths - 1).clamp(min=0), scores)
        return out, after._replace(**last)

    def _read_only(self, x, out, log_sums, state, mask):
        """The mixture's logits into `out`, from the keys and weights of the state alone."""
        K, m = out.shape[1], state.keys.shape[1]
        q, weights = unit(x[:, -K:].to(state.keys.dtype)), torch.log_softmax(state.scores, -1)[:, None]
        there = torch.arange(m, device=x.device) >= m - state.filled[:, None, None]
        to = torch.arange(K, device=x.device).expand(len(x), K)
        to = to if mask is None else torch.where(mask[:, -K:], to, -1)
        for a in range(0, K, BLOCK):
            queries = q[:, a : a + BLOCK]
            sight = Sight(self, queries, state.keys, state.labels, there.expand(-1, queries.shape[1], -1))
            self._mix(out, log_sums, sight, weights, slice(None), to[:, a : a + BLOCK])

    def _mix(self, out, log_sums, sight, weights, rows, to):
        """Write the mixture's logits of a block of queries to places (row, `to`) of `out`; nowhere where to < 0."""
        at = ((to >= 0) & ~sight.empty).nonzero(as_tuple=True)
        if not len(at[0]):
            return
        pairs = weights.exp()[..., 1:].unflatten(-1, (len(self.temperatures), -1))
        # Of all probability, so much is the cache's at each temperature; the rest is the model's.
        of_cache = (pairs * weights.new_tensor(self.shares)).sum(-1)  # (R, C, G)
        attention = sight.attention(of_cache)
        words, where = torch.unique(sight.labels, return_inverse=True)
        spread = attention.new_zeros(*attention.shape[:2], len(words))
        spread = spread.scatter_add(2, where[:, None].expand(attention.shape), attention)[at]
        of_model = 1 - of_cache.sum(-1).expand(to.shape)[at]
        row = at[0] if isinstance(rows, slice) else rows[at[0]]
        extra = spread.log() + (log_sums[row, to[at]] - of_model.log())[:, None]
        into = row[:, None], to[at][:, None], words[None]
        out[into] = torch.logaddexp(out[into].to(extra.dtype), extra).to(out.dtype)

    def _state(self, state, x, sequences):
        """The state to start from: the one given, once it is known to be this cache's, or an empty one."""
        wide = accumulation_dtype(x)
        if state is None:
            return self.init_state(sequences, x.shape[-1], device=x.device, dtype=wide)
        if not isinstance(state, CacheState):
            raise FastWeightError(f"state is a {type(state).__name__}; expected a CacheState, as score() returns")
        expected = (sequences, state.keys.shape[1], x.shape[-1])
        if tuple(state.keys.shape) != expected:
            raise FastWeightError(
                f"state holds keys of shape {tuple(state.keys.shape)}; expected {expected}: it "
                f"belongs to another batch or model, x is {tuple(x.shape)}"
            )
        if state.scores.shape[1] != self.experts or state.keys.shape[1] > self.window:
            raise FastWeightError(
                f"state holds {state.keys.shape[1]} tokens and {state.scores.shape[1]} experts; "
                f"expected at most {self.window} and {self.experts}: a stream goes on with the "
                "cache that began it"
            )
        return state
