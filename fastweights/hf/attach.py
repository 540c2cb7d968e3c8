"""A head on any causal language model of the ecosystem: it learns from what the model reads and writes.

The model itself is not changed: hooks see the tokens go in, and answer in the place of the output embedding, with a
residual layer that learns (residual.py) and a neural cache. What they know travels in the model's own cache, as one
more layer of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_checked_json, write_tensors
from fastweights.hf.cache import memory_of
from fastweights.hf.inputs import real_tokens
from fastweights.hf.residual import HeadSettings, HeadState, ResidualHead
from fastweights.torch import cross_entropy
from fastweights.torch.cache import CacheState, NeuralCache
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.tree import map_tensors

NAME = "fast_head"  # of the new part: model.fast_head
KIND = "fastweights head 2"
WEIGHTS, CONFIG = "fast_head.safetensors", "fast_head.json"
CACHES = ("past_key_values", "cache_params")
WINDOW = 4096  # tokens that a cache holds unless told; on a novel and a module, 1,024 gained a third less than 2,048


class FastState(NamedTuple):
    """What an attached head and its cache know of a text; None where there is no such part, or nothing is known.

    It is the `fast_state` of a model's output, and the argument of the next call that goes on with the same text.

    Attributes:
        head: the `HeadState` of the residual layer.
        cache: the `CacheState` of the neural cache.

    Examples:
        >>> FastState()  # before the first token
        FastState(head=None, cache=None)
    """

    head: HeadState | None = None
    cache: CacheState | None = None


class Use(NamedTuple):
    """Which parts of an attachment take part in a call.

    Attributes:
        head, cache: whether the layer and the cache answer.
        learn: whether they learn from the text.
    """

    head: bool = True
    cache: bool = True
    learn: bool = True


@dataclass
class Call:
    """One forward pass of the model: what went in, and what comes out in the place of the output embedding.

    Attributes:
        tokens, mask: (B, T) that the model was given, and its attention mask or None.
        state: what is known before these tokens, and after the pass what is known then.
        cache: the model's own cache, in which the state travels.
        context: how many of the first tokens are there for the body alone, learned before.
        keep: `logits_to_keep` as the caller gave it.
        logits: of the kept tokens, once they are known.
    """

    tokens: Tensor
    mask: Tensor | None
    state: FastState
    cache: Any
    context: int
    keep: Any
    logits: Tensor | None = None


class Hooks:
    """What forward passes of the model mean for its head. Nothing of a call is kept here: threads may share a model.

    Four hooks, in the order in which they run: `enter` when the model is called, `skip` and `answer` around the output
    embedding, `leave` when the model is done.
    """

    def __init__(self, model: nn.Module, head: ResidualHead, cache: NeuralCache | None, trained: list[nn.Parameter]):
        output: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.head, self.cache, self.output, self.trained = head, cache, output, trained
        self.call: ContextVar[Call | None] = ContextVar("call", default=None)
        self.use: ContextVar[Use | None] = ContextVar("use", default=None)
        self.handles = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            output.register_forward_pre_hook(self.skip),
            output.register_forward_hook(self.answer),
            model.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def used(self) -> Use:
        """The parts that take part now: as `using` says, or all of them."""
        return self.use.get() or Use(learn=self.head.adapting)

    def enter(self, model: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note what the head must know, and have the model compute all features."""
        state, context = named.pop("fast_state", None), named.pop("fast_context", 0)
        use = self.used()
        if not use.head and not use.cache:
            return given, named
        tokens = named.get("input_ids", given[0] if given else None)
        if tokens is None:
            raise FastWeightError("input_ids is missing; expected tokens: an attached head learns from them, "
                                  "inputs_embeds do not say which they are")  # fmt: skip
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if state is None and cache is not None:
            state = memory_of(cache).state
        if state is not None and not isinstance(state, FastState):
            raise FastWeightError(f"fast_state is a {type(state).__name__}; expected the fast_state of another call")
        self.call.set(Call(tokens, named.get("attention_mask"), state or FastState(), cache, context,
                           named.get("logits_to_keep", 0)))  # fmt: skip
        if "logits_to_keep" in named:
            named["logits_to_keep"] = 0
        return given, named

    def skip(self, output: nn.Module, given: tuple) -> tuple | None:
        """The features on their way into the output embedding, which gets none: `answer` has the logits."""
        call = self.call.get()
        if call is None:
            return None
        x, tokens = given[0], call.tokens
        if x.shape[:-1] != tokens.shape:
            raise FastWeightError(f"the features have shape {tuple(x.shape)}; expected {tuple(tokens.shape)} and a "
                                  "width: the model does not call its output embedding once per token")  # fmt: skip
        kept, n, T = call.keep, call.context, tokens.shape[1]
        K = min(kept, T) or T if isinstance(kept, int) else T
        call.logits, call.state = self.read(x[:, n:], tokens[:, n:], call, min(K, T - n))
        if T - n < K:  # context is answered by the model alone
            call.logits = torch.cat([self.output.forward(x[:, T - K : n]), call.logits], 1)
        if not isinstance(kept, int):
            call.logits = call.logits[:, kept]
        return (x[:, :0], *given[1:])

    def answer(self, output: nn.Module, given: tuple, out: Any) -> Any:
        """The logits that `skip` made, in the place of those of the output embedding."""
        call = self.call.get()
        return None if call is None else call.logits

    def leave(self, model: nn.Module, given: tuple, named: dict[str, Any], out: Any) -> None:
        """Put what was learned into the model's cache and output. Runs after an error too, so that no call stays
        behind.
        """
        call = self.call.get()
        self.call.set(None)
        if call is None or out is None:
            return
        cache = next((found for name in CACHES if (found := getattr(out, name, None)) is not None), call.cache)
        if cache is not None:
            memory_of(cache).state = call.state
        if hasattr(out, "logits"):
            out.fast_state = call.state

    def read(self, x: Tensor, tokens: Tensor, call: Call, keep: int) -> tuple[Tensor, FastState]:
        """Logits of the last `keep` tokens, and the state after all of them."""
        use, state, T = self.used(), call.state, tokens.shape[1]
        mask = real_tokens(call.mask, call.tokens.shape[1])
        mask = None if mask is None else mask[:, -T:]
        K = keep if mask is None else T  # the last real token may be anywhere
        known: dict[str, Any] = {}
        learned = state.head
        if use.head and use.learn:
            found, learned = self.head(x, tokens, self.output, mask=mask, state=state.head, keep=K)
            logits, known = found.logits, dict(log_sums=found.log_sums, losses=found.losses)
        else:
            features = self.head.features(x[:, -K:], state.head) if use.head else x[:, -K:]
            logits = self.output.forward(features)
            if use.cache and use.learn and K < T:
                known = dict(losses=self._losses(x, tokens))
        cached = state.cache
        if use.cache and self.cache is not None:
            apart = torch.is_grad_enabled() and logits.requires_grad
            logits, cached = self.cache.answer(x.detach(), tokens, logits, cached, mask=mask, learn=use.learn,
                                               overwrite=not apart, **known)  # fmt: skip
        return logits[:, -keep:], map_tensors(Tensor.detach, FastState(learned, cached))

    def _losses(self, x, tokens):
        """The model's own loss of each token but the first, without holding logits."""
        bias = getattr(self.output, "bias", None)
        bias = x.new_zeros(len(self.output.weight)) if bias is None else bias
        losses = cross_entropy.loss(x[:, :-1], self.output.weight.mT, bias, tokens[:, 1:])
        return torch.nn.functional.pad(losses, (1, 0))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()


