"""What a normalisation does to the delta rule's memory: measured on the retrieval task and in a language model.

With the delta rule a write multiplies the memory by I - g k k^T / |k|^2, g = beta |k|^2 the gain: eigenvalue 1 - g
along the key and 1 elsewhere. g = 1 replaces what was there, g > 2 makes it grow, g near 0 hardly writes. The
attention norm divides what is retrieved by kappa = z . k, so there g = beta |k|^2 / kappa.

Shapes: B sequences, L pairs, A copies of the model, K features, S values.
"""

import math

import torch
from torch import Tensor

from fastweights.core import Inputs, Spec
from fastweights.lab.tasks.key_value_retrieval import Model, effective
from fastweights.torch import fast_weight
from fastweights.torch.probing.measures import measure

SCORES = ("loss", "cosine", "size", "retrieved", "memory", "z", "gain", "highest_gain")


class Probe(Model):
    """A retrieval model that measures its memory whenever it is scored."""

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """(A, len(SCORES)): on sequences as long as those it trains on."""
        keys, values = self.task.sequences(20, self.task.length, self.copies, self.device)
        asked, target, occurs = self.task.all_questions(keys, values)
        memory, z = self.memory(keys, values, None)
        y, v = self.read(memory, z, asked, None), self.eye[target]
        count = occurs.sum((0, 1))
        mean = lambda x: (x * occurs).sum((0, 1)) / count  # noqa: E731
        raw, beta = self.written(keys, values)
        k, beta, total = effective(self.norm, self.features, raw, beta)
        seen = measure(Inputs(k, k, self.eye[values], beta), Spec(), k.shape[1])
        size = y.norm(dim=-1)
        return torch.stack(
            [
                (0.5 * (y - v).square().sum(-1) * occurs).sum(1).div(occurs.sum(1)).mean(0),
                mean((y * v).sum(-1) / size.clamp(min=1e-30)),
                mean(size),
                seen.writes.retrieved.mean((0, 1)),
                seen.marks.norm[:, -1].mean(0),
                total.norm(dim=-1).mean(0),
                seen.writes.gain.mean((0, 1)),
                seen.writes.gain.amax((0, 1)),
            ],
            1,
        )

    def written(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Raw keys and rates."""
        beta = self.rates(keys, values)
        assert beta is not None, "the delta rule has rates"
        return self.raw_keys(keys, values), beta

    @torch.no_grad()
    def trace(self, segments: int, times: int) -> list[dict[str, float]]:
        """Along sequences `times` as long as those of training, in float64, after each of `segments` parts.

        Returns:
            Per part: its end (position), the length of the memory and of z, the length of what is retrieved, the gain
                of the
            writes (median, 5 and 95 percent), and growth, the largest singular value of the product of all transitions
            so far: how much a memory that was there before the first pair can have grown.
        """
        keys, values = self.task.sequences(4, times * self.task.length, self.copies, self.device)
        raw, beta = (x.double() for x in self.written(keys, values))
        v = self.eye[values].double()
        part, found = raw.shape[1] // segments, []
        memory = z = product = None
        for n in range(segments):
            here = slice(n * part, (n + 1) * part)
            k, rate, z = effective(self.norm, self.features, raw[:, here], beta[:, here], z=z)
            if product is None:
                product = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(1, k.shape[2], -1, -1)
            seen = measure(Inputs(k, k, v[:, here], rate, state=memory), Spec(), part)
            memory = seen.state
            _, product = fast_weight(k[:1], k[:1], torch.zeros_like(k[:1]), beta=rate[:1], state=product)
            gain = seen.writes.gain.flatten()
            shares = torch.tensor([0.05, 0.5, 0.95], dtype=gain.dtype, device=gain.device)
            low, middle, high = torch.quantile(gain, shares)
            growth = torch.linalg.matrix_norm(product.cpu(), 2).mean() if product.isfinite().all() else math.inf
            numbers = dict(
                memory=seen.marks.norm[:, -1].mean(),
                retrieved=seen.writes.retrieved.mean(),
                z=z.norm(dim=-1).mean(),
                growth=growth,
                low_gain=low,
                gain=middle,
                high_gain=high,
            )
            found.append(dict(position=(n + 1) * part, **{name: float(x) for name, x in numbers.items()}))
        return found
