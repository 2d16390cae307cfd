"""BERT of transformers, with any head: attention by heads, MLPs by hidden units, word embeddings by the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

LAYER = "**.encoder.layer.*"


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; with cross attention nothing is split. Without masks the forward pass is a chain."""
    if "transformers.models.bert.modeling_bert.BertPreTrainedModel" not in class_names(model):
        return None
    crossed = any(name.endswith("crossattention") for name, _ in model.named_modules())
    return Hints((LAYER,), _chain(model), {}, {} if crossed else _plan())


def _chain(model: Any) -> tuple[str, ...] | None:
    """Return the steps; a decoder's attention needs a mask, and other heads use more than the last tokens."""
    names = class_names(model)
    body = ("bert.embeddings", "bert.encoder.layer.*")
    if model.config.is_decoder:
        return None
    if "transformers.models.bert.modeling_bert.BertForSequenceClassification" in names:
        return (*body, "bert.pooler", "dropout", "classifier")
    return (*body, "cls") if "transformers.models.bert.modeling_bert.BertForMaskedLM" in names else None


def _plan() -> dict[str, str]:
    return {
        "**.embeddings.word_embeddings": "vocabulary",
        "**.predictions.decoder": "vocabulary",
        f"{LAYER}.attention.self": "heads",
        f"{LAYER}.attention.self.query": "column",
        f"{LAYER}.attention.self.key": "column",
        f"{LAYER}.attention.self.value": "column",
        f"{LAYER}.attention.output.dense": "row",
        f"{LAYER}.attention.output.LayerNorm": "sequence",
        f"{LAYER}.intermediate.dense": "column",
        f"{LAYER}.output.dense": "row",
        f"{LAYER}.output.LayerNorm": "sequence",
    }
