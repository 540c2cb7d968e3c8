"""A Fast Weight Layer on any causal language model of the ecosystem: it learns from what the model reads and writes.

The model itself is not changed: hooks see the tokens go in, and change the features on their way into the output
embedding. What the head has learned travels in the model's own cache, as one more layer of it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_json, write_tensors
from fastweights.fwl import FWLState
from fastweights.hf.cache import memory_of
from fastweights.hf.head import FastHead, HeadConfig
from fastweights.hf.inputs import real_tokens
from fastweights.torch.dtypes import accumulation_dtype

NAME = "fast_head"  # of the new part: model.fast_head
KIND = "fastweights head 1"
WEIGHTS, CONFIG = "fast_head.safetensors", "fast_head.json"
CACHES = ("past_key_values", "cache_params")


class Hooks:
    """What one forward pass of the model means for its head. `off`: the model is as it was."""

    def __init__(self, model: nn.Module, head: FastHead, output: Any, trained: list[nn.Parameter]):
        self.head, self.output, self.trained = head, output, trained
        self.off = False
        self.call: dict[str, Any] | None = None
        self.handles = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            output.register_forward_pre_hook(self.change),
            model.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def enter(self, model: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note what the head must know, and have the model compute all features."""
        state, context = named.pop("fast_state", None), named.pop("fast_context", 0)
        if self.off:
            return given, named
        tokens = named.get("input_ids", given[0] if given else None)
        if tokens is None:
            raise FastWeightError("input_ids is missing; expected tokens: an attached head learns from them, "
                                  "inputs_embeds do not say which they are")  # fmt: skip
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if state is None and cache is not None:
            state = memory_of(cache).state
        self.call = dict(tokens=tokens, mask=named.get("attention_mask"), state=state, cache=cache, context=context,
                         keep=named.get("logits_to_keep", 0))  # fmt: skip
        if "logits_to_keep" in named:
            named["logits_to_keep"] = 0
        return given, named

    def change(self, output: nn.Module, given: tuple) -> tuple | None:
        """The features on their way into the output embedding."""
        if self.off or self.call is None:
            return None
        x, tokens, n = given[0], self.call["tokens"], self.call["context"]
        if x.shape[:-1] != tokens.shape:
            raise FastWeightError(f"the features have shape {tuple(x.shape)}; expected {tuple(tokens.shape)} and a "
                                  "width: the model does not call its output embedding once per token")  # fmt: skip
        mask = real_tokens(self.call["mask"], tokens.shape[1])
        features, self.call["state"] = self.head(
            x[:, n:], tokens[:, n:], output.weight, getattr(output, "bias", None), state=self.call["state"],
            mask=None if mask is None else mask[:, n:], learn=self.head.adapting,
        )  # fmt: skip
        features = torch.cat([x[:, :n], features], 1) if n else features
        keep = self.call["keep"]
        return (features[:, slice(-keep, None) if isinstance(keep, int) else keep], *given[1:])

    def leave(self, model: nn.Module, given: tuple, named: dict[str, Any], out: Any) -> None:
        call, self.call = self.call, None
        if call is None or out is None:
            return
        cache = next((found for name in CACHES if (found := getattr(out, name, None)) is not None), call["cache"])
        if cache is not None:
            memory_of(cache).state = call["state"]
        if hasattr(out, "logits"):
            out.fast_state = call["state"]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def attach(
    model: nn.Module,
    size: int | None = None,
    *,
    mode: str = "residual",
    normalizer: float = 1.0,
    step_size: float | None = None,
    decay: float | None = None,
    rule: str = "sum",
    clip: float | None = None,
    first_order: bool = False,
    freeze: bool = True,
) -> FastHead:
    """Put a Fast Weight Layer before the output embedding of a causal language model; returns it, `model.fast_head`.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> head = attach(model, size=8)  # logits are what they were, until it is trained
        >>> optimizer = torch.optim.Adam(head.parameters())

    From then on `model(...)`, `generate`, `Trainer` and `pipeline` go through it. A text longer than the model's
    window is read in pieces: `out = model(tokens, fast_state=out.fast_state)`, with `fast_context=n` when the first n
    tokens are only there for the body and have been learned before.

    Args:
        size: its hidden width; the width of the features when absent.
        mode: "residual" adds to the features and starts as nothing; "between" replaces them and must be trained.
        normalizer: number of tokens that the summed gradients are divided by.
        step_size: initial value of the learned step sizes; 0 in a residual (and only then nothing changes at first).
        decay, rule, clip, first_order: as of `FWLBlock`.
        freeze: only the new parameters train.
    """
    if hasattr(model, NAME):
        raise FastWeightError("a head is attached already; expected detach(model) first")
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = find()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise FastWeightError(f"the output embedding is a {type(output).__name__}; expected one with a weight (V, D) "
                              "of real numbers: its gradient is what the head learns from")  # fmt: skip
    if step_size is None:
        step_size = 0.0 if mode == "residual" else 0.01
    config = HeadConfig(weight.shape[1], size or weight.shape[1], mode=mode, normalizer=normalizer, decay=decay,
                        step_size=step_size, rule=rule, clip=clip, first_order=first_order)  # fmt: skip
    wide = accumulation_dtype(weight)
    head = FastHead(config, device=weight.device, dtype=wide)
    trained = [p for p in model.parameters() if p.requires_grad] if freeze else []
    for p in trained:
        p.requires_grad_(False)
    setattr(model, NAME, head)
    object.__setattr__(head, "hooks", Hooks(model, head, output, trained))
    return head


