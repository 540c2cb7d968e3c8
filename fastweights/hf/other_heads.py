"""Heads other than the next token, as the ecosystem's own: classification of texts and tokens, question answering."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from fastweights.hf.model import FastWeightPreTrainedModel


class FastWeightForSequenceClassification(GenericForSequenceClassification, FastWeightPreTrainedModel):
    """A label for a text, from its last token: tokens (B, T) -> logits (B, num_labels).

    Examples:
        >>> import torch
        >>> from fastweights.hf import FastWeightConfig
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, mixers="delta", pad_token_id=256)
        >>> model = FastWeightForSequenceClassification(FastWeightConfig(num_labels=3, **sizes))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).logits.shape
        torch.Size([2, 3])
    """


class FastWeightForTokenClassification(GenericForTokenClassification, FastWeightPreTrainedModel):
    """A label for each token: tokens (B, T) -> logits (B, T, num_labels).

        >>> import torch
        >>> from fastweights.hf import FastWeightConfig
        >>> config = FastWeightConfig(num_labels=3, hidden_size=16, num_attention_heads=2, mixers="delta")
        >>> FastWeightForTokenClassification(config)(torch.zeros(2, 8, dtype=torch.long)).logits.shape
        torch.Size([2, 8, 3])

    A memory reads from left to right: a token's label knows nothing of the tokens after it.
    """


class FastWeightForQuestionAnswering(GenericForQuestionAnswering, FastWeightPreTrainedModel):
    """Where in a text the answer starts and ends: tokens (B, T) -> start_logits and end_logits (B, T).

    Examples:
        >>> import torch
        >>> from fastweights.hf import FastWeightConfig
        >>> config = FastWeightConfig(hidden_size=16, num_attention_heads=2, mixers="delta")
        >>> FastWeightForQuestionAnswering(config)(torch.zeros(1, 8, dtype=torch.long)).start_logits.shape
        torch.Size([1, 8])
    """

    base_model_prefix = "model"
