"""What the queries of a neural cache see: the keys of its state, of the tokens before them, and no padding.

Shapes: R sequences, L tokens of the longest, C queries of a block, D width, N keys in sight, G temperatures.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.core import FastWeightError

BLOCK = 128  # queries at a time
WIDE_BLOCK = 1024  # the same on a GPU, which waits for the host when they are few
EPS = 1e-12  # under the squared length of a feature vector


class CacheState(NamedTuple):
    """What a `NeuralCache` holds after some tokens: pass it on, save it, fork it. Batch first in every field.

    Attributes:
        keys: (B, m, D) unit vectors of the last m <= window tokens, the newest last.
        labels: (B, m) the token that followed each.
        filled: (B,) how many of the m there are, those at the end.
        scores: (B, E) log likelihood that each expert has given to the text so far, less that of the best.
        waiting: (B, D + 1), in a stream, the last token's features until its label is known, with 1 after them (0 where
            there is no token); None in a text with known labels.
        logits: (B, V), in a stream, the model's logits at that token; None otherwise.

    Examples:
        >>> from fastweights.torch import NeuralCache
        >>> _, state = NeuralCache(window=3).score(torch.randn(1, 5, 4), torch.arange(5)[None], torch.ones(1, 5))
        >>> state.labels.tolist()  # of the last three tokens
        [[2, 3, 4]]
    """

    keys: Tensor
    labels: Tensor
    filled: Tensor
    scores: Tensor
    waiting: Tensor | None = None
    logits: Tensor | None = None


class Sight:
    """What a block of queries (R, C, D) sees of keys (R, N, D).

    Similarities are kept relative to the largest that a query sees, so that no exponential overflows.

    Attributes:
        labels: (R, N) the tokens that followed the keys.
        visible: (R, C, N) which keys a query may see: earlier ones, within the window.
        empty: (R, C) whether it sees none.
        apart: (R, C, N) similarity less the largest, -inf where nothing is visible.
        sums: (R, C, G) of exp(c apart) over the keys, for each temperature c.
    """

    def __init__(self, cache, q, keys, labels, visible):
        self.cache, self.labels, self.visible, self.length = cache, labels, visible, q.shape[1]
        self.empty = ~visible.any(-1)
        similarity = torch.where(visible, q @ keys.mT, -torch.inf)
        top = similarity.amax(-1, keepdim=True) if keys.shape[1] else similarity.sum(-1, keepdim=True)
        self.apart = similarity - torch.where(self.empty[..., None], 0.0, top)  # <= 0
        sums = torch.stack([e.sum(-1) for e in exponentials(self.apart, cache.temperatures)], -1)
        self.sums = torch.where(self.empty[..., None], 1.0, sums)  # (R, C, G)

    def log_hits(self, labels):
        """Log of the probability that the cache gives to labels (R, C), per temperature; anything where it is empty."""
        hits = self._dense(labels) if self.apart.is_cuda else self._sparse(labels)
        return hits.clamp(min=torch.finfo(hits.dtype).tiny).log() - self.sums.log()

    def _dense(self, labels):
        """Sums of exp(c apart) over keys that a label (R, C) followed, (R, C, G): a GPU need not say how many match."""
        match = self.labels[:, None] == labels[..., None]
        return torch.stack([(e * match).sum(-1) for e in exponentials(self.apart, self.cache.temperatures)], -1)

    def _sparse(self, labels):
        """The same from the keys that match, which are few."""
        row, query, key = ((self.labels[:, None] == labels[..., None]) & self.visible).nonzero(as_tuple=True)
        apart = self.apart[row, query, key][:, None] * self.apart.new_tensor(self.cache.temperatures)
        return torch.zeros_like(self.sums).index_put((row, query), apart.exp(), accumulate=True)

    def attention(self, shares):
        """Weights of the keys (R, C, N), summed over temperatures by shares (R, C, G)."""
        shares = shares / self.sums
        found = torch.zeros_like(self.apart)
        for g, e in enumerate(exponentials(self.apart, self.cache.temperatures)):
            found = torch.addcmul(found, e, shares[..., g, None])
        return found


class Held:
    """The keys of the state and those of new tokens behind them, as queries see them.

    Args:
        cache: whose window and temperatures hold.
        state: what it knows before the new tokens.
        keys, labels: (R, L, D) and (R, L) of the new tokens.
    """

    def __init__(self, cache, state, keys, labels):
        self.cache, self.filled, self.before, self.new = cache, state.filled, state.keys.shape[1], keys
        self.keys, self.labels = torch.cat([state.keys, keys], 1), torch.cat([state.labels, labels], 1)

    def look(self, rows, part):
        """The sight of the new tokens in the slice `part`, of some sequences."""
        end, window, device = self.before + part.stop, self.cache.window, self.keys.device
        first = max(0, self.before + part.start - window)
        key = torch.arange(first, end, device=device)
        own = torch.arange(self.before + part.start, end, device=device)[:, None]  # the queries' own places
        there = key >= (self.before - self.filled[rows])[:, None, None]
        seen = slice(first, end)
        return Sight(
            self.cache,
            self.new[rows, part],
            self.keys[rows, seen],
            self.labels[rows, seen],
            there & (key < own) & (key >= own - window),
        )

    def after(self, written, scores):
        """The state once the first `written` of the new tokens are in it: so many of each row (R,), or of all rows."""
        sizes = {written} if isinstance(written, int) else set(written.tolist())
        m = min(self.cache.window, self.before + max(sizes)) if sizes else 0
        if len(sizes) == 1:  # a view would keep all keys alive
            end = self.before + sizes.pop()
            keys, labels = self.keys[:, end - m : end].clone(), self.labels[:, end - m : end].clone()
        else:
            at = (torch.arange(m, device=written.device) + (self.before + written - m)[:, None]).clamp(min=0)
            keys, labels = rows_at(self.keys, at), rows_at(self.labels, at)
        filled = (self.filled + written).clamp(max=self.cache.window)
        return CacheState(keys, labels, filled, scores)


class Stream(NamedTuple):
    """The token that waited and the new ones, padding left out, so that each row's tokens stand at its start.

    Attributes:
        keys: (R, L, D).
        labels: (R, L) the token after each.
        place: (R, L) of its logits, less than 0 where there are none.
        lengths: (R,).
        waited: (R, L) whether it is the token that waited.
    """

    keys: Tensor
    labels: Tensor
    place: Tensor
    lengths: Tensor
    waited: Tensor

    @classmethod
    def of(cls, x, tokens, state, mask, without):
        """Of new tokens, of which the first `without` have no logits."""
        B, T = tokens.shape
        if mask is not None:  # whatever padding holds
            x = torch.where(mask[..., None], x, 0.0)
        keys, place = unit(x), torch.arange(-without, T - without, device=x.device).expand(B, T)
        there = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        waited = torch.zeros_like(there)
        if state.waiting is not None:
            keys = torch.cat([state.waiting[:, None, :-1], keys], 1)
            there = torch.cat([state.waiting[:, -1:] > 0, there], 1)
            tokens, place = torch.cat([tokens[:, :1], tokens], 1), torch.cat([place[:, :1] * 0 - 1, place], 1)
            waited = torch.cat([torch.ones_like(there[:, :1]), waited], 1)
        if state.waiting is not None or mask is not None:
            order = torch.argsort(~there, dim=1, stable=True)
            keys, tokens, place, waited = (rows_at(a, order) for a in (keys, tokens, place, waited))
        lengths = there.sum(1)
        if mask is not None and without:
            last = rows_at(place, (lengths - 1).clamp(min=0)[:, None])[:, 0]
            if bool(((last < 0) & mask.any(1)).any()):
                raise FastWeightError(
                    "logits are missing for the last real token of a row; expected padding on the "
                    "left, or logits of all tokens"
                )
        return cls(keys, torch.roll(tokens, -1, 1), place, lengths, waited)

    def losses(self, logits, log_sums, losses, state):
        """The model's own loss of the labels (R, L)."""
        at, sums = self.place.clamp(min=0), log_sums
        if losses is None:
            row = torch.arange(len(logits), device=logits.device)[:, None]
            own = rows_at(sums, at) - logits[row, at, self.labels].to(sums.dtype)
        else:
            shift = losses.shape[1] - logits.shape[1]
            own = torch.take_along_dim(losses.to(sums.dtype), (self.place + shift).clamp(min=0), 1).roll(-1, 1)
        if state.logits is None:
            return own
        old = log_sum(state.logits, sums.dtype)[:, None] - torch.take_along_dim(state.logits, self.labels[:, :1], 1)
        return torch.where(self.waited, old, own)

    def last(self, logits, state):
        """`waiting` and `logits` of the state after the last token of each row."""
        at = (self.lengths - 1).clamp(min=0)[:, None]
        key, place, waited = (rows_at(x, at)[:, 0] for x in (self.keys, self.place, self.waited))
        there = (self.lengths > 0)[:, None]
        found = rows_at(logits, place.clamp(min=0)[:, None])[:, 0].to(key.dtype)
        if state.logits is not None:
            found = torch.where(waited[:, None], state.logits, found)
        return dict(waiting=torch.cat([torch.where(there, key, 0.0), there.to(key.dtype)], 1), logits=found)


