"""Loss and gradients of a training step: as they come, or as one CUDA graph, one launch in the place of hundreds.

A step of a small model takes the host longer to launch than the device to compute. The first step of its shapes runs as
it is, the second is captured and later ones are replayed. Clipping and the optimiser follow as ever, on gradients that
the graph leaves where they are.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.fwl_config import FWLConfig
from fastweights.models.compiled import How
from fastweights.models.config import Config
from fastweights.models.documents import Documents
from fastweights.models.language_model import State
from fastweights.torch import graphs
from fastweights.torch.devices import copied
from fastweights.torch.learning.training_loss import unfit
from fastweights.torch.packing import fixed_shapes
from fastweights.torch.tree import flatten, unflatten
from fastweights.training.objective import Objective

CONTIGUOUS = torch.contiguous_format
MOST = 4  # graphs that are kept; they share their memory

Batch = tuple[Tensor, Tensor, Tensor, Documents]  # tokens, labels, weights (B, T), and where documents start


def said(reason: str | None) -> str:
    """How the kernels of a step come to run, in words.  reason: why they are not captured, or None."""
    return f"launched one by one ({reason})" if reason else "captured as one CUDA graph"


class Gradients:
    """Adds the gradients of a batch to those that the parameters have.

    Args:
        objective: an `Objective`, wrapped or not.
        autocast: context of its forward pass.
    """

    reason: str | None = None  # why nothing is captured

    def __init__(self, objective: nn.Module, autocast: Any, reason: str | None = None):
        self.objective, self.autocast, self.reason = objective, autocast, reason

    def __call__(self, batch: Batch, state: State, scale: float) -> tuple[Tensor, State]:
        """The loss without gradient, and the state after the batch.

        Args:
            batch: tokens, labels, weights, documents.
            state: carried from the batch before.
            scale: what the objective is multiplied by.
        """
        with self.autocast:
            trained, loss, state = self.objective(*batch[:3], state, batch[3])
        (trained * scale).backward()
        return loss, state

    def __str__(self) -> str:
        return said(self.reason)


def refuses(config: Config, layer: FWLConfig | None, how: How, device: str) -> str | None:
    """Why steps of this run are not captured, or None.  layer: the Fast Weight Layer's, None where there is none.

    Examples:
        >>> refuses(Config(), None, How(False, "as --no-compile says"), "cuda")
        'blocks are not compiled'
    """
    if not device.startswith("cuda"):
        return "there is no GPU"
    if torch.version.hip:
        return "graphs were not tried on AMD GPUs"
    if not how.compiled:
        return "blocks are not compiled"
    if config.parallel != "none":
        return f"graphs were not tried with --parallel {config.parallel}"
    if config.accumulate > 1:
        return "gradients of several batches are added up"
    if config.checkpointing:
        return "blocks are computed again in the backward pass"
    if layer is None:
        return None
    if layer.normalizer == "sequence":
        return "the Fast Weight Layer's normalizer is 'sequence'"
    reason = unfit(layer, device.partition(":")[0], config.length)
    return reason and f"the Fast Weight Layer is trained with weights per document: {reason}"


class CapturedGradients(Gradients):
    """The same by a CUDA graph, for batches whose documents are `even`.

    Gradients take the place of those that the parameters have. They, and the state until it is given to the next call,
    lie in the memory of the graph: they are those of the latest call alone.
    """

    def __init__(self, objective: Objective, autocast: Any):
        super().__init__(objective, autocast)
        self.layer = objective.model.fast is not None  # its room depends on the documents of a row
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.known: dict[Hashable, graphs.Graph | str | None] = {}  # None: seen once;  a string: why it cannot be
        self.used: list[nn.Parameter] = []  # those that have a gradient

    def __call__(self, batch: Batch, state: State, scale: float) -> tuple[Tensor, State]:
        """The loss without gradient, and the state after the batch."""
        tokens, labels, weights, documents = batch
        leaves = flatten(state)
        names = [name for name, _ in leaves]
        own = copied(torch.tensor(scale, dtype=torch.float32), tokens.device)
        table = documents.starts, documents.first, documents.last, documents.keep, documents.even.cu_seqlens
        inputs = (tokens, labels, weights, own, *table, *(x for _, x in leaves))
        most = max(2, documents.most) if self.layer else 0

        def work(*given: Tensor) -> tuple[Tensor, ...]:
            return self._work(most, state, names, *given)

        loss, *rest = self._run((most, tuple((x.shape, x.dtype) for x in inputs)), work, inputs)
        for p, grad in zip(self.used, rest, strict=False):
            p.grad = grad
        return loss, unflatten(state, dict(zip(names, rest[len(self.used) :], strict=True)))

    def _run(self, key: Hashable, work: graphs.Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """work(*inputs), captured the second time and replayed from then on."""
        found = self.known.get(key)
        if key in self.known and found is None:
            while len(self.known) > MOST:
                del self.known[next(iter(self.known))]
            others = [known.graph.pool() for known in self.known.values() if isinstance(known, graphs.Graph)]
            found = graphs.capture(work, inputs, others[0] if others else None)
            torch.cuda.empty_cache()  # steps are in the graph's own memory now
            self.reason = f"capturing failed: {found}" if isinstance(found, str) else self.reason
        self.known[key] = found
        return graphs.replay(found, inputs) if isinstance(found, graphs.Graph) else work(*inputs)

    def _work(
        self,
        most: int,
        state: State,
        names: list[str],
        tokens: Tensor,
        labels: Tensor,
        weights: Tensor,
        scale: Tensor,
        starts: Tensor,
        first: Tensor,
        last: Tensor,
        keep: Tensor,
        offsets: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        """(loss, the gradients of parameters that have one, the tensors of the state), from tensors alone.

        Args:
            most: room for documents in a row, of a Fast Weight Layer.
            state, names: the form of a state, and the names of its tensors.
            tokens, labels, weights: (B, T).
            scale: what the objective is multiplied by.
            starts, first, last, keep, offsets: of Documents; the offsets are those of `even` ones.
            leaves: the tensors of the state.
        """
        offsets = offsets.clone()  # tables are remembered with the tensor, and must be worked out in every replay
        even = Documents(starts, offsets, first, last, keep, whole=False)
        state = unflatten(state, dict(zip(names, leaves, strict=True)))
        with torch.enable_grad(), fixed_shapes():
            with self.autocast:
                documents = even._replace(even=even, most=most)
                trained, loss, state = self.objective(tokens, labels, weights, state, documents)
            grads = torch.autograd.grad(trained * scale, self.parameters, allow_unused=True)
        self.used = [p for p, grad in zip(self.parameters, grads, strict=True) if grad is not None]
        return loss, *_apart([grad for grad in grads if grad is not None]), *(x for _, x in flatten(state))


def _apart(grads: list[Tensor]) -> list[Tensor]:
    """The gradients, each in memory of its own, since clipping changes them in place."""
    found, memory = list[Tensor](), set[int]()
    for grad in grads:
        at = grad.untyped_storage().data_ptr()
        found.append(grad if grad.is_contiguous() and at not in memory else grad.clone(memory_format=CONTIGUOUS))
        memory.add(at)
    return found
