"""`fastweights bench fwl`: what a Fast Weight Layer costs, forward+backward of the training loss.

The published layer, and one that is refreshed every 64 tokens. On a GPU: the block alone beside its slow head alone, at
the sizes the published code was measured at. "float32" makes products in full float32, "tf32" as JAX does on such a GPU
unless told otherwise, "bfloat16" is autocast. On a CPU: a training step of a causal Transformer of six layers with a
linear head, and with a Fast Weight Layer. Then the block alone in every framework that is installed
(fwl_frameworks.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fastweights.bench import fwl_frameworks
from fastweights.bench.agree import Disagreement, deviation
from fastweights.bench.report import explain_noise, milliseconds, new_table, timing_dict
from fastweights.bench.timing import Advance, Timing, interleave
from fastweights.torch import FWLBlock, cross_entropy

Shape = tuple[int, int, int, int, int]  # batch, tokens, width of the body, size, vocabulary
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": ((4, 2048, 512, 512, 32000), (4, 4096, 768, 768, 50257)),
    "cpu": ((2, 512, 512, 256, 4096),),
}
PUBLISHED = {  # the published JAX block on an H200, default float32, 16 chunks: milliseconds, temporary GiB
    (4, 2048, 512, 512, 32000): (19.5, 5.04),
    (4, 4096, 768, 768, 50257): (130.3, 12.58),
}
SMOKE: tuple[Shape, ...] = ((2, 12, 8, 8, 20),)
REFRESH = 64  # tokens between updates of the layer whose gradients are taken at its current weights
TOLERANCE = {"float32": 1e-5, "tf32": 5e-3, "bfloat16": 5e-2}


@dataclass
class Result:
    """A Fast Weight Layer beside the slow head alone, at one shape and precision.

    Attributes:
        shape: (B, T, D, size, V).
        precision: "float32", "tf32" or "bfloat16".
        error: largest deviation of a small block from float64.
        timings: milliseconds by contestant.
        peak: on a GPU, bytes of temporary memory by contestant.
    """

    shape: Shape
    precision: str
    error: float
    timings: dict[str, Timing]
    peak: dict[str, int]

    @property
    def ratio(self) -> float:
        """Time of the published layer over that of the slow head."""
        return self.times_slow("fast weight layer")

    def times_slow(self, name: str) -> float:
        """Time of a contestant over that of the slow head."""
        return self.timings[name].median / self.timings["slow head"].median


class Body(nn.Module):
    """A causal Transformer of six pre-norm layers over an embedding."""

    def __init__(self, vocabulary: int, dim: int, layers: int = 6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        layer = nn.TransformerEncoderLayer(dim, max(1, dim // 64), 4 * dim, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> features (B, T, D)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.layers(self.embed(tokens), mask=mask, is_causal=True)


def check(device: str, precision: str) -> float:
    """Loss and gradients of a small block here, against float64 on the CPU; raise when they deviate.

    Args:
        device: that will be timed.
        precision: "float32", "tf32" or "bfloat16".

    Returns:
        The largest deviation of a gradient, relative to its largest number.
    """
    torch.manual_seed(0)
    exact = FWLBlock(32, 200, inputs=48, step_size=0.5, dtype=torch.float64)
    block = FWLBlock(32, 200, inputs=48, step_size=0.5, device=device)
    block.load_state_dict(exact.state_dict())
    x, labels, weights = torch.randn(2, 150, 48, dtype=torch.float64), torch.randint(200, (2, 150)), torch.ones(2, 150)
    want = torch.autograd.grad(exact.loss(x, labels, weights.double()), list(exact.parameters()))
    # The block here against itself in float64 on the CPU: the loss's gradients of all parameters.
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = block.loss(x.float().to(device), labels.to(device), weights.to(device))
    got = torch.autograd.grad(loss, list(block.parameters()))
    error = max(deviation(a.cpu(), b) for a, b in zip(got, want, strict=True))
    if not error <= 4 * TOLERANCE[precision]:
        raise Disagreement(
            f"FWLBlock in {precision} on {device} deviates from float64 by {error:.1e} of the largest "
            "gradient. Nothing is reported."
        )
    return error


def contestants(shape: Shape, device: str, precision: str) -> dict[str, Callable[[], object]]:
    """{name: a function that computes loss and gradients}: the slow head, the layer, and the refreshed layer.

    On a CPU each has the whole body before it; on a GPU it starts from random features.

    Args:
        shape: (B, T, D, size, V).
        device: "cpu" or "cuda".
        precision: of TOLERANCE; products in TF32 are switched on by the caller.
    """
    B, T, D, size, V = shape
    torch.manual_seed(0)
    tokens = torch.randint(V, (B, T), device=device)
    labels, weights = tokens.roll(-1, 1), torch.ones(B, T, device=device)
    # On a CPU the body is a part of what is timed, on a GPU the block alone.
    body: nn.Module = Body(V, D).to(device) if device == "cpu" else nn.Identity()
    x = tokens if device == "cpu" else torch.randn(B, T, D, device=device, requires_grad=True)
    block = FWLBlock(size, V, inputs=D).to(device)
    refreshed = FWLBlock(size, V, inputs=D, refresh=REFRESH, normalizer=1.0, step_size=1 / D).to(device)
    linear = nn.Linear(D, V).to(device)

    def step(loss: Callable[[Tensor], Tensor], module: nn.Module) -> Callable[[], object]:
        wanted = [*([] if device == "cpu" else [x]), *body.parameters(), *module.parameters()]

        def call() -> object:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                value = loss(body(x))
            return torch.autograd.grad(value, wanted, allow_unused=True)

        return call

    def slow_head(h: Tensor) -> Tensor:
        if device == "cpu":
            return nn.functional.cross_entropy(linear(h).flatten(0, 1), labels.flatten())
        p = dict(block.named_parameters())
        n = torch.relu(h @ p["dense1"] + p["bias1"]) ** 2 @ p["dense2"] + p["bias2"]
        n = nn.functional.layer_norm(n, (size,), p["scale"], p["shift"])
        return cross_entropy.loss(n, p["unembed"], p["unembed_bias"], labels).mean()

    return {
        "slow head": step(slow_head, linear if device == "cpu" else block),
        "fast weight layer": step(lambda h: block.loss(h, labels, weights), block),
        "refreshed": step(lambda h: refreshed.loss(h, labels, weights), refreshed),
    }


def run(
    shapes: Sequence[Shape],
    device: str,
    precisions: Sequence[str],
    repeats: int,
    advance: Advance,
    tell: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Check the layer, then time all contestants in turns, for every shape and precision.

    Args:
        shapes: (B, T, D, size, V) each.
        device: "cpu" or "cuda".
        precisions: of TOLERANCE.
        repeats: samples per contestant.
        advance: moves a progress bar.
        tell: called with the results so far after each.
    """
    results = list[Result]()
    for shape in shapes:
        for precision in precisions:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            error = check(device, precision)
            calls = contestants(shape, device, precision)
            peak = {}
            if device == "cuda":
                for name, call in calls.items():
                    call()
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    call()
                    torch.cuda.synchronize()
                    peak[name] = torch.cuda.max_memory_allocated() - before
            results.append(Result(shape, precision, error, interleave(calls, repeats=repeats, device=device), peak))
            tell(results)
            advance(f"{shape} {precision}", 1)
    return results