def rows_at(x, at):
    """x (R, L, ...) at places (R, n) of its second axis."""
    return x[torch.arange(len(x), device=x.device)[:, None], at]


def exponentials(x: Tensor, factors: Sequence[float]) -> Iterator[Tensor]:
    """exp(c x) for every c: a product of two of those before it where there are such, which is faster."""
    found: dict[float, Tensor] = {}
    for c in factors:
        half = next((a for a in found if c - a in found), None)
        found[c] = (x * c).exp() if half is None else found[half] * found[c - half]
        yield found[c]


def against_model(log_hits: Tensor, own: Tensor, known: Tensor, shares: Sequence[float]) -> Tensor:
    """log p_e(y) - log p(y) of every expert, (R, C, E), 0 where nothing is known.

    Args:
        log_hits: (R, C, G) log of the probability that the cache gives to y.
        own: (R, C) the model's loss of y.
        known: (R, C) whether y is known and the cache has something to say.
        shares: of the cache in each expert's mixture.
    """
    s = torch.stack([own.new_full((), s) for s in shares])  # of a list, a GPU would be waited for
    ratio = (log_hits + own[..., None])[..., None]  # the cache against the model, (R, C, G, 1)
    pairs = torch.logaddexp(torch.log1p(-s), s.log() + ratio).flatten(-2)
    pairs = torch.where(known[..., None], pairs, 0.0)
    return torch.cat([torch.zeros_like(pairs[..., :1]), pairs], -1)


