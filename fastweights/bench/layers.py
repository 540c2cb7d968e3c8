"""`fastweights bench layers`: what a layer costs over its projections and its memory, forward+backward."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from fastweights.attention.presets import PRESETS
from fastweights.bench.agree import Disagreement, deviation
from fastweights.bench.report import explain_noise, milliseconds, new_table, timing_dict
from fastweights.bench.timing import Advance, Timing, interleave
from fastweights.torch import FastWeightAttention, fast_weight

DEFAULT = dict(batch=1, tokens=2048, dim=256, heads=8)
SMOKE = dict(batch=1, tokens=64, dim=16, heads=2)
TOLERANCE = 1e-4  # of float32 against float64, over the largest number
NAMES = ("default", *PRESETS)


@dataclass
class Result:
    """A layer, timed in milliseconds beside its two parts.

    Attributes:
        name: of the preset.
        error: its deviation from float64.
        timings: of "layer", "projections" and "memory".
    """

    name: str
    error: float
    timings: dict[str, Timing]

    @property
    def ratio(self) -> float:
        """Time of the layer over that of its projections and its memory: what everything between them costs."""
        parts = self.timings["projections"].median + self.timings["memory"].median
        return self.timings["layer"].median / parts


def make(name: str, dim: int, heads: int) -> FastWeightAttention:
    """The layer of this name, with the same weights each time."""
    torch.manual_seed(0)
    return FastWeightAttention(dim, heads) if name == "default" else FastWeightAttention.preset(name, dim, heads)


def check(layer: FastWeightAttention, x: Tensor) -> float:
    """How far the layer is from itself in float64, token by token on a prefix; raise when too far."""
    exact = copy.deepcopy(layer).double()
    exact.method = "recurrent"
    prefix = x[:, :96]
    with torch.no_grad():
        error = deviation(layer(prefix)[0], exact(prefix.double())[0])
        whole = deviation(layer(x)[0][:, :96], layer(prefix)[0].double())
    if not max(error, whole) <= TOLERANCE:
        raise Disagreement(
            f"{layer} deviates from float64 by {max(error, whole):.1e} of the largest number; allowed "
            f"{TOLERANCE:.0e}. Nothing is reported."
        )
    return error


def parts(layer: FastWeightAttention, x: Tensor) -> dict[str, Callable[[], object]]:
    """The layer, its projections alone and its memory alone, forward+backward, as functions.

    The two parts get inputs of the shapes that they have inside the layer, and give gradients of all of them.
    """
    c = layer.config
    B, T, _ = x.shape
    inner = torch.randn(B, T, c.heads * c.value_width, requires_grad=True)
    weights = dict(layer.named_parameters())
    # The memory alone gets random inputs of the shapes that the layer would give it.
    width = c.value_width + (c.attention_norm and c.rule == "sum")  # the normaliser is one more column
    q, k = torch.nn.functional.normalize(torch.rand(2, B, T, c.heads, c.feature_width), dim=-1)
    rates = [torch.rand(B, T, c.heads) if wanted else None for wanted in (c.has_beta, c.decay is not None)]
    inputs = [q, k, torch.randn(B, T, c.heads, width), *rates]
    leaves = [t.requires_grad_() for t in inputs if t is not None]
    ones = torch.randn(B, T, c.dim), torch.randn(B, T, c.heads, width)

    def whole() -> object:
        return torch.autograd.grad(layer(x)[0], [x, *weights.values()], ones[0])

    def projections() -> object:
        y, z = layer.in_proj(x), layer.out_proj(inner)
        leaves = [x, inner, layer.in_proj.weight, layer.out_proj.weight]
        return torch.autograd.grad([y, z], leaves, [torch.ones_like(y), ones[0]])

    def memory() -> object:
        q, k, v, beta, decay = inputs
        assert q is not None and k is not None and v is not None  # noqa: PT018
        log_decay = None if decay is None else -decay
        o, _ = fast_weight(q, k, v, beta=beta, log_decay=log_decay, rule=c.rule)  # type: ignore[arg-type]
        return torch.autograd.grad(o, leaves, ones[1])

    return dict(layer=whole, projections=projections, memory=memory)


def run(
    names: Sequence[str],
    *,
    batch: int,
    tokens: int,
    dim: int,
    heads: int,
    repeats: int,
    advance: Advance,
) -> list[Result]:
    """Check each layer, then time it in turns with its parts.

    Args:
        names: of presets, or "default".
        batch, tokens, dim, heads: sizes.
        repeats: samples.
        advance: moves the progress bar.
    """
    results = []
    for name in names:
        layer = make(name, dim, heads)
        x = torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
        error = check(layer, x.detach())
        results.append(Result(name, error, interleave(parts(layer, x), repeats=repeats)))
        advance(name, 1)
    return results


def show(results: Sequence[Result], console: Console, *, batch: int, tokens: int, dim: int, heads: int) -> None:
    """Print the results as a table."""
    table = new_table(f"layers, forward+backward, ms, ({batch}, {tokens}, {dim}), {heads} heads, float32 on cpu")
    for heading in ("", "layer", "projections", "memory", "layer / (projections + memory)", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    for r in results:
        noisy = "~" if any(t.noisy for t in r.timings.values()) else ""
        cells = [milliseconds(r.timings[part]) for part in ("layer", "projections", "memory")]
        table.add_row(r.name, *cells, f"{noisy}{r.ratio:.2f}", f"{r.error:.0e}")
    console.print(table)
    explain_noise((t for r in results for t in r.timings.values()), console)


def payload(results: Sequence[Result], sizes: dict[str, int]) -> list[dict[str, object]]:
    """The results, for JSON."""
    return [
        {
            "name": r.name,
            **sizes,
            "error": r.error,
            "ratio": r.ratio,
            **{part: timing_dict(t) for part, t in r.timings.items()},
        }
        for r in results
    ]
