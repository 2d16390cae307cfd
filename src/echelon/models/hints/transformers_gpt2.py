"""GPT-2 of transformers, with any head: attention by heads, MLPs by hidden units, embedding by the vocabulary."""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

BLOCK = "**.h.*"


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; with cross attention nothing is split. The forward pass, with its masks, is no chain."""
    if "transformers.models.gpt2.modeling_gpt2.GPT2PreTrainedModel" not in class_names(model):
        return None
    crossed = any(name.endswith("crossattention") for name, _ in model.named_modules())
    return Hints((BLOCK,), None, {}, {} if crossed else _plan())


def _plan() -> dict[str, str]:
    return {
        "**.wte": "vocabulary",
        "lm_head": "vocabulary",
        f"{BLOCK}.attn": "heads",
        f"{BLOCK}.attn.c_attn": "column(parts=3)",
        f"{BLOCK}.attn.c_proj": "row",
        f"{BLOCK}.mlp.c_fc": "column",
        f"{BLOCK}.mlp.c_proj": "row",
        f"{BLOCK}.ln_[12]": "sequence",
    }