def run_frameworks(
    shapes: Sequence[Shape],
    device: str,
    repeats: int,
    advance: Advance,
    only: Sequence[str] | None = None,
    tell: Callable[[list[dict[str, Any]]], None] = lambda found: None,
) -> list[dict[str, Any]]:
    """Milliseconds of the block alone by framework, published and refreshed, in float32 as each makes products.

    Args:
        shapes: (B, T, width of the body, size, vocabulary) of each problem.
        device: that is timed on.
        repeats: samples of each framework.
        advance: called after each sample, for a progress bar.
        only: "jax", "keras", both, or "none"; all that are installed when absent.
        tell: called with what was found so far after each.
    """
    frameworks, found = fwl_frameworks.chosen(only), list[dict[str, Any]]()
    if not frameworks:
        return []
    torch.backends.cuda.matmul.allow_tf32 = True  # as JAX does unless told otherwise
    for shape in shapes:
        for refresh in (None, REFRESH):
            steps = fwl_frameworks.contestants(shape, device, frameworks, refresh)
            error = fwl_frameworks.check(steps)
            timings = interleave(steps, repeats=repeats)  # every step waits for its device
            found.append(dict(shape=shape, refresh=refresh, error=error, timings=timings))
            tell(found)
            advance(f"{shape} in {', '.join(frameworks)}", 0.5)
    return found


