"""The application's language model as one of the ecosystem: `generate`, `Trainer`, `pipeline` take it as any other."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fastweights.core import FastWeightError
from fastweights.hf import captured, generation
from fastweights.hf.cache import FastWeightCache, Reading
from fastweights.hf.config import FastWeightConfig
from fastweights.hf.head import FastHead, HeadConfig
from fastweights.hf.inputs import packing_of, real_tokens, text_starts
from fastweights.models.blocks import EPS, Block
from fastweights.models.language_model import State
from fastweights.torch.tree import map_tensors


class FastWeightBlock(GradientCheckpointingLayer, Block):
    """A block of the application, with the ecosystem's switch for checkpointing."""


class FastWeightPreTrainedModel(PreTrainedModel):
    """What all our models of the ecosystem share: their configuration, initial weights and abilities."""

    config_class = FastWeightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FastWeightBlock"]  # noqa: RUF012 - the base class's own form
    _supports_sdpa = True  # what softmax blocks run
    accepts_loss_kwargs = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights that a checkpoint lacks get their documented initial values; what it has stays as it is."""
        reset: Any = getattr(module, "reset_parameters", None)
        tensors = [*module.parameters(), *module.buffers()]
        loaded = [x for x in tensors if getattr(x, "_is_hf_initialized", False)]
        if reset is None or len(loaded) == len(tensors):
            return
        kept = [x.clone() for x in loaded]
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            weight: Any = module.weight
            weight.normal_(std=self.config.hidden_size**-0.5)
        else:
            reset()
        for x, old in zip(loaded, kept, strict=True):
            x.copy_(old)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: a list of keys and values is not what these models remember. They make their own cache."""
        return False


class FastWeightModel(FastWeightPreTrainedModel):
    """Embedding, blocks and norm: tokens (B, T) -> features (B, T, D).

        >>> model = FastWeightModel(FastWeightConfig(hidden_size=16, num_attention_heads=2, mixers="delta*2"))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 8, 16])

    Args:
        config: a `FastWeightConfig`.
    """

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        trunk = config.trunk()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(FastWeightBlock(trunk, name) for name in trunk.mixers)
        self.norm = nn.RMSNorm(config.hidden_size, EPS)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Replace it."""
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,  # of packed batches, see inputs.py; others are refused
    ) -> BaseModelOutputWithPast | tuple:
        """Features of tokens, or of embeddings, and the cache after them.

        Args:
            input_ids: (B, T) tokens; or inputs_embeds (B, T, D), one of the two.
            attention_mask: (B, T) or (B, all tokens so far): 0 for padding, on any side.
            position_ids: (B, T). Memories need none, but where they do not go on by 1, another text starts.
            past_key_values: a `FastWeightCache`, to go on with the same texts.
            use_cache: whether to return one; as the configuration says when absent, and not in training.
            output_hidden_states: return the output of every block too.
            output_attentions: must not be True: a memory has no attention weights.
            kwargs: cu_seq_lens_q or seq_idx of packed batches; others are refused.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise FastWeightError("input_ids and inputs_embeds are both given or both absent; expected one of them")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise FastWeightError("output_attentions is True; expected False: a memory has no attention weights")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache, new = self._cache(past_key_values, use_cache, len(x)), x.shape[1]
        state = None if cache is None else cache.state
        # Tokens of a rejected draft that stay are read again before the new ones.
        if cache is not None and cache.again is not None:
            x = torch.cat([cache.again.x.to(x), x], 1)
        if cache is not None and cache.recording:
            cache.readings.append(Reading(state, x))
        mask = real_tokens(attention_mask, x.shape[1])
        documents = text_starts(x, mask, position_ids, packing_of(kwargs))
        after: list[Any] = []
        hidden: list[Any] = [x]
        blocks = [None] * len(self.blocks) if state is None else state.blocks
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        alone = mask is None and documents is None and not wanted
        if alone and captured.refuses(self.blocks, self.norm, x, blocks) is None:
            x, after = captured.step(self.blocks, self.norm, x, blocks)
        else:
            for block, memory in zip(self.blocks, blocks, strict=True):
                x, memory = block(x, memory, documents, mask if documents is None else None)
                hidden.append(x)
                after.append(memory)
            x = self.norm(x)
        if cache is not None:
            cache.state = State(after, None if state is None else state.fast)
            cache.seen, cache.again = cache.seen + new, None
        hidden = [x[:, -new:] for x in (*hidden[:-1], x)] if x.shape[1] > new else [*hidden[:-1], x]
        out = BaseModelOutputWithPast(
            last_hidden_state=hidden[-1],
            past_key_values=cache,
            hidden_states=tuple(hidden) if wanted else None,
        )
        return out if _dict_wanted(self.config, return_dict) else out.to_tuple()

    def _cache(self, given, use_cache, batch):
        """The cache to go on with or to fill, or None."""
        use = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if given is None:
            return FastWeightCache() if use else None
        if not isinstance(given, FastWeightCache):
            raise FastWeightError(
                f"past_key_values is a {type(given).__name__}; expected a FastWeightCache, or None "
                "to have one made: the state is no list of keys and values"
            )
        if given.state is not None and given.batch_size != batch:
            raise FastWeightError(f"past_key_values has {given.batch_size} rows; expected {batch}, as input_ids has")
        return given


