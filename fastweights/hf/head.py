"""A Fast Weight Layer as an output head: it reads features and the tokens they belong to, and learns from each token.

The mathematics is in fastweights/fwl.py. Here the output embedding belongs to someone else and is passed in, any mask
is served, and writes are aligned so that one code path is both the parallel pass and the step: before the features of
token j are answered, the memory learns that token j followed the one before it.

The features n = layer_norm(dense2(relu(dense1 x)^2)) take the place of x.

Shapes: B rows, T tokens, D width of the features, F hidden width, V vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights import fwl, fwl_config
from fastweights.core import FastWeightError
from fastweights.fwl import SlowPass
from fastweights.fwl_config import FWLState
from fastweights.refresh import fast_weights, labelled
from fastweights.torch import cross_entropy
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.framework import OPS
from fastweights.torch.learning import refresh

STEPS = 6  # learned step sizes: of both matrices and biases, and of the norm's two


@dataclass(frozen=True)
class HeadConfig:
    """Everything a head is, but its weights. Arguments as of `FWLBlock`; size is the hidden width.

    width: of the features;  normalizer: a number, since a stream does not know how many tokens will follow.
    """

    width: int
    size: int
    normalizer: float = 1.0
    step_size: float = 0.0
    decay: float | None = None
    rule: str = "sum"
    clip: float | None = None
    first_order: bool = False
    eps: float = 1e-6
    refresh: int | None = None
    within: str = "held"
    log_steps: bool = False

    def __post_init__(self):
        if isinstance(self.normalizer, str):
            raise FastWeightError(
                f"normalizer is {self.normalizer!r}; expected a number of tokens: a stream does not "
                "know how many will follow"
            )
        self.layer  # noqa: B018 - its checks

    @property
    def layer(self) -> fwl_config.FWLConfig:
        """The same as the configuration of a Fast Weight Layer; its vocabulary of 1 is a placeholder for the
        caller's own.
        """
        return fwl_config.FWLConfig(
            self.width,
            1,
            hidden=self.size,
            normalizer=self.normalizer,
            step_size=self.step_size,
            decay=self.decay,
            rule=self.rule,
            clip=self.clip,
            first_order=self.first_order,
            eps=self.eps,
            refresh=self.refresh,
            within=self.within,
            log_steps=self.log_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON.

        Examples:
            >>> HeadConfig(width=8, size=16).to_dict()["size"]
            16
        """
        return asdict(self)


class Columns(NamedTuple):
    """For each token the one before it: its input x, its slow pass, and whether it is there to be learned from."""

    x: Tensor
    slow: Any
    learns: Tensor


