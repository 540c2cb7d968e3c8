"""Dynamic evaluation of many documents side by side, each with weights, rate and clip of its own.

`fastweights.torch.DynamicEvaluation` reads one document at a time, and a GPU waits for the host between its many small
kernels. Here `torch.func.vmap` maps the gradient over documents, so that one launch serves all of them. The numbers
are those of `DynamicEvaluation` (the stage `speed` compares them). The rule is "sgd", or "rms" where gradients are
divided by their root mean square (`divide`).

Shapes: N documents, T tokens, C tokens of a segment, D width, V vocabulary.
"""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.tree import flatten, map_tensors

ROWS = 8  # documents that have ended leave the batch by so many, so that few shapes occur
SAMPLE = 61  # one weight of so many is compared when a CUDA graph is checked
ALIKE = 0.02  # relative difference up to which a CUDA graph counts as right


class WholeModel(nn.Module):
    """Logits (C, V) of tokens (C,) by the whole model, its memory carried as a flat list of tensors."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model, self.empty_state = model, model.init_state(1).blocks

    def start(self) -> list[Tensor]:
        """The state before the first token."""
        return [x for _, x in flatten(self.empty_state)]

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of a segment, and the state after it."""
        tensors = iter(state)
        blocks = map_tensors(lambda _: next(tensors), self.empty_state)
        with sdpa_kernel(SDPBackend.MATH), _plain_lstm(self.model):  # vmap has no rule for other attention kernels
            logits, after = self.model.logits(tokens[None], State(blocks, None))
        return logits[0], [x for _, x in flatten(after.blocks)]


