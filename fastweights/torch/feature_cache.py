"""A neural cache of constant size: `fast_weight` with features as keys and the next token, one-hot, as value.

With phi a feature map that is nowhere negative, the memory S (K, V) and the sum z of its rows,

    S_t = a S_{t-1} + phi(x_t) [y_t],      p_a(y) = S_{t-1}^T phi(x_t) / (z_{t-1} . phi(x_t))

is a distribution over tokens for each decay a. Decay and share are mixed online, as temperature and share are in
`NeuralCache`; the formulas and the mixture are those of cache.py.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.torch.cache import SHARES
from fastweights.torch.cache_sight import Stream, against_model, check, log_sum, places, unit, weigh
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.ops import fast_weight, feature_map

DECAYS = (1.0, 0.999, 0.99, 0.9)
MOST = 8192  # tokens of a vocabulary
SPAN = 256  # tokens at a time: their answers (SPAN, H, V + 1) are held


class FeatureCacheState(NamedTuple):
    """What a `FeatureCache` knows; of one size for a text of any length. Batch first in every field.

    Attributes:
        memory: (B, H, K, V + 1), for each of H decays the matrix S, and the sum z beside it as one more column.
        scores: (B, E) log likelihood that each expert has given to the text so far, less that of the best.
        waiting: as in `CacheState`.
        logits: as in `CacheState`.

    Examples:
        >>> FeatureCache(256, features="relu").init_state(1, 16).memory.shape  # 256 tokens, features of width 16
        torch.Size([1, 4, 16, 257])
    """

    memory: Tensor
    scores: Tensor
    waiting: Tensor | None = None
    logits: Tensor | None = None


class FeatureCache:
    r"""Predict the tokens that followed similar features, from a memory of constant size; nothing to tune.

    It is a `fast_weight` memory per decay a, whose keys are the features phi(x) and whose values are the next tokens:

    $$ S_t = a S_{t-1} + \phi(x_t) [y_t]^\top, \qquad z_t = a z_{t-1} + \phi(x_t), \qquad
       p_a(y) = \frac{S_{t-1}^\top \phi(x_t)}{z_{t-1}^\top \phi(x_t)} $$

    Every pair of a decay and a share makes its own mixture with the model's prediction, and these are weighed by the
    likelihood that they have given to the text so far, as in `NeuralCache`.

        >>> cache = FeatureCache(4, features="relu")
        >>> x, labels = torch.eye(4).repeat(1, 3, 1), torch.arange(4).repeat(1, 3)
        >>> losses, state = cache.score(x, labels, torch.full((1, 12), math.log(4)))
        >>> state.memory.shape, losses[0, -4:].mean() < losses[0, :4].mean()
        (torch.Size([1, 4, 4, 5]), tensor(True))

    It never forgets what decay 1 wrote, and blurs it instead: what a `NeuralCache` finds exactly among its last tokens,
    this one finds by features that overlap. The memory has K V numbers per decay, which only suits small vocabularies,
    bytes above all; for others use `NeuralCache`, whose size does not depend on the vocabulary.

    Args:
        vocab_size: V, at most 8,192.
        features: a map without negative values: "relu", "elu+1" or "dpfp-N"; the width K follows from it.
        decays: a of the grid, each in (0, 1].
        shares: s of the grid, each in (0, 1).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        features: str = "dpfp-1",
        decays: Sequence[float] = DECAYS,
        shares: Sequence[float] = SHARES,
    ):
        if not 1 <= vocab_size <= MOST:
            raise FastWeightError(
                f"vocab_size is {vocab_size}; expected 1 to {MOST}: the memory has a column per "
                "token, for more use NeuralCache"
            )
        if features not in ("relu", "elu+1") and not features.startswith("dpfp-"):
            raise FastWeightError(
                f"features is {features!r}; expected 'relu', 'elu+1' or 'dpfp-N': a map without "
                "negative values, as its answers are probabilities"
            )
        if not decays or not all(0 < a <= 1 for a in decays):
            raise FastWeightError(f"decays is {tuple(decays)}; expected numbers in (0, 1], at least one")
        if not shares or not all(0 < s < 1 for s in shares):
            raise FastWeightError(f"shares is {tuple(shares)}; expected numbers in (0, 1), at least one")
        self.vocab_size, self.features = vocab_size, features
        self.decays, self.shares = tuple(decays), tuple(shares)

    def init_state(self, batch: int, width: int, *, device: Any = None, dtype: Any = None) -> FeatureCacheState:
        """The empty memory of `batch` sequences with features of this width."""
        to = dict(device=device, dtype=dtype or torch.get_default_dtype())
        K = feature_map(torch.zeros(1, 1, 1, width, **to), self.features).shape[-1]
        H, experts = len(self.decays), 1 + len(self.decays) * len(self.shares)
        return FeatureCacheState(torch.zeros(batch, H, K, self.vocab_size + 1, **to), torch.zeros(batch, experts, **to))

    def score(
        self,
        x: Tensor,
        labels: Tensor,
        losses: Tensor,
        state: FeatureCacheState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, FeatureCacheState]:
        """Losses (B, T) of the mixture and the state after the last token; arguments as of `NeuralCache.score`."""
        check(x, dict(labels=(labels, x.shape[:2]), losses=(losses, x.shape[:2]), mask=(mask, x.shape[:2])), cu_seqlens)
        state = self._state(state, x, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        if state.waiting is not None:
            raise FastWeightError(
                "state is that of a stream, whose last token waits for its label; expected answer(), "
                "or a state that score() returned"
            )
        wide = state.memory.dtype
        place, lengths = places(x, mask, cu_seqlens)
        x = x.to(wide) if mask is None else torch.where(mask[..., None], x.to(wide), 0.0)
        keys, y, flat = unit(x).flatten(0, 1)[place], labels.flatten()[place], losses.to(wide).flatten()
        real = torch.arange(place.shape[1], device=x.device) < lengths[:, None]
        out, memory, scores = flat.clone(), state.memory, state.scores
        # Some hundred tokens at a time, since each answer is as wide as the vocabulary.
        for a in range(0, place.shape[1], SPAN):
            part = slice(a, a + SPAN)
            answers, memory = self._read(keys[:, part], y[:, part], real[:, part], real[:, part], memory)
            own = flat[place[:, part]]
            relative = self._relative(answers, y[:, part], own, real[:, part])
            weights, scores = weigh(scores, slice(None), relative)
            mixed = own - torch.logsumexp(weights + relative, -1)
            out = out.index_put((place[:, part][real[:, part]],), mixed[real[:, part]])
        return out.view(losses.shape), FeatureCacheState(memory, scores)

    def answer(
        self,
        x: Tensor,
        tokens: Tensor,
        logits: Tensor,
        state: FeatureCacheState | None = None,
        *,
        losses: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, FeatureCacheState]:
        """Logits (B, K, V) of the mixture in a stream, and its state; arguments as of `NeuralCache.answer`."""
        B, T = x.shape[:2]
        check(x, dict(tokens=(tokens, (B, T)), losses=(losses, (B, T)), mask=(mask, (B, T))))
        if logits.dim() != 3 or logits.shape[::2] != (B, self.vocab_size) or not 0 < logits.shape[1] <= T:
            raise FastWeightError(
                f"logits has shape {tuple(logits.shape)}; expected ({B}, K, {self.vocab_size}) with "
                f"K from 1 to {T}, x is {tuple(x.shape)}"
            )
        K = logits.shape[1]
        if losses is None and K < T:
            raise FastWeightError(
                f"losses is missing with logits of {K} of {T} tokens; expected the model's own loss "
                "of each token: the mixture is weighed by them"
            )
        state = self._state(state, x, B)
        wide = state.memory.dtype
        sums = log_sum(logits, wide)
        stream = Stream.of(x.to(wide), tokens, state, mask, T - K)
        own = stream.losses(logits, sums, losses, state)
        out, memory, scores = logits.clone(), state.memory, state.scores
        for a in range(0, stream.keys.shape[1], SPAN):
            part = slice(a, a + SPAN)
            left = stream.lengths[:, None] - torch.arange(stream.keys.shape[1], device=x.device)[part]
            y = stream.labels[:, part]
            answers, memory = self._read(stream.keys[:, part], y, left > 0, left > 1, memory)
            relative = self._relative(answers, y, own[:, part], left > 1)
            weights, scores = weigh(scores, slice(None), relative)
            self._mix(out, sums, answers, weights, torch.where(left > 0, stream.place[:, part], -1))
        return out, FeatureCacheState(memory, scores, **stream.last(logits, state))

    def _read(self, keys, labels, real, writes, memory):
        """Answers (R, L, H, V + 1), the sum last, each before its token is written; and the memory after all."""
        H, w = len(self.decays), writes[..., None].to(keys.dtype)
        phi = feature_map(keys[:, :, None], self.features).expand(-1, -1, H, -1)
        hot = torch.nn.functional.one_hot(labels, self.vocab_size).to(keys.dtype)
        v = (torch.cat([hot, torch.ones_like(w)], -1) * w)[:, :, None].expand(-1, -1, H, -1)
        log_decay = w * keys.new_tensor([math.log(a) for a in self.decays])  # nothing ages while a label is unknown
        return fast_weight(phi, phi, v, log_decay=log_decay, rule="sum", read="before", state=memory, mask=real)

    def _relative(self, answers, labels, own, known):
        """log p_e(y) - log p(y) of every expert, (R, L, E), from the memory's answers and the model's own losses."""
        total = answers[..., -1]
        tiny = torch.finfo(total.dtype).tiny
        hits = torch.take_along_dim(answers, labels[..., None, None], -1)[..., 0]
        seen = total > tiny  # (R, L, H): by the features of any earlier token
        log_hits = torch.where(seen, hits.clamp(min=tiny).log() - total.clamp(min=tiny).log(), -own[..., None])
        return against_model(log_hits, own, known, self.shares)  # what sees nothing leaves its share to the model

    def _mix(self, out, sums, answers, weights, place):
        """The mixture's logits at places (row, place) of `out`; nowhere where place < 0."""
        pairs = weights.exp()[..., 1:].unflatten(-1, (len(self.decays), -1))
        total = answers[..., -1]
        of_cache = (pairs * weights.new_tensor(self.shares)).sum(-1) * (total > torch.finfo(total.dtype).tiny)
        spread = (answers[..., :-1] * (of_cache / total.clamp(min=torch.finfo(total.dtype).tiny))[..., None]).sum(-2)
        row, at = (place >= 0).nonzero(as_tuple=True)
        to = place[row, at]
        extra = spread[row, at].clamp(min=0).log() + (sums[row, to] - torch.log1p(-of_cache.sum(-1)[row, at]))[:, None]
        out[row, to] = torch.logaddexp(out[row, to].to(extra.dtype), extra).to(out.dtype)

    def _state(self, state, x, sequences):
        """The state to start from: the one given, once its shape is known to be right, or an empty one."""
        wanted = self.init_state(sequences, x.shape[-1], device=x.device, dtype=accumulation_dtype(x))
        if state is None:
            return wanted
        if not isinstance(state, FeatureCacheState):
            raise FastWeightError(f"state is a {type(state).__name__}; expected a FeatureCacheState")
        if state.memory.shape != wanted.memory.shape or state.scores.shape != wanted.scores.shape:
            raise FastWeightError(
                f"state holds a memory of {tuple(state.memory.shape)}; expected "
                f"{tuple(wanted.memory.shape)}: it is of another batch, model or cache"
            )
        return state
