"""A run's folder: config.json, metrics.jsonl, the tokenizer, best.safetensors, last.safetensors and the one before.

`last` and `previous` hold weights, optimiser, carried memory and position; `best` the weights of the lowest validation
loss. No file is ever pickled, each is replaced as a whole, and each but metrics.jsonl has a checksum: where one is
damaged, the next best is taken, with a warning.
"""

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastweights.core import FastWeightError
from fastweights.files import read_json, write_checked_json
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.tensor_files import read_first_whole
from fastweights.text import tokenizer
from fastweights.torch.devices import pick_device

CONFIG, METRICS = "config.json", "metrics.jsonl"
BEST, LAST, PREVIOUS = "best.safetensors", "last.safetensors", "previous.safetensors"


def read_config(run: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a run, and what else config.json holds."""
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise FastWeightError(f"run {run} {what}; expected a folder that `fastweights train` made")
    content = read_json(run / CONFIG, "the folder of a run that `fastweights train` made")
    config, vocab = content.get("config"), content.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, int) or vocab < 1:
        raise FastWeightError(f"{run / CONFIG} has no config; expected a file that `fastweights train` wrote")
    published = {} if "refresh" in config else {"refresh": 0}  # a run from before there was another layer
    try:
        return Config.read(config | published), content
    except FastWeightError as error:
        raise FastWeightError(f"{run / CONFIG}: {error}") from None


def write_config(run: Path, config: Config, vocab: int, **about: Any) -> None:
    """Write config.json: the configuration, the size of the vocabulary, and what else is worth knowing of the run.

    Args:
        run: folder of the run.
        config: what is trained.
        vocab: number of tokens.
        about: further facts: the corpus, the tokenizer, the number of parameters.
    """
    write_checked_json(run / CONFIG, dict(config=config.to_dict(), vocab=vocab, **about))


def load(run: str | Path, *, last: bool = False, device: str = "auto") -> LanguageModel:
    """The model of a run with its tokenizer, ready to evaluate.

        model = load("runs/first")
        memory = model.read("def area(radius):")
        text = model.tokenizer.decode(generate(model, memory, 100))

    `model.read(text)` makes a `Memory` of a text, `generate(model, memory, tokens)` goes on writing from it.

    Args:
        run: folder that `fastweights train` made.
        last: take the last weights rather than those with the best validation loss.
        device: "cpu", "cuda", or "auto", a GPU where PyTorch finds one.
    """
    run = Path(run)
    config, about = read_config(run)
    order = (LAST, PREVIOUS) if last else (BEST, LAST, PREVIOUS)
    tensors, _, file = read_checkpoint(run, order)
    weights = {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")}
    check_weights(config, about["vocab"], weights, file)
    model = LanguageModel(config, about["vocab"])
    model.load_state_dict(weights)
    model.tokenizer = read_tokenizer(run, about)
    return model.to(pick_device(device)).eval()


def read_checkpoint(run: Path, names: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], dict[str, str], Path]:
    """(tensors, metadata, path) of the first of these files that is whole; warns of those that are damaged."""
    there = [run / name for name in names if (run / name).exists()]
    if not there:
        expected = " or ".join(names[:2])
        raise FastWeightError(f"run {run} has no checkpoint yet; expected {expected}: train it for longer")
    return read_first_whole(there)


def read_tokenizer(run: Path, about: dict[str, Any]) -> tokenizer.Bytes | tokenizer.Subwords:
    """The tokenizer of a run; raises where it is not the one that config.json names."""
    found = tokenizer.load(run)
    name = about.get("tokenizer", found.name)
    if found.name != name or found.size != about["vocab"]:
        raise FastWeightError(
            f"the tokenizer of {run} is {found.name} with {found.size} tokens; expected {name} with {about['vocab']}, "
            f"as {CONFIG} says: {tokenizer.FILE} is missing, damaged or of another run"
        )
    return found


class Undrawn(TorchFunctionMode):
    """While it lasts, initial weights are neither drawn nor worked out: on the meta device PyTorch would import its
    compiler to find the shapes of these functions, which takes seconds.
    """

    SAME_SHAPE = ("empty_like", "normal_", "uniform_", "log", "exp", "expm1")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The tensor as it is, for these functions of one."""
        if getattr(func, "__name__", "") in self.SAME_SHAPE:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def check_weights(config: Config, vocab: int, weights: dict[str, torch.Tensor], file: Path) -> None:
    """Raise unless weights are those that the configuration asks for; nothing is allocated to find out.

    Args:
        config: of the run.
        vocab: number of tokens.
        weights: name -> tensor, from a file.
        file: for the message.
    """
    try:
        with torch.device("meta"), Undrawn():
            wanted = LanguageModel(config, vocab).state_dict()
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes whose product is no number of bytes
        raise FastWeightError(
            f"{CONFIG} beside {file} cannot be: {error}; expected of shape and size that exist"
        ) from None
    for name in sorted(wanted.keys() | weights.keys()):
        expected, got = (x[name].shape if name in x else None for x in (wanted, weights))
        if got != expected:
            shape = lambda s: "missing" if s is None else f"of shape {tuple(s)}"  # noqa: E731
            raise FastWeightError(
                f"{file} holds other weights than {CONFIG} says: {name} is {shape(got)}; expected {shape(expected)}"
            )


def start_from(model: LanguageModel, run: Path, *, weights: bool = True) -> None:
    """Keep the weights of a trained run, and leave the Fast Weight Layer of `model` alone to be trained.

    Args:
        model: with a Fast Weight Layer, the same blocks and the same vocabulary as the run.
        run: folder of the trained run. Its own Fast Weight Layer is taken over, but for its steps.
        weights: False when the model has them already, as after a checkpoint was read.
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
