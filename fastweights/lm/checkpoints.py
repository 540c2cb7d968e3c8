"""Checkpoints of a run while it trains: the best weights, and all that going on from the last step takes."""

import json
from pathlib import Path

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_tensors, write_tensors
from fastweights.lm.parallel import Ranks, spread_like, whole
from fastweights.models.language_model import LanguageModel
from fastweights.models.run_folder import BEST, LAST, set_weights
from fastweights.torch.tree import flatten, unflatten


def save_best(run: Path, model: LanguageModel, step: int, ranks: Ranks) -> None:
    """Write the weights alone, with the step that they are from. All processes call it, the first writes."""
    weights = {f"model.{n}": whole(x) for n, x in model.state_dict().items()}
    if ranks.first:
        write_tensors(run / BEST, weights, dict(step=str(step)))


def save_last(
    run: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, states: list, about: dict, ranks: Ranks
) -> None:
    """Write all that going on takes: weights, optimiser, carried memories and position. All processes call it.

    Args:
        run: folder.
        model, optimizer: as they are after a step.
        states: carried memory of each accumulated batch of this process.
        about: step, seconds and best loss so far.
        ranks: which process this is; tensors that are spread over processes are put together first.
    """
    tensors = {f"model.{n}": whole(x) for n, x in model.state_dict().items()}
    for i, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{n}": whole(x) for n, x in values.items()}
    for i, state in enumerate(ranks.gather(states)):
        tensors |= {f"state.{i}.{n}": x for n, x in flatten(state)}
    if ranks.first:
        write_tensors(run / LAST, tensors, dict(about=json.dumps(about)))


def restore(run: Path, model: LanguageModel, ranks: Ranks) -> tuple[list, dict]:
    """Put back the last weights; returns the carried states, one per accumulated batch, and the position."""
    tensors, metadata = read_tensors(run / LAST)
    set_weights(model, {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}, run / LAST)
    carried = _numbered(tensors, "state")
    expected = model.config.accumulate * ranks.world
    if len(carried) != expected:
        raise FastWeightError(
            f"{run / LAST} carries the memory of {len(carried)} batches; expected {expected}: resume "
            "with as many processes as it was trained by"
        )
    like = model.init_state(1)
    states = [unflatten(like, {n: x.to(ranks.device) for n, x in carried[i].items()}) for i in sorted(carried)]
    return ranks.mine(states), json.loads(metadata["about"])


def restore_optimizer(run: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put back what the optimiser knew."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots = _numbered(read_tensors(run / LAST)[0], "optimizer")
    state = {i: {n: spread_like(x, parameters[i]) for n, x in values.items()} for i, values in slots.items()}
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=state))


def _numbered(tensors: dict[str, torch.Tensor], kind: str) -> dict[int, dict[str, torch.Tensor]]:
    """{"kind.3.a.b": x} as {3: {"a.b": x}}."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if first == kind:
            found.setdefault(int(number), {})[rest] = x
    return found
