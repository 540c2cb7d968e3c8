"""Where a read comes from: how much of the output at token t is the value that was written at token s.

A memory is linear in the values it was given, so its output is a sum over them and over the memory it started from:

    o_t = sum_s A_ts v_s + S_0^T x_t

A is exact: decay, write rates and what later writes erased are in it. In a chunk of C tokens A follows from the
inverse that the chunk form of fastweights/chunk_form.py has anyway, with the identity in the place of the values; over
earlier chunks a reader x goes backwards, x <- g x - W^T (k x), in work that is linear in the length for each row.

Shapes: B rows, T tokens, H heads, K key width, V value width, n tokens asked about, S sources: the writes so far.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights import chunk_form, core
from fastweights.checks import check
from fastweights.core import FastWeightError, Inputs, Spec
from fastweights.features import parse_fixed
from fastweights.literals import Norm, Read, Rule
from fastweights.torch.dtypes import outside_autocast
from fastweights.torch.probing.measures import heads_first, prepared, unit_inverse

CHUNK = 64  # tokens
GROUP = 32  # chunks that are prepared at once
ROWS = 256  # rows that `top` holds at once


class Rows(NamedTuple):
    """Where the outputs of some tokens come from.

    Attributes:
        weights: (B, n, H, S) A_ts, one row for each token asked about, one column for each write of the call. With
            several writes per token, write j of token s is column s * writes + j.
        start: (B, n, H, V) what the memory that the call started from adds to the output.
    """

    weights: Tensor
    start: Tensor


class Sources(NamedTuple):
    """The largest sources of each token asked about, (B, n, H, top), largest first.

    Attributes:
        write: the write's number (its token, unless a token writes several times).
        weight: A_ts.
        share: |A_ts| |v_s| as a share of the sum over all writes: how much of the read it is, whatever its direction.
    """

    write: Tensor
    weight: Tensor
    share: Tensor


class Attribution:
    """What `attribution` returns: rows are computed when they are asked for, so that any length fits.

    Examples:
        >>> k = torch.eye(3).reshape(1, 3, 1, 3)
        >>> found = attribution(k, k, torch.ones(1, 3, 1, 2))
        >>> found.top(2, n=1).write.item()  # the third token reads what it wrote itself
        2
    """

    def __init__(self, inputs: Inputs, spec: Spec):
        """inputs, spec: of a call of `fast_weight`, features mapped or not."""
        if reason := core.refuses_chunks(spec):
            raise FastWeightError(
                f"attribution {reason.partition(';')[0]}; expected rule 'sum' or 'delta': others "
                "need not be linear in their values"
            )
        if inputs.cu_seqlens is not None:
            raise FastWeightError("cu_seqlens is given; expected one text per row: a source belongs to one text")
        self.tokens, self.writes = inputs.q.shape[1], spec.writes
        self.before = spec.before
        with torch.no_grad(), outside_autocast(inputs.q):
            self.inputs, self.spec = prepared(inputs, spec)
            self.sizes = self.inputs.v.square().sum(-1).sqrt().transpose(1, 2)  # (B, H, S)

    @torch.no_grad()
    def rows(self, tokens: int | Iterable[int] | None = None) -> Rows:
        """For each of these tokens, all when absent, the weight of every value in what it read.

        `o = weights @ v + start`, where `start` is what the memory before the text contributed.
        """
        own = 0 if self.before else self.writes - 1  # of a token's writes, the one beside which its query stands
        return self._rows(self._chosen(tokens) * self.writes + own, self.inputs, self.spec)

    @torch.no_grad()
    def overwritten(self, tokens: int | Iterable[int] | None = None) -> Rows:
        """For each of these tokens, all when absent, the weight of every value in what its write took out.

        `removed = weights @ v + start`: beta times what its key retrieved before the write, in terms of the values that
        had been written until then. The sum rule takes nothing out. With several writes per token there is a row for
        each write.
        """
        x, chosen = self.inputs, self._chosen(tokens)
        chosen = (chosen[:, None] * self.writes + torch.arange(self.writes)).flatten()
        if not core.RULES[self.spec.rule].d:
            B, S, H, V = x.v.shape
            return Rows(x.v.new_zeros(B, len(chosen), H, S), x.v.new_zeros(B, len(chosen), H, V))
        a = x.log_decay.exp()
        reader = (a if x.by_channel else a[..., None]) * x.eraser * x.beta[..., None]
        return self._rows(chosen, x._replace(q=reader), self.spec._replace(read="before"))

    def top(self, tokens: int | Iterable[int] | None = None, n: int = 5) -> Sources:
        """For each of these tokens, all when absent, the n earlier writes that contributed most to what it read."""
        return self._top(self.rows, tokens, n)

    def top_overwritten(self, tokens: int | Iterable[int] | None = None, n: int = 5) -> Sources:
        """For each of these tokens, all when absent, the n earlier writes of which its own write removed most."""
        return self._top(self.overwritten, tokens, n)

    def _top(self, rows: Callable[[Tensor], Rows], tokens, n):
        """The n largest sources by `rows` of these tokens, some hundred tokens at a time."""
        if n < 1:
            raise FastWeightError(f"n is {n}; expected at least 1: how many sources of each token")
        found = []
        for some in self._chosen(tokens).split(ROWS):
            weights = rows(some).weights
            sizes = weights.abs() * self.sizes[:, None]
            share, write = sizes.topk(min(n, sizes.shape[-1]), -1)
            total = sizes.sum(-1, keepdim=True)
            share = torch.where(total > 0, share / total.clamp(min=1e-30), 0.0)
            found.append(Sources(write, weights.gather(-1, write), share))
        return Sources(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))

    def _chosen(self, tokens):
        """Numbers of tokens (n,) on the CPU; negative ones count from the end, None stands for all."""
        if tokens is None:
            return torch.arange(self.tokens)
        asked = (
            tokens if isinstance(tokens, Tensor) else torch.tensor([tokens] if isinstance(tokens, int) else [*tokens])
        )
        asked = torch.where(asked < 0, asked + self.tokens, asked)
        if not len(asked) or bool(((asked < 0) | (asked >= self.tokens)).any()):
            raise FastWeightError(f"tokens is {tokens}; expected numbers of tokens from 0 to {self.tokens - 1}")
        return asked.cpu()

    def _rows(self, chosen, x, spec):
        """Rows of these writes' readers, x.q, for chosen (n,) in any order."""
        with outside_autocast(x.q):
            order = chosen.argsort()
            weights, start = self._walk_back(chosen[order].tolist(), x, spec)
            back = order.argsort().to(weights.device)
            return Rows(weights[:, :, back].transpose(1, 2), start[:, :, back].transpose(1, 2))

    def _walk_back(self, chosen, x, spec):
        """Weights (B, H, n, S) and start (B, H, n, V) of readers in ascending order."""
        B, S, H, K = x.k.shape
        C = min(CHUNK, max(1, S))
        weights = x.k.new_zeros(B, H, len(chosen), S + -S % C)
        readers = x.k.new_zeros(B, H, len(chosen), K)
        last = chosen[-1] // C + 1 if chosen else 0  # chunks after this one write what nobody here reads
        first_active = len(chosen)  # readers from here on have started
        for stop in range(last, 0, -GROUP):
            begin = max(0, stop - GROUP)
            part = heads_first(x.map_tokens(lambda y: y[:, begin * C : stop * C]), C)  # noqa: B023
            identity = torch.eye(C, dtype=x.k.dtype, device=x.k.device).expand(*part.k.shape[:3], C, C)
            chunks = chunk_form.prepare(part._replace(v=identity), spec, torch, unit_inverse)
            for c in reversed(range(stop - begin)):
                q, A, U, kT, g = (y[:, :, c] for y in (chunks.q, chunks.A, chunks.U, chunks.kT, chunks.g))
                W = None if chunks.W is None else chunks.W[:, :, c]
                columns = slice((begin + c) * C, (begin + c + 1) * C)
                if first_active < len(chosen):
                    r = readers[:, :, first_active:]
                    z = r @ kT
                    weights[:, :, first_active:, columns] = z @ U
                    readers[:, :, first_active:] = r * g.mT if W is None else r * g.mT - z @ W
                new = slice(bisect_left(chosen, columns.start, hi=first_active), first_active)
                if own := [t - columns.start for t in chosen[new]]:
                    z = A[:, :, own]
                    weights[:, :, new, columns] = z @ U
                    readers[:, :, new] = q[:, :, own] if W is None else q[:, :, own] - z @ W
                    first_active = new.start
        return weights[..., :S], readers @ x.state.to(readers.dtype)


