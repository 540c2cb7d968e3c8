"""Blocks compiled with torch.compile: one kind of block is compiled once and shared by all of that kind.

Only training steps run compiled, and all of them have the same shapes (`Documents.even`), so nothing is compiled anew
when documents start elsewhere, in an evaluation, or when a run goes on.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.private import start_compilers
from fastweights.torch.tree import map_tensors


class How(NamedTuple):
    """Whether blocks are compiled, and why or why not, to be printed.

    Examples:
        >>> str(How(True, "as --compile says"))
        'compiled (as --compile says)'
    """

    compiled: bool
    reason: str

    @property
    def name(self) -> str:
        """One word for tables: "compiled" or "eager"."""
        return "compiled" if self.compiled else "eager"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def decide(config: Config, device: str) -> How:
    """How a run of this configuration trains its blocks.

    Examples:
        >>> str(decide(Config(), "cpu"))
        'eager (blocks are compiled on a GPU unless --compile says otherwise)'
    """
    if config.compile is not None:
        return How(config.compile, "as --compile says" if config.compile else "as --no-compile says")
    if not device.startswith("cuda"):
        return How(False, "blocks are compiled on a GPU unless --compile says otherwise")
    if find_spec("triton") is None:
        return How(False, "torch.compile needs Triton, which is not installed")
    if "lstm" in config.mixers:
        return How(False, "an LSTM is a call of the vendor's library, which leaves nothing to compile")
    if config.parallel != "none":
        return How(False, f"compiled blocks were not tried with --parallel {config.parallel}")
    return How(True, "blocks of a kind share what is compiled; the first step takes longer")


def compile_blocks(model: LanguageModel, backend: str = "inductor") -> None:
    """From now on training steps of the model run its blocks compiled.

    One function is compiled, which takes the block as an argument; so blocks of the same kind share what was compiled,
    and a model of twelve equal blocks compiles one. Shapes are fixed.

    Args:
        model: is changed.
        backend: of torch.compile; "eager" and "aot_eager" compile nothing, for tests.
    """
    for module in model.modules():
        if isinstance(module, FastWeightAttention):
            module.carries_gradients = False  # of its state, see `_run`
    # Padded rows would be copied before and after a layer's own operators, which take them as they are.
    options: Any = {"comprehensive_padding": False} if backend == "inductor" else None
    model.compiled = torch.compile(_run, backend=backend, dynamic=False, options=options)
    if backend == "inductor" and model.embedding.weight.is_cuda:
        start_compilers()


def _run(block: Any, x: Tensor, more: Tensor, state: Any, documents: Any) -> tuple[Tensor, Tensor, Any]:
    """One block on x + more (B, T, D), as its two `halves`: what torch.compile sees.

    What the block before it adds is given by itself, so that the sum, the norm that follows it and their gradients are
    one pass each. Training carries states without gradients. Said here, it spares the compiled backward pass gradients
    of zeros.
    """
    x, more, state = block.halves(x + more, state, documents)
    return x, more, map_tensors(Tensor.detach, state)
