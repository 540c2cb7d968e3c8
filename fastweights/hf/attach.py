"""A head on any causal language model of the ecosystem: it learns from what the model reads and writes.

The model itself is not changed: hooks see the tokens go in, and answer in the place of the output embedding, with a
residual layer that learns (residual.py) and a neural cache; matrices inside the model may learn too (body.py). What
they know travels in the model's own cache, as one more layer of it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.files import read_json, write_checked_json
from fastweights.hf.body import THIRDS, FastBody, down_projections
from fastweights.hf.cache import memory_of
from fastweights.hf.hooks import FastState, Hooks, Use
from fastweights.hf.residual import HeadSettings, ResidualHead
from fastweights.tensor_files import read_tensors, write_tensors
from fastweights.torch.cache import NeuralCache
from fastweights.torch.dtypes import accumulation_dtype

NAME = "fast_head"  # of the new part: model.fast_head
KIND = "fastweights head 2"
RULE = "balanced"  # of the steps of matrices inside the model
WEIGHTS, CONFIG = "fast_head.safetensors", "fast_head.json"
WINDOW = 4096  # tokens that a cache holds unless told; on a novel and a module, 1,024 gained a third less than 2,048


def attach(
    model: nn.Module,
    size: int | None = None,
    *,
    refresh: int = 64,
    step_size: float = 0.01,
    clip: float = 1.0,
    layer: bool = True,
    cache: NeuralCache | bool = True,
    where: str | Sequence[str] | None = None,
    body_step: float = 0.0018,
    every: int = 1,
    freeze: bool = True,
) -> ResidualHead:
    """Let a causal language model learn from the text it reads; returns the new part, `model.fast_head`.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> head = attach(model)  # of use at once, without any training
        >>> out = model(torch.arange(32)[None])  # `generate`, `Trainer` and `pipeline` go through it too

    Two things are put before the output embedding. A residual layer, which starts as nothing, takes a step of gradient
    descent after every `refresh` tokens; a `NeuralCache` finds words that followed similar features. Before anything is
    learned, and with `head.adapting = False`, logits are exactly those of the model. The body stays as it is.

    A text longer than the model's window is read in pieces: `out = model(tokens, fast_state=out.fast_state)`, with
    `fast_context=n` when the first n tokens are only there for the body and have been learned before.

    Args:
        size: hidden width of the layer; twice the width of the features when absent.
        refresh: tokens between two steps of the layer, each at its weights as they are by then.
        step_size, clip: of these steps; the largest length of a gradient. `fastweights hf adapt` trains the step sizes.
        layer: whether there is a residual layer. Beside matrices that learn (`where`) it gains little for its time.
        cache: True for a cache of 4,096 tokens, a `NeuralCache` of your own, or False.
        where: matrices inside the model that learn from the text too, by one step after each forward pass: "first",
            "middle", "last" or "all" for the down projections in that third of the model, or names as
            `down_projections` returns. None for none.
        body_step: share of its own length by which a step changes each of these matrices.
        every: forward passes to a step of these matrices. With 8 they learn from windows 1, 2, 4, 8, 16, 24, ... of a
            long text; the other windows are read without a backward pass.
        freeze: whether the model's own parameters are frozen, so that training changes the new ones alone.
    """
    if hasattr(model, NAME):
        raise FastWeightError("a head is attached already; expected detach(model) first")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise FastWeightError(
            f"the model is a {type(model).__name__}, with an encoder; expected a causal language model, which predicts "
            "the tokens that it reads"
        )
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = find()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise FastWeightError(
            f"the output embedding is a {type(output).__name__}; expected one with a weight (V, D) "
            "of real numbers: its gradient is what the head learns from"
        )
    if not isinstance(cache, (bool, NeuralCache)):
        raise FastWeightError(f"cache is a {type(cache).__name__}; expected a NeuralCache, True or False")
    settings = HeadSettings(
        weight.shape[1], size or 2 * weight.shape[1], refresh=refresh, step_size=step_size, clip=clip
    )
    head = ResidualHead(settings, device=weight.device, dtype=accumulation_dtype(weight))
    body = None
    if where is not None:
        if not isinstance(where, Sequence):
            raise FastWeightError(
                f"where is {where!r}; expected one of {', '.join(map(repr, THIRDS))}, or names of matrices"
            )
        if not 0 < body_step < math.inf:
            raise FastWeightError(f"body_step is {body_step}; expected a positive number")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise FastWeightError(f"every is {every!r}; expected a whole number of forward passes, 1 or more")
        names = down_projections(model, where) if isinstance(where, str) and where in THIRDS else where
        body = FastBody(model, (names,) if isinstance(names, str) else tuple(names), body_step, every)
        if output in body.modules:
            body.remove()
            raise FastWeightError("where names the output embedding; expected layers below it: the head answers there")
    trained = [p for p in model.parameters() if p.requires_grad] if freeze else []
    for p in trained:
        p.requires_grad_(False)
    setattr(model, NAME, head)
    chosen = (NeuralCache(WINDOW) if cache else None) if isinstance(cache, bool) else cache
    object.__setattr__(head, "hooks", Hooks(model, head, chosen, trained, body, layer))
    return head


def detach(model: nn.Module) -> ResidualHead:
    """Take the head off again; the model is as it was. Returns the head.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> head = attach(model)
        >>> detach(model) is head, hasattr(model, "fast_head")
        (True, False)
    """
    head = attached(model)
    hooks: Hooks = head.hooks  # type: ignore[assignment]
    hooks.remove()
    for p in hooks.trained:
        p.requires_grad_(True)
    delattr(model, NAME)
    return head


def attached(model: nn.Module) -> ResidualHead:
    """The head that `attach` or `load_attached` put on a model, `model.fast_head`; raises FastWeightError where
    there is none.
    """
    head = getattr(model, NAME, None)
    if not isinstance(head, ResidualHead):
        raise FastWeightError("no head is attached; expected attach(model) or load_attached(model, folder) first")
    return head


@contextmanager
def using(
    model: nn.Module, *, head: bool = True, cache: bool = True, learn: bool = True, body: bool = True
) -> Iterator[None]:
    """Within the block, only these parts of an attachment take part; without any, the model is as it was.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> tokens, head = torch.arange(32)[None], attach(model)
        >>> with using(model, head=False, cache=False, body=False):
        ...     plain = model(tokens).logits  # as if nothing were attached

    head, cache, body: whether the layer, the cache and the matrices of `attach(where=...)` answer by what they have
    learned.  learn: whether they go on learning.
    """
    if not hasattr(model, NAME):
        if head or cache:
            attached(model)  # says what is missing
        yield
        return
    hooks: Any = attached(model).hooks
    before = hooks.use.set(Use(head, cache, learn, body))
    try:
        yield
    finally:
        hooks.use.reset(before)


def save_attached(model: nn.Module, folder: str | Path) -> None:
    """Write the new part alone into a folder: a safetensors file and what it is, as JSON. The model is not written.

    Args:
        model: a model with an attached head.
        folder: is made if it does not exist. `load_attached` reads it for the same kind of model.
    """
    head = attached(model)
    hooks: Any = head.hooks
    cache = None if hooks.cache is None else hooks.cache.to_dict()
    about = dict(kind=KIND, head=head.settings.to_dict(), cache=cache, model=_identity(model), layer=hooks.layer)
    if hooks.body is not None:
        names, step, every = list(hooks.body.names), hooks.body.step, hooks.body.every
        about |= dict(body=dict(where=names, body_step=step, every=every, rule=RULE))
    write_tensors(Path(folder) / WEIGHTS, dict(head.state_dict()), dict(kind=KIND))
    write_checked_json(Path(folder) / CONFIG, about)


def load_attached(model: nn.Module, folder: str | Path) -> ResidualHead:
    """Attach the head that `save_attached` or `fastweights hf adapt` wrote for this model; returns it.

    A head for a model of another type, width or vocabulary is refused.

    Args:
        model: a causal language model without a head.
        folder: of the head.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> head = attach(model)
        >>> save_attached(model, "some.head")
        >>> _ = detach(model)
        >>> torch.equal(load_attached(model, "some.head").dense1, head.dense1)
        True
    """
    folder = Path(folder)
    about = read_json(folder / CONFIG, "a folder that `fastweights hf adapt` wrote")
    if about.get("kind") != KIND:
        raise FastWeightError(
            f"{folder / CONFIG} is {about.get('kind', 'no head')!r}; expected {KIND!r}: a file that "
            "`fastweights hf adapt` wrote"
        )
    mine, parts = _identity(model), [about.get(name) for name in ("model", "head", "cache")]
    if not all(isinstance(part, dict) for part in parts[:2]) or not isinstance(parts[2], (dict, type(None))):
        raise FastWeightError(
            f"{folder / CONFIG} does not say what it is for; expected a file of `fastweights hf adapt`"
        )
    for name, value in mine.items():
        if about["model"].get(name) != value:
            got = about["model"].get(name)
            raise FastWeightError(f"{folder} is a head for {name} {got}; expected {value}: that of this model")
    tensors, _ = read_tensors(folder / WEIGHTS)
    try:
        settings = HeadSettings(**about["head"])
        cache = False if parts[2] is None else NeuralCache(**parts[2])
    except TypeError as error:
        raise FastWeightError(f"{folder / CONFIG}: {error}; expected the settings of a head and its cache") from None
    check_shapes(settings, tensors, folder / WEIGHTS)
    arguments = {name: value for name, value in settings.to_dict().items() if name != "width"}
    layer = about.get("layer", True)
    head = attach(model, cache=cache, layer=layer is not False, **arguments, **_body_of(about, folder / CONFIG))
    head.load_state_dict(tensors)
    return head


def check_shapes(settings: HeadSettings, tensors: dict[str, Tensor], file: Path) -> None:
    """Raise unless these are the weights of a head with these settings; nothing is allocated to find out."""
    try:
        wanted = {name: x.shape for name, x in ResidualHead(settings, device="meta").state_dict().items()}
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes whose product is no number of bytes
        reason = str(error).splitlines()[0]
        raise FastWeightError(f"{CONFIG} beside {file} cannot be: {reason}; expected sizes that exist") from None
    got = {name: x.shape for name, x in tensors.items()}
    for name in sorted(wanted.keys() | got.keys()):
        if got.get(name) != wanted.get(name):
            found, expected = (tuple(x[name]) if name in x else "none" for x in (got, wanted))
            raise FastWeightError(f"{name} of {file} has shape {found}; expected {expected}, as {CONFIG} says")


def _body_of(about: dict[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of `attach` that say which matrices inside the model learn; none in most files."""
    body = about.get("body", {})
    if not isinstance(body, dict) or (body and set(body) != {"where", "body_step", "every", "rule"}):
        raise FastWeightError(f"{path} has a body of {body!r}; expected where, body_step, every and rule, or none")
    if body and body["rule"] != RULE:
        raise FastWeightError(f"{path} has a body with steps of rule {body['rule']!r}; expected {RULE!r}")
    return {name: value for name, value in body.items() if name != "rule"}


def _identity(model: Any) -> dict[str, Any]:
    """What a head must fit: the model's type, the size of its vocabulary and the width of its features."""
    weight = model.get_output_embeddings().weight
    return dict(type=model.config.model_type, vocabulary=weight.shape[0], width=weight.shape[1])


def state_of(cache: Any) -> FastState | None:
    """What the head has learned, in the cache that a forward pass or `generate` returned; None before the first token.

    Args:
        cache: `out.past_key_values` of a model with an attached head.
    """
    return memory_of(cache).state
