"""Dynamic evaluation of many documents side by side, each with weights, rate and clip of its own.

`fastweights.torch.DynamicEvaluation` reads one document at a time, and a GPU waits for the host between its many small
kernels. Here `torch.func.vmap` maps the gradient over documents, so that one launch serves all of them. The numbers
are those of `DynamicEvaluation` (the stage `speed` compares them); the rule is sgd, or rms
where `divide` is given.
"""

import os
from contextlib import contextmanager
from functools import partial

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
        with sdpa_kernel(SDPBackend.MATH), _plain(self.model):  # vmap has no rule for some of the others
            logits, after = self.model.logits(tokens[None], State(blocks, None))
        return logits[0], [x for _, x in flatten(after.blocks)]


@contextmanager
def _plain(model):
    """Inside, recurrent layers run token by token in plain operations: vmap has no rule for those of cuDNN."""
    layers = [m for m in model.modules() if isinstance(m, nn.LSTM)]
    for layer in layers:
        layer.forward = partial(_token_by_token, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _token_by_token(lstm, x, state):
    (h,), (c,) = state
    given, found = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0), []
    for gates in given.unbind(1):
        i, f, g, o = (gates + F.linear(h, lstm.weight_hh_l0)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        found.append(h)
    return torch.stack(found, 1), (h[None], c[None])


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

    def learn(now, x, y, rates, clips, steps, state):
        """Losses and the memory after a segment; the weights `now` are changed in place."""
        grads, (losses, state) = gradients(now, x, y, *state)
        norm = torch.stack([g.flatten(1).norm(dim=1) for name, g in grads.items() if name not in steps]).norm(dim=0)
        rate = rates * (clips / (norm + 1e-12)).clamp(max=1.0)
        for name, w in now.items():
            g = grads.pop(name).to(w.dtype)
            g = g / divide[name] if name in divide else g
            size = losses.shape[1] * steps[name] if name in steps else rate
            w.addcmul_(g, size.view(-1, *[1] * (w.dim() - 1)).to(w.dtype), value=-1.0)  # biases may share a g
        return losses, state

    parts, width, recorded = [], lengths[0], Recorded(learn)
    for at in range(0, width, segment):
        n = min(len(lengths), -(-sum(length > at for length in lengths) // 8) * 8)
        part = slice(at, min(at + segment, width))
        now, sizes = {name: w[:n] for name, w in weights.items()}, {name: x[:n] for name, x in steps.items()}
        state = [x[:n] for x in state]
        losses, state = recorded(now, inputs[:n, part], labels[:n, part], rates[:n], clips[:n], sizes, state)
        parts.append(F.pad(losses, (0, 0, 0, len(lengths) - n)))
    return torch.cat(parts, 1)


class Recorded:
    """The steps of dynamic evaluation, recorded as a CUDA graph once two segments of one shape have been read.

    The host then launches one graph for each segment in the place of thousands of kernels. What cannot be recorded runs
    as it is.
    """

    def __init__(self, learn):
        self.learn, self.graph, self.shapes, self.seen = learn, None, None, 0
        self.on = torch.cuda.is_available() and not os.environ.get("EAGER")

    def __call__(self, now, x, y, rates, clips, steps, state):
        shapes = [tuple(t.shape) for t in (x, y, *state)]
        if shapes != self.shapes:
            self.graph, self.shapes, self.seen = None, shapes, 0
        self.seen += 1
        given = now, x, y, rates, clips, steps, state
        if self.graph is None:
            return self.record(*given) if self.on and self.seen > 2 else self.learn(*given)
        for kept, new in zip(self.inputs, (x, y, *state), strict=True):
            kept.copy_(new)
        self.graph.replay()
        losses, after = self.outputs
        return losses.clone(), [t.clone() for t in after]

    def record(self, now, x, y, rates, clips, steps, state):
        """Read a segment as a graph and as it is: both must find the same losses and change the weights alike."""
        self.inputs = [t.clone() for t in (x, y, *state)]
        before, graph = {n: w.clone() for n, w in now.items()}, torch.cuda.CUDAGraph()
        some = lambda: torch.cat([(w - before[n]).flatten(1)[:, ::61] for n, w in now.items()], 1)  # noqa: E731
        try:
            with torch.cuda.graph(graph):
                a, b, *rest = self.inputs
                self.outputs = self.learn(now, a, b, rates, clips, steps, rest)
            graph.replay()
            found, change = self.outputs[0].clone(), some()
        except RuntimeError as error:
            print(f"not recorded: {error}", flush=True)
            self.on, change = False, None
        for n, w in now.items():
            w.copy_(before[n])
        losses, state = self.learn(now, x, y, rates, clips, steps, state)
        if change is not None:
            want = some()
            apart = torch.stack([(change - want).norm(dim=1) / want.norm(dim=1), (found - losses).abs().amax(1)])
            apart = float(apart.nanquantile(0.9))  # rates that are too large end in NaN
            print(f"recorded {len(x)} documents, {apart:.1e} apart", flush=True)
            self.on = apart < 0.02
            self.graph = graph if self.on else None
        return losses, state
