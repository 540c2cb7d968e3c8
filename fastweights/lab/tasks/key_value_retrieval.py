"""Models that are trained to retrieve values by their keys (key_value_pairs.py), and how they are scored.

Shapes: B sequences, L pairs, A copies of the model (seeds), side by side as heads; D = 64 key width, N queries.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.attention.arguments import NORMS
from fastweights.attention.config import AttentionConfig
from fastweights.attention.memory import mix
from fastweights.features import EPS as FEATURE_EPS
from fastweights.lab.engine.training import adam, descend
from fastweights.lab.tasks.key_value_pairs import Task
from fastweights.torch import fast_weight, feature_map
from fastweights.torch.framework import OPS

D = 64
EPS = 1e-6  # the published code's, added to every denominator when reading
BANK = 64  # random rotations that FAVOR+'s directions are made of


def effective(
    norm: str,
    features: str,
    raw: Tensor,
    beta: Tensor,
    *,
    projection: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and rates of the plain delta rule that writes the same as a norm of the layer.

    They are what `FastWeightAttention` gives to `fast_weight`.

    Args:
        norm: of the layer.
        features: map of the keys.
        raw: (B, L, A, D) keys before it.
        beta: (B, L, A) rates.
        projection: FAVOR+'s directions.
        z: (B, A, K), the attention norm's sum of keys to start from.

    Returns:
        Keys (B, L, A, K), rates (B, L, A), and z after the last pair.
    """
    of_features: Any = NORMS[norm][0]
    k = feature_map(raw, features, norm=of_features, projection=projection)
    if NORMS[norm][1]:
        total = k.cumsum(1) if z is None else z[:, None] + k.cumsum(1)
        kappa = ((total - k) * k).sum(-1)
        kappa = torch.where(kappa.abs() > 1e-12, kappa, 1.0)  # the first key finds nothing to divide
        return k / kappa[..., None], beta * kappa, total[:, -1]
    if norm == "nlms":
        beta = beta / (k.square().sum(-1) + FEATURE_EPS)
    return k, beta, k.sum(1) if z is None else z + k.sum(1)


