"""Models, tokenizers and texts from disk."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.core import FastWeightError
from fastweights.text import corpus
from fastweights.text.scores import Text
from fastweights.torch.devices import pick_device

MOST, MOST_LAYERS = 2**34, 4096  # of the numbers in a configuration


def load_model(path: str | Path, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """(model, tokenizer) of a folder of the ecosystem or a GGUF file, whose quantised weights become real numbers
    again.

    Args:
        path: folder with config.json, folder with a single GGUF file, or the file itself. Nothing is downloaded.
        device: "cpu", "cuda", or "auto", a GPU where PyTorch finds one.
        dtype: of the weights.

    Returns:
        The model in evaluation mode, and a fast tokenizer, which knows what bytes a token stands for.
    """
    import transformers

    path = Path(path)
    if not path.exists():
        raise FastWeightError(f"model {path} does not exist; expected a folder with config.json, or a GGUF file")
    source: dict[str, Any] = dict(local_files_only=True)
    if path.is_file():
        source |= dict(gguf_file=path.name)
        path = path.parent
    elif not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise FastWeightError(f"model {path} has no config.json; expected one, or a single GGUF file in it")
        source |= dict(gguf_file=found[0].name)
    file = path / source.get("gguf_file", "config.json")
    if (path / "metrics.jsonl").exists():
        raise FastWeightError(
            f"model {path} is a run of `fastweights train`; expected a model of transformers: `fastweights hf export` "
            "makes one of it, and `fastweights eval` scores the run itself"
        )
    try:
        _check_size(transformers.AutoConfig.from_pretrained(path, **source), file)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **source)
    except FastWeightError:
        raise
    except Exception as error:  # transformers and its parts raise whatever they meet
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise FastWeightError(f"{file} cannot be read: {reason}; expected a model of transformers") from error
    if not tokenizer.is_fast:
        raise FastWeightError(
            f"the tokenizer of {path} is a {type(tokenizer).__name__}; expected a fast one: bits per "
            "byte need to know which bytes a token stands for"
        )
    return model.to(pick_device(device)).eval(), tokenizer


def _check_size(config: Any, file: Path) -> None:
    """Refuse a configuration that asks for far more weights than its files hold, before memory is taken for them."""
    import transformers

    sizes = [v for v in config.to_dict().values() if isinstance(v, int)]
    if max(sizes, default=0) > MOST or getattr(config, "num_hidden_layers", 0) > MOST_LAYERS:
        raise FastWeightError(f"{file} has a size of {max(sizes)}; expected at most {MOST}, in {MOST_LAYERS} layers")
    with torch.device("meta"):
        asked = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    held = sum(p.stat().st_size for p in ([file] if file.suffix == ".gguf" else file.parent.glob("*.safetensors")))
    if held and asked > 8 * held + 2**20:  # a weight takes a bit at least
        raise FastWeightError(
            f"{file} asks for {asked:,} weights; expected at most {8 * held:,}: its files hold {held:,} bytes"
        )


def read_text(tokenizer: Any, name: str, data: bytes) -> Text:
    """A text with its tokens and the bytes that each stands for. Bytes that are not UTF-8 become U+FFFD.

    Args:
        tokenizer: of the model.
        name: of the text, for tables.
        data: its bytes.
    """
    text = data.decode("utf-8", "replace")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if not found["input_ids"]:
        raise FastWeightError(f"{name} is empty; expected a text of at least one token")
    widths = np.array([len(c.encode()) for c in text])
    at = np.r_[0, np.cumsum(widths)]  # bytes before each character
    starts = np.array([a for a, _ in found["offset_mapping"]])
    starts[0] = 0
    sizes = np.diff(np.r_[at[starts], at[-1]])
    return Text(name, text.encode(), np.array(found["input_ids"], np.int64), sizes)


def read_file(tokenizer: Any, path: Path, limit: int = 0) -> Text:
    """A file as a `Text`; the first `limit` bytes of it where that is not 0.

    Args:
        tokenizer: of the model.
        path: of the file.
        limit: bytes to read from its start; 0 for all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FastWeightError(f"cannot read {path}: {error.strerror}; expected a file") from None
    return read_text(tokenizer, path.name, data[:limit] if limit else data)


def read_corpus(tokenizer: Any, data: str) -> list[Text]:
    """The documents of `stdlib`, a file, a folder or `hf:NAME[:CONFIG]`."""
    found = [read_text(tokenizer, d.name, d.data) for d in corpus.documents(data)]
    if not found:
        raise FastWeightError(f"data is {data!r}, which holds no text; expected at least one file that is not empty")
    return found


def row_of(tokenizer: Any, text: Text) -> torch.Tensor:
    """(1, T + 1): what comes before a text, and its tokens."""
    before = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return torch.from_numpy(np.r_[before, text.tokens])[None]