def attach(
    model: nn.Module,
    size: int | None = None,
    *,
    refresh: int = 64,
    step_size: float = 0.01,
    clip: float = 1.0,
    cache: NeuralCache | bool = True,
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
        cache: True for a cache of 4,096 tokens, a `NeuralCache` of your own, or False.
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
    if not isinstance(cache, (bool, NeuralCache)):
        raise FastWeightError(f"cache is a {type(cache).__name__}; expected a NeuralCache, True or False")
    settings = HeadSettings(
        weight.shape[1], size or 2 * weight.shape[1], refresh=refresh, step_size=step_size, clip=clip
    )
    head = ResidualHead(settings, device=weight.device, dtype=accumulation_dtype(weight))
    trained = [p for p in model.parameters() if p.requires_grad] if freeze else []
    for p in trained:
        p.requires_grad_(False)
    setattr(model, NAME, head)
    chosen = (NeuralCache(WINDOW) if cache else None) if isinstance(cache, bool) else cache
    object.__setattr__(head, "hooks", Hooks(model, head, chosen, trained))
    return head


def detach(model: nn.Module) -> ResidualHead:
    """Take the head off again; the model is as it was. Returns the head.

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
def using(model: nn.Module, *, head: bool = True, cache: bool = True, learn: bool = True) -> Iterator[None]:
    """Within the block, only these parts of an attachment take part; without any, the model is as it was.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> tokens, head = torch.arange(32)[None], attach(model)
        >>> with using(model, head=False, cache=False):
        ...     plain = model(tokens).logits  # as if nothing were attached

    head, cache: whether the layer and the cache answer.  learn: whether they go on learning.
    """
    if not hasattr(model, NAME):
        if head or cache:
            attached(model)  # says what is missing
        yield
        return
    hooks: Any = attached(model).hooks
    before = hooks.use.set(Use(head, cache, learn))
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
    about = dict(kind=KIND, head=head.settings.to_dict(), cache=cache, model=_identity(model))
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
        raise FastWeightError(f"{folder / CONFIG} is {about.get('kind', 'no head')!r}; expected {KIND!r}: a file that "
                              "`fastweights hf adapt` wrote")  # fmt: skip
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
    head = attach(model, cache=cache, **arguments)
    head.load_state_dict(tensors)
    return head


def check_shapes(settings: HeadSettings, tensors: dict[str, Tensor], file: Path) -> None:
    """Raise unless these are the weights of a head with these settings; nothing is allocated to find out."""
    wanted = {name: x.shape for name, x in ResidualHead(settings, device="meta").state_dict().items()}
    got = {name: x.shape for name, x in tensors.items()}
    for name in sorted(wanted.keys() | got.keys()):
        if got.get(name) != wanted.get(name):
            found, expected = (tuple(x[name]) if name in x else "none" for x in (got, wanted))
            raise FastWeightError(f"{name} of {file} has shape {found}; expected {expected}, as {CONFIG} says")


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
