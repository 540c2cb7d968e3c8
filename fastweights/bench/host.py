"""`fastweights bench host`: what a call costs the host in eager mode, in microseconds.

On a GPU the host only queues work; small calls are as slow as the host is. Each sample times a row of calls without
waiting for the device in between.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fastweights.bench.agree import Disagreement, deviation
from fastweights.bench.case import Case
from fastweights.bench.peers import PEERS
from fastweights.bench.report import explain_noise, new_table
from fastweights.bench.timing import Advance, Timing
from fastweights.models.blocks import Block
from fastweights.models.config import Config
from fastweights.torch import FastWeightAttention, fast_weight

SHAPE = (1, 256, 4, 64)  # B, T, H, K = V
SMOKE = (1, 32, 2, 8)
CALLS = 20  # per sample
Calls = dict[str, tuple[Callable[[], Tensor], list[Tensor]]]  # what is timed, and what it is differentiated by
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class Result:
    """Microseconds per call.

    Attributes:
        name: what was called.
        forward: without gradients.
        both: forward+backward.
    """

    name: str
    forward: Timing
    both: Timing


def _operations(shape: Sequence[int], device: str, dtype: torch.dtype, peers: bool) -> Calls:
    """The operation beside attention's own and what peers are installed.

    Args:
        shape: (B, T, H, K).
        device, dtype: of the inputs.
        peers: whether FLA takes part.

    Returns:
        {name: (a call, the tensors that it is differentiated by)}.
    """
    B, T, H, K = shape
    make = lambda: torch.randn(B, T, H, K, device=device, dtype=dtype)  # noqa: E731
    q, k, v = make(), nn.functional.normalize(make(), dim=-1), make()
    beta = torch.rand(B, T, H, device=device, dtype=dtype)
    for x in (q, k, v, beta):
        x.requires_grad_()
    _check(q, k, v, beta)
    first = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v)]
    calls: Calls = {
        "fast_weight, delta": (lambda: fast_weight(q, k, v, beta=beta)[0], [q, k, v, beta]),
        "fast_weight, sum": (lambda: fast_weight(q, k, v, rule="sum")[0], [q, k, v]),
        "scaled_dot_product_attention": (
            lambda: nn.functional.scaled_dot_product_attention(first[0], first[1], first[2], is_causal=True),
            first,
        ),
    }
    # FLA's first call tunes itself for minutes, so it takes part only when asked for.
    for peer in PEERS:
        if peers and peer.name == "FLA" and device == "cuda":
            found = peer.contestant(Case("delta", (B, T, H, K, K), device, "bfloat16"))
            if not isinstance(found, str):
                calls["FLA, delta"] = (_output(found.call, q, k, v, beta), [q, k, v, beta])
    return calls


def _output(call: Callable[..., Any], *inputs: Tensor) -> Callable[[], Tensor]:
    """The call as a function without arguments, of its output without the state."""
    return lambda: call(*inputs)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
    """Raise unless what is timed is the equation."""
    with torch.no_grad():
        exact = fast_weight(*(x.double() for x in (q, k, v)), beta=beta.double(), method="recurrent")[0]
        error = deviation(fast_weight(q, k, v, beta=beta)[0], exact)
    if not error <= TOLERANCE[q.dtype]:
        raise Disagreement(
            f"fast_weight deviates from float64 by {error:.1e} of the largest number; allowed "
            f"{TOLERANCE[q.dtype]:.0e}. Nothing is reported."
        )


def _layers(shape: Sequence[int], device: str, dtype: torch.dtype, names: Iterable[str]) -> Calls:
    """Layers, one block of the language model, and attention's own layer, as `_operations` returns them.

    Args:
        shape: (B, T, heads, width of a head).
        device, dtype: of inputs and parameters.
        names: of the presets to time.
    """
    B, T, H, K = shape
    dim = H * K
    x = torch.randn(B, T, dim, device=device, dtype=dtype, requires_grad=True)
    to: dict[str, Any] = dict(device=device, dtype=dtype)
    calls: Calls = {}
    for name in names:
        layer = FastWeightAttention.preset(name, dim, H, **to)
        calls[f"layer, {name}"] = (_output(layer, x), [x, *layer.parameters()])
    softmax = nn.MultiheadAttention(dim, H, batch_first=True, **to)
    mask = nn.Transformer.generate_square_subsequent_mask(T, device=torch.device(device), dtype=dtype)
    attend = lambda: softmax(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]  # noqa: E731
    calls["nn.MultiheadAttention"] = (attend, [x, *softmax.parameters()])
    block = Block(Config(dim=dim, heads=H, depth=1, model="gated-delta"), "gated-delta", **to)
    calls["block, gated-delta"] = (_output(block, x), [x, *block.parameters()])
    return calls


def run(
    shape: Sequence[int],
    device: str,
    dtype: torch.dtype,
    repeats: int,
    *,
    layers: Sequence[str],
    compiled: bool,
    peers: bool,
    advance: Advance,
) -> list[Result]:
    """Time everything in turns.

    Args:
        shape: (B, T, H, K).
        device, dtype: of the inputs.
        repeats: samples, of 20 calls each; one more warms up.
        layers: names of presets.
        compiled: also torch.compile of the first of these layers; on a GPU also in the mode that replays CUDA graphs,
            and captured as a CUDA graph without a compiler.
        peers: also FLA, if it is installed.
        advance: moves the progress bar.
    """
    calls = _operations(shape, device, dtype, peers) | _layers(shape, device, dtype, layers)
    if compiled:
        call, leaves = calls[f"layer, {layers[0]}"]
        for mode in _modes(device):
            name = f"layer, {layers[0]}, torch.compile" + (f", {mode}" if mode else "")
            calls[name] = (torch.compile(call, mode=mode), leaves)
    results = _in_turns(calls, device, repeats, advance)
    if compiled and device == "cuda":
        # Alone, after the others: PyTorch's own graphs (mode="reduce-overhead") fail once another one is captured.
        call, leaves = calls[f"layer, {layers[0]}"]
        graph = {f"layer, {layers[0]}, CUDA graph": (_captured(call, leaves), leaves)}
        results += _in_turns(graph, device, repeats, advance)
    return results


def _in_turns(calls: Calls, device: str, repeats: int, advance: Advance) -> list[Result]:
    """Time the contestants in turns, so that a slow moment of the machine falls on all of them."""
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for turn in range(repeats + 1):
        for name, (call, leaves) in calls.items():
            up = torch.ones_like(call())
            both = lambda call=call, leaves=leaves, up=up: torch.autograd.grad(call(), leaves, up)  # noqa: E731
            with torch.no_grad():
                forward_time = _row(call, wait)
            both_time = _row(both, wait)
            if turn:  # the first one warms up
                samples[name][0].append(forward_time)
                samples[name][1].append(both_time)
            advance(name, 1)
    return [Result(name, Timing.of(forward), Timing.of(both)) for name, (forward, both) in samples.items()]


def _captured(call: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Tensor]:
    """The call and its backward pass as two CUDA graphs, which are replayed."""
    graphed: Any = torch.cuda.make_graphed_callables(lambda *_: call(), tuple(leaves))
    return lambda: graphed(*leaves)


def _row(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Microseconds of the host per call, in a row of calls."""
    call()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    wait()
    return 1e6 * elapsed / CALLS


