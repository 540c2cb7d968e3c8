"""`fastweights bench memory`: our methods against the peers, forward and forward+backward, in one interleaved run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fastweights.bench import agree, peers
from fastweights.bench.case import (
    DECAYS,
    INPUTS,
    Case,
    Contestant,
    Shape,
    auto,
    composed,
    eager_method,
    our_method,
    our_methods,
)
from fastweights.bench.timing import Advance, Call, Timing, clock, interleave
from fastweights.core import FastWeightError
from fastweights.features import parse_fixed
from fastweights.torch.ops import METHODS

SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((1, 2048, 4, 64, 64), (1, 4096, 4, 64, 64), (4, 1024, 8, 64, 64), (1, 2048, 4, 128, 128)),
    "cuda": (
        (8, 4096, 16, 128, 128), (32, 2048, 16, 64, 64), (2, 16384, 16, 128, 128), (1, 65536, 16, 128, 128),
        (4, 2048, 16, 128, 128),
    ),
}  # fmt: skip
PAPER: dict[str, tuple[Shape, ...]] = {"cuda": ((96, 256, 8, 16, 16), (16, 4096, 8, 32, 32))}  # DPFP-3, sum norm, delta
SMOKE: tuple[Shape, ...] = ((1, 48, 2, 8, 8), (2, 200, 1, 4, 6))  # checked by the loop, and by chunks it vouches for
PASSES = ("forward", "forward_backward")
STEPS = 2  # per case: check, time


@dataclass
class Result:
    """A case, timed: how fast and how exact each contestant was, and who did not take part.

    Attributes:
        case: what was computed.
        auto: the method that "auto" stands for in it.
        passes: milliseconds per pass ("forward", "forward_backward") and contestant.
        errors: deviations from float64, per contestant and result.
        peers: those that compute the same function.
        left_out: why others did not take part.
        extra_bytes: peak of forward+backward above the inputs, on a GPU.
    """

    case: Case
    auto: str
    passes: dict[str, dict[str, Timing]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    extra_bytes: dict[str, int] = field(default_factory=dict)  # peak of forward+backward above the inputs, on a GPU

    def speedup(self, name: str, which: str) -> float | None:
        """How many times as fast as the fastest peer that computes the same."""
        timed = self.passes[which]
        times = [timed[peer].median for peer in self.peers if peer in timed]
        return min(times) / timed[name].median if times and name in timed else None


def cases(
    shapes: Sequence[Shape],
    rules: Sequence[str],
    device: str,
    dtype: str,
    features: str = "identity",
    norm: str = "none",
    decays: Sequence[str] = ("none",),
) -> list[Case]:
    """Every rule on every shape with every decay; on a GPU's own shapes the paper's features too, if none are named.

    Args:
        shapes: (B, T, H, K, V) of each.
        rules: "delta", "sum".
        device, dtype: of the inputs.
        features, norm: as for `fast_weight`.
        decays: of DECAYS.
    """
    parse_fixed(features)
    for decay in decays:
        if decay not in DECAYS:
            raise FastWeightError(f"--decay is {decay!r}; expected one of {', '.join(DECAYS)}")
    wanted = product(rules, shapes, decays)
    asked = [Case(rule, shape, device, dtype, features, norm, decay) for rule, shape, decay in wanted]
    plain = (features, norm, *decays) == ("identity", "none", "none")
    if tuple(shapes) == SHAPES[device] and "delta" in rules and plain:
        asked += [Case("delta", shape, device, dtype, "dpfp-3", "sum") for shape in PAPER.get(device, ())]
    return asked


def run(
    cases: Sequence[Case],
    *,
    repeats: int,
    methods: Sequence[str] = (),
    only: Sequence[str] = (),
    softmax: bool = False,
    advance: Advance = lambda what, steps: None,
    tell: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Check every case, then time every case.

    Args:
        cases: what to compute.
        repeats: samples per contestant.
        methods: ours; all but the loop over tokens when empty.
        only: these peers alone, or "none"; all that are installed when empty.
        softmax: also time causal softmax attention, which is another function.
        advance: moves the progress bar, by two steps per case.
        tell: called with the results so far when a case has been timed.
    """
    results, entered = list[Result](), []
    for case in cases:
        advance(f"checking {case}", 0)
        contestants, left_out = enter(case, methods, only, softmax)
        errors, failed = agree.check(case, contestants, case.tensors())
        contestants = [
            replace(c, backward=agree.without_backward(c.name) not in failed)
            for c in contestants
            if c.name not in failed
        ]
        same = tuple(c.name for c in contestants if c.peer and c.comparable)
        results.append(Result(case, auto(case), errors=errors, peers=same, left_out=left_out | failed))
        entered.append(contestants)
        advance(f"checking {case}", 1)
    # All cases are checked before any is timed: a disagreement shows early, and nothing is reported then.
    for at, (result, contestants) in enumerate(zip(results, entered, strict=True), 1):
        result.passes = time(result.case, contestants, repeats, advance)
        if result.case.device == "cuda":
            result.extra_bytes = peaks(result.case, contestants)
        tell(results[:at])
    return results


