"""Dynamic evaluation: score a text with a model that keeps training on it (Krause et al. 2018, 2019).

The text is cut into segments. Each is scored first, then learned from, so no score has seen its own token:

    sgd       theta <- theta - lr g + decay (theta_0 - theta)
    rms       theta <- theta - lr g / (r + eps) + min(decay r / r_mean, 1) (theta_0 - theta)
    rms-sum   theta <- theta - lr g / (s + eps) + decay s (theta_0 - theta)

theta_0 are the trained weights, g the segment's gradient, r the root of the mean squared gradient over training
batches, r_mean its mean over tensors, s the root of the sum of squares (the form of the Transformer-XL experiments).
"""

import fnmatch
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.torch import graphs, private
from fastweights.torch.cache import CacheState, NeuralCache, recorded
from fastweights.torch.gradient_statistics import Call, GradientStatistics, call_model, evaluating, token_losses, track
from fastweights.torch.tree import map_tensors

RULES = ("sgd", "rms", "rms-sum")

PRESETS: dict[str, dict[str, Any]] = {  # the published settings
    "awd-lstm-ptb": dict(rule="rms", segment=5, lr=5e-5, decay=2e-3, eps=2e-5),
    "qrnn-ptb": dict(rule="rms", segment=20, lr=1.2e-4, decay=0.02, eps=2e-5),
    "qrnn-wikitext-2": dict(rule="rms", segment=20, lr=1.2e-4, decay=0.008, eps=2e-5),
    "transformer-xl-wikitext-103": dict(rule="rms-sum", segment=128, lr=2e-6, decay=0.0, eps=1e-5),
    "transformer-xl-enwik8": dict(rule="rms-sum", segment=128, lr=1.2e-5, decay=24.0, eps=1e-4),
    "transformer-xl-text8": dict(rule="rms-sum", segment=128, lr=1.5e-5, decay=24.0, eps=1e-4),
}


