"""What a memory does while it is written, in numbers: of every write, and of the memory every so many tokens.

Everything is computed from the arguments of a `fast_weight` call, beside it: fastweights/chunk_form.py
with the erase key in the place of the query gives what each key retrieves, and the memory at the end of each chunk.

Shapes: B rows, T writes, H heads, K key width, V value width, M marks, one at the end of every `every` tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights import chunk_form, core
from fastweights.core import FastWeightError, Inputs, Spec
from fastweights.torch.dtypes import accumulation_dtype, outside_autocast
from fastweights.torch.methods import map_plainly, state_shape
from fastweights.torch.triangular import inverse

GROUP = 64  # chunks whose memories are held at once
LONGEST = 64  # tokens of a chunk, where `every` can be cut into such chunks


class Writes(NamedTuple):
    """Of every write, (B, T, H): what a token did to the memory.

    Attributes:
        beta: the write rate.
        decay: the share of the memory that the token keeps; with one per channel, their geometric mean.
        gain: beta e . k; a write of the delta rule keeps 1 - gain of what is stored along its key.
        value: |v|, the size of the value that was given.
        retrieved: |r|, the size of what the key retrieved before the write, r = (a S)^T e.
        error: |v - r|, the distance between the two.
        cosine: of the angle between v and r; 0 where one of them is 0.
        written: the norm of the change of the memory, beta |k| |v - r|, or beta |k| |v| for the sum rule.
    """

    beta: Tensor
    decay: Tensor
    gain: Tensor
    value: Tensor
    retrieved: Tensor
    error: Tensor
    cosine: Tensor
    written: Tensor


class Marks(NamedTuple):
    """Of the memory S after every `every` tokens and after the last, (B, M, H).

    Attributes:
        norm: |S|, the root of its summed squares.
        rank: the effective number of directions in use, |S|^4 / |S^T S|^2: 1 where one association fills it, at most
            min(K, V), where all singular values are equal.
        capacity: rank / min(K, V), the share of the directions in use.
        interference: how far the associations of the span of tokens before this one have changed in this span: the root
            mean square of what its keys retrieve now less what they retrieved then, over what they retrieved then. 0:
            as they were; 1: as if erased. NaN at the first mark, which has nothing before it.
        half_life: tokens after which decay alone leaves half of a write, at the mean decay of the span; inf without
            decay.
    """

    norm: Tensor
    rank: Tensor
    capacity: Tensor
    interference: Tensor
    half_life: Tensor


class Measured(NamedTuple):
    """What `measure` returns.

    Attributes:
        writes, marks: the measurements.
        at: (M,) tokens read before each mark.
        state: the memory after the last token.
        keys: (B, H, n, K) those of the last span, for the next call.
    """

    writes: Writes
    marks: Marks
    at: Tensor
    state: Tensor
    keys: Tensor


def check_every(every: int) -> int:
    """every, or a FastWeightError."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise FastWeightError(f"every is {every!r}; expected a positive whole number: tokens between two measurements")
    return every


