"""Models that learn to retrieve values by their keys (the task of key_value_pairs.py), and how they are scored.

A model makes keys k_i and write rates beta_i of the pairs, one-hot values v_i, and a query q of the key that is asked
for. With phi the feature map and a norm of `FastWeightAttention`, its answer is

    sum rule:    y = S^T phi(q),  S = sum_i phi(k_i) v_i^T,  divided by z . phi(q) with z = sum_i phi(k_i)
    delta rule:  the same with S written by the delta rule at rates beta_i

`write` and `read` compute that as it stands, which is how a model is scored. `attend` computes the same answers as
weighted sums of the values, which is less work for the single question per sequence that it is trained on.

Shapes: B sequences, L pairs, N questions, S values, A copies of the model (seeds) side by side as heads; D = 64 is the
width of keys and queries, K that of their features, E that of the embeddings of keys.
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
ROTATIONS = 64  # random rotations that FAVOR+'s directions are made of
SCORED = 20  # sequences in an evaluation


def delta_rule_writes(
    norm: str,
    features: str,
    keys: Tensor,
    beta: Tensor,
    *,
    projection: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and rates of the plain delta rule that writes the same as a layer with a norm.

    They are what `FastWeightAttention` hands to `fast_weight`. Attention norm divides what key i retrieves by
    kappa_i = z_{i-1} . phi(k_i), which is the same as a key phi(k_i) / kappa_i with a rate beta_i kappa_i.

    Args:
        norm: of the layer.
        features: feature map of the keys.
        keys: (B, L, A, D) before the feature map.
        beta: (B, L, A) write rates.
        projection: FAVOR+'s directions, or None.
        z: (B, A, K), the sum of the features of earlier keys to start from; zeros when absent.

    Returns:
        Keys (B, L, A, K), rates (B, L, A), and z (B, A, K) after the last pair.
    """
    feature_norm: Any = NORMS[norm][0]
    k = feature_map(keys, features, norm=feature_norm, projection=projection)
    if _divides(norm):
        sums = k.cumsum(1) if z is None else z[:, None] + k.cumsum(1)  # z after each pair
        kappa = ((sums - k) * k).sum(-1)
        kappa = torch.where(kappa.abs() > 1e-12, kappa, 1.0)  # before the first key there is nothing to divide by
        return k / kappa[..., None], beta * kappa, sums[:, -1]
    if norm == "nlms":
        beta = beta / (k.square().sum(-1) + FEATURE_EPS)
    return k, beta, k.sum(1) if z is None else z + k.sum(1)


def _divides(norm: str) -> bool:
    """Whether a norm of `FastWeightAttention` is an attention norm, which divides by z what is read."""
    return NORMS[norm][1]


