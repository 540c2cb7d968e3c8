"""Which branches of the Triton kernels a call takes, and the fewest calls that take all of them.

A kernel branches on which of its tensors are there, on their dtypes and on its constants: switches, block sizes,
stages. Each is a *choice*, and every two choices of one launch together are a *branch*, so that an `if` inside an `if`
counts as one. Calls are planned, neither compiled nor run, so that this takes seconds.
"""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any
from unittest import mock

from fastweights.torch.kernels.launch import Launch
from fastweights.torch.kernels.plan import Plan

SIZES = {"H", "K", "V", "D", "EPS"}  # the call's own numbers, on which no kernel branches

Branch = tuple[str, tuple[str, Any], tuple[str, Any]]


class Planned(Exception):
    """Raised in place of the first run of a plan; args are its launches."""


def launches(call: Callable[[], Any]) -> list[Launch]:
    """What `call` would launch, its backward pass included; nothing runs."""

    def stop(plan: Plan, *others: Plan) -> None:
        raise Planned([launch for each in (plan, *others) for launch in each.launches])

    with mock.patch.object(Plan, "finish", stop):
        try:
            call()
        except Planned as planned:
            return list(planned.args[0])
    return []  # such a call was planned before, or launches nothing


def branches(launch: Launch) -> set[Branch]:
    """Every two choices of a launch, as (kernel, choice, choice)."""
    names = launch.kernel.arg_names
    tensors = len(launch.slots)
    given = dict(zip(names, launch.dtypes, strict=False))
    constants = dict(zip(names[tensors + len(launch.numbers) :], launch.constants, strict=True))
    choices = [
        *((name, "absent" if dtype is None else str(dtype)) for name, dtype in given.items()),
        *((name, value) for name, value in constants.items() if name not in SIZES),
        *launch.options,
    ]
    kernel = launch.kernel.fn.__module__.rpartition(".")[2] + "." + launch.kernel.fn.__name__
    return {(kernel, *pair) for pair in combinations(choices, 2)}


def fewest(calls: Iterable[tuple[Any, set[Branch], float]]) -> tuple[list[Any], int]:
    """(calls that take every branch that any call takes, how many branches that is).

    calls: (what stands for it, its branches, what it costs). Greedily: always the call that takes most new branches
    for its cost.
    """
    rest = list(calls)
    wanted: set[Branch] = set().union(*(taken for _, taken, _ in rest))
    missing, chosen = set(wanted), []
    while missing:
        best = max(rest, key=lambda call: len(call[1] & missing) / call[2])
        chosen.append(best[0])
        missing -= best[1]
    return chosen, len(wanted)