class FastHead(nn.Module):
    """features, state = head(x, tokens, unembed): x (B, T, D) of a causal body, tokens (B, T) that it read.

    The features at token t have learned from the tokens up to t, and from nothing after it. The output embedding
    `unembed` (V, D), with a bias (V,) or None, is used and not held.

        >>> head = FastHead(HeadConfig(width=8, size=16, step_size=0.1, normalizer=32.0))
        >>> features, state = head(torch.randn(1, 5, 8), torch.randint(20, (1, 5)), torch.randn(20, 8))
        >>> features.shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, config: HeadConfig, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.config = config
        D, F = config.width, config.size
        to = dict(device=device, dtype=dtype or torch.get_default_dtype())
        empty = lambda *shape: nn.Parameter(torch.empty(*shape, **to))  # noqa: E731
        self.dense1, self.bias1, self.dense2, self.bias2 = empty(D, F), empty(F), empty(F, D), empty(D)
        self.scale, self.shift, self.steps = empty(D), empty(D), empty(STEPS)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights anew."""
        c = self.config
        self.dense1.normal_(std=c.width**-0.5)
        self.dense2.normal_(std=c.size**-0.5)
        for zero in (self.bias1, self.bias2, self.shift):
            zero.zero_()
        self.scale.fill_(1.0)
        self.steps.fill_(c.layer.initial_step)

    def init_state(self, batch: int) -> Any:
        """What the head knows before the first token.

        Args:
            batch: number of texts, each with a memory of its own.

        Returns:
            An `FWLState`, or a `RefreshState` where the config has a refresh: zeros, and no token that waits for its
            label.
        """
        c, like = self.config, self.dense1
        if c.refresh is not None:
            return refresh.init_state(c.layer, c.width, batch, like)
        wide = accumulation_dtype(like)
        zeros = lambda *shape: torch.zeros(batch, *shape, dtype=wide, device=like.device)  # noqa: E731
        pending = torch.zeros(batch, c.width, dtype=like.dtype, device=like.device)
        return FWLState(
            zeros(1, c.width + 1, c.size), zeros(1, c.size + 1, c.width), zeros(1, 1, 2 * c.width), pending, zeros()
        )

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        unembed: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        state: Any = None,
        learn: bool = True,
        full: bool | None = None,
    ) -> tuple[Tensor, Any]:
        """Features (B, T, D) in the place of x, and the state after the last token.

        Args:
            x: (B, T, D).
            tokens: (B, T) that belong to x. One below 0 is one that nobody knows: nothing is learned from it.
            unembed, bias: (V, D) and (V,) or None, the output embedding.
            mask: (B, T), False for padding, wherever it is.
            state: of an earlier call; `init_state(B)` when absent.
            learn: False gives the features of what is known so far, and the state as it was.
            full: of single tokens and a refreshed layer: whether a whole chunk waits in every row (True) or in none;
                when absent the state is looked at.
        """
        state = self.init_state(len(x)) if state is None else state
        u = x.to(self.dense1.dtype)
        if mask is not None:  # whatever padding holds
            u = torch.where(mask[..., None], u, 0.0)
        if self.config.refresh is not None:
            bias = unembed.new_zeros(len(unembed)) if bias is None else bias
            p = self._weights() | dict(unembed=unembed.mT.to(u.dtype), unembed_bias=bias.to(u.dtype))
            n, state = self._refreshed(p, u, tokens, mask, state, full) if learn else (self._known(p, u, state), state)
            return n.to(x.dtype), state
        if not learn:
            return self._read(u, self._slow(u), lambda i, q: _ask(q, state[i])).to(x.dtype), state
        before, slow, pending, waiting = self._aligned(u, mask, state)
        before, tokens = Columns(before.x, before.slow, before.learns * (tokens >= 0)), tokens.clamp(min=0)
        share = (before.learns / self.config.normalizer).to(u.dtype)
        written = self._write(before, self._gradient(before, tokens, unembed, bias) * share[..., None])
        after: list[Any] = [None, None, None]

        def memory(i, q):
            (k, v), how = written[i], dict(writes=before.learns > 0, ages=before.learns)
            answer, after[i] = fwl.write_and_read(self.config.layer, OPS, q, k, v, state[i], read="after", **how)
            return answer

        features = self._read(u, slow, memory).to(x.dtype)
        return features, FWLState(after[0], after[1], after[2], pending, waiting)

    def _known(self, p, u, state):
        """The features of what was learned before the unfinished chunk."""
        layer = self.config.layer
        return fwl.slow_pass(layer, OPS, fast_weights(layer, OPS, p, state[:3], u), u).n

    def _refreshed(self, p, u, tokens, mask, state, full):
        """Features and state of a refreshed layer: a row's real tokens are a sequence, in which each is a label.

        Rows are packed: padding is taken out, rows become one after the other, and the features are put back where the
        real tokens were. The label of a row's last token comes with the next call, which completes what waits in the
        state.
        """
        layer = self.config.layer
        if mask is None and tokens.shape[1] == 1:
            label = tokens[:, 0]
            told = labelled(layer, OPS, state, label.clamp(min=0), (label >= 0).to(state.shares.dtype))
            found = refresh.features(layer, p, u[:, 0], told, full)
            if found is not None:
                return found[0][:, None], found[1]
        there = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        count, first = there.sum(1), there.long().argmax(1, keepdim=True)
        label = tokens.gather(1, first)[:, 0]
        known = (count > 0) & (label >= 0)
        state = labelled(layer, OPS, state, label.clamp(min=0), known.to(state.shares.dtype))
        x, tokens, cu = u[there][None], tokens[there][None], torch.cat([count.new_zeros(1), count.cumsum(0)])
        if not x.shape[1]:  # nothing but padding
            return torch.zeros_like(u), state
        labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        weights = (labels >= 0).to(state.shares.dtype)
        weights[:, cu[1:][count > 0] - 1] = 0  # what follows the last token of a row is not known yet
        n: Any
        n, _, state = refresh.read(
            layer, OPS, p, x, labels.clamp(min=0), weights, state, fresh=False, cu_seqlens=cu, score=False
        )
        return torch.zeros_like(u).masked_scatter(there[..., None], n), state

    def _aligned(self, u, mask, state):
        """(what came before each token, the slow pass of the tokens, the last real one, whether there is one).

        The token that the last call ended with waits in the state: its label is the first token of this call. With
        padding, the token before is the newest real one, wherever it is.
        """
        both = torch.cat([state.pending[:, None].to(u.dtype), u], 1)
        there = torch.cat([state.waiting[:, None], torch.ones_like(u[..., 0], dtype=state.waiting.dtype)], 1)
        if mask is None:
            slow = self._slow(both)
            old, new = (
                SlowPass(*(x if x is None else x[:, part] for x in slow)) for part in (slice(-1), slice(1, None))
            )
            return Columns(both[:, :-1], old, there[:, :-1]), new, u[:, -1], torch.ones_like(state.waiting)
        at = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = torch.where(mask, at, 0).cummax(1).values  # (B, T): the newest real token; 0 is what the state holds
        previous = torch.cat([torch.zeros_like(last[:, :1]), last[:, :-1]], 1)
        x = torch.take_along_dim(both, previous[..., None], 1)
        learns = torch.take_along_dim(there, previous, 1) * mask
        pending = torch.take_along_dim(both, last[:, -1:, None], 1)[:, 0]
        waiting = torch.take_along_dim(there, last[:, -1:], 1)[:, 0]
        return Columns(x, self._slow(x), learns), self._slow(u), pending, waiting

    def _gradient(self, before, tokens, unembed, bias):
        """Of the loss of each token, at the slow features of the token before it."""
        features = before.slow.n
        bias = unembed.new_zeros(len(unembed)) if bias is None else bias
        _, dn = cross_entropy.head(features.to(unembed.dtype), unembed.mT, bias, tokens)
        return dn.to(features.dtype)

    def _slow(self, x):
        """The slow pass of x: what the weights make of it before anything is learned."""
        return fwl.slow_pass(self.config.layer, OPS, self._weights(), x)

    def _write(self, before, dn):
        """Keys and values of each memory."""
        return fwl.write(self.config.layer, OPS, self._weights(), before.x, before.slow, dn)

    def _read(self, x, slow, memory):
        """The fast features, with memory(i, q) the answer of the i-th memory."""
        return fwl.read(self.config.layer, OPS, self._weights(), x, slow, memory)

    def _weights(self):
        """Parameters by name, as fwl.py takes them."""
        return dict(self.named_parameters(recurse=False))

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.width}, {c.size}, decay={c.decay}"


def _ask(q, S):
    """What memory S (B, 1, K, V) answers to q (B, T, K).

    Both may differ in type: the memory is at least float32.
    """
    return (q.to(S.dtype) @ S[:, 0]).to(q.dtype)
