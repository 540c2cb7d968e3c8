"""What is benchmarked: a case (rule, shape, device, dtype) and the contestants that compute it.

Shapes: B batch, T tokens, H heads, K key width, V value width.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from fastweights import features
from fastweights.core import Inputs, Spec
from fastweights.torch.methods import map_plainly
from fastweights.torch.ops import METHODS, choose, fast_weight

Shape = tuple[int, int, int, int, int]
INPUTS = ("q", "k", "v", "beta", "log_decay")
DECAYS = ("none", "head", "channel")


@dataclass(frozen=True)
class Case:
    """One memory to compute: S and o for random unit queries and keys, always the same ones.

    Attributes:
        rule: "delta" or "sum".
        shape: (B, T, H, K, V). With features, K is the width that they are computed from, in the clock, and queries and
            keys are not normalised.
        device, dtype: of the inputs.
        features, norm: as for `fast_weight`.
        decay: "none", "head", one per token and head, or "channel", one per token, head and key channel.
    """

    rule: str
    shape: Shape
    device: str = "cpu"
    dtype: str = "float32"
    features: str = "identity"
    norm: str = "none"
    decay: str = "none"

    def __str__(self) -> str:
        mapped = f", {self.features} with {self.norm} norm" if self.mapped else ""
        decay = "" if self.decay == "none" else f", one decay per {self.decay}"
        return f"{self.rule} rule, {','.join(map(str, self.shape))}{mapped}{decay}, {self.dtype} on {self.device}"

    @property
    def mapped(self) -> bool:
        """Whether features are a part of what is timed."""
        return self.features != "identity" or self.norm != "none"

    @property
    def key_width(self) -> int:
        """Of what the memory is written with."""
        return features.parse(self.features).width(self.shape[3])

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, beta (delta rule only, so that every peer of the sum rule computes the same), log_decay where there
        is a decay, and the gradient do.

        Half of the decays lie between 0.91 and 0.97, and one of 200 under 0.5.
        """
        B, T, H, K, V = self.shape
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every device
        q, k = torch.randn(2, B, T, H, K, generator=generator)
        if not self.mapped:
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        v, do = torch.randn(2, B, T, H, V, generator=generator)
        x = dict(q=q, k=k, v=v, do=do)
        if self.rule == "delta":
            x["beta"] = torch.randn(B, T, H, generator=generator).sigmoid()
        if self.decay != "none":
            width = [self.key_width] if self.decay == "channel" else []
            x["log_decay"] = -(torch.randn(B, T, H, *width, generator=generator) - 3).exp()
        return {name: a.to(self.device, getattr(torch, self.dtype)) for name, a in x.items()}

    def asdict(self) -> dict[str, object]:
        """Names and values, for JSON."""
        return asdict(self)


def parse_shape(text: str) -> Shape:
    """A shape as the command line writes it; V is K where it is left out.

    Examples:
        >>> parse_shape("1,2048,4,64")
        (1, 2048, 4, 64, 64)
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 5) or min(sizes) < 1:
        raise ValueError(f"--shape is {text!r}; expected B,T,H,K or B,T,H,K,V, such as 1,2048,4,64: positive numbers")
    B, T, H, K, *V = sizes
    return B, T, H, K, V[0] if V else K


def same(*x: Tensor | None) -> tuple[Tensor | None, ...]:
    """Inputs or outputs as they are: for a contestant with our layout."""
    return x


@dataclass(frozen=True)
class Contestant:
    """A way to compute a case.

    Attributes:
        name: as tables call it.
        call: call(*native inputs) returns the output and the last state (None if it has none).
        to_native: makes the native inputs from those of INPUTS, None for what the case has not; peers take them in
            another layout or scale.
        from_native: turns their output and state into ours. Both run outside the clock.
        peer: whether it is another library.
        comparable: False for another function, timed for reference only.
        backward: False where its backward pass does not run here, and its forward pass alone is timed.
    """

    name: str
    call: Callable[..., tuple[Tensor, Tensor | None]]
    to_native: Callable[..., tuple[Tensor | None, ...]] = same
    from_native: Callable[..., tuple[Tensor | None, ...]] = same
    peer: bool = True
    comparable: bool = True  # False: another function, timed for reference only
    backward: bool = True


def our_method(method: str, case: Case) -> Contestant:
    """`fast_weight` with one method, features and all."""
    how = dict(rule=case.rule, features=case.features, norm=case.norm, method=method)

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
        return fast_weight(q, k, v, beta=beta, log_decay=log_decay, **how)  # type: ignore[arg-type]

    return Contestant(method, call, peer=False)


def composed(contestant: Contestant, case: Case) -> Contestant:
    """A contestant that knows no features, after theirs in PyTorch's own operators, all in the clock."""
    spec = Spec(features=case.features, norm=case.norm)

    def call(q: Tensor, k: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q, k = (map_plainly(x, spec) for x in (q, k))
        o, state = contestant.from_native(*contestant.call(*contestant.to_native(q, k, *others)))
        assert o is not None
        return o, state

    return Contestant(f"eager features, {contestant.name}", call, comparable=contestant.comparable)


def eager_method(method: str, case: Case) -> Contestant:
    """`fast_weight` with one method, after the features in PyTorch's own operators: what others would compose."""
    return composed(our_method(method, replace(case, features="identity", norm="none")), case)


def our_methods() -> tuple[str, ...]:
    """All that are timed unless named: every method but the loop over tokens, which takes minutes at these lengths."""
    return tuple(name for name in METHODS if name != "recurrent")


def auto(case: Case) -> str:
    """The method "auto" stands for in this case."""
    B, T, H, K, V = case.shape
    q, v = (torch.empty(B, T, H, width, device=case.device, dtype=getattr(torch, case.dtype)) for width in (K, V))
    log_decay = {"none": None, "head": q[..., 0], "channel": q}[case.decay]
    return choose(Inputs(q, q, v, log_decay=log_decay), Spec(rule=case.rule))