def weigh(scores, rows, relative):
    """(log weights of the experts before each token of a block, scores after it)."""
    so_far = scores[rows][:, None] + relative.cumsum(1)
    after = so_far[:, -1] - so_far[:, -1].amax(-1, keepdim=True)
    scores = after if isinstance(rows, slice) else scores.index_copy(0, rows, after)
    return torch.log_softmax(so_far - relative, -1), scores


def places(x, mask, cu_seqlens):
    """Places (R, L) in the flattened tokens of each sequence's own, in order from the left; and its length (R,)."""
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        place = starts[:, None] + torch.arange(int(lengths.max()), device=x.device)
        return place.clamp(max=max(0, T - 1)), lengths
    offset = torch.arange(B, device=x.device)[:, None] * T
    if mask is None:
        return offset + torch.arange(T, device=x.device), torch.full((B,), T, device=x.device)
    return offset + torch.argsort(~mask, dim=1, stable=True), mask.sum(1)


def blocks(lengths):
    """(slice of tokens, sequences that have any there), in `pieces` of the longest."""
    sizes = lengths.tolist()
    for part in pieces(max(sizes, default=0), lengths.is_cuda):
        yield part, slice(None) if min(sizes) > part.start else (lengths > part.start).nonzero()[:, 0]


def pieces(length, on_gpu):
    """Slices of BLOCK tokens, WIDE_BLOCK on a GPU, that make up a length."""
    block = WIDE_BLOCK if on_gpu else BLOCK
    for a in range(0, length, block):
        yield slice(a, min(a + block, length))


def unit(x):
    """x / |x| over the last axis; a vector of zeros stays one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def log_sum(logits, dtype):
    """Log of the summed exponentials of logits (..., V), in this dtype."""
    return torch.logsumexp(logits.to(dtype), -1)


def check(x, others, cu_seqlens=None):
    """Raise FastWeightError unless x is (B, T, D) and the others, {name: (value, expected shape)}, fit it."""
    if x.dim() != 3 or not x.is_floating_point():
        raise FastWeightError(f"x has shape {tuple(x.shape)} and dtype {x.dtype}; expected real features (B, T, D)")
    for name, (value, shape) in others.items():
        if value is not None and tuple(value.shape) != tuple(shape):
            raise FastWeightError(
                f"{name} has shape {tuple(value.shape)}; expected {tuple(shape)}: one per token, x is {tuple(x.shape)}"
            )
    for name, wanted in (("labels", "integers"), ("tokens", "integers"), ("mask", "bool")):
        value = others.get(name, (None,))[0]
        if value is not None and (value.is_floating_point() or (value.dtype == torch.bool) != (wanted == "bool")):
            raise FastWeightError(f"{name} has dtype {value.dtype}; expected {wanted}")
    if cu_seqlens is not None:
        if others["mask"][0] is not None:
            raise FastWeightError("mask with cu_seqlens; expected one of them: packed texts have no padding")
        ends = cu_seqlens.tolist()
        if x.shape[0] != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != x.shape[1] or sorted(ends) != ends:
            raise FastWeightError(
                f"cu_seqlens is {ends} for x {tuple(x.shape)}; expected offsets from 0 to "
                f"{x.shape[1]} that never fall, of texts packed into one row"
            )
