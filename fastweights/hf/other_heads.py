"""Heads other than the next token, as the ecosystem's own: classification of texts and tokens, question answering."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from fastweights.hf.model import FastWeightPreTrainedModel


class FastWeightForSequenceClassification(GenericForSequenceClassification, FastWeightPreTrainedModel):
    """A label for a text, from its last token: tokens (B, T) -> logits (B, num_labels)."""


class FastWeightForTokenClassification(GenericForTokenClassification, FastWeightPreTrainedModel):
    """A label for each token: tokens (B, T) -> logits (B, T, num_labels)."""


class FastWeightForQuestionAnswering(GenericForQuestionAnswering, FastWeightPreTrainedModel):
    """Where in a text the answer starts and ends: tokens (B, T) -> start_logits and end_logits (B, T)."""

    base_model_prefix = "model"
