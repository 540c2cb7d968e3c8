"""Dynamic evaluation of many documents side by side, each with weights, rate and clip of its own.

`fastweights.torch.DynamicEvaluation` reads one document at a time, and a GPU waits for the host between its many small
kernels. Here `torch.func.vmap` maps the gradient over documents, so that one launch serves all of them. The numbers
are those of `DynamicEvaluation` (the stage `speed` compares them); the rule is sgd, or rms
where `divide` is given.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.tree import flatten, map_tensors


class Whole(nn.Module):
    """Logits (C, V) of tokens (C,) by the whole model, its memory carried as a flat list of tensors."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model, self.like = model, model.init_state(1).blocks

    def start(self) -> list[Tensor]:
        return [x for _, x in flatten(self.like)]

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = iter(state)
        blocks = map_tensors(lambda _: next(parts), self.like)
        with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for some of the others
            logits, after = self.model.logits(tokens[None], State(blocks, None))
        return logits[0], [x for _, x in flatten(after.blocks)]


class Alone(nn.Module):
    """Logits (C, V) of features (C, D) by the model's last layer, which carries nothing."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def start(self) -> list[Tensor]:
        return []

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.model.fast.slow_logits(x[None])[0], []


@torch.no_grad()
def score(
    module: nn.Module, names: list[str], inputs: list[Tensor], labels: list[Tensor], rates: Tensor, clips: Tensor, *,
    divide: dict[str, Tensor] | None = None, steps: dict[str, Tensor] | None = None,
    start: dict[str, Tensor] | None = None, segment: int = 64, most: int = 32,
) -> list[Tensor]:  # fmt: skip
    """Losses (T,) of each document, every token scored before it is learned from.

    names: the parameters of the module that learn.  inputs: (T, ...) of each document;  labels: (T,) of each.
    rates, clips: (N,) of each.  divide: what divides a gradient, by name.  steps: (N,) by name, of parameters that take
    steps of their own as those of a Fast Weight Layer do: on the sum of a segment's gradients, without rate and clip.
    start: values to begin with in the place of the module's own.  most: documents at once, fewer where there is no
    memory for them.
    """
    order = sorted(range(len(labels)), key=lambda i: -len(labels[i]))
    found: list[Tensor] = [labels[0]] * len(labels)
    own = {n: p.detach() for n, p in module.named_parameters()} | (start or {})
    a = 0
    while a < len(order):
        some = order[a : a + most]
        pick = torch.tensor(some, device=rates.device)
        try:
            losses = _together(
                module, {n: own[n] for n in names}, [inputs[i] for i in some], [labels[i] for i in some], rates[pick],
                clips[pick], divide or {}, {n: x[pick] for n, x in (steps or {}).items()}, segment,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            if len(some) == 1:
                raise
            most = len(some) // 2
            continue
        for i, row in zip(some, losses, strict=True):
            found[i] = row[: len(labels[i])]
        a += len(some)
    return found


def _together(module, start, inputs, labels, rates, clips, divide, steps, segment):
    """Documents, the longest first, as rows filled up to its length; rows that have ended are left out by eights."""
    weights = {n: x.expand(len(labels), *x.shape).clone() for n, x in start.items()}
    lengths = [len(y) for y in labels]
    inputs, labels = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (inputs, labels))
    state = [x.detach().expand(len(lengths), *x.shape) for x in module.start()]

    def loss_of(weights, x, y, *state):
        logits, after = functional_call(module, weights, (x, *state))
        losses = F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, y, reduction="none")
        return losses.mean(), (losses, after)

    gradients = vmap(grad(loss_of, has_aux=True))
    parts, width = [], lengths[0]
    for at in range(0, width, segment):
        n = min(len(lengths), -(-sum(length > at for length in lengths) // 8) * 8)
        part = slice(at, min(at + segment, width))
        now = {name: w[:n] for name, w in weights.items()}
        grads, (losses, state) = gradients(now, inputs[:n, part], labels[:n, part], *(x[:n] for x in state))
        parts.append(F.pad(losses, (0, 0, 0, len(lengths) - n)))
        norm = torch.stack([g.flatten(1).norm(dim=1) for name, g in grads.items() if name not in steps]).norm(dim=0)
        rate = rates[:n] * (clips[:n] / (norm + 1e-12)).clamp(max=1.0)
        for name, w in now.items():
            g = grads.pop(name).to(w.dtype)
            g = g / divide[name] if name in divide else g
            size = losses.shape[1] * steps[name][:n] if name in steps else rate
            w.sub_(g.mul_(size.view(-1, *[1] * (w.dim() - 1)).to(w.dtype)))
    return torch.cat(parts, 1)