def detach(model: nn.Module) -> FastHead:
    """Take the head off again; the model is as it was. Returns the head."""
    head = attached(model)
    hooks: Hooks = head.hooks  # type: ignore[assignment]
    hooks.remove()
    for p in hooks.trained:
        p.requires_grad_(True)
    delattr(model, NAME)
    return head


def attached(model: nn.Module) -> FastHead:
    head = getattr(model, NAME, None)
    if not isinstance(head, FastHead):
        raise FastWeightError("no head is attached; expected attach(model) or load_attached(model, folder) first")
    return head


def save_attached(model: nn.Module, folder: str | Path) -> None:
    """Write the head alone: a safetensors file and what it is, as JSON."""
    head = attached(model)
    about = dict(kind=KIND, head=head.config.to_dict(), model=_identity(model))
    write_tensors(Path(folder) / WEIGHTS, dict(head.state_dict()), dict(kind=KIND))
    write_json(Path(folder) / CONFIG, about)


def load_attached(model: nn.Module, folder: str | Path) -> FastHead:
    """Attach the head that `save_attached` or `fastweights hf adapt` wrote for this model."""
    folder = Path(folder)
    about = read_json(folder / CONFIG, "a folder that `fastweights hf adapt` wrote")
    if about.get("kind") != KIND:
        raise FastWeightError(f"{folder / CONFIG} is no head; expected a file that `fastweights hf adapt` wrote")
    mine = _identity(model)
    for name, value in about["model"].items():
        if mine[name] != value:
            raise FastWeightError(f"{folder} is a head for {name} {value}; expected {mine[name]}: that of this model")
    arguments = dict(about["head"])
    arguments.pop("width"), arguments.pop("eps")
    tensors, _ = read_tensors(folder / WEIGHTS)
    head = attach(model, **arguments)
    head.load_state_dict(tensors)
    return head


def _identity(model: Any) -> dict[str, Any]:
    weight = model.get_output_embeddings().weight
    return dict(type=model.config.model_type, vocabulary=weight.shape[0], width=weight.shape[1])


def state_of(cache: Any) -> FWLState | None:
    """What the head has learned, in the cache that a forward pass or `generate` returned."""
    return memory_of(cache).state
