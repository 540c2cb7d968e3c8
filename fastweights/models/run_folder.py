"""A run's folder: config.json, metrics.jsonl, the tokenizer, best.safetensors and last.safetensors.

`last` holds weights, optimiser, carried memory and position; `best` the weights of the lowest validation loss. No file
is ever pickled, and each is replaced as a whole.
"""

import json
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_json, write_tensors
from fastweights.lm.parallel import Ranks, spread_like, whole
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.models.memory import flatten, unflatten
from fastweights.text import tokenizer

CONFIG, METRICS, BEST, LAST = "config.json", "metrics.jsonl", "best.safetensors", "last.safetensors"


def read_config(run: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a run, and what else config.json holds."""
    if not run.is_dir():
        raise FastWeightError(f"run {run} does not exist; expected a folder that `fastweights train` made")
    content = read_json(run / CONFIG, "the folder of a run that `fastweights train` made")
    if "config" not in content or "vocab" not in content:
        raise FastWeightError(f"{run / CONFIG} has no config; expected a file that `fastweights train` wrote")
    return Config(**content["config"]), content


def write_config(run: Path, config: Config, vocab: int, **about: Any) -> None:
    write_json(run / CONFIG, dict(config=config.to_dict(), vocab=vocab, **about))


def load(run: str | Path, *, last: bool = False, device: str = "auto") -> LanguageModel:
    """The model of a run with its tokenizer, ready to evaluate: the best weights, or the last."""
    run = Path(run)
    config, about = read_config(run)
    file = next((run / f for f in ((LAST,) if last else (BEST, LAST)) if (run / f).exists()), None)
    if file is None:
        raise FastWeightError(f"run {run} has no checkpoint yet; expected {BEST} or {LAST}: train it for longer")
    model = LanguageModel(config, about["vocab"])
    tensors, _ = read_tensors(file)
    weights = {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}
    set_weights(model, weights, file)
    model.tokenizer = tokenizer.load(run)
    return model.to(pick_device(device)).eval()


def pick_device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise FastWeightError("device is 'cuda'; PyTorch finds no GPU here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def set_weights(model: LanguageModel, weights: dict[str, torch.Tensor], file: Path) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FastWeightError(f"{file} holds other weights than {CONFIG} says: {error}") from None


def save_best(run: Path, model: LanguageModel, step: int, ranks: Ranks) -> None:
    weights = {f"model.{n}": whole(x) for n, x in model.state_dict().items()}
    if ranks.first:
        write_tensors(run / BEST, weights, dict(step=str(step)))


def save_last(
    run: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, states: list, about: dict, ranks: Ranks
) -> None:
    """All processes call it, the first writes."""
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
        raise FastWeightError(f"{run / LAST} carries the memory of {len(carried)} batches; expected {expected}: resume "
                              "with as many processes as it was trained by")  # fmt: skip
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