@dataclass(frozen=True)
class DynamicResult:
    """What `DynamicEvaluation.run` returns.

    Attributes:
        losses: (B, T - 1) of every token but the first, in nats, before the model learned from it.
        seconds: taken.
    """

    losses: Tensor
    seconds: float

    @property
    def mean(self) -> float:
        """Mean loss per token, in nats."""
        return float(self.losses.mean())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: among how many tokens, equally likely, the model chooses on average."""
        return math.exp(self.mean)


class DynamicEvaluation:
    r"""Score text while learning from it; the model is as before when the block ends.

    The text is cut into segments. Each is scored, then a gradient step is taken on its loss, so no score has seen its
    own token. With the trained weights theta_0 and the segment's gradient g, rule "sgd" is

    $$ \theta \leftarrow \theta - \mathrm{lr}\, g + \mathrm{decay}\, (\theta_0 - \theta) $$

    and the other two divide g by how large each weight's gradients were in training.

        >>> model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
        >>> with DynamicEvaluation(model, rule="sgd", lr=0.5) as dynamic:
        ...     result = dynamic.run(torch.randint(20, (1, 100)))
        >>> result.losses.shape
        torch.Size([1, 99])

    Args:
        model: a language model: tokens (B, T) -> logits (B, T, V), a Hugging Face output, or (logits, state).
        rule: "sgd", "rms" or "rms-sum"; the last two need `statistics`.
        lr, decay, eps: as in the rules; decay pulls the weights back to the trained ones.
        segment: tokens scored between two updates.
        context: tokens before a segment that are fed again with it, unscored, for models without a carried state.
        carry: pass the state a model returns to its next call: model(tokens, state) -> (logits, state).
        parameters: which adapt: name patterns such as `"*.mlp.*"`; all when `"*"`, those that are frozen too.
        statistics: `GradientStatistics.collect(model, batches)` on training data.
        clip: largest norm of a segment's gradient.
        call: how to call an unusual model: (model, tokens, state) -> (logits, state); logits of the last `segment`
            tokens are enough.
        cache: a `NeuralCache` to mix into the predictions. The losses returned are those of the mixture; the weights
            still learn from the loss of the model alone.
        features: with a cache, the module whose output are the features that it looks up, such as the last norm; the
            input of `model.get_output_embeddings()` when absent.
        graph: on a GPU, segments of one shape are a CUDA graph where no state is carried, there is no cache and no hook
            looks on; True: hooks may be left out too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: str = "sgd",
        lr: float = 1e-3,
        decay: float = 0.0,
        eps: float = 1e-5,
        segment: int = 64,
        context: int = 0,
        carry: bool = False,
        parameters: str | Sequence[str] = "*",
        statistics: GradientStatistics | None = None,
        clip: float | None = None,
        call: Call = call_model,
        cache: NeuralCache | None = None,
        features: nn.Module | None = None,
        graph: bool = False,
    ):
        if rule not in RULES:
            raise FastWeightError(f"rule is {rule!r}; expected one of {', '.join(map(repr, RULES))}")
        if not 0 <= lr < math.inf:
            raise FastWeightError(f"lr is {lr}; expected a number of at least 0: a step goes down the gradient")
        if segment < 1:
            raise FastWeightError(f"segment is {segment}; expected at least 1 token between updates")
        if carry and context:
            raise FastWeightError(f"context is {context} with carry=True; expected one: a carried state holds the past")
        if rule != "sgd" and statistics is None:
            raise FastWeightError(
                f"statistics is missing for rule={rule!r}; expected GradientStatistics.collect("
                "model, batches) on training data: they scale each weight's step"
            )
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        named = {n: p for n, p in model.named_parameters() if any(fnmatch.fnmatchcase(n, x) for x in patterns)}
        if not named:
            raise FastWeightError(
                f"parameters is {parameters!r}, which matches none; expected patterns of names such "
                f"as {', '.join(n for n, _ in list(model.named_parameters())[:3])}"
            )
        missing = [n for n in named if statistics is not None and n not in statistics]
        if missing:
            raise FastWeightError(
                f"statistics has no {missing[0]!r}; expected all that adapt: collect them from this model, with none "
                "of these frozen, or leave it out by `parameters`"
            )
        self.model, self.rule, self.lr, self.decay, self.eps = model, rule, lr, decay, eps
        self.segment, self.context, self.carry, self.clip, self.call = segment, context, carry, clip, call
        self.named, self.statistics = named, statistics
        self.cache, self._recorded = cache, None if cache is None else _features(model, features)
        self.graph = graph
        self._graphs: dict[Any, Any] = {}
        self._cached: CacheState | None = None
        self._before: list[tuple[Tensor, bool]] | None = None

    @classmethod
    def preset(cls, name: str, model: nn.Module, **changes: Any) -> "DynamicEvaluation":
        """The settings of a published experiment, such as "awd-lstm-ptb" or "transformer-xl-enwik8", with `changes`
        to them.
        """
        if name not in PRESETS:
            raise FastWeightError(f"preset is {name!r}; expected one of {', '.join(map(repr, PRESETS))}")
        return cls(model, **(PRESETS[name] | changes))

    def __enter__(self) -> "DynamicEvaluation":
        """Remember the weights as they are; from here on those that were named learn, and no others have gradients."""
        self._training = self.model.training
        self._asked = [p.requires_grad for p in self.model.parameters()]
        self._trained = {n: p.detach().clone() for n, p in self.named.items()}
        self._scales = self._scale() if self.statistics is not None else None
        for p in self.model.parameters():
            p.requires_grad_(False)
        for p in self.named.values():
            p.requires_grad_(True)
        evaluating(self.model)
        return self

    def __exit__(self, *failure) -> None:
        """Put the weights back as they were, and whether they have gradients."""
        with torch.no_grad():
            for n, p in self.named.items():
                p.copy_(self._trained[n])
        for p, asked in zip(self.model.parameters(), self._asked, strict=True):
            p.requires_grad_(asked)
        self.model.train(self._training)
        self._graphs.clear()
        del self._trained, self._scales

    def reset(self) -> None:
        """Back to the trained weights and an empty cache, for a new document."""
        self._cached = None
        with torch.no_grad():
            for n, p in self.named.items():
                p.copy_(self._trained[n])

    def run(
        self, tokens: Tensor, *, progress: bool = False, advance: Callable[[int], Any] = lambda n: None
    ) -> DynamicResult:
        """Score tokens (B, T), learning as it goes; call again to go on learning from the same document.

        Weights and cache go on from call to call; a carried state and the context begin anew with each.

        Each segment is scored first and learned from afterwards. All rows of a batch share the weights that learn: for
        one document alone, B is 1.

        Args:
            tokens: (B, T).
            progress: whether to draw a progress bar.
            advance: advance(tokens) after every segment, for a bar of your own.

        Returns:
            A result with `losses` (B, T - 1) in nats, of every token but the first, `seconds`, `mean` and `perplexity`.
        """
        if not hasattr(self, "_trained"):
            raise FastWeightError(
                "run was called outside its block; expected `with DynamicEvaluation(...) as "
                "dynamic`: leaving the block restores the model"
            )
        if tokens.dim() != 2 or tokens.shape[1] < 2:
            raise FastWeightError(f"tokens has shape {tuple(tokens.shape)}; expected (B, T) with T >= 2")
        start, state, losses = time.perf_counter(), None, []
        # Segment after segment: score it with the weights of before, then take a step on its loss.
        starts = range(0, tokens.shape[1] - 1, self.segment)
        for a in track(starts, "dynamic evaluation", progress):
            b = min(a + self.segment, tokens.shape[1] - 1)
            first = max(0, a - self.context)
            labels = tokens[:, a + 1 : b + 1]
            if self._captures(tokens):
                loss, *grads = self._replayed(tokens[:, first:b], labels)
            else:
                watch: Any = nullcontext([]) if self._recorded is None else recorded(**self._recorded)
                with watch as seen:
                    loss, grads, state = self._gradients(tokens[:, first:b], labels, state)
                loss = self._mixed(seen, labels, loss)
            losses.append(loss)
            self._learn(grads)
            advance(b - a)
        return DynamicResult(torch.cat(losses, 1), time.perf_counter() - start)

    def _mixed(self, seen, labels, losses):
        """The losses with the cache's share in them, if there is one."""
        if self.cache is None:
            return losses
        if len(seen) != 1 or seen[0].dim() != 3 or seen[0].shape[1] < labels.shape[1]:
            raise FastWeightError(
                f"features was called {len(seen)} times, with {[tuple(x.shape) for x in seen]}; "
                "expected one call per segment, with features (B, T, D)"
            )
        x = seen[0][:, seen[0].shape[1] - labels.shape[1] :].detach()
        mixed, self._cached = self.cache.score(x, labels, losses, self._cached)
        return mixed

    def _gradients(self, tokens, labels, state):
        """Losses of a segment (B, n), the gradients of their mean, and the state after it."""
        with torch.enable_grad():
            logits, state = self.call(self.model, tokens, state)
            loss = token_losses(logits[:, logits.shape[1] - labels.shape[1] :], labels)
            grads = torch.autograd.grad(loss.mean(), list(self.named.values()), materialize_grads=True)
        return loss.detach(), grads, map_tensors(Tensor.detach, state) if self.carry else None

    def _captures(self, tokens):
        """Whether segments are replayed as a CUDA graph: where nothing but the tokens changes and no hook looks on."""
        if self.carry or self.cache is not None or torch.is_autocast_enabled("cuda") or graphs.refuses(tokens):
            return False
        return self.graph or not any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules())

    def _replayed(self, tokens, labels):
        """(losses, gradients ...) of a segment, from the second of its shape on as a graph: weights change in place."""

        def run(tokens, labels):
            loss, grads, _ = self._gradients(tokens, labels, None)
            return loss, *grads

        shape = tokens.shape, labels.shape
        if shape not in self._graphs:
            self._graphs[shape] = None
            return run(tokens, labels)
        found = self._graphs[shape]
        if found is None:
            found = self._graphs[shape] = graphs.capture(run, (tokens, labels))
        if isinstance(found, str):
            return run(tokens, labels)
        loss, *grads = graphs.replay(found, (tokens, labels))
        return loss.clone(), *grads

    @torch.no_grad()
    def _learn(self, grads):
        """One step on the mean loss of a segment: the gradient, clipped and divided as the rule says, then the pull
        back.
        """
        grads = list(grads)
        weights: list[Tensor] = list(self.named.values())
        trained = [self._trained[n] for n in self.named]
        back: Any = private.difference_of_all(trained, weights) if self.decay else None
        if self.clip is not None:
            norm = torch.stack(private.norm_of_all(grads)).norm()
            grads = private.product_of_all(grads, (self.clip / (norm + 1e-12)).clamp(max=1.0))
        pulls: Any = self.decay
        if self._scales is not None:
            divide, pulls = zip(*(self._scales[n] for n in self.named), strict=True)
            grads = private.quotient_of_all(grads, list(divide))
        private.add_all(weights, grads, alpha=-self.lr)
        if back is not None:
            private.scale_all(back, list(pulls) if self._scales is not None else pulls)
            private.add_all(weights, back)

    def _scale(self):
        """Per parameter: what divides its gradient, and how strongly it is pulled back."""
        assert self.statistics is not None
        roots = {n: self.statistics[n].to(p.device, p.dtype).sqrt() for n, p in self.named.items()}
        if self.rule == "sgd":
            return None
        if self.rule == "rms-sum":
            roots = {n: r * math.sqrt(self.statistics.batches) for n, r in roots.items()}
            return {n: (r + self.eps, self.decay * r) for n, r in roots.items()}
        mean = torch.stack([r.mean() for r in roots.values()]).mean()
        return {n: (r + self.eps, (self.decay * r / mean).clamp(max=1.0)) for n, r in roots.items()}


def _features(model, features):
    """Arguments of `recorded`: which module has a model's features, as its output or its input."""
    if features is not None:
        return dict(module=features)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is None:
        raise FastWeightError(
            "features is missing with a cache; expected the module whose output it looks up, such as "
            f"the last norm: a {type(model).__name__} does not tell its own"
        )
    return dict(module=output, inputs=True)
