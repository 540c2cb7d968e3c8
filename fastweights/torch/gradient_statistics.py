"""How large the gradients of a model's weights are over training data: what dynamic evaluation scales its steps by."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.files import replacing
from fastweights.torch.dtypes import wide

Call = Callable[[nn.Module, Tensor, Any], tuple[Tensor, Any]]


def call_model(model: nn.Module, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """(logits (B, T, V), state) of a language model: a Hugging Face one, or one that returns logits, or both."""
    out = model(tokens) if state is None else model(tokens, state)
    if hasattr(out, "logits"):
        return out.logits, None
    return out if isinstance(out, tuple) else (out, None)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (B, T) in nats of logits (B, T, V)."""
    return nn.functional.cross_entropy(wide(logits).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def track(items: Iterable, name: str, show: bool) -> Iterable:
    """The items, with a progress bar of this name where it is to be shown."""
    if not show:
        return items
    from rich import progress

    return progress.track(items, description=name)


def evaluating(model: nn.Module) -> None:
    """Put a model into evaluation mode, in which it can still be differentiated.

    cuDNN's recurrent layers have gradients in training mode alone, which without dropout means nothing else to them.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not module.dropout:
            module.train()


class GradientStatistics(dict[str, Tensor]):
    """Mean squared gradients by parameter name, over `batches` batches of training data.

    The rules "rms" and "rms-sum" of `DynamicEvaluation` divide by their roots, so that each weight takes steps of a
    size that suits it. Collect them once per model, and keep them beside it.

        >>> from fastweights.torch import DynamicEvaluation
        >>> model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
        >>> statistics = GradientStatistics.collect(model, [torch.randint(20, (4, 32)) for _ in range(3)])
        >>> statistics.batches, statistics["1.weight"].shape
        (3, torch.Size([20, 16]))
        >>> dynamic = DynamicEvaluation(model, rule="rms", lr=1e-3, statistics=statistics)
    """

    batches: int = 0

    @classmethod
    def collect(
        cls, model: nn.Module, data: Iterable[Tensor], *, call: Call = call_model, progress: bool = False
    ) -> "GradientStatistics":
        """Over batches of training tokens (B, T), with the model in evaluation mode.

        Args:
            model: a language model, as for `DynamicEvaluation`.
            data: batches; a few dozen are enough.
            call: how to call an unusual model.
            progress: show a bar.
        """
        found, training = cls(), model.training
        evaluating(model)
        try:
            for tokens in track(data, "gradient statistics", progress):
                loss = token_losses(call(model, tokens[:, :-1], None)[0], tokens[:, 1:]).mean()
                named = {n: p for n, p in model.named_parameters() if p.requires_grad}
                grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                for (name, p), g in zip(named.items(), grads, strict=True):
                    found[name] = found.get(name, torch.zeros_like(p)) + (0 if g is None else g.detach() ** 2)
                found.batches += 1
        finally:
            model.train(training)
        if not found.batches:
            raise FastWeightError("data has no batches; expected at least one batch of training tokens (B, T)")
        for name in found:
            found[name] /= found.batches
        return found

    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file, which appears when it is complete."""
        from safetensors.torch import save_file

        with replacing(Path(path)) as temporary:
            save_file({n: x.contiguous() for n, x in self.items()}, temporary, metadata={"batches": str(self.batches)})

    @classmethod
    def load(cls, path: str | Path) -> "GradientStatistics":
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            found = cls({n: file.get_tensor(n) for n in file.keys()})  # noqa: SIM118 - not a dict
            found.batches = int(file.metadata()["batches"])
        return found
