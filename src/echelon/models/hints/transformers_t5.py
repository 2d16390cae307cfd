"""T5 of transformers, with any head: MLPs by hidden units. Attention is whole: layers share one bias of all heads."""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; an encoder and a decoder that reads it at every layer are no chain."""
    if "transformers.models.t5.modeling_t5.T5PreTrainedModel" not in class_names(model):
        return None
    mlp = "**.DenseReluDense"
    plan = {f"{mlp}.wi": "column", f"{mlp}.wi_[01]": "column", f"{mlp}.wo": "row"}
    return Hints(("**.block.*",), None, {}, plan)