def peaks(case: Case, contestants: Sequence[Contestant]) -> dict[str, int]:
    """The most memory that forward+backward of each takes above its inputs, on a GPU."""
    x, found = case.tensors(), {}
    for contestant in (c for c in contestants if c.backward):
        call = forward_backward(contestant, x)
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        found[contestant.name] = torch.cuda.max_memory_allocated() - before
    return found


def enter(
    case: Case, methods: Sequence[str] = (), only: Sequence[str] = (), softmax: bool = False
) -> tuple[list[Contestant], dict[str, str]]:
    """Who takes part in a case, and why the others do not.

    Args:
        case: what is computed.
        methods, only, softmax: as for `run`.

    Returns:
        The contestants, and {name: reason} of those left out.
    """
    names = [*(peer.name for peer in peers.PEERS), "none"]
    for name in only:
        if name not in names:
            raise FastWeightError(f"--peer is {name!r}; expected one of {', '.join(names)}")
    left_out: dict[str, str] = {}
    contestants = []
    # Ours: those asked for, or all that can run here. With features each also after PyTorch's own operators.
    for method in methods or our_methods():
        if method not in METHODS:
            raise FastWeightError(f"--method is {method!r}; expected one of {', '.join(METHODS)}")
        contestant = our_method(method, case)
        if not methods and (reason := _refusal(contestant, case)):
            left_out[method] = reason
        else:
            contestants.append(contestant)
            if case.mapped:
                contestants.append(eager_method(method, case))
    # Peers: those asked for, or all that are installed and can take the case.
    asked = tuple(peer for peer in peers.PEERS if not only or peer.name in only)
    for peer in asked + ((peers.SOFTMAX,) if softmax and not case.mapped else ()):
        found = peer.contestant(case)
        if isinstance(found, str):
            left_out[peer.name] = found
        else:
            contestants.append(composed(found, case) if case.mapped else found)
    return contestants, left_out


def _refusal(contestant: Contestant, case: Case) -> str | None:
    """Why one of our methods cannot run here, in its own words."""
    _, _, _, K, V = case.shape
    x = replace(case, shape=(1, 2, 1, K, V)).tensors()
    try:
        contestant.call(*(x.get(name) for name in INPUTS))
    except FastWeightError as error:
        return str(error)
    return None


def time(case: Case, contestants: Sequence[Contestant], repeats: int, advance: Advance) -> dict[str, dict[str, Timing]]:
    """Forward without gradients, then forward+backward with the gradients of all inputs, of those that can.

    Args:
        case: shape, rule, device and dtype of the problem.
        contestants: whose outputs were found to agree.
        repeats: samples of each.
        advance: called after each sample, for a progress bar.
    """
    x = case.tensors()
    timed = {}
    for which, prepare in (("forward", forward), ("forward_backward", forward_backward)):
        calls = {c.name: prepare(c, x) for c in contestants if c.backward or which == "forward"}
        share = 1 / (len(PASSES) * repeats * len(calls))
        tick = partial(advance, f"timing {case}", share)
        timed[which] = interleave(calls, repeats=repeats, tick=tick, by=clock(case.device))
    return timed


def forward(contestant: Contestant, x: Mapping[str, Tensor]) -> Call:
    """A forward pass as a function, its inputs made already and gradients off."""
    native = _native(contestant, x, gradients=False)

    def call() -> None:
        with torch.no_grad():
            contestant.call(*native)

    return call


def forward_backward(contestant: Contestant, x: Mapping[str, Tensor]) -> Call:
    """Forward and backward as a function, its inputs made already."""
    native = _native(contestant, x, gradients=True)
    leaves = [a for a in native if a is not None and a.requires_grad]
    do = _native(contestant, {**x, "v": x["do"]}, gradients=False)[2]  # the layout of the output is that of v

    def call() -> None:
        torch.autograd.grad(contestant.call(*native)[0], leaves, do)

    return call


def _native(contestant: Contestant, x: Mapping[str, Tensor], *, gradients: bool) -> list[Tensor | None]:
    """The contestant's own inputs, made outside the clock; those that depend on ours want gradients.

    Args:
        contestant: whose layout and dtype the inputs get.
        x: our inputs by name.
        gradients: whether they are to collect gradients.
    """
    ours = [x[name].detach().clone().requires_grad_() if name in x else None for name in INPUTS]
    native = contestant.to_native(*ours)
    return [None if a is None else a.detach().requires_grad_(gradients and a.requires_grad) for a in native]