@contextmanager
def _plain_lstm(model):
    """Inside, LSTM layers run token by token in plain operations: vmap has no rule for those of cuDNN."""
    layers = [m for m in model.modules() if isinstance(m, nn.LSTM)]
    for layer in layers:
        layer.forward = partial(_token_by_token, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _token_by_token(lstm, x, state):
    """What an LSTM layer makes of x (B, T, D): its output and its state."""
    (h,), (c,) = state
    from_inputs = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
    hidden = []
    for inputs in from_inputs.unbind(1):
        i, f, g, o = (inputs + F.linear(h, lstm.weight_hh_l0)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    return torch.stack(hidden, 1), (h[None], c[None])


class LastLayer(nn.Module):
    """Logits (C, V) of features (C, D) by the model's last layer, which carries nothing."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def start(self) -> list[Tensor]:
        """No state."""
        return []

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of a segment, and no state."""
        return self.model.fast.slow_logits(x[None])[0], []


@torch.no_grad()
def score(
    module: nn.Module,
    names: list[str],
    inputs: list[Tensor],
    labels: list[Tensor],
    rates: Tensor,
    clips: Tensor,
    *,
    divide: dict[str, Tensor] | None = None,
    steps: dict[str, Tensor] | None = None,
    start: dict[str, Tensor] | None = None,
    segment: int = 64,
    most: int = 32,
) -> list[Tensor]:
    """Losses (T,) of each document in nats, every token scored before it is learned from.

    Args:
        module: a WholeModel or a LastLayer.
        names: of the parameters of the module that learn.
        inputs: (T,) tokens or (T, D) features of each document.
        labels: (T,) of each document.
        rates: (N,) learning rates.
        clips: (N,) largest norms of a gradient.
        divide: by the name of a parameter, what its gradient is divided by.
        steps: by the name of a parameter, step sizes (N,) as those of a Fast Weight Layer: such a parameter follows the
            sum of a segment's gradients with its own step size, without rate and clip.
        start: by the name of a parameter, the value to begin with in place of the module's own.
        segment: tokens between two updates.
        most: documents that are read at once; fewer where memory does not suffice.
    """
    longest_first = sorted(range(len(labels)), key=lambda i: -len(labels[i]))
    losses: list[Tensor] = [labels[0]] * len(labels)
    values = {name: p.detach() for name, p in module.named_parameters()} | (start or {})
    first = 0
    while first < len(longest_first):
        batch = longest_first[first : first + most]
        index = torch.tensor(batch, device=rates.device)
        learner = Learner(
            module, divide or {}, rates[index], clips[index], {n: x[index] for n, x in (steps or {}).items()}, segment
        )
        try:
            rows = learner.read({n: values[n] for n in names}, [inputs[i] for i in batch], [labels[i] for i in batch])
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            most = len(batch) // 2
            continue
        for i, row in zip(batch, rows, strict=True):
            losses[i] = row[: len(labels[i])]
        first += len(batch)
    return losses


class Rows(NamedTuple):
    """The documents of a batch that are still being read, as views of tensors of all its documents.

    Attributes:
        weights: by name, (n, ...) the parameters that learn.
        rates, clips: (n,) learning rates and largest norms of a gradient.
        steps: by name, (n,) step sizes of parameters that have their own.
    """

    weights: dict[str, Tensor]
    rates: Tensor
    clips: Tensor
    steps: dict[str, Tensor]


class Learner:
    """Dynamic evaluation of some documents as rows of one batch; arguments as for `score`."""

    def __init__(self, module, divide, rates, clips, steps, segment):
        self.module, self.divide, self.rates, self.clips = module, divide, rates, clips
        self.steps, self.segment = steps, segment
        self.gradients = vmap(grad(self._loss, has_aux=True))

    def read(self, start, inputs, labels):
        """Losses (N, T) of documents, the longest first; what stands after the end of a document means nothing.

        Args:
            start: initial values of the parameters that learn, by name.
            inputs, labels: of each document.
        """
        lengths = [len(y) for y in labels]
        weights = {name: x.expand(len(lengths), *x.shape).clone() for name, x in start.items()}
        inputs, labels = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (inputs, labels))
        state = [x.detach().expand(len(lengths), *x.shape) for x in self.module.start()]
        parts, learn_segment = [], CapturedSegment(self._learn_segment)
        for at in range(0, lengths[0], self.segment):
            reading = sum(length > at for length in lengths)
            n = min(len(lengths), -(-reading // ROWS) * ROWS)  # rows that are still read
            tokens = slice(at, min(at + self.segment, lengths[0]))
            rows = Rows(
                {name: w[:n] for name, w in weights.items()},
                self.rates[:n],
                self.clips[:n],
                {name: size[:n] for name, size in self.steps.items()},
            )
            state = [x[:n] for x in state]
            losses, state = learn_segment(rows, inputs[:n, tokens], labels[:n, tokens], state)
            parts.append(F.pad(losses, (0, 0, 0, len(lengths) - n)))
        return torch.cat(parts, 1)

    def _loss(self, weights, inputs, labels, *state):
        """The mean loss of a segment (C,) of one document, and as a by-product its losses and the state after it."""
        logits, after = functional_call(self.module, weights, (inputs, *state))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses.mean(), (losses, after)

    def _learn_segment(self, rows, inputs, labels, state):
        """Losses (N, C) of a segment and the state after it; the weights of the rows are changed in place."""
        gradients, (losses, state) = self.gradients(rows.weights, inputs, labels, *state)
        with_rate = [g.flatten(1).norm(dim=1) for name, g in gradients.items() if name not in rows.steps]
        norm = torch.stack(with_rate).norm(dim=0)
        rate = rows.rates * (rows.clips / (norm + 1e-12)).clamp(max=1.0)
        for name, w in rows.weights.items():
            g = gradients.pop(name).to(w.dtype)
            g = g / self.divide[name] if name in self.divide else g
            size = losses.shape[1] * rows.steps[name] if name in rows.steps else rate
            w.addcmul_(g, size.view(-1, *[1] * (w.dim() - 1)).to(w.dtype), value=-1.0)  # biases may share a gradient
        return losses, state


class CapturedSegment:
    """`Learner._learn_segment`, captured as a CUDA graph once two segments of the same shape have been read.

    The host then launches one graph for each segment in place of thousands of kernels. The graph reads and changes the
    rows where they lie in memory; tokens, labels and state are copied into its own. What cannot be captured runs as it
    is.
    """

    def __init__(self, learn_segment):
        self.learn_segment, self.graph, self.shapes, self.calls = learn_segment, None, None, 0
        self.captures = torch.cuda.is_available()

    def __call__(self, rows, inputs, labels, state):
        """Losses of a segment and the state after it, as `Learner._learn_segment`."""
        shapes = [tuple(x.shape) for x in (inputs, labels, *state)]
        if shapes != self.shapes:
            self.graph, self.shapes, self.calls = None, shapes, 0
        self.calls += 1
        if self.graph is None and self.captures and self.calls > 2:
            return self._capture(rows, inputs, labels, state)
        if self.graph is None:
            return self.learn_segment(rows, inputs, labels, state)
        for own, x in zip(self.inputs, (inputs, labels, *state), strict=True):
            own.copy_(x)
        self.graph.replay()
        losses, after = self.outputs
        return losses.clone(), [x.clone() for x in after]

    def _capture(self, rows, inputs, labels, state):
        """Read a segment as a graph and as it is; the graph is kept if both give the same losses and weights."""
        self.inputs = [x.clone() for x in (inputs, labels, *state)]
        before, graph = {name: w.clone() for name, w in rows.weights.items()}, torch.cuda.CUDAGraph()

        def change():
            """How far a sample of the weights is from where it was, (N, weights)."""
            return torch.cat([(w - before[name]).flatten(1)[:, ::SAMPLE] for name, w in rows.weights.items()], 1)

        captured = None
        try:
            with torch.cuda.graph(graph):
                own_inputs, own_labels, *own_state = self.inputs
                self.outputs = self.learn_segment(rows, own_inputs, own_labels, own_state)
            graph.replay()
            captured = self.outputs[0].clone(), change()
        except RuntimeError as error:
            print(f"not captured: {error}", flush=True)
            self.captures = False
        for name, w in rows.weights.items():
            w.copy_(before[name])
        losses, state = self.learn_segment(rows, inputs, labels, state)
        if captured is not None:
            want, (captured_losses, captured_change) = change(), captured
            difference = torch.stack(
                [
                    (captured_change - want).norm(dim=1) / want.norm(dim=1),
                    (captured_losses - losses).abs().amax(1),
                ]
            )
            difference = float(difference.nanquantile(0.9))  # documents with too large a rate end in NaN
            print(f"captured {len(inputs)} documents, {difference:.1e} apart", flush=True)
            self.captures = difference < ALIKE
            self.graph = graph if self.captures else None
        return losses, state
