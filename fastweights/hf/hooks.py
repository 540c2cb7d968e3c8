"""The hooks by which an attached head, its cache and matrices inside a model take part in its forward passes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.hf.body import FastBody, OfCall, teaches, without_graph
from fastweights.hf.cache import memory_of
from fastweights.hf.inputs import real_tokens
from fastweights.hf.residual import HeadState, ResidualHead
from fastweights.torch import cross_entropy
from fastweights.torch.cache import CacheState, NeuralCache
from fastweights.torch.tree import map_tensors

CACHES = ("past_key_values", "cache_params")


class FastState(NamedTuple):
    """What an attached head and its cache know of a text; None where there is no such part, or nothing is known.

    It is the `fast_state` of a model's output, and the argument of the next call that goes on with the same text.

    Attributes:
        head: the `HeadState` of the residual layer.
        cache: the `CacheState` of the neural cache.
        body: what the matrices of `attach(where=...)` have learned, one tensor (B, inputs, outputs) for each.
        passes: (B,), forward passes that these matrices have read; they learn from one of every few.

    Examples:
        >>> FastState()  # before the first token
        FastState(head=None, cache=None, body=None, passes=None)
    """

    head: HeadState | None = None
    cache: CacheState | None = None
    body: tuple[Tensor, ...] | None = None
    passes: Tensor | None = None


class Use(NamedTuple):
    """Which parts of an attachment take part in a call.

    Attributes:
        head, cache: whether the layer and the cache answer.
        learn: whether they learn from the text.
        body: whether matrices inside the model answer with what they have learned.
    """

    head: bool = True
    cache: bool = True
    learn: bool = True
    body: bool = True


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
    grad: bool = True  # whether the caller wants gradients
    logits: Tensor | None = None


class Hooks:
    """What forward passes of the model mean for its head. Nothing of a call is kept here: threads may share a model.

    Four hooks, in the order in which they run: `enter` when the model is called, `skip` and `answer` around the output
    embedding, `leave` when the model is done.
    """

    def __init__(
        self,
        model: nn.Module,
        head: ResidualHead,
        cache: NeuralCache | None,
        trained: list[nn.Parameter],
        body: FastBody | None = None,
        layer: bool = True,
    ):
        output: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.head, self.cache, self.output, self.trained, self.body = head, cache, output, trained, body
        self.call, self.use = OfCall("call"), OfCall("use")  # a Call, a Use
        self.layer = layer
        self.handles = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            output.register_forward_pre_hook(self.skip),
            output.register_forward_hook(self.answer),
            model.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def used(self) -> Use:
        """The parts that take part now: as `using` says, or all of them; without a layer, never the layer."""
        use = self.use.get() or Use(learn=self.head.adapting)
        return use if self.layer else use._replace(head=False)

    def enter(self, model: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note what the head must know, and have the model compute all features.

        Args:
            model, given, named: what PyTorch hands such a hook: the model, and the arguments of the call.

        Returns:
            The arguments as the model itself knows them: `fast_state` and `fast_context` are ours and are taken out.
        """
        state, context = named.pop("fast_state", None), named.pop("fast_context", 0)
        use = self.used()
        body = self.body if use.body else None
        if not use.head and not use.cache and body is None:
            return given, named
        tokens = named.get("input_ids", given[0] if given else None)
        if tokens is None:
            raise FastWeightError(
                "input_ids is missing; expected tokens: an attached head learns from them, "
                "inputs_embeds do not say which they are"
            )
        if isinstance(context, bool) or not isinstance(context, int) or not 0 <= context < max(1, tokens.shape[1]):
            raise FastWeightError(
                f"fast_context is {context!r} with tokens {tuple(tokens.shape)}; expected 0 to {tokens.shape[1] - 1}: "
                "the number of first tokens that were read before, and at least one is new"
            )
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        # A cache that nothing is in yet may make its layers as the model asks for them: ours comes after, in `leave`.
        if state is None and cache is not None and getattr(cache, "layers", None) != []:
            state = memory_of(cache).state
        if state is not None and not isinstance(state, FastState):
            raise FastWeightError(f"fast_state is a {type(state).__name__}; expected the fast_state of another call")
        call = Call(
            tokens,
            named.get("attention_mask"),
            state or FastState(),
            cache,
            context,
            named.get("logits_to_keep", 0),
            torch.is_grad_enabled(),
        )
        self.call.set(call)
        if body is not None:
            self._start_body(body, call, use.learn)
        if "logits_to_keep" in named:
            named["logits_to_keep"] = 0
        return given, named

    def _start_body(self, body: FastBody, call: Call, learn: bool) -> None:
        """Let the chosen matrices answer by what they know, and learn until the features are there if it is their turn.

        They learn from the passes that `teaches` names. A pass of one token has no pair of a token and the next,
        so nothing is learned from it and it is not counted. Gradients are switched on here and put back as the caller
        had them in `_end_body` or, after an error, in `leave`.
        """
        learned = call.state.body or body.init_state(len(call.tokens))
        body.check_state(learned, len(call.tokens))
        if learn:
            if torch.is_inference_mode_enabled():
                raise FastWeightError(
                    "where is given, and torch.inference_mode forbids the gradients that its "
                    "matrices learn from; expected torch.no_grad, or using(model, learn=False)"
                )
            passes = call.state.passes
            if passes is None:
                passes = torch.zeros(len(call.tokens), dtype=torch.long)  # on the CPU: the host asks for it
            if call.tokens.shape[1] > 1:
                passes = passes + 1
                if teaches(int(passes[0]), body.every):
                    learned = tuple(S.detach().requires_grad_() for S in learned)
                    torch.set_grad_enabled(True)
            call.state = call.state._replace(passes=passes)
        call.state = call.state._replace(body=learned)
        body.now.set(learned)

    def _end_body(self, x: Tensor, call: Call) -> Tensor:
        """The features x, once the chosen matrices have learned from them where they do.

        Features of token t predict token t + 1, so the pass teaches from all tokens but the last. Where they learn from
        every pass, tokens of the context were learned before; where from one of several, the context teaches too.
        """
        body, learned = self.body, call.state.body
        if body is None or body.now.get() is None or learned is None:
            return x
        body.now.set(None)
        torch.set_grad_enabled(call.grad)
        if not learned[0].requires_grad:
            return x
        first, T = max(call.context - 1, 0) if body.every == 1 else 0, x.shape[1]
        if first < T - 1:
            mask = real_tokens(call.mask, T)
            real = None if mask is None else mask[:, first : T - 1] & mask[:, first + 1 :]
            with torch.enable_grad():
                read = x[:, first : T - 1]
            _, found = body.gradients(read, call.tokens[:, first + 1 :], real, self.output, learned, keep=call.grad)
            learned = body.after(learned, found)
        call.state = call.state._replace(body=tuple(S.detach() for S in learned))
        return x if call.grad else x.detach()

    def skip(self, output: nn.Module, given: tuple) -> tuple | None:
        """The features on their way into the output embedding, which gets none: `answer` has the logits.

        The output embedding is a product with tens of thousands of words. The head makes its own logits from the same
        features, so the embedding is handed no tokens and costs nothing.
        """
        call = self.call.get()
        if call is None:
            return None
        x, tokens = given[0], call.tokens
        if x.shape[:-1] != tokens.shape:
            raise FastWeightError(
                f"the features have shape {tuple(x.shape)}; expected {tuple(tokens.shape)} and a "
                "width: the model does not call its output embedding once per token"
            )
        x = self._end_body(x, call)
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
        if call is not None and self.body is not None and self.body.now.get() is not None:  # the pass has failed
            self.body.now.set(None)
            torch.set_grad_enabled(call.grad)
        if call is None or out is None:
            return
        cache = next((found for name in CACHES if (found := getattr(out, name, None)) is not None), call.cache)
        if self.body is not None and not call.grad:
            without_graph(cache)
            for name in ("loss", "hidden_states", "attentions"):
                if getattr(out, name, None) is not None:
                    setattr(out, name, without_graph(getattr(out, name)))
        if cache is not None:
            memory_of(cache).state = call.state
        if hasattr(out, "logits"):
            out.fast_state = call.state

    def read(self, x: Tensor, tokens: Tensor, call: Call, keep: int) -> tuple[Tensor, FastState]:
        """Logits of the last `keep` tokens, and the state after all of them.

        Args:
            x: (B, T, D), features of the new tokens.
            tokens: (B, T).
            call: the pass.
            keep: tokens whose logits the caller wants.
        """
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
        # The cache mixes in what it expects. It writes into its arrays in place, unless autograd needs them.
        cached = state.cache
        if use.cache and self.cache is not None:
            apart = torch.is_grad_enabled() and logits.requires_grad
            logits, cached = self.cache.answer(
                x.detach(), tokens, logits, cached, mask=mask, learn=use.learn, overwrite=not apart, **known
            )
        return logits[:, -keep:], map_tensors(Tensor.detach, state._replace(head=learned, cache=cached))

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
        if self.body is not None:
            self.body.remove()
