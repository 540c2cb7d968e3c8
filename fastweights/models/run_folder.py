"""A run's folder: config.json, metrics.jsonl, the tokenizer, best.safetensors and last.safetensors.

`last` holds weights, optimiser, carried memory and position; `best` the weights of the lowest validation loss. No file
is ever pickled, and each is replaced as a whole.
"""

from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_json
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.text import tokenizer
from fastweights.torch.devices import pick_device

CONFIG, METRICS, BEST, LAST = "config.json", "metrics.jsonl", "best.safetensors", "last.safetensors"


def read_config(run: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a run, and what else config.json holds."""
    if not run.is_dir():
        raise FastWeightError(f"run {run} does not exist; expected a folder that `fastweights train` made")
    content = read_json(run / CONFIG, "the folder of a run that `fastweights train` made")
    if "config" not in content or "vocab" not in content:
        raise FastWeightError(f"{run / CONFIG} has no config; expected a file that `fastweights train` wrote")
    published = {} if "refresh" in content["config"] else {"refresh": 0}  # a run from before there was another layer
    return Config(**(content["config"] | published)), content


def write_config(run: Path, config: Config, vocab: int, **about: Any) -> None:
    """Write config.json: the configuration, the size of the vocabulary, and what else is worth knowing of the run."""
    write_json(run / CONFIG, dict(config=config.to_dict(), vocab=vocab, **about))


def load(run: str | Path, *, last: bool = False, device: str = "auto") -> LanguageModel:
    """The model of a run with its tokenizer, ready to evaluate.

        model = load("runs/first")
        memory = model.read("def area(radius):")
        text = b"".join(model.tokenizer.decode([token]) for token in generate(model, memory, 100))

    `model.read(text)` makes a `Memory` of a text, `generate(model, memory, tokens)` goes on writing from it.

    Args:
        run: folder that `fastweights train` made.
        last: take the last weights rather than those with the best validation loss.
        device: "cpu", "cuda", or "auto", a GPU where PyTorch finds one.
    """
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


def set_weights(model: LanguageModel, weights: dict[str, torch.Tensor], file: Path) -> None:
    """Load weights into a model; FastWeightError says where they do not fit the configuration."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FastWeightError(f"{file} holds other weights than {CONFIG} says: {error}") from None


def start_from(model: LanguageModel, run: Path, *, weights: bool = True) -> None:
    """Keep the weights of a trained run, and leave the Fast Weight Layer of `model` alone to be trained.

    weights: False when the model has them already.  A Fast Weight Layer of the run is taken over, but for its steps.
    """
    if model.fast is None:
        raise FastWeightError(f"head is 'linear' with start {run}; expected 'fwl': the rest of the model is kept")
    if weights:
        trained = load(run, device="cpu").state_dict()
        own = model.state_dict()
        kept = {n: x for n, x in trained.items() if n != "fast.steps" and n in own and x.shape == own[n].shape}
        missing = [n for n in own if n not in kept and not n.startswith("fast.")]
        if missing:
            got, expected = (tuple(x[missing[0]].shape) if missing[0] in x else "none" for x in (trained, own))
            raise FastWeightError(
                f"{missing[0]} of run {run} has shape {got}; expected {expected}: the run to start "
                "from must have the same blocks and vocabulary"
            )
        model.load_state_dict(kept, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fast."))