class FastWeightForCausalLM(FastWeightPreTrainedModel, GenerationMixin):
    """A language model with memory of constant size, which `generate`, `Trainer` and `pipeline` take as any other.

        >>> model = FastWeightForCausalLM(FastWeightConfig(hidden_size=16, num_attention_heads=2, mixers="delta*2"))
        >>> out = model(torch.zeros(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long))
        >>> out.logits.shape
        torch.Size([1, 8, 257])
        >>> model.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])

    Args:
        config: a `FastWeightConfig`; with head="fwl" the output learns from every token that the model reads.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the base class's own form

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        self.model = FastWeightModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fast = FastHead(_head(config)) if config.head == "fwl" else None
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The matrix from features to logits."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace it."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,  # of packed batches, see inputs.py; others are refused
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, the loss where labels are given, and the cache.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as of `FastWeightModel`.
            labels: (B, T), as input_ids, -100 where none is scored; the loss is that of the next token, their mean.
            logits_to_keep: how many of the last tokens, or which, get logits; 0 for all.
            num_items_in_batch: what the summed loss is divided by, where a batch is a part of a larger one.
            shift_labels: (B, T), labels that are shifted by one token already.
        """
        packing = packing_of(kwargs)
        given = past_key_values if isinstance(past_key_values, FastWeightCache) else FastWeightCache()
        before, again = None if given.state is None else given.state.fast, given.again
        out: Any = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            output_attentions,
            True,
            **packing,
        )
        x, cache = out.last_hidden_state, out.past_key_values
        # The Fast Weight Layer learns from the tokens as they are read; packed texts each by themselves.
        if self.fast is not None:
            new, tokens = x.shape[1], self._tokens_of(inputs_embeds) if input_ids is None else input_ids
            if again is not None and again.features is not None and again.tokens is not None:
                x, tokens = torch.cat([again.features, x], 1), torch.cat([again.tokens, tokens], 1)
            mask = real_tokens(attention_mask, x.shape[1])
            features, fast = self._learn(x, tokens, before, mask, text_starts(x, mask, position_ids, packing))
            if cache is not None:  # made anew: torch.compile of PyTorch 2.11 cannot return what `_replace` makes
                cache.state = State(cache.state.blocks, fast)
                if cache.recording:
                    last = cache.readings[-1]
                    cache.readings[-1] = Reading(last.state, last.x, tokens, x)
            x = features[:, -new:]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        whole = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=out.hidden_states)
        return whole if _dict_wanted(self.config, return_dict) else whole.to_tuple()

    def _learn(self, x, tokens, state, mask, documents):
        """What the Fast Weight Layer makes of the features, and what it knows after them."""
        head: Any = self.fast
        with _loaded(self.lm_head):
            unembed = self.lm_head.weight
            if documents is None:
                return head(x, tokens, unembed, mask=mask, state=state, learn=self.config.adapt)
            rows = documents.to_rows(x), documents.to_rows(tokens)
            entered = head.init_state(len(x)) if state is None else state
            y, after = head(
                *rows,
                unembed,
                mask=documents.real,
                state=map_tensors(documents.enter, entered),
                learn=self.config.adapt,
            )
            return documents.from_rows(y), map_tensors(documents.leave, after)

    def _tokens_of(self, x):
        """Tokens (B, T) that these are the embeddings of, to learn from; -1 where they are of none."""
        weight = self.model.embed_tokens.weight
        nearest = (x @ weight.mT - 0.5 * weight.square().sum(-1)).argmax(-1)
        return torch.where((weight[nearest] == x).all(-1), nearest, -1)

    def init_continuous_batching(self, *args: Any, **how: Any) -> Any:
        """Refused with a FastWeightError: continuous batching pages keys and values, which a memory does not keep."""
        raise FastWeightError(
            "continuous batching is asked for; expected `generate` with a batch: its pages hold keys "
            "and values, which a memory does not have"
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **given: Any,  # of the forward pass
    ) -> Any:
        """Greedy decoding and sampling: by our loop, which does not wait for the device, wherever it serves."""
        call = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        return generation.sample(self, super()._sample, *call, given)

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **how: Any) -> dict[str, Any]:
        """The state that a compiled forward returned is copied: with CUDA graphs, the next call overwrites it."""
        cache = outputs.get("past_key_values")
        if isinstance(cache, FastWeightCache) and _compiled(self):
            cache.state = map_tensors(Tensor.clone, cache.state)
        return super()._update_model_kwargs_for_generation(outputs, *args, **how)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict, *args: Any, **how: Any
    ) -> None:
        """`generate` starts with our cache, whose size is constant whatever it is asked to be."""
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic", "dynamic_full", "static"):
            raise FastWeightError(
                f"cache_implementation is {wanted!r}; expected None: the state of this model has a "
                "constant size and is a FastWeightCache"
            )
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, FastWeightCache):
            cache.temporary = False
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FastWeightCache()
            model_kwargs["past_key_values"].temporary = True
            drafted = GenerationMode.ASSISTED_GENERATION in args or wanted == "dynamic_full"  # of older assistants
            if generation_config.is_assistant or drafted:
                model_kwargs["past_key_values"].activate_past_recording()


def _compiled(model):
    """Whether torch.compile made the forward that calls of this model run."""
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def _dict_wanted(config, return_dict):
    """Whether an output with names is wanted, rather than a tuple."""
    return config.return_dict if return_dict is None else return_dict


def _loaded(module):
    """The module's weights where they are used; they are elsewhere when `device_map` offloads them."""
    if not module.weight.is_meta or not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def _head(config: FastWeightConfig) -> HeadConfig:
    """The configuration of the Fast Weight Layer."""
    fast = dict(config.fast)
    size = fast.pop("size") or 2 * config.hidden_size
    return HeadConfig(config.hidden_size, size, **fast)