def attribution(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    rule: Rule = "delta",
    read: Read = "after",
    state: Tensor | None = None,
    mask: Tensor | None = None,
    features: str | Callable[[Tensor], Tensor] = "identity",
    norm: Norm = "none",
    writes: int = 1,
) -> Attribution:
    """Where the reads of `fast_weight` come from, exactly; arguments as there.

        >>> k = torch.eye(2)[[0, 1, 0]].reshape(1, 3, 1, 2)  # the third key is the first
        >>> found = attribution(k, k, torch.randn(1, 3, 1, 4), beta=torch.full((1, 3, 1), 0.5))
        >>> found.rows(2).weights.flatten().tolist()  # of its read, half is its own value, a quarter the first
        [0.25, 0.0, 0.5]
        >>> found.overwritten(2).weights.flatten().tolist()  # its write took out a quarter of the first value
        [0.25, 0.0, 0.0]

    `rows(tokens)` are the weights A_ts of every value in each token's output, `top(tokens, n)` the largest of them,
    `overwritten(tokens)` what each token's write took out. Rows are computed when asked for: a row costs work and
    memory that grow with the length of the text alone, so ask for some tokens of a long text, not for all.
    """
    inputs = Inputs(q, k, v, beta, log_decay, erase, state, None, mask)
    phi = parse_fixed(features)
    spec = Spec.make(rule, read, features if callable(features) else phi.name, norm, writes)
    check(inputs, spec, width=phi.width)
    return Attribution(inputs, spec)
