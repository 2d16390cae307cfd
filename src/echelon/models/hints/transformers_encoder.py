"""RoBERTa, DistilBERT and ViT of transformers that classify: their layers follow each other, and one token is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.families import class_names


@dataclass(frozen=True)
class _Encoder:
    layer: str
    chain: tuple[str, ...]
    plan: Mapping[str, str] = field(default_factory=dict)


_BERT_LAYER = {
    ".attention.self": "heads",
    **{f".attention.self.{name}": "column" for name in ("query", "key", "value")},
    ".attention.output.dense": "row",
    ".attention.output.LayerNorm": "sequence",
    ".intermediate.dense": "column",
    ".output.dense": "row",
    ".output.LayerNorm": "sequence",
}
_ROBERTA = _Encoder(
    "**.encoder.layer.*",
    ("roberta.embeddings", "roberta.encoder.layer.*", "classifier"),
    {"**.embeddings.word_embeddings": "vocabulary", **{f"**.encoder.layer.*{k}": v for k, v in _BERT_LAYER.items()}},
)
_DISTILBERT = _Encoder(
    "**.transformer.layer.*",
    ("distilbert.embeddings", "distilbert.transformer.layer.*", ":first", "pre_classifier", "=relu", "dropout",
     "classifier"),
    {
        "**.embeddings.word_embeddings": "vocabulary",
        "**.transformer.layer.*.attention": "heads",
        **{f"**.transformer.layer.*.attention.{name}_lin": "column" for name in "qkv"},
        "**.transformer.layer.*.attention.out_lin": "row",
        "**.transformer.layer.*.ffn.lin1": "column",
        "**.transformer.layer.*.ffn.lin2": "row",
        "**.transformer.layer.*.*_layer_norm": "sequence",
    },
)  # fmt: skip
_VIT = _Encoder(
    "vit.layers.*",
    ("vit.embeddings", "vit.layers.*", "vit.layernorm", ":first", "classifier"),
    {
        "vit.layers.*.attention": "heads",
        **{f"vit.layers.*.attention.{name}_proj": "column" for name in "qkv"},
        "vit.layers.*.attention.o_proj": "row",
        "vit.layers.*.mlp.fc1": "column",
        "vit.layers.*.mlp.fc2": "row",
        "vit.layers.*.layernorm_*": "sequence",
    },
)
_KNOWN: Mapping[str, _Encoder] = {
    "transformers.models.roberta.modeling_roberta.RobertaForSequenceClassification": _ROBERTA,
    "transformers.models.distilbert.modeling_distilbert.DistilBertForSequenceClassification": _DISTILBERT,
    "transformers.models.vit.modeling_vit.ViTForImageClassification": _VIT,
}


def hints(model: nn.Module) -> Hints | None:
    """Return the hints of those classifiers; others, and a ViT whose layers have other names, have none."""
    names = class_names(model)
    known = next((encoder for name, encoder in _KNOWN.items() if name in names), None)
    if known is None or (known is _VIT and not hasattr(getattr(model, "vit", None), "layers")):
        return None
    decodes = getattr(model.config, "is_decoder", False) or getattr(model.config, "add_cross_attention", False)
    chain = None if decodes else known.chain
    return Hints((known.layer,), chain, {}, known.plan, {":first": _first_token})


def _first_token(_: Any, x: Tensor) -> Tensor:
    """Return the state (N, D) of the first token of (N, T, D)."""
    return x[:, 0]
