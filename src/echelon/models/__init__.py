"""Models by name, fitted to the data: built-ins, timm, torchvision, and a user's own; weights read from files."""

from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.models.families import hints_for
from echelon.models.logits import give_logits, keep_no_cache
from echelon.models.of_transformers import fill_padding
from echelon.models.pretrained import locate_weights
from echelon.models.registry import (
    auto_name,
    build_model,
    build_untried,
    builtin_names,
    is_chain_by_name,
    leads_to_model,
    parameter_count,
)
from echelon.models.speech_of_transformers import hear_no_padding
from echelon.models.weights import LoadedWeights, load_state, load_weights, read_weights

__all__ = [
    "Hints",
    "LoadedWeights",
    "ModelInput",
    "auto_name",
    "build_model",
    "build_untried",
    "builtin_names",
    "fill_padding",
    "give_logits",
    "hear_no_padding",
    "hints_for",
    "is_chain_by_name",
    "keep_no_cache",
    "leads_to_model",
    "load_state",
    "load_weights",
    "locate_weights",
    "parameter_count",
    "read_weights",
]