def _modes(device: str) -> tuple[str | None, ...]:
    """Modes of torch.compile that are timed."""
    return (None, "reduce-overhead") if device == "cuda" else (None,)


def steps(repeats: int, layers: Sequence[str], compiled: bool, device: str) -> int:
    """How often `run` advances."""
    more = len(_modes(device)) + (device == "cuda") if compiled else 0
    return (repeats + 1) * (len(layers) + 6 + more)


def show(results: Sequence[Result], shape: Sequence[int], device: str, dtype: torch.dtype, console: Console) -> None:
    """Print the results as a table."""
    B, T, H, K = shape
    kind = str(dtype).removeprefix("torch.")
    title = f"the host's microseconds per call, (B, T, H, K) = ({B}, {T}, {H}, {K}), {kind} on {device}"
    table = new_table(title)
    for heading in ("", "forward", "forward+backward"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        cells = [f"{'~' if t.noisy else ''}{t.median:.0f}" for t in (result.forward, result.both)]
        table.add_row(result.name, *cells)
    console.print(table)
    explain_noise((t for r in results for t in (r.forward, r.both)), console)


def payload(results: Sequence[Result], shape: Sequence[int], dtype: torch.dtype) -> dict[str, object]:
    """The results, for JSON."""
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": {r.name: {"forward": r.forward.median, "forward_backward": r.both.median} for r in results},
    }