@torch.no_grad()
def measure(inputs: Inputs, spec: Spec, every: int = 16, *, keys: Tensor | None = None) -> Measured:
    """Measure what a call of `fast_weight` with these arguments writes, one write per token or `spec.writes`.

    Args:
        inputs, spec: of the call.
        every: tokens between two marks.
        keys: of the span before the first token, `Measured.keys` of the call before; the first mark then has an
            interference too.

    Examples:
        >>> key = torch.ones(1, 2, 1, 1)  # one key, written twice
        >>> value = torch.tensor([5.0, 7.0]).reshape(1, 2, 1, 1)
        >>> found = measure(Inputs(key, key, value), Spec(rule="delta"))
        >>> found.writes.retrieved.flatten().tolist(), found.writes.error.flatten().tolist()
        ([0.0, 5.0], [5.0, 2.0])
    """
    check_every(every)
    with outside_autocast(inputs.q):
        x, spec = prepared(inputs, spec)
        if inputs.cu_seqlens is None:
            return _measure(x, spec, every * max(1, x.k.shape[1] // max(1, inputs.q.shape[1])), every, keys)
        return _packed(x, spec, every)


def prepared(inputs: Inputs, spec: Spec) -> tuple[Inputs, Spec]:
    """The same call with features mapped, one write per token, padding turned into nothing, every array there, wide."""
    if spec.maps:
        mapped = {n: map_plainly(x, spec) for n in ("q", "k", "erase") if (x := getattr(inputs, n)) is not None}
        inputs, spec = inputs._replace(**mapped), spec.without_maps()
    if spec.writes > 1:
        inputs, spec = core.expand_writes(inputs, spec, torch)
    if inputs.mask is not None:
        mask = inputs.mask
        clean = lambda x: torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, 0.0)  # noqa: E731
        beta = torch.ones_like(inputs.k[..., 0]) if inputs.beta is None else inputs.beta
        inputs = inputs._replace(beta=beta).map_tokens(clean)._replace(mask=None)
    wide = accumulation_dtype(inputs.q.dtype)
    ones = inputs.k[..., 0].to(wide) * 0
    state = inputs.state
    return (
        inputs._replace(
            beta=ones + 1 if inputs.beta is None else inputs.beta,
            log_decay=ones if inputs.log_decay is None else inputs.log_decay,
            state=inputs.q.new_zeros(state_shape(inputs, spec), dtype=wide) if state is None else state,
        ).map_tokens(lambda x: x.detach().to(wide)),
        spec,
    )


def heads_first(x: Inputs, chunk: int) -> Inputs:
    """(B, T, H, ...) -> (B, H, n, chunk, ...), the last chunk filled up with tokens that do nothing."""
    T = x.k.shape[1]
    missing = -T % chunk

    def cut(y):
        if missing:
            y = torch.cat([y, y.new_zeros(y.shape[0], missing, *y.shape[2:])], 1)
        return y.transpose(1, 2).contiguous().unflatten(2, (-1, chunk))

    return x.map_tokens(cut)


def _chunk_size(span):
    """Tokens of a chunk: whole chunks make a span."""
    best = max(d for d in range(1, min(span, LONGEST) + 1) if span % d == 0)
    return span if best < 8 < span else best


def _measure(x, spec, span, every, keys):
    """`measure` of one text per row, group of chunks by group.

    span: writes between two marks;  every: tokens;  keys: of the span before, or None.
    """
    C = _chunk_size(span)
    T, per_mark = x.k.shape[1], span // C
    erase = x.eraser if core.RULES[spec.rule].d else x.k  # what the sum rule's key would find there
    a = x.log_decay.exp()
    asked = x._replace(q=(a if x.by_channel else a[..., None]) * erase)
    y = heads_first(asked, C)
    n = y.k.shape[2]
    S, reads, sizes, ends = x.state.to(y.k.dtype), [], [], []
    group = max(1, GROUP // per_mark) * per_mark
    for first in range(0, n, group):
        part = y.map_tokens(lambda z: z[:, :, first : first + group])  # noqa: B023
        chunk = chunk_form.prepare(part, spec._replace(read="before"), torch, unit_inverse)
        S, read, some = _walk(S, chunk)
        reads.append(read)
        starts, after = some[:-1:per_mark], some[per_mark::per_mark]
        if len(after) < len(starts):  # the text ends inside a span
            after = torch.cat([after, some[-1:]])
        sizes.append(_sizes(after))
        k = part.k.flatten(2, 3)
        ends.append(_interference(starts, after, k, span, keys))
        keys = k[:, :, (len(after) - 1) * span :]
    retrieved = torch.cat(reads, 2).flatten(2, 3)[:, :, :T].transpose(1, 2) if reads else x.v
    writes = _writes(x, spec, erase, retrieved)
    marks = torch.tensor([min(m * every, -(-T * every // span)) for m in range(1, -(-T // span) + 1)])
    by_mark = lambda parts: torch.cat(parts).unflatten(1, x.state.shape[:2]).transpose(0, 1)  # noqa: E731
    if not reads:
        none = x.beta[:, :0]
        return Measured(writes, Marks(*[none] * 5), marks, S, keys)
    norm, rank = (by_mark([s[i] for s in sizes]) for i in range(2))
    share = rank / min(S.shape[-2:])
    return Measured(writes, Marks(norm, rank, share, by_mark(ends), _half_life(x, span, every)), marks, S, keys)


def unit_inverse(L, xp):
    """`chunk_form.inverse` by the routine for many small matrices."""
    X = inverse(L.flatten(0, -3)).view(L.shape)
    return X - torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)


def _walk(S, chunk):
    """(S after, what queries read (B, H, n, C, V), memories before each chunk and after all (n + 1, B H, K, V)).

    Chunks are the first axis, so that some of the memories are a part of their array that need not be copied.
    """
    n, shape = chunk.U.shape[2], S.shape
    S = S.flatten(0, 1)
    U, kT, g = (x.flatten(0, 1).unbind(1) for x in (chunk.U, chunk.kT, chunk.g))
    W = None if chunk.W is None else chunk.W.flatten(0, 1).unbind(1)
    memories, values = [S], []
    for i in range(n):
        values.append(U[i] if W is None else torch.baddbmm(U[i], W[i], S, alpha=-1))
        S = torch.baddbmm(g[i] * S, kT[i], values[i])
        memories.append(S)
    every, u = torch.stack(memories), torch.stack(values)
    q, A = (x.flatten(0, 1).transpose(0, 1) for x in (chunk.q, chunk.A))
    read = (q @ every[:-1]).add_(A @ u)
    return S.unflatten(0, shape[:2]), read.transpose(0, 1).unflatten(0, shape[:2]), every


def _sizes(S):
    """Norm and effective rank of memories (..., K, V)."""
    gram = S.mT @ S if S.shape[-1] <= S.shape[-2] else S @ S.mT
    square, root = gram.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.vector_norm(gram, dim=(-1, -2))
    return square.sqrt(), torch.where(root > 0, (square / root).square(), 0.0)


def _interference(starts, after, k, span, keys):
    """(M, B H): how far what the keys of the span before retrieve has moved from `starts` to `after` (M, B H, K, V).

    k: (B, H, T, K) of these spans;  keys: (B, H, n, K) of the span before them, or None.
    """
    M = len(after)
    if keys is None:
        parts = [after.new_full(after.shape[:2], math.nan)[:1]]
    else:
        parts = [_moved(starts[:1], after[:1], keys.flatten(0, 1)[None])]
    if M > 1:
        whole = k[:, :, : (M - 1) * span].flatten(0, 1).unflatten(1, (-1, span)).transpose(0, 1)
        parts.append(_moved(starts[1:], after[1:], whole))
    return torch.cat(parts)


def _moved(before, after, k):
    """How far what keys k retrieve has moved from one memory to the other, relative to what they retrieved; NaN for
    nothing.
    """
    found = k @ before
    then = torch.linalg.vector_norm(found, dim=(-1, -2))
    change = torch.linalg.vector_norm((k @ after).sub_(found), dim=(-1, -2))
    return torch.where(then > 0, change / then, math.nan)


def _half_life(x, span, every):
    """(B, M, H): tokens in which the mean decay of each span halves a write; inf where nothing decays."""
    log_a = x.log_decay.mean(-1) if x.by_channel else x.log_decay
    T = log_a.shape[1]
    missing = -T % span
    padded = torch.cat([log_a, log_a.new_zeros(log_a.shape[0], missing, log_a.shape[2])], 1)
    total = padded.unflatten(1, (-1, span)).sum(2)
    count = torch.full((total.shape[1], 1), float(every), dtype=total.dtype, device=total.device)
    if missing:
        count[-1] = (span - missing) * every / span
    return torch.where(total < 0, -math.log(2) * count / total.clamp(max=-1e-30), math.inf)


def _writes(x, spec, erase, r):
    """The measurements of every write, given what its key retrieved, r (B, T, H, V)."""
    size = lambda y: torch.linalg.vector_norm(y, dim=-1)  # noqa: E731
    error = x.v - r
    value, found, distance = size(x.v), size(r), size(error)
    both = value * found
    log_a = x.log_decay.mean(-1) if x.by_channel else x.log_decay
    return Writes(
        beta=x.beta,
        decay=log_a.exp(),
        gain=x.beta * (erase * x.k).sum(-1),
        value=value,
        retrieved=found,
        error=distance,
        cosine=torch.where(both > 0, (x.v * r).sum(-1) / both.clamp(min=1e-30), 0.0),
        written=x.beta * size(x.k) * (distance if core.RULES[spec.rule].d else value),
    )


def _packed(x, spec, every):
    """Sequences of one row, each with a memory of its own; marks are those of each in turn."""
    from itertools import pairwise

    found, offsets = [], x.cu_seqlens.tolist()
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b > a:
            part = x.map_tokens(lambda y: y[:, a:b])._replace(state=x.state[i : i + 1], cu_seqlens=None)  # noqa: B023
            one = _measure(part, spec, every, every, None)
            found.append(one._replace(at=one.at + a))
    if not found:
        raise FastWeightError(f"cu_seqlens is {offsets}; expected at least one token to measure")
    join = lambda parts: type(parts[0])(*(torch.cat(y, 1) for y in zip(*parts, strict=True)))  # noqa: E731
    return Measured(
        join([f.writes for f in found]),
        join([f.marks for f in found]),
        torch.cat([f.at for f in found]),
        torch.cat([f.state for f in found]),
        found[-1].keys,
    )
