"""GPT-2 of transformers, with any head: attention by heads, MLPs by hidden units, embedding by the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

BLOCK = "**.h.*"
EMBEDDINGS = ("transformer.wte", "transformer.wpe", "transformer.drop")


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; with cross attention nothing is split. The language model's forward pass is a chain."""
    if "transformers.models.gpt2.modeling_gpt2.GPT2PreTrainedModel" not in class_names(model):
        return None
    crossed = any(name.endswith("crossattention") for name, _ in model.named_modules())
    plan = {} if crossed else _plan()
    return Hints((BLOCK,), _chain(model), {":embed": EMBEDDINGS}, plan, {":embed": _embed})


def _chain(model: Any) -> tuple[str, ...] | None:
    """Return the steps; eager attention is causal by its mask alone, which a block by itself does not have."""
    language = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel" in class_names(model)
    if not language or model.config._attn_implementation == "eager":
        return None
    return (":embed", "transformer.h.*", "transformer.ln_f", "lm_head")


def _embed(model: Any, tokens: Tensor) -> Tensor:
    """Map ids (N, T) to (N, T, D), as `GPT2Model.forward` does at its start."""
    body = model.transformer
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    found: Tensor = body.drop(body.wte(tokens) + body.wpe(positions))
    return found


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