def show_frameworks(found: Sequence[dict[str, Any]], device: str, console: Console) -> None:
    """Print what `run_frameworks` found as a table."""
    if not found:
        return
    table = new_table(f"The block alone by framework, forward+backward, ms on {device}")
    for heading in ("B,T,D,size,V", "", *found[0]["timings"], "error"):
        table.add_column(heading, justify="right")
    for r in found:
        kind = "published" if r["refresh"] is None else f"refresh={r['refresh']}"
        cells = [milliseconds(t) for t in r["timings"].values()]
        table.add_row(",".join(map(str, r["shape"])), kind, *cells, f"{r['error']:.0e}")
    console.print(table)
    explain_noise((t for r in found for t in r["timings"].values()), console)


def payload_frameworks(found: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """The same, for JSON, with the milliseconds of the published JAX block where they are known."""
    published = {shape: ms for shape, (ms, _) in PUBLISHED.items()}
    return [
        r
        | dict(timings={name: timing_dict(t) for name, t in r["timings"].items()})
        | dict(published_ms=published.get(r["shape"]))
        for r in found
    ]


def show(results: Sequence[Result], device: str, console: Console) -> None:
    """Print the results as a table, the published numbers beside them on a GPU.

    Args:
        results: of `run`.
        device: "cpu" or "cuda".
        console: of rich, to print on.
    """
    what = "the block alone" if device == "cuda" else "a training step of a six-layer Transformer"
    table = new_table(f"Fast Weight Layer, {what}, forward+backward, ms on {device}")
    headings = ["B,T,D,size,V", "", "slow head", "fast weight layer", "ratio", f"refresh={REFRESH}", "ratio", "error"]
    for heading in (*headings, *(["temporary", "published"] if device == "cuda" else [])):
        table.add_column(heading, justify="right")
    for r in results:
        slow, fast, again = (milliseconds(t) for t in r.timings.values())
        noisy = "~" if any(t.noisy for t in r.timings.values()) else ""
        row = [
            ",".join(map(str, r.shape)),
            r.precision,
            slow,
            fast,
            f"{noisy}{r.ratio:.2f}",
            again,
            f"{noisy}{r.times_slow('refreshed'):.2f}",
            f"{r.error:.0e}",
        ]
        # The most memory that a call takes beyond what was there, the second time it is called.
        if device == "cuda":
            published = "{} ms, {} GiB".format(*PUBLISHED[r.shape]) if r.shape in PUBLISHED else ""
            row += [f"{r.peak['fast weight layer'] / 2**30:.2f} GiB", published]
        table.add_row(*row)
    console.print(table)
    explain_noise((t for r in results for t in r.timings.values()), console)


def payload(results: Sequence[Result]) -> list[dict[str, object]]:
    """The results, for JSON."""
    return [
        {
            "shape": r.shape,
            "precision": r.precision,
            "error": r.error,
            "ratio": r.ratio,
            "peak_bytes": r.peak,
            "published_ms_gib": PUBLISHED.get(r.shape) if r.peak else None,
            **{name: timing_dict(t) for name, t in r.timings.items()},
        }
        for r in results
    ]
