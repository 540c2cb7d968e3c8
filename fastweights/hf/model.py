"""The application's language model as one of the ecosystem: `generate`, `Trainer`, `pipeline` take it as any other."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fastweights.core import FastWeightError
from fastweights.hf.cache import FastWeightCache
from fastweights.hf.config import FastWeightConfig
from fastweights.hf.head import FastHead, HeadConfig
from fastweights.hf.masked import run_block
from fastweights.models.language_model import LanguageModel, State


class FastWeightPreTrainedModel(PreTrainedModel):
    config_class = FastWeightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - the base class's own form
    _is_stateful = True
    accepts_loss_kwargs = True

    def _init_weights(self, module: nn.Module) -> None:
        """Constructors have done it."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


class FastWeightModel(FastWeightPreTrainedModel):
    """Embedding, blocks and norm: tokens (B, T) -> features (B, T, D)."""

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        with torch.device("cpu"):  # `from_pretrained` builds on no device, where the layers' seeds cannot be drawn
            trunk = LanguageModel(config.trunk(), config.vocab_size)
        self.embed_tokens, self.blocks, self.norm = trunk.embedding, trunk.blocks, trunk.norm
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        """attention_mask (B, T) or (B, all tokens so far): 0 for padding, on any side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise FastWeightError("input_ids and inputs_embeds are both given or both absent; expected one of them")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache, len(x))
        state = cache.state if cache is not None and cache.state is not None else self.init_state(len(x))
        mask = real_tokens(attention_mask, x.shape[1])
        after: list[Any] = []
        hidden: list[Any] = [x]
        for block, memory in zip(self.blocks, state.blocks, strict=True):
            if self.gradient_checkpointing and self.training:
                x, memory = self._gradient_checkpointing_func(run_block, block, x, memory, mask)
            else:
                x, memory = run_block(block, x, memory, mask)
            hidden.append(x)
            after.append(memory)
        x = self.norm(x)
        if cache is not None:
            cache.state, cache.seen = State(after, state.fast), cache.seen + x.shape[1]
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*hidden[:-1], x) if wanted else None,
        )
        return out.to_tuple() if return_dict is False else out

    def init_state(self, batch: int) -> State:
        return State([block.mixer.init_state(batch) for block in self.blocks], None)

    def _cache(self, given, use_cache, batch):
        use = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if given is None:
            return FastWeightCache() if use else None
        if not isinstance(given, FastWeightCache):
            raise FastWeightError(f"past_key_values is a {type(given).__name__}; expected a FastWeightCache: the "
                                  "state is no list of keys and values")  # fmt: skip
        if given.state is not None and given.batch_size != batch:
            raise FastWeightError(f"past_key_values has {given.batch_size} rows; expected {batch}, as input_ids has")
        return given


class FastWeightForCausalLM(FastWeightPreTrainedModel, GenerationMixin):
    """A language model with memory of constant size.

    >>> model = FastWeightForCausalLM(FastWeightConfig(hidden_size=16, num_attention_heads=2, mixers="delta*2"))
    >>> out = model(torch.zeros(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long))
    >>> out.logits.shape
    torch.Size([1, 8, 257])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the base class's own form

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        self.model = FastWeightModel(config)
        with torch.device("cpu"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.fast = FastHead(_head(config)) if config.head == "fwl" else None
        nn.init.normal_(self.lm_head.weight, std=config.hidden_size**-0.5)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """labels (B, T): as input_ids, -100 where none is scored; the loss is that of the next token, their mean."""
        before = None if past_key_values is None or past_key_values.state is None else past_key_values.state.fast
        out: Any = self.model(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states
        )
        x, cache = out.last_hidden_state, out.past_key_values
        if self.fast is not None:
            if input_ids is None:
                raise FastWeightError("input_ids is missing; expected tokens: a Fast Weight Layer learns from them, "
                                      "inputs_embeds do not say which they are")  # fmt: skip
            mask = real_tokens(attention_mask, x.shape[1])
            x, fast = self.fast(x, input_ids, self.lm_head.weight, mask=mask, state=before, learn=self.config.adapt)
            if cache is not None:
                cache.state = cache.state._replace(fast=fast)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size,
                                      num_items_in_batch=num_items_in_batch)  # fmt: skip
        whole = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=out.hidden_states)
        return whole.to_tuple() if return_dict is False else whole

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int | Tensor = 0,
        **kwargs: Any,  # what `generate` keeps for other models
    ) -> dict[str, Any]:  # fmt: skip
        """Only what the cache has not seen."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        given: dict[str, Any] = dict(past_key_values=past_key_values, attention_mask=attention_mask,
                                     use_cache=use_cache, logits_to_keep=logits_to_keep)  # fmt: skip
        if inputs_embeds is not None and not seen:
            return given | dict(inputs_embeds=inputs_embeds)
        return given | dict(input_ids=input_ids[:, min(seen, input_ids.shape[1] - 1) :])


def real_tokens(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """(B, T) bool of the last `tokens`, or None where none of them is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise FastWeightError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected (B, T): 0 for padding")
    mask = attention_mask[:, -tokens:].bool()
    if mask.shape[1] != tokens:
        raise FastWeightError(f"attention_mask has {mask.shape[1]} columns; expected at least {tokens}: one per token")
    return None if bool(mask.all()) else mask


def _head(config: FastWeightConfig) -> HeadConfig:
    fast = dict(config.fast)
    size = fast.pop("size") or 2 * config.hidden_size
    return HeadConfig(config.hidden_size, size, mode="between", **fast)
