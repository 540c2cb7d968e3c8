"""What a normalisation does to the delta rule's memory, measured on the retrieval task (key_value_pairs.py).

With the delta rule a write multiplies the memory by its transition I - g k k^T / |k|^2, where g = beta |k|^2 is the
gain: the transition has eigenvalue 1 - g along the key and 1 elsewhere. g = 1 replaces what was there, g > 2 makes it
grow, g near 0 hardly writes. Attention norm divides what is retrieved by kappa = z . k; there g = beta |k|^2 / kappa.

Shapes: B sequences, L pairs, A copies of the model, D width of keys, K that of their features, S values.
"""

import math

import torch
from torch import Tensor

from fastweights.core import Inputs, Spec
from fastweights.lab.tasks.key_value_retrieval import Model, delta_rule_writes
from fastweights.torch import fast_weight
from fastweights.torch.probing.measures import measure

SCORES = ("loss", "cosine", "size", "retrieved", "memory", "z", "gain", "highest_gain")
TRACED = 4  # sequences along which the memory is traced


class ProbedModel(Model):
    """A retrieval model of the delta rule that measures its memory whenever it is scored."""

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Measurements (A, len(SCORES)) on sequences as long as those of training.

        loss: of the answers.  cosine, size: of the answers with respect to the values of length 1.  retrieved: length
        of what keys retrieve before they write.  memory, z: their norms after the last pair.  gain, highest_gain: mean
        and largest gain of the writes.
        """
        keys, values = self.task.sequences(20, self.task.length, self.copies, self.device)
        query_keys, answers, occurs = self.task.all_questions(keys, values)
        y, v = self.read(*self.write(keys, values, None), query_keys, None), self.one_hot[answers]
        size = y.norm(dim=-1)

        def mean(x: Tensor) -> Tensor:
            """Mean (A,) of x (B, N, A) over the questions whose key occurs."""
            return (x * occurs).sum((0, 1)) / occurs.sum((0, 1))

        k, beta, z = delta_rule_writes(self.norm, self.features, *self._keys_and_rates(keys, values))
        measured = measure(Inputs(k, k, self.one_hot[values], beta), Spec(), k.shape[1])
        return torch.stack(
            [
                (0.5 * (y - v).square().sum(-1) * occurs).sum(1).div(occurs.sum(1)).mean(0),
                mean((y * v).sum(-1) / size.clamp(min=1e-30)),
                mean(size),
                measured.writes.retrieved.mean((0, 1)),
                measured.marks.norm[:, -1].mean(0),
                z.norm(dim=-1).mean(0),
                measured.writes.gain.mean((0, 1)),
                measured.writes.gain.amax((0, 1)),
            ],
            1,
        )

    def _keys_and_rates(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, L, A, D) before the feature map and write rates (B, L, A) of pairs (B, L, A)."""
        beta = self.write_rates(keys, values)
        assert beta is not None, "the delta rule has rates"
        return self.project_keys(keys, values), beta

    @torch.no_grad()
    def trace(self, segments: int, times: int) -> list[dict[str, float]]:
        """Measure the memory along sequences that are longer than those of training, in float64.

        Args:
            segments: number of measurements, one at the end of each part of the sequences.
            times: how many times as long as those of training the sequences are.

        Returns:
            A dict for each part:
                position: pairs up to its end.
                memory, z: their norms there.
                retrieved: length of what the keys of the part retrieve before they write.
                low_gain, gain, high_gain: 5 percent, median and 95 percent of the gains of the part's writes.
                growth: the largest singular value of the product of all transitions so far, which is how much a memory
                    that was there before the first pair can have grown; inf where the product is not finite.
        """
        keys, values = self.task.sequences(TRACED, times * self.task.length, self.copies, self.device)
        raw_keys, rates = (x.double() for x in self._keys_and_rates(keys, values))
        v = self.one_hot[values].double()
        length = raw_keys.shape[1] // segments
        memory = z = product = None
        points = []
        for n in range(segments):
            part = slice(n * length, (n + 1) * length)
            k, beta, z = delta_rule_writes(self.norm, self.features, raw_keys[:, part], rates[:, part], z=z)
            measured = measure(Inputs(k, k, v[:, part], beta, state=memory), Spec(), length)
            memory = measured.state
            if product is None:
                product = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(1, k.shape[2], -1, -1)
            # A memory that starts as the identity and in which zeros are written is the product of the transitions.
            _, product = fast_weight(k[:1], k[:1], torch.zeros_like(k[:1]), beta=beta[:1], state=product)
            gain = measured.writes.gain.flatten()
            shares = torch.tensor([0.05, 0.5, 0.95], dtype=gain.dtype, device=gain.device)
            low_gain, median_gain, high_gain = torch.quantile(gain, shares)
            growth = torch.linalg.matrix_norm(product.cpu(), 2).mean() if product.isfinite().all() else math.inf
            numbers = dict(
                memory=measured.marks.norm[:, -1].mean(),
                retrieved=measured.writes.retrieved.mean(),
                z=z.norm(dim=-1).mean(),
                growth=growth,
                low_gain=low_gain,
                gain=median_gain,
                high_gain=high_gain,
            )
            points.append(dict(position=(n + 1) * length, **{name: float(x) for name, x in numbers.items()}))
        return points
