"""The hybrid models of transformers that `fastweights bench hf` times: families, sizes, and how one is built."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastweights.core import FastWeightError


class Size(NamedTuple):
    """hidden: width of the model;  heads, width: of the linear layers;  tokens: read;  new: generated."""

    hidden: int
    heads: int
    width: int
    layers: tuple[str, ...]
    tokens: int
    new: int


LAYERS = ("linear_attention", "full_attention")
SIZES = {
    "tiny": Size(64, 4, 16, 2 * LAYERS, tokens=128, new=16),
    "layer": Size(1024, 16, 128, LAYERS, tokens=2048, new=16),
}
SMOKE = {"tiny": Size(32, 2, 8, LAYERS, tokens=20, new=2)}


class Family(NamedTuple):
    """A family of transformers: its module and config there, and the fields of a config that say its linear layers.

    fields: from a size to arguments of the config that only this family has.
    """

    module: str
    config: str
    fields: Callable[[Size], dict[str, Any]]


def _heads(size: Size) -> dict[str, Any]:
    """Fields for the linear layers of the families that name them as Qwen3-Next does."""
    return dict(
        linear_key_head_dim=size.width,
        linear_value_head_dim=size.width,
        linear_num_key_heads=size.heads,
        linear_num_value_heads=size.heads,
    )


def _kimi(size: Size) -> dict[str, Any]:
    """Fields for Kimi Linear: its decay is per channel, and its full attention is compressed to half the width."""
    half = size.width // 2
    return dict(
        linear_head_dim=size.width,
        linear_num_heads=size.heads,
        kv_lora_rank=half,
        qk_rope_head_dim=half,
        qk_nope_head_dim=half,
        v_head_dim=size.width,
        mlp_layer_types=["dense"] * len(size.layers),
    )


FAMILIES = {
    "qwen3-next": Family("qwen3_next", "Qwen3NextConfig", lambda size: _heads(size) | dict(
        head_dim=size.width, num_experts=0, mlp_only_layers=list(range(len(size.layers))))),
    "qwen3.5": Family("qwen3_5", "Qwen3_5TextConfig", lambda size: _heads(size) | dict(head_dim=size.width)),
    "olmo-hybrid": Family("olmo_hybrid", "OlmoHybridConfig", _heads),
    "kimi-linear": Family("kimi_linear", "KimiLinearConfig", _kimi),
}  # fmt: skip


def build(family: str, size: Size, device: str, dtype: torch.dtype) -> Any:
    """A random model of a family; raises FastWeightError where this transformers has none.

    Weights are drawn anew, since some of transformers' own are left as they were allocated when there is no checkpoint.

    Args:
        family: name in FAMILIES.
        size: of the model.
        device, dtype: where it lives and what its weights are.
    """
    try:
        from transformers import AutoModelForCausalLM, logging

        found = FAMILIES[family]
        config_class = getattr(importlib.import_module(f"transformers.models.{found.module}"), found.config)
    except (ImportError, AttributeError):
        raise FastWeightError(f"transformers has no {family} here; pip install --upgrade transformers") from None
    logging.set_verbosity_error()
    config = config_class(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=len(size.layers),
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        layer_types=list(size.layers),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **found.fields(size),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() == 1 or x.isnan().any():  # decays and norms, some of which are left as they were allocated
                x.copy_(torch.rand_like(x) if "A_log" not in name else torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * x.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype)
