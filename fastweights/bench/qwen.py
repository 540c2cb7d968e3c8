"""Hugging Face's Qwen3-Next, which is our `gated-delta` model by another hand: its delta rule, and the whole of it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.attention import NORM_EPS
from fastweights.core import FastWeightError
from fastweights.models.blocks import EPS
from fastweights.models.language_model import LanguageModel
from fastweights.torch import feature_map, nn


def _theirs() -> Any:
    """The module of Qwen3-Next; FastWeightError where transformers is not installed.

    Its delta rule in plain PyTorch is the baseline: what runs where nobody has installed kernels.
    """
    try:
        from transformers import logging
        from transformers.models.qwen3_next import modeling_qwen3_next
    except ImportError:
        raise FastWeightError(
            "bench lm compares with transformers, which is not installed; pip install transformers"
        ) from None
    logging.set_verbosity_error()  # it says at length that it runs without kernels: that is what is timed
    return modeling_qwen3_next


@contextmanager
def their_rule() -> Iterator[None]:
    """Our layers with the delta rule that Qwen3-Next runs without kernels, until the block ends.

    The function takes ours' arguments: it maps q and k first, and undoes the division by sqrt(K) of theirs.

    Both rules then see the same q, k, v, beta and decay, so that the difference in time is the rule's alone.
    """
    # Transformers wraps it in a decorator that would look for kernels first.
    rule = inspect.unwrap(_theirs().torch_chunk_gated_delta_rule)

    def fast_weight(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        beta: Any,
        log_decay: Any,
        state: Any,
        features: str = "identity",
        norm: Any = "none",
        **_: Any,
    ) -> Any:
        q, k = (feature_map(x, features, norm=norm) for x in (q, k))
        g = torch.zeros_like(beta) if log_decay is None else log_decay
        return rule(
            q * q.shape[-1] ** 0.5,
            k,
            v,
            g=g,
            beta=beta,
            chunk_size=64,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=False,
        )

    # Layers look the operation up when they are called: replacing it in one place reaches all of them.
    ours = nn.OPS
    nn.OPS = ours._replace(fast_weight=fast_weight)
    try:
        yield
    finally:
        nn.OPS = ours


@torch.no_grad()
def their_model(ours: LanguageModel) -> Any:
    """Qwen3-Next without softmax layers or experts, with the sizes and weights of our gated-delta model.

    The two then give the same loss, and what is timed is how each computes it.

    Args:
        ours: a gated-delta model without dropout; its weights are copied.
    """
    theirs = _theirs()
    c, width = ours.config, ours.config.dim // ours.config.heads
    # Every layer is linear attention, every feed-forward dense: what is left is our model.
    model = theirs.Qwen3NextForCausalLM(
        theirs.Qwen3NextConfig(
            vocab_size=ours.vocab,
            hidden_size=c.dim,
            num_hidden_layers=c.depth,
            tie_word_embeddings=True,
            use_cache=False,
            layer_types=["linear_attention"] * c.depth,
            mlp_only_layers=list(range(c.depth)),
            num_experts=0,
            intermediate_size=ours.blocks[0].feed_forward.out.in_features,
            rms_norm_eps=EPS,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=width,
            linear_value_head_dim=width,
            linear_num_key_heads=c.heads,
            linear_num_value_heads=c.heads,
            head_dim=width,
            num_attention_heads=c.heads,
            num_key_value_heads=c.heads,
        )
    )
    # Their RMS norms scale by 1 + w where ours scale by w.
    weights = {"model.embed_tokens.weight": ours.embedding.weight, "model.norm.weight": ours.norm.weight - 1}
    weights["lm_head.weight"] = ours.embedding.weight
    for i, block in enumerate(ours.blocks):
        weights |= {f"model.layers.{i}.{name}": x for name, x in _layer(block, c.heads).items()}
        # Their queries are shorter by sqrt(K), so the same epsilon would weigh more.
        model.model.layers[i].linear_attn.norm.variance_epsilon = NORM_EPS / width  # their queries are shorter
    model.load_state_dict(weights)
    return model


def _layer(block: Any, heads: int) -> dict[str, Tensor]:
    """The weights of one block by their names; theirs scale by 1 + w in the norms, and lie head by head.

    Args:
        block: of our model, a Gated DeltaNet layer and a SwiGLU feed-forward.
        heads: of the layer.
    """
    layer, mixer = block.mixer.layer, "linear_attn."
    widths = layer.config.sections
    # Our one input projection is two of theirs, in which each head's parts lie together.
    q, k, v, gate, beta, decay = layer.in_proj.weight.split(
        [widths[n] for n in ("q", "k", "v", "gate", "beta", "decay")]
    )
    by_head = lambda *parts: torch.cat([x.unflatten(0, (heads, -1)) for x in parts], 1).flatten(0, 1)  # noqa: E731
    into = dict(zip(("gate", "up"), block.feed_forward.into.weight.chunk(2), strict=True))
    return {
        "input_layernorm.weight": block.norm1.weight - 1,
        "post_attention_layernorm.weight": block.norm2.weight - 1,
        "mlp.gate_proj.weight": into["gate"],
        "mlp.up_proj.weight": into["up"],
        "mlp.down_proj.weight": block.feed_forward.out.weight,
        mixer + "in_proj_qkvz.weight": by_head(q, k, v, gate),
        mixer + "in_proj_ba.weight": by_head(beta, decay),
        mixer + "conv1d.weight": layer.conv.mT[:, None],
        mixer + "dt_bias": layer.decay_bias,
        mixer + "A_log": layer.decay_log,
        mixer + "norm.weight": layer.out_norm,
        mixer + "out_proj.weight": layer.out_proj.weight,
    }
