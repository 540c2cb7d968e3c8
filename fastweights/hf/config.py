"""The configuration of a model in the ecosystem's names."""

from typing import Any

from transformers import PreTrainedConfig

from fastweights.core import FastWeightError
from fastweights.models.config import CHOICES, PUBLISHED, Config


class FastWeightConfig(PreTrainedConfig):
    """Everything a FastWeightForCausalLM is, but its weights.

        >>> config = FastWeightConfig(vocab_size=1000, hidden_size=64, mixers=["delta", "delta", "softmax"])
        >>> config.num_hidden_layers
        3

    Args:
        vocab_size: tokens; 257 is every byte and the start of a document.
        hidden_size: width of the features.
        num_attention_heads: memories, or attention heads, per block.
        mixers: the mixer of each block, as in `fastweights train --layers`: a list, or "delta*3,softmax".
        intermediate_size: width of the feed-forward layers; 0 for 4 hidden_size (relu) or 8/3 hidden_size (swiglu).
        feed_forward: "swiglu" or "relu".
        sliding_window: tokens that softmax blocks look back.
        head: "linear", or "fwl", a Fast Weight Layer, which learns from every token it reads.
        fast: its arguments: size (its hidden width; 2 hidden_size when 0), normalizer, step_size, decay, rule, clip.
        adapt: whether it learns while it reads; without, its slow weights answer.
        dropout: share of features dropped after every mixer and feed-forward layer in training.
        use_cache, tie_word_embeddings, pad_token_id, bos_token_id, eos_token_id, kwargs: as of every configuration.
    """

    model_type = "fastweights"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the base class's own form

    def __init__(
        self,
        vocab_size: int = 257,
        hidden_size: int = 128,
        num_attention_heads: int = 4,
        mixers: list[str] | str = "gated-delta*4",
        intermediate_size: int = 0,
        feed_forward: str = "swiglu",
        sliding_window: int = 256,
        head: str = "linear",
        fast: dict[str, Any] | None = None,
        adapt: bool = True,
        dropout: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,  # what every configuration of the ecosystem takes and stores
    ):
        if head not in CHOICES["head"]:
            raise FastWeightError(f"head is {head!r}; expected {' or '.join(map(repr, CHOICES['head']))}")
        kwargs.pop("num_hidden_layers", None)  # the length of mixers
        layers = mixers if isinstance(mixers, str) else ",".join(mixers)
        common: dict[str, Any] = dict(
            tie_word_embeddings=tie_word_embeddings,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
        )
        super().__init__(**common, **kwargs)
        self.vocab_size, self.hidden_size, self.num_attention_heads = vocab_size, hidden_size, num_attention_heads
        self.intermediate_size, self.feed_forward, self.sliding_window = intermediate_size, feed_forward, sliding_window
        self.head, self.fast, self.adapt, self.dropout = head, {"size": 0} | PUBLISHED | (fast or {}), adapt, dropout
        self.use_cache = use_cache
        self.mixers: list[str] = [layers]
        self.mixers = list(self.trunk().mixers)
        self.num_hidden_layers = len(self.mixers)

    def trunk(self) -> Config:
        """The same as the `Config` of `fastweights train`, without its head: what the blocks are made from."""
        return Config(
            layers=",".join(self.mixers),
            dim=self.hidden_size,
            heads=self.num_attention_heads,
            ff=self.feed_forward,
            hidden=self.intermediate_size,
            window=self.sliding_window,
            dropout=self.dropout,
            head="linear",
        )
