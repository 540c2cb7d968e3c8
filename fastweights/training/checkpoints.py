"""Checkpoints of a run while it trains: the best weights, and all that going on from the last step takes."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.models.language_model import LanguageModel
from fastweights.models.run_folder import BEST, LAST, PREVIOUS, check_weights, read_checkpoint
from fastweights.tensor_files import write_tensors
from fastweights.torch.tree import flatten, unflatten
from fastweights.training.parallel import Ranks, spread_like, whole

DAMAGED = "damaged.safetensors"  # what a damaged last checkpoint is called when the run goes on from the one before

Numbered = dict[int, dict[str, torch.Tensor]]


def save_best(run: Path, model: LanguageModel, step: int, ranks: Ranks) -> None:
    """Write the weights alone, with the step that they are from. All processes call it, the first writes.

    Args:
        run: folder of the run.
        model: whose weights are written.
        step: that they are from.
        ranks: the processes of the run.
    """
    weights = {f"model.{n}": whole(x) for n, x in model.state_dict().items()}
    if ranks.first:
        write_tensors(run / BEST, weights, dict(step=str(step)))


def save_last(
    run: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, states: list, about: dict, ranks: Ranks
) -> None:
    """Write all that going on takes: weights, optimiser, carried memories and position. All processes call it.

    Args:
        run: folder. The checkpoint before is kept there as previous.safetensors, should this one be damaged.
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
        write_tensors(run / LAST, tensors, dict(about=json.dumps(about)), run / PREVIOUS)


def exists(run: Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return (run / LAST).exists() or (run / PREVIOUS).exists()


def restore(run: Path, model: LanguageModel, ranks: Ranks) -> tuple[list, dict[str, Any], Numbered]:
    """Put back the last weights, or those before where the last are damaged.

    Returns the carried states, one per accumulated batch, the position, and what the optimiser knew.

    Args:
        run: folder of the run.
        model: to fill with the weights.
        ranks: the processes of the run.
    """
    tensors, metadata, file = read_checkpoint(run, (LAST, PREVIOUS))
    weights = {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}
    check_weights(model.config, model.vocab, weights, file)
    model.load_state_dict(weights)
    about = _position(metadata, file)
    # Processes that read different checkpoints would train apart without an error.
    steps = ranks.sum(about["step"])[0]
    if steps != about["step"] * ranks.world:
        raise FastWeightError(
            f"{file} is of step {about['step']}; expected the same in all processes: one of them reads another "
            "checkpoint, as when theirs is damaged"
        )
    if ranks.first and file.name != LAST and (run / LAST).exists():
        (run / LAST).replace(run / DAMAGED)  # it must not take the good one's place
    carried = _numbered(tensors, "state")
    expected = model.config.accumulate * ranks.world
    if len(carried) != expected:
        raise FastWeightError(
            f"{file} carries the memory of {len(carried)} batches; expected {expected}: resume "
            "with as many processes as it was trained by"
        )
    like = model.init_state(1)
    states = [unflatten(like, {n: x.to(ranks.device) for n, x in carried[i].items()}) for i in sorted(carried)]
    return ranks.mine(states), about, _numbered(tensors, "optimizer")


def _position(metadata: dict[str, str], file: Path) -> dict[str, Any]:
    """The step, the seconds behind it and the best loss so far."""
    try:
        about = json.loads(metadata["about"])
        good = isinstance(about["step"], int) and about["step"] >= 0
        good = good and math.isfinite(about["seconds"]) and isinstance(about["best"], float)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise FastWeightError(f"{file} does not say how far it came; expected a file of `fastweights train`")
    return about


def restore_optimizer(slots: Numbered, optimizer: torch.optim.Optimizer) -> None:
    """Put back what the optimiser knew."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(i < len(parameters) for i in slots):
        raise FastWeightError(f"the checkpoint's optimiser has {len(slots)} parameters; expected {len(parameters)}")
    state = {i: {n: spread_like(x, parameters[i]) for n, x in values.items()} for i, values in slots.items()}
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=state))


def _numbered(tensors: dict[str, torch.Tensor], kind: str) -> Numbered:
    """{"kind.3.a.b": x} as {3: {"a.b": x}}."""
    found: Numbered = {}
    for name, x in tensors.items():
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if first == kind and number.isdigit():
            found.setdefault(int(number), {})[rest] = x
    return found