class Model:
    """A copies of a model that writes pairs into a memory and reads it with a key, and their optimiser.

    Args:
        task: what is asked.
        features: of the library, "softmax" (no memory: attention over all pairs) or "tanh".
        rule: "sum", "delta" or "fwm" (Schlag 2021, ICLR: delta, the memory scaled back to norm 1, layer norm after).
        norm: of `FastWeightAttention`.
        form: "published" for FAVOR+ without scaling, its sum against an epsilon.
        copies, batch: A models, and B sequences per step of each.
        lr: of Adam.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        task: Task,
        features: str,
        rule: str = "sum",
        norm: str = "attention",
        *,
        form: str = "stable",
        copies: int = 1,
        batch: int = 32,
        lr: float = 1e-3,
        device: str = "cpu",
    ):
        self.task, self.features, self.rule, self.norm, self.form = task, features, rule, norm, form
        self.copies, self.batch, self.device = copies, batch, device
        S, A = task.keys, copies
        E = int(2.2 * S)
        bound = D**-0.5
        xavier = features == "softmax"

        def uniform(*shape: int, limit: float) -> Tensor:
            return (2 * limit * torch.rand(A, *shape) - limit).to(device).requires_grad_()

        self.embedding = torch.randn(A, S, E).to(device).requires_grad_()
        into_k = (6 / (S + E + D)) ** 0.5 if xavier else bound
        into_q = (6 / (E + D)) ** 0.5 if xavier else bound
        self.key_of_value, self.key_of_key = uniform(S, D, limit=into_k), uniform(E, D, limit=into_k)
        self.key_bias, self.query_bias = uniform(D, limit=(S + E) ** -0.5), uniform(D, limit=E**-0.5)
        self.query = uniform(E, D, limit=into_q)
        self.parameters = [
            self.embedding,
            self.key_of_value,
            self.key_of_key,
            self.key_bias,
            self.query_bias,
            self.query,
        ]
        if rule != "sum":
            rate = (S + E) ** -0.5
            self.beta_of_value, self.beta_of_key = uniform(S, 1, limit=rate), uniform(E, 1, limit=rate)
            self.beta_bias = uniform(1, limit=rate)
            self.parameters += [self.beta_of_value, self.beta_of_key, self.beta_bias]
        self.optimizer = adam(self.parameters, lr)
        self.eye = torch.eye(S, device=device)
        self.offset = torch.arange(A, device=device) * S
        self.bank = rotations().to(device) if features.startswith("favor") else None
        own = features in ("softmax", "tanh") or (self.bank is not None and form == "published")
        with warnings.catch_warnings():  # what the library warns of is what is studied here
            warnings.simplefilter("ignore")
            self.config = AttentionConfig(
                D,
                A,
                features="identity" if own else features,
                rule="sum" if rule == "sum" else "delta",
                norm="none" if own and rule != "sum" else norm,
                key_dim=D,
                value_dim=S,
                out_norm=False,
            )

    def pick(self, table: Tensor, index: Tensor) -> Tensor:
        """Rows of table (A, S, width) at index (..., A) -> (..., A, width)."""
        rows = table.flatten(0, 1).index_select(0, (index + self.offset).flatten())
        return rows.view(*index.shape, table.shape[-1])

    def raw_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Of the concatenation of value and embedded key, through one linear map: (B, L, A, D)."""
        by_key = torch.baddbmm(self.key_bias[:, None], self.embedding, self.key_of_key)
        return self.pick(by_key, keys) + self.pick(self.key_of_value, values)

    def raw_queries(self, keys: Tensor) -> Tensor:
        """Of embedded keys (..., A), through another linear map: (..., A, D)."""
        return self.pick(torch.baddbmm(self.query_bias[:, None], self.embedding, self.query), keys)

    def rates(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """Write rates (B, L, A) in (0, 1), from value and embedded key; None for the sum rule."""
        if self.rule == "sum":
            return None
        by_key = torch.baddbmm(self.beta_bias[:, None], self.embedding, self.beta_of_key)
        return torch.sigmoid(self.pick(by_key, keys) + self.pick(self.beta_of_value, values))[..., 0]

    def directions(self) -> Tensor | None:
        """FAVOR+'s of this batch (M, D), drawn anew: a product of random rotations, each row as long as a Gaussian's.

        A factorisation per draw could not be recorded; two rotations of a bank with random signs between them can.
        """
        if self.bank is None:
            return None
        M = int(self.features.partition("-")[2])
        one, other = torch.randint(BANK, (2, -(-M // D)), device=self.device)
        signs = torch.randn(len(one), 1, D, dtype=self.bank.dtype, device=self.device).sign()
        rows = torch.bmm(self.bank.index_select(0, one) * signs, self.bank.index_select(0, other)).flatten(0, 1)[:M]
        return rows * torch.randn_like(rows).norm(dim=1, keepdim=True)

    def mapped(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """What the library's own feature maps do not do: tanh, and FAVOR+ as published."""
        if self.features == "tanh":
            return torch.tanh(x)
        if directions is not None and self.form == "published":  # undo the library's scaling by D^(-1/4)
            return feature_map(x * D**0.25, self.features, projection=directions)
        return x

    def phi(self, x: Tensor, directions: Tensor | None, query: bool) -> Tensor:
        """Features as they are read with (query) or, for the sum rule, written with."""
        x = self.mapped(x, directions)
        if self.config.features == "identity":
            return (
                x / (x.sum(-1, keepdim=True) + EPS * query) if self.form == "published" and self.rule == "delta" else x
            )
        norm, divided = NORMS[self.norm]
        query_norm: Any = "max" if query and divided and directions is not None else norm
        return feature_map(x, self.config.phi.name, norm=query_norm, projection=directions)

    def memory(self, keys: Tensor, values: Tensor, directions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The memory (B, A, K, S) after all pairs, and the attention normaliser z (B, A, K) or None.

        Args:
            keys: (B, L, A), integers.
            values: (B, L, A), integers.
            directions: random directions of FAVOR+, or None.
        """
        raw, v, beta = self.raw_keys(keys, values), self.eye[values], self.rates(keys, values)
        if self.rule == "fwm":
            assert beta is not None
            return self._scaled_memory(self.phi(raw, directions, False), v, beta), None
        own = self.config.features == "identity"
        k = self.phi(raw, directions, False) if own else raw
        projection = None if own else directions
        # kernels would be compiled anew for every S
        how = dict(cu_seqlens=None, mask=None, method="chunked", chunk_size=None, log_decay=None)
        _, memory, z = mix(self.config, OPS, k, k, v, beta, None, None, projection, how)
        return memory, z

    def _scaled_memory(self, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """The delta rule with the memory scaled back to a norm of 1 whenever it is longer, from the second pair on."""
        (B, L, A, K), S = k.shape, v.shape[-1]
        memory = k.new_zeros(B * A, K, S)
        k, v, beta = (
            k.transpose(0, 1).reshape(L, -1, K, 1),
            v.transpose(0, 1).reshape(L, -1, 1, S),
            beta.transpose(0, 1),
        )
        v, beta = v * beta.reshape(L, -1, 1, 1), -beta.reshape(L, -1, 1, 1)
        for t in range(L):
            error = torch.baddbmm(v[t], k[t].mT * beta[t], memory)  # beta (v - what the key retrieves)
            memory = torch.baddbmm(memory, k[t], error)
            if t:
                memory = memory / memory.flatten(1).norm(dim=-1).clamp(min=1.0)[:, None, None]
        return memory.view(B, A, K, S)

    def read(self, memory: Tensor, z: Tensor | None, asked: Tensor, directions: Tensor | None) -> Tensor:
        """Answers (B, N, A, S) to keys asked (B, N, A).

        Args:
            memory: (B, A, K, S), as `memory` returns it.
            z: (B, A, K), the attention normaliser, or None.
            asked: (B, N, A) keys.
            directions: random directions of FAVOR+, or None.
        """
        q = self.phi(self.raw_queries(asked), directions, True)
        y = torch.einsum("bnak,baks->bnas", q, memory)
        if self.rule == "fwm":
            return F.layer_norm(y, y.shape[-1:])
        return y if z is None else self._divide(y, torch.einsum("bnak,bak->bna", q, z)[..., None])

    def _divide(self, y: Tensor, total: Tensor) -> Tensor:
        """Answers over the weights that they sum, as published with an epsilon, or guarded against 0 alone."""
        if self.form == "published" or self.rule == "delta":
            return y / (total + EPS)
        return y / total.clamp(min=1e-30)

    def attend(self, keys: Tensor, values: Tensor, asked: Tensor, directions: Tensor | None) -> Tensor:
        """The same answers (B, N, A, S) as `read` of `memory`, from the weight of each pair, without a memory.

        A sum of outer products read with a query is a weighted sum of values. For one query per sequence this is
        hundreds of times less work.
        """
        if self.rule == "delta":
            weights = self._overwritten(keys, values, asked, directions)
        else:
            k = self.raw_keys(keys, values)
            if self.features == "softmax":
                weights = torch.einsum("bnad,blad->bnal", self.raw_queries(asked), k * D**-0.5).softmax(-1)
            else:
                q, k = self.phi(self.raw_queries(asked), directions, True), self.phi(k, directions, False)
                weights = torch.einsum("bnak,blak->bnal", q, k)
                weights = self._divide(weights, weights.sum(-1, keepdim=True))
        index = values.transpose(1, 2)[:, None].expand(*weights.shape)
        return torch.zeros(*weights.shape[:3], self.task.keys, device=keys.device).scatter_add(-1, index, weights)

    def _overwritten(self, keys: Tensor, values: Tensor, asked: Tensor, directions: Tensor | None) -> Tensor:
        """Weights (B, 1, A, L) of the delta rule, for one query per sequence (N = 1).

        The memory is a product of transitions, and a query reads the last one first: it is itself a memory of one
        column, from which the pairs, last to first, retrieve their weight and remove it.
        """
        own, divided = self.config.features == "identity", NORMS[self.config.norm][1]
        if not divided:  # whole numbers are lighter to turn around than keys
            keys, values = keys.flip(1), values.flip(1)
        raw, beta = self.raw_keys(keys, values), self.rates(keys, values)
        assert beta is not None  # the delta rule has rates
        k, beta, z = effective(
            self.config.norm,
            self.config.phi.name,
            self.phi(raw, directions, False) if own else raw,
            beta,
            projection=None if own else directions,
        )
        if divided:
            k, beta = k.flip(1), beta.flip(1)
        q = self.phi(self.raw_queries(asked), directions, True)[:, 0]
        o, _ = fast_weight(
            k, k, torch.zeros_like(k[..., :1]), beta=beta, state=q[..., None], read="before", method="chunked"
        )
        weights = (o[..., 0] * beta).flip(1).transpose(1, 2)[:, None]
        return self._divide(weights, (q * z).sum(-1)[:, None, :, None]) if divided else weights

    def loss(self, keys: Tensor, values: Tensor, asked: Tensor, target: Tensor) -> Tensor:
        """(A,): of one question per sequence, asked (B, A), and its answer."""
        directions = self.directions()
        if self.rule != "fwm":
            y = self.attend(keys, values, asked[:, None], directions)[:, 0]
        else:
            y = self.read(*self.memory(keys, values, directions), asked[:, None], directions)[:, 0]
        return 0.5 * (y - self.eye[target]).square().sum(-1).mean(0)

    def step(self) -> None:
        """One step of Adam on fresh sequences."""
        keys, values = self.task.sequences(self.batch, self.task.length, self.copies, self.device)
        descend(self.loss(keys, values, *self.task.question(keys, values)).sum(), self.optimizer)

    @torch.no_grad()
    def score(self, L: int, sequences: int = 20) -> Tensor:
        """(A,): mean loss over all keys that occur, in sequences of L pairs."""
        keys, values = self.task.sequences(sequences, L, self.copies, self.device)
        asked, target, occurs = self.task.all_questions(keys, values)
        directions = self.directions()
        if self.features == "softmax":
            y = self.attend(keys, values, asked, directions)
        else:
            y = self.read(*self.memory(keys, values, directions), asked, directions)
        error = 0.5 * (y - self.eye[target]).square().sum(-1) * occurs
        return (error.sum(1) / occurs.sum(1)).mean(0)

    def evaluate(self) -> Tensor:
        """(A, 1), or (A, 2) in setting 2: at L = S, as published, and at L = 2 S, as it is trained."""
        lengths = dict.fromkeys((self.task.keys, self.task.length))
        return torch.stack([self.score(L) for L in lengths], 1)


@functools.cache
def rotations() -> Tensor:
    """(BANK, D, D) random rotations, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(BANK, D, D, generator=generator, dtype=torch.float64))[0].float()
