"""The libraries a user would pick instead. Each adapter returns a contestant, or the reason there is none."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from fastweights.bench.case import Case, Contestant


@dataclass(frozen=True)
class Peer:
    """A library a user would pick instead.

    Attributes:
        name: as tables call it.
        module, package: what is imported, and what pip installs.
        enter: enter(case, name) makes a contestant or says why not; called only when the module can be found.
    """

    name: str
    module: str
    package: str
    enter: Callable[[Case, str], Contestant | str]

    def contestant(self, case: Case) -> Contestant | str:
        """The peer in this case, or why not."""
        if find_spec(self.module):
            return self.enter(case, self.name)
        return f"not installed (pip install {self.package})"


def _load(module: str, name: str) -> Callable | str:
    """A function of a peer, or why it cannot be had: other people's imports fail in many ways.

    module, name: where it is and what it is called.
    """
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        return f"{module}.{name} does not load: {type(error).__name__}: {error}"


def _hugging_face(case: Case, name: str) -> Contestant | str:
    """The chunked delta rule in PyTorch that Qwen3-Next runs when no kernels are installed, with a decay per channel
    that of Kimi Linear. It divides q by sqrt(K).
    """
    if case.rule != "delta":
        return "delta rule only"
    models = "transformers.models."
    if case.decay == "channel":
        load = _load(models + "kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention")
    else:
        load = _load(models + "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    if isinstance(load, str):
        return load
    rule = inspect.unwrap(load)  # the PyTorch function itself: no notice, no kernels in its place

    def to_native(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> tuple[Tensor, ...]:
        return q * q.shape[-1] ** 0.5, k, v, torch.zeros_like(beta) if log_decay is None else log_decay, beta

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            chunk_size=64,
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=False,
        )

    return Contestant(name, call, to_native)


FLA = {  # module and function by rule and decay
    ("sum", "none"): ("fla.ops.linear_attn", "chunk_linear_attn"),
    ("sum", "head"): ("fla.ops.simple_gla", "chunk_simple_gla"),
    ("sum", "channel"): ("fla.ops.gla", "chunk_gla"),
    ("delta", "none"): ("fla.ops.delta_rule", "chunk_delta_rule"),
    ("delta", "head"): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("delta", "channel"): ("fla.ops.kda", "chunk_kda"),
}


def _flash_linear_attention(case: Case, name: str) -> Contestant | str:
    """FLA's Triton kernels."""
    if case.device != "cuda":
        return "CUDA only"
    if case.rule == "delta":
        if case.dtype == "float32":
            return "its delta rule refuses float32"
        if case.key_width > 256:
            return "its delta rule refuses keys wider than 256"
        # A crash of the process cannot be caught, so such cases are not tried.
        if case.key_width & (case.key_width - 1):
            return "its backward dies with an illegal memory access where K is no power of two, and the process with it"
    run = _load(*FLA[case.rule, case.decay])
    if isinstance(run, str):
        return run
    more = dict(normalize=False) if (case.rule, case.decay) == ("sum", "none") else {}

    def call(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rates = {name: x for name, x in (("g", log_decay), ("beta", beta)) if x is not None}
        return run(q, k, v, **rates, scale=1.0, output_final_state=True, **more)

    return Contestant(name, call)


def _fast_transformers(case: Case, name: str) -> Contestant | str:
    """idiap's compiled causal product, in the layout (B, H, T, D)."""
    if case.rule != "sum":
        return "sum rule only"
    if case.decay != "none":
        return "no decay"
    if case.dtype != "float32":
        return "float32 only"
    product = _load("fast_transformers.causal_product", "causal_dot_product")
    if isinstance(product, str):
        return product
    if case.device == "cuda" and _load("fast_transformers.causal_product", "causal_dot_product_cuda") is None:
        return "built without CUDA"
    return Contestant(name, lambda q, k, v, *_: (product(q, k, v), None), _heads_first, _heads_last)


def _softmax(case: Case, name: str) -> Contestant | str:
    """Causal softmax attention: another function, for scale."""

    def call(q: Tensor, k: Tensor, v: Tensor, *_: None) -> tuple[Tensor, None]:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), None

    return Contestant(name, call, _heads_first, _heads_last, comparable=False)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v as (B, H, T, D), contiguous; rates and decays are not used."""
    return tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))


def _heads_last(o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """An output (B, H, T, D) in our layout again."""
    return o.transpose(1, 2), state


PEERS = (
    Peer("Hugging Face", "transformers", "transformers", _hugging_face),
    Peer("FLA", "fla", "flash-linear-attention", _flash_linear_attention),
    Peer("fast-transformers", "fast_transformers", "pytorch-fast-transformers", _fast_transformers),
)
SOFTMAX = Peer("softmax", "torch", "torch", _softmax)
