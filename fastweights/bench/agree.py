"""Whether contestants compute the same memory: their outputs, states and gradients against float64."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fastweights.bench.case import INPUTS, Case, Contestant, our_method

# Largest deviation over the largest exact number. GPU kernels may multiply float32 in TF32, with ten bits.
TOLERANCE = {("cpu", "float32"): 1e-5, ("cuda", "float32"): 5e-3, ("cpu", "bfloat16"): 2e-2, ("cuda", "bfloat16"): 5e-2}
LOOP_TOKENS = 160  # the loop over tokens vouches for this many: two chunks and a half


class Disagreement(Exception):
    """A contestant that does not compute the memory. Its time would mean nothing, so none is reported."""


def results(contestant: Contestant, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a contestant computes, with our meaning, whatever its own layout is.

    Args:
        contestant: whom to ask; without a backward pass, for outputs alone.
        x: inputs by name, and "do", the gradient of the output.

    Returns:
        o, the state where there is one, and the gradients of sum(o * do) as dq, dk, dv, dbeta, dlog_decay.
    """
    leaves = {name: x[name].detach().clone().requires_grad_() for name in INPUTS if name in x}
    with torch.set_grad_enabled(contestant.backward):
        native = contestant.to_native(*(leaves.get(name) for name in INPUTS))
        o, state = contestant.from_native(*contestant.call(*native))
    assert o is not None
    found = {"o": o.detach()} | ({} if state is None else {"state": state.detach()})
    if not contestant.backward:
        return found
    gradients = torch.autograd.grad(o, list(leaves.values()), x["do"].to(o.dtype))
    return found | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def exact(case: Case, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`results` in float64: the loop over tokens, or, for long sequences, chunks that agree with it on a prefix.

    The loop would take minutes at benchmark lengths. So on 160 tokens the chunked form is held to it, and is then
    trusted.
    """
    x = {name: a.double() for name, a in x.items()}
    loop, chunked = our_method("recurrent", case), our_method("chunked", case)
    if case.shape[1] <= LOOP_TOKENS:
        return results(loop, x)
    prefix = {name: a[:1, :LOOP_TOKENS] for name, a in x.items()}
    vouched = results(loop, prefix)
    whole = results(chunked, x)
    compare("chunked in float64", case, results(chunked, prefix), vouched, 1e-9)
    compare("chunked in float64", case, {"o": whole["o"][:1, :LOOP_TOKENS]}, vouched, 1e-9)
    return whole


def compare(
    name: str, case: Case, got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """How far each result is from the exact one; raise Disagreement when one is too far.

    Args:
        name, case: for the message.
        got, want: results by name.
        tolerance: the largest `deviation` that is allowed.
    """
    errors = {part: deviation(a, want[part]) for part, a in got.items()}
    wrong = [f"{part} by {error:.1e}" for part, error in errors.items() if not error <= tolerance]  # NaN is wrong
    if wrong:
        raise Disagreement(
            f"{name} deviates from the exact memory ({case}): {', '.join(wrong)} of the largest number; "
            f"allowed {tolerance:.0e}. Nothing is reported."
        )
    return errors


def deviation(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest number wanted."""
    if got.shape != want.shape:
        return float("inf")
    return ((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def without_backward(name: str) -> str:
    """What a peer whose backward pass fails is called where the reason is given."""
    return f"{name}, backward"


def check(
    case: Case, contestants: Sequence[Contestant], x: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The deviations of every contestant that can be compared, and the peers that fail here with their reason.

    Raise Disagreement when a deviation is too large. An error of one of our own methods is raised as it is. Of a peer
    whose backward pass fails the forward pass is compared; the reason stands under `without_backward` of its name.

    Args:
        case: shape, rule, device and dtype of the problem.
        contestants: ours and the peers', each with a call of its own.
        x: the inputs by name, the same for all.
    """
    want, tolerance = exact(case, x), TOLERANCE[case.device, case.dtype]
    errors, failed = {}, {}
    for contestant in contestants:
        name, got = contestant.name, dict[str, Tensor]()
        try:
            got = results(contestant, x) if contestant.comparable else {}
        except Exception as error:
            if not contestant.peer:
                raise
            failed[name] = f"fails here: {type(error).__name__}: {error}".splitlines()[0]
            with suppress(Exception):
                got = results(replace(contestant, backward=False), x)
                failed[without_backward(name)] = failed.pop(name)
        if got:
            errors[name] = compare(name, case, got, want, tolerance)
    return errors, failed
