"""Records of memories: what every write of a layer did, and what its memory was every so many tokens."""

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError, Inputs, Spec
from fastweights.torch.probing.attributions import Attribution
from fastweights.torch.probing.layer_records import array_of, joined
from fastweights.torch.probing.measures import Marks, Measured, Writes, measure


class MemoryRecord:
    """What one memory did, in NumPy arrays; each measurement is an attribute.

    Measured at every write, arrays (B, T, H): beta, decay, gain, value, retrieved, error, cosine, written.
    Measured of the memory once every `every` tokens, arrays (B, M, H): norm, rank, capacity, interference, half_life;
    `at` (M,) says after how many tokens. The module `fastweights.torch.probing.measures` defines each of them.

    Calls of the same batch size follow one another in time, as the segments of a text do.

    Attributes:
        name: of the module that holds the memory.
        rule: "delta" or "sum".
        writes: number of writes per token.
        every: tokens between two measurements of the memory.
        calls: for each call of the layer its measurements by name, and the tokens after which they were taken.
        kept: with `keep=True`, the arguments of each call, for `attribution`.
    """

    def __init__(self, name: str, rule: str, writes: int, every: int, keep: bool):
        self.name, self.rule, self.writes, self.every = name, rule, writes, every
        self.calls: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
        self.kept: list[tuple[Inputs, Spec]] = []
        self._keep, self._total = keep, 0
        self._keys: Tensor | None = None

    def add(self, inputs: Inputs, spec: Spec) -> None:
        """Measure one call of `fast_weight` with these arguments, and append it to what was measured before."""
        carried = self._keys is not None and inputs.state is not None and len(self._keys) == len(inputs.q)
        found: Measured = measure(inputs, spec, self.every, keys=self._keys if carried else None)
        self._keys = found.keys
        arrays = {
            n: array_of(x) for part in (found.writes, found.marks) for n, x in zip(part._fields, part, strict=True)
        }
        self.calls.append((arrays, array_of(found.at) + self._total))
        self._total += inputs.q.shape[1]
        if self._keep:
            held = inputs._replace(state=None if inputs.state is None else inputs.state.detach().clone())
            self.kept.append((held.map_tokens(Tensor.detach), spec))

    @property
    def at(self) -> np.ndarray:
        """(M,): tokens read before each mark, counted from the first call on."""
        return np.concatenate([at for _, at in self.calls])

    def __getattr__(self, name: str) -> np.ndarray:
        """A measurement by its name, over all calls so far, joined along the text."""
        if name not in MEASURES:
            raise AttributeError(f"a MemoryRecord has no {name!r}; expected one of {', '.join(MEASURES)}")
        return joined(self.name, [arrays[name] for arrays, _ in self.calls])

    def attribution(self) -> Attribution:
        """Where this memory's reads come from; needs `probe(..., keep=True)`."""
        if not self.kept:
            raise FastWeightError("attribution needs the keys and values of the calls; expected probe(..., keep=True)")
        calls, spec = [x for x, _ in self.kept], self.kept[0][1]
        fields = Inputs._fields[:6]
        joined = {n: torch.cat([getattr(x, n) for x in calls], 1) for n in fields if getattr(calls[0], n) is not None}
        mask = None if calls[0].mask is None else torch.cat([x.mask for x in calls], 1)
        return Attribution(Inputs(**joined, state=calls[0].state, mask=mask), spec)

    def __repr__(self) -> str:
        return f"MemoryRecord({self.name!r}, rule={self.rule!r}, {self._total} tokens)"


MEASURES = (*Writes._fields, *Marks._fields)