class Model:
    """A copies of a model that writes pairs into a memory and reads it with a key, and their optimiser.

    Args:
        task: that the models learn.
        features: a feature map of the library, "softmax" (no memory: attention over all pairs) or "tanh".
        rule: "sum", "delta" or "fwm", the rule of the Fast Weight Memory (Schlag 2021, ICLR): the delta rule, the
            memory scaled back to norm 1 after each write, and layer norm after reading.
        norm: of `FastWeightAttention`.
        form: "published" for FAVOR+ without scaling, divided by its sum plus an epsilon; "stable" for the library's.
        copies: number of models that are trained side by side.
        batch: sequences in a step of each copy.
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
        self._make_parameters()
        self.optimizer = adam(self.parameters, lr)
        self.one_hot = torch.eye(task.keys, device=device)
        self.first_rows = torch.arange(copies, device=device) * task.keys  # of each copy in a flattened (A S, width)
        self.rotations = random_rotations().to(device) if features.startswith("favor") else None
        # Whether `phi` maps keys itself, since the library has no such map; the layer then gets mapped keys.
        favor_as_published = self.rotations is not None and form == "published"
        self.maps_keys = features in ("softmax", "tanh") or favor_as_published
        with warnings.catch_warnings():  # what the library warns of is what is studied here
            warnings.simplefilter("ignore")
            self.config = AttentionConfig(
                D,
                copies,
                features="identity" if self.maps_keys else features,
                rule="sum" if rule == "sum" else "delta",
                norm="none" if self.maps_keys and rule != "sum" else norm,
                key_dim=D,
                value_dim=task.keys,
                out_norm=False,
            )

    def _make_parameters(self) -> None:
        """Draw the parameters as the published code does: as nn.Linear, or by Xavier's rule for softmax attention.

        Keys and rates are linear in the concatenation of value and embedded key, which is why each has two matrices.
        """
        S, A = self.task.keys, self.copies
        E = int(2.2 * S)

        def uniform(*shape: int, limit: float) -> Tensor:
            return (2 * limit * torch.rand(A, *shape) - limit).to(self.device).requires_grad_()

        self.embedding = torch.randn(A, S, E).to(self.device).requires_grad_()
        xavier = self.features == "softmax"
        key_limit = (6 / (S + E + D)) ** 0.5 if xavier else D**-0.5
        query_limit = (6 / (E + D)) ** 0.5 if xavier else D**-0.5
        self.key_of_value, self.key_of_key = uniform(S, D, limit=key_limit), uniform(E, D, limit=key_limit)
        self.key_bias, self.query_bias = uniform(D, limit=(S + E) ** -0.5), uniform(D, limit=E**-0.5)
        self.query = uniform(E, D, limit=query_limit)
        self.parameters = [
            self.embedding,
            self.key_of_value,
            self.key_of_key,
            self.key_bias,
            self.query_bias,
            self.query,
        ]
        if self.rule != "sum":
            limit = (S + E) ** -0.5
            self.beta_of_value, self.beta_of_key = uniform(S, 1, limit=limit), uniform(E, 1, limit=limit)
            self.beta_bias = uniform(1, limit=limit)
            self.parameters += [self.beta_of_value, self.beta_of_key, self.beta_bias]

    def _look_up(self, table: Tensor, index: Tensor) -> Tensor:
        """Rows (..., A, width) of each copy's table (A, S, width) at index (..., A)."""
        rows = table.flatten(0, 1).index_select(0, (index + self.first_rows).flatten())
        return rows.view(*index.shape, table.shape[-1])

    def project_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys (B, L, A, D) of pairs: value and embedded key through one linear map.  keys, values: (B, L, A)."""
        by_key = torch.baddbmm(self.key_bias[:, None], self.embedding, self.key_of_key)
        return self._look_up(by_key, keys) + self._look_up(self.key_of_value, values)

    def project_queries(self, keys: Tensor) -> Tensor:
        """Queries (..., A, D) for keys (..., A): the embedded key through another linear map."""
        return self._look_up(torch.baddbmm(self.query_bias[:, None], self.embedding, self.query), keys)

    def write_rates(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """Write rates (B, L, A) from 0 to 1 of pairs (B, L, A); None for the sum rule."""
        if self.rule == "sum":
            return None
        by_key = torch.baddbmm(self.beta_bias[:, None], self.embedding, self.beta_of_key)
        return torch.sigmoid(self._look_up(by_key, keys) + self._look_up(self.beta_of_value, values))[..., 0]

    def draw_directions(self) -> Tensor | None:
        """FAVOR+'s random directions (M, D), drawn anew for each batch; None for other feature maps.

        They are rows of random rotations, each as long as a vector of Gaussians. A rotation by factorisation could not
        be captured in a CUDA graph; the product of two drawn beforehand, with random signs between them, can.
        """
        if self.rotations is None:
            return None
        M = int(self.features.partition("-")[2])
        first, second = torch.randint(ROTATIONS, (2, -(-M // D)), device=self.device)
        signs = torch.randn(len(first), 1, D, dtype=self.rotations.dtype, device=self.device).sign()
        products = torch.bmm(self.rotations.index_select(0, first) * signs, self.rotations.index_select(0, second))
        rows = products.flatten(0, 1)[:M]
        return rows * torch.randn_like(rows).norm(dim=1, keepdim=True)

    def phi(self, x: Tensor, directions: Tensor | None, query: bool) -> Tensor:
        """Features (..., K) of keys or queries x (..., D).

        Args:
            x: keys or queries.
            directions: FAVOR+'s, or None.
            query: whether x are queries; published FAVOR+ adds an epsilon to their sum alone.
        """
        if not self.maps_keys:
            norm: Any = NORMS[self.norm][0]
            if query and _divides(self.norm) and directions is not None:
                norm = "max"  # a common factor of the query's features cancels in the division by z . phi(q)
            return feature_map(x, self.config.phi.name, norm=norm, projection=directions)
        if self.features == "tanh":
            x = torch.tanh(x)
        elif directions is not None:  # D^(1/4) undoes the scaling of the library's FAVOR+
            x = feature_map(x * D**0.25, self.features, projection=directions)
        if self.form == "published" and self.rule == "delta":
            return x / (x.sum(-1, keepdim=True) + EPS * query)
        return x

    def write(self, keys: Tensor, values: Tensor, directions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The memory (B, A, K, S) after all pairs, and the normaliser z (B, A, K), or None without attention norm.

        Args:
            keys, values: (B, L, A), of the pairs.
            directions: FAVOR+'s, or None.
        """
        k, v, beta = self.project_keys(keys, values), self.one_hot[values], self.write_rates(keys, values)
        if self.maps_keys or self.rule == "fwm":
            k = self.phi(k, directions, query=False)
        if self.rule == "fwm":
            assert beta is not None  # the Fast Weight Memory has rates
            return self._scaled_memory(k, v, beta), None
        projection = None if self.maps_keys else directions
        # "chunked", since kernels would be compiled anew for every S
        options = dict(cu_seqlens=None, mask=None, method="chunked", chunk_size=None, log_decay=None)
        _, memory, z = mix(self.config, OPS, k, k, v, beta, None, None, projection, options)
        return memory, z

    def _scaled_memory(self, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """The Fast Weight Memory (B, A, K, S): the delta rule, and the memory scaled back to norm 1 where it is longer.

        Args:
            k: (B, L, A, K) keys.
            v: (B, L, A, S) values.
            beta: (B, L, A) write rates.
        """
        (B, L, A, K), S = k.shape, v.shape[-1]
        memory = k.new_zeros(B * A, K, S)
        k = k.transpose(0, 1).reshape(L, -1, K, 1)
        v = v.transpose(0, 1).reshape(L, -1, 1, S)
        beta = beta.transpose(0, 1).reshape(L, -1, 1, 1)
        beta_v, minus_beta = v * beta, -beta
        for t in range(L):
            error = torch.baddbmm(beta_v[t], k[t].mT * minus_beta[t], memory)  # beta (v - what the key retrieves)
            memory = torch.baddbmm(memory, k[t], error)
            if t:  # as published, not after the first pair
                memory = memory / memory.flatten(1).norm(dim=-1).clamp(min=1.0)[:, None, None]
        return memory.view(B, A, K, S)

    def read(self, memory: Tensor, z: Tensor | None, query_keys: Tensor, directions: Tensor | None) -> Tensor:
        """Answers (B, N, A, S).

        Args:
            memory: (B, A, K, S), of `write`.
            z: (B, A, K), of `write`, or None.
            query_keys: (B, N, A), the keys that are asked for.
            directions: FAVOR+'s, or None.
        """
        q = self.phi(self.project_queries(query_keys), directions, query=True)
        y = torch.einsum("bnak,baks->bnas", q, memory)
        if self.rule == "fwm":
            return F.layer_norm(y, y.shape[-1:])
        return y if z is None else self._divide(y, torch.einsum("bnak,bak->bna", q, z)[..., None])

    def _divide(self, y: Tensor, total: Tensor) -> Tensor:
        """y over the sum of its weights: with an epsilon, as published, or guarded against 0 alone."""
        if self.form == "published" or self.rule == "delta":
            return y / (total + EPS)
        return y / total.clamp(min=1e-30)

    def attend(self, keys: Tensor, values: Tensor, query_keys: Tensor, directions: Tensor | None) -> Tensor:
        """The answers (B, N, A, S) of `write` and `read`, as sums of the one-hot values by the weight of each pair.

        Args:
            keys, values: (B, L, A), of the pairs.
            query_keys: (B, N, A), the keys that are asked for; N = 1 for the delta rule.
            directions: FAVOR+'s, or None.
        """
        if self.rule == "delta":
            weights = self._delta_weights(keys, values, query_keys, directions)
        elif self.features == "softmax":
            k = self.project_keys(keys, values)
            weights = torch.einsum("bnad,blad->bnal", self.project_queries(query_keys), k * D**-0.5).softmax(-1)
        else:
            q = self.phi(self.project_queries(query_keys), directions, query=True)
            k = self.phi(self.project_keys(keys, values), directions, query=False)
            weights = torch.einsum("bnak,blak->bnal", q, k)
            weights = self._divide(weights, weights.sum(-1, keepdim=True))
        index = values.transpose(1, 2)[:, None].expand(*weights.shape)
        return torch.zeros(*weights.shape[:3], self.task.keys, device=keys.device).scatter_add(-1, index, weights)

    def _delta_weights(self, keys: Tensor, values: Tensor, query_keys: Tensor, directions: Tensor | None) -> Tensor:
        """Weights (B, 1, A, L) of the pairs in what one query per sequence reads from a memory of the delta rule.

        With transitions M_i = I - beta_i k_i k_i^T the memory is S = sum_i M_L ... M_{i+1} beta_i k_i v_i^T, so the
        weight of pair i is beta_i k_i . x_i, where x_i = M_{i+1} ... M_L q. These x_i, from the last pair to the first,
        are the states of a memory of one column that starts as q and in which the delta rule writes zeros: each key
        retrieves its weight, and removes it.

        Args:
            keys, values, query_keys, directions: as for `attend`, N = 1.
        """
        divides = _divides(self.config.norm)
        if not divides:  # the order matters to z alone, and whole numbers are less work to reverse than keys
            keys, values = keys.flip(1), values.flip(1)
        k, beta = self.project_keys(keys, values), self.write_rates(keys, values)
        assert beta is not None  # the delta rule has rates
        k, beta, z = delta_rule_writes(
            self.config.norm,
            self.config.phi.name,
            self.phi(k, directions, query=False) if self.maps_keys else k,
            beta,
            projection=None if self.maps_keys else directions,
        )
        if divides:
            k, beta = k.flip(1), beta.flip(1)
        q = self.phi(self.project_queries(query_keys), directions, query=True)[:, 0]
        zeros = torch.zeros_like(k[..., :1])
        o, _ = fast_weight(k, k, zeros, beta=beta, state=q[..., None], read="before", method="chunked")
        weights = (o[..., 0] * beta).flip(1).transpose(1, 2)[:, None]
        return self._divide(weights, (q * z).sum(-1)[:, None, :, None]) if divides else weights

    def loss(self, keys: Tensor, values: Tensor, query_keys: Tensor, answers: Tensor) -> Tensor:
        """The loss (A,) of each copy, mean over its sequences, with one question for each.

        Args:
            keys, values: (B, L, A), of the pairs.
            query_keys, answers: (B, A), a key and its value.
        """
        directions = self.draw_directions()
        if self.rule == "fwm":
            y = self.read(*self.write(keys, values, directions), query_keys[:, None], directions)[:, 0]
        else:
            y = self.attend(keys, values, query_keys[:, None], directions)[:, 0]
        return 0.5 * (y - self.one_hot[answers]).square().sum(-1).mean(0)

    def step(self) -> None:
        """One step of Adam on fresh sequences."""
        keys, values = self.task.sequences(self.batch, self.task.length, self.copies, self.device)
        descend(self.loss(keys, values, *self.task.question(keys, values)).sum(), self.optimizer)

    @torch.no_grad()
    def score(self, L: int) -> Tensor:
        """The loss (A,) of each copy on fresh sequences of L pairs, mean over all keys that occur."""
        keys, values = self.task.sequences(SCORED, L, self.copies, self.device)
        query_keys, answers, occurs = self.task.all_questions(keys, values)
        directions = self.draw_directions()
        if self.features == "softmax":
            y = self.attend(keys, values, query_keys, directions)
        else:
            y = self.read(*self.write(keys, values, directions), query_keys, directions)
        error = 0.5 * (y - self.one_hot[answers]).square().sum(-1) * occurs
        return (error.sum(1) / occurs.sum(1)).mean(0)

    def evaluate(self) -> Tensor:
        """Losses (A, 1), or (A, 2) in setting 2: at L = S, as published, and at L = 2 S, as it is trained."""
        lengths = dict.fromkeys((self.task.keys, self.task.length))
        return torch.stack([self.score(L) for L in lengths], 1)


@functools.cache
def random_rotations() -> Tensor:
    """ROTATIONS random rotations (ROTATIONS, D, D), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(ROTATIONS, D, D, generator=generator, dtype=torch.float64))[0].float()
