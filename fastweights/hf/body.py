"""Matrices inside a model that learn from the text: those that end feed-forward layers, as `attach(where=...)` says.

A chosen matrix W answers with W + S, where S belongs to a text, one per row of the batch, and starts at 0. At the end
of every forward pass S takes a step against the gradient g of the model's own mean loss on the tokens of that pass,
each as the token before it in the pass predicted it:

    S <- S - e |W| G / |G|,    G = diag(a) g diag(b): g with rows of one length and columns of one length (`balanced`)

In G all inputs and all outputs of the matrix count alike. Such a step taught several times as much as one along g on
every text tried (docs/results/pretrained-models.md). It changes each matrix by a share e of its own length |W|. Layers
below the first chosen one need no gradient. With `every` passes to a step, S learns from some of the passes
(`teaches`), and the others cost what reading costs.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.torch import cross_entropy, private
from fastweights.torch.dtypes import accumulation_dtype

DOWN = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h", "mlp.fc_out", "fc2", "feed_forward.out")
THIRDS = ("first", "middle", "last", "all")
ROUNDS = 5  # of rows and columns


def down_projections(model: Any, third: str = "middle") -> tuple[str, ...]:
    """Names of the matrices that end the feed-forward layers in a third of a model: `parameters` of dynamic evaluation.

    They are a small part of the weights, and no gradient is needed below the lowest of them.

    Args:
        model: a causal language model.
        third: "first", "middle" or "last" third of the blocks, or "all".

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> down_projections(LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)))
        ('model.layers.1.mlp.down_proj.weight',)
    """
    if third not in THIRDS:
        raise FastWeightError(f"third is {third!r}; expected one of {', '.join(map(repr, THIRDS))}")
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and n.removesuffix(".weight").endswith(DOWN)]
    if not names:
        raise FastWeightError(
            f"no feed-forward layer of the {type(model).__name__} ends in one of {', '.join(DOWN)}; "
            "expected one per block: name the parameters themselves"
        )
    n, i = len(names), THIRDS.index(third)
    return tuple(names) if third == "all" else tuple(names[-(-i * n // 3) : -(-(i + 1) * n // 3)])


def teaches(number: int, every: int) -> bool:
    """Whether the chosen matrices take a step after this forward pass of a text.

    The first steps gain the most, so they come early: after passes 1, 2, 4, ... and from `every` on after each multiple
    of it.

    Args:
        number: of the pass; the first of a text is 1.
        every: passes to a step, later in the text.

    Examples:
        >>> [n for n in range(1, 40) if teaches(n, 8)]
        [1, 2, 4, 8, 16, 24, 32]
    """
    return number % every == 0 or (number < every and number & (number - 1) == 0)


class OfCall:
    """A value of the forward pass that is running, None outside of one: every thread has its own.

    Copies and pickles of a model start without one, which a bare context variable would forbid.
    """

    def __init__(self, name: str):
        self.name, self.variable = name, ContextVar[Any](name, default=None)
        self.get, self.set, self.reset = self.variable.get, self.variable.set, self.variable.reset

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return OfCall, (self.name,)


def balanced(g: Tensor) -> Tensor:
    """g (..., m, n) with its rows and its columns scaled so that each have one length, and all of it length 1.

    Rows and columns take turns (Sinkhorn's iteration on the squares), columns last; rows of zeros stay zeros.

    Examples:
        >>> x = balanced(torch.tensor([[4.0, 0.1], [0.2, 0.01]]))
        >>> [[round(n, 3) for n in x.norm(dim=axis).tolist()] for axis in (0, 1)]
        [[0.707, 0.707], [0.707, 0.707]]
    """
    squares = g.square()
    tiny = 1e-30 * squares.mean((-2, -1), keepdim=True) + torch.finfo(g.dtype).tiny
    b = torch.ones_like(squares[..., 0, :, None])
    for _ in range(ROUNDS):
        a = 1 / (squares @ b + tiny)  # squared factors of the rows, then of the columns
        columns = squares.mT @ a
        b = 1 / (columns + tiny)
    length = (b * columns).sum((-2, -1), keepdim=True).sqrt()
    return g * (a.sqrt() / length.clamp(min=1.0)) * b.sqrt().mT


class FastBody:
    """The chosen matrices of a model.

    names: of their weights;  step: e, the share of its length by which a step changes a matrix;  every: passes to a
    step.

    Each chosen layer gets a forward hook that adds x S to its answer. `now` holds the S of the pass that is running, in
    a context variable, so that two threads can read two texts with one model.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], step: float, every: int = 1):
        if not names:
            raise FastWeightError(
                "where names nothing; expected at least one matrix: a model of few layers has none "
                "in some of its thirds"
            )
        self.names, self.step, self.every = names, step, every
        self.modules = [self._module(model, name) for name in names]
        # (inputs, outputs) of each; GPT-2's own layers hold the transpose of what nn.Linear does
        self.shapes = [tuple(m.weight.shape[:: -1 if isinstance(m, nn.Linear) else 1]) for m in self.modules]
        self.now = OfCall("now")  # the S of the pass
        self.handles = [m.register_forward_hook(partial(self._add, i)) for i, m in enumerate(self.modules)]

    @staticmethod
    def _module(model, name):
        """The module whose weight has this name; raises where it is no layer with a matrix."""
        known = dict(model.named_modules())
        module = known.get(name.removesuffix(".weight"))
        weight = getattr(module, "weight", None)
        if module is None or not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise FastWeightError(
                f"where names {name!r}, which is no layer with a matrix of real numbers; expected "
                f"one of {', '.join(map(repr, THIRDS))}, or names such as those that "
                "down_projections(model) returns"
            )
        return module

    def init_state(self, batch: int) -> tuple[Tensor, ...]:
        """What the matrices have learned before the first token: zeros (B, inputs, outputs) of each."""
        dtypes = (accumulation_dtype(m.weight) for m in self.modules)
        return tuple(
            torch.zeros(batch, *shape, device=m.weight.device, dtype=dtype)
            for m, shape, dtype in zip(self.modules, self.shapes, dtypes, strict=True)
        )

    def check_state(self, learned: tuple[Tensor, ...], batch: int) -> None:
        """Raise FastWeightError unless this was learned by these matrices, from as many texts."""
        got = [tuple(S.shape[1:]) for S in learned]
        if got != self.shapes:
            raise FastWeightError(
                f"fast_state is of matrices of shapes {got}; expected {self.shapes}: a text goes on with the model and "
                "the where that began it"
            )
        texts = len(learned[0])
        if texts != batch:
            raise FastWeightError(f"fast_state is that of {texts} texts; expected {batch}: one per row of tokens")

    def _add(self, i: int, module: nn.Module, given: tuple, out: Tensor) -> Tensor | None:
        """out + x S: what the layer answers by what the text has taught it.

        Args:
            i: number of the chosen matrix.
            module, given, out: what PyTorch hands a hook: the layer, its arguments and its answer.

        Returns:
            The new answer, or None, which leaves it, outside of a pass that learns.
        """
        learned = self.now.get()
        if learned is None:
            return None
        x, S = given[0], learned[i]
        if x.dim() != 3 or len(x) != len(S):
            raise FastWeightError(
                f"{self.names[i]} is called with {tuple(x.shape)}; expected ({len(S)}, T, "
                f"{S.shape[1]}), one row per text: leave it out of where"
            )
        return out + (x.to(S.dtype) @ S).to(out.dtype)

    def whole(self, learned: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The weights W + S of one text by name, for `torch.func.functional_call`: reading then costs what it did."""
        found = {}
        for name, m, S in zip(self.names, self.modules, learned, strict=True):
            S = S[0].mT if isinstance(m, nn.Linear) else S[0]
            found[name if name.endswith(".weight") else f"{name}.weight"] = m.weight + S.to(m.weight.dtype)
        return found

    def gradients(
        self, x: Tensor, labels: Tensor, real: Tensor | None, output: Any, learned: tuple[Tensor, ...], *, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The model's own losses of labels (B, n), and the gradients of their mean by `learned`, with which features x
        (B, n, D) were made.

        real (B, n): False for pairs that teach nothing, such as padding.  output: the output embedding.  keep: the
        caller needs x's graph.
        """
        bias = getattr(output, "bias", None)
        with torch.no_grad():
            bias = x.new_zeros(len(output.weight)) if bias is None else bias
            # r is the gradient of each token's loss by its features; 1 / count makes the loss a mean per text.
            losses, r = cross_entropy.head(x.detach(), output.weight.mT, bias, labels)
            count = (torch.ones_like(labels) if real is None else real).to(r.dtype)
            r = r * (count / count.sum(1, keepdim=True).clamp(min=1))[..., None]
        return losses, torch.autograd.grad(x, learned, r.to(x.dtype), retain_graph=keep)

    @torch.no_grad()
    def after(self, learned: tuple[Tensor, ...], gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What is known after a step: each matrix changes by e |W| G / |G|.

        On a GPU those of a shape go together, in few launches; on a CPU one by one, so that each stays in its cache.
        """
        found: dict[int, Tensor] = {}
        kinds = [(g.shape, None if g.is_cuda else i) for i, g in enumerate(gradients)]
        for kind in dict.fromkeys(kinds):
            alike = [i for i, other in enumerate(kinds) if other == kind]
            change = balanced(torch.stack([gradients[i] for i in alike]))
            lengths = torch.stack(private.norm_of_all([self.modules[i].weight for i in alike]))
            change *= (-self.step * lengths.to(change.dtype))[:, None, None, None]
            found |= zip(alike, change + torch.stack([learned[i].detach() for i in alike]), strict=True)
        return tuple(found[i] for i in range(len(gradients)))

    def remove(self) -> None:
        """Take the hooks off: the model answers as it did before."""
        for handle in self.handles:
            handle.remove()


def without_graph(value: Any) -> Any:
    """A value of a forward pass, or a model's cache, whose tensors no longer hold what they were made of."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(without_graph(x) for x in value)
    if isinstance(value, dict) and not hasattr(value, "logits"):
        return {name: without_graph(x) for name, x in value.items()}
    for part in (value, *(getattr(value, "layers", None) or ())):  # a cache and its layers keep tensors as attributes
        for name, x in list(vars(part).items()) if hasattr(part, "__dict__") else ():
            if isinstance(x, Tensor) or (isinstance(x, (list, dict)) and name != "layers"):
                setattr(part, name, without_graph(x))
    return value
