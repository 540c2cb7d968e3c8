"""Heads other than the next token, as the ecosystem's own: classification of texts and tokens, question answering."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from fastweights.hf.model import FastWeightPreTrainedModel


class FastWeightForSequenceClassification(GenericForSequenceClassification, FastWeightPreTrainedModel):
    """A label for a text, from its last token."""


class FastWeightForTokenClassification(GenericForTokenClassification, FastWeightPreTrainedModel):
    """A label for each token."""


class FastWeightForQuestionAnswering(GenericForQuestionAnswering, FastWeightPreTrainedModel):
    """Where in a text the answer starts and ends."""

    base_model_prefix = "model"
