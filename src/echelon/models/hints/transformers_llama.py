"""Llama, Mistral, Qwen2 and Qwen3 of transformers: attention by heads, gated MLPs by hidden units."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

KINDS = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2",
         "qwen3.modeling_qwen3.Qwen3")  # fmt: skip
LAYER = "**.layers.*"


def hints(model: nn.Module) -> Hints | None:
    """Return the hints. A language model's forward pass is a chain where attention needs no mask to be causal."""
    names = class_names(model)
    if not any(f"transformers.models.{kind}PreTrainedModel" in names for kind in KINDS):
        return None
    language = any(f"transformers.models.{kind}ForCausalLM" in names for kind in KINDS)
    config: Any = model.config
    if not language or config._attn_implementation != "sdpa":
        return Hints((LAYER,), None, {}, _plan())
    steps = {f":layer{i}": i for i in range(config.num_hidden_layers)}
    glue = {step: (f"model.layers.{i}", "model.rotary_emb") for step, i in steps.items()}
    functions = {step: partial(_layer, number=i) for step, i in steps.items()}
    return Hints((LAYER,), ("model.embed_tokens", *steps, "model.norm", "lm_head"), glue, _plan(), functions)


def _layer(model: Any, x: Tensor, number: int) -> Tensor:
    """Run one layer on activations (N, T, D) with the angles of their positions, as the model's `forward` does.

    Raises:
        ValueError: there are more tokens than the window of tokens that a layer sees.
    """
    window = getattr(model.config, "sliding_window", None)
    if window is not None and x.shape[1] > window:
        raise ValueError(f"{x.shape[1]} tokens are more than sliding_window={window}, which needs a mask")
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    angles = model.model.rotary_emb(x, positions)
    layer = model.get_submodule(f"model.layers.{number}")
    found: Tensor | tuple[Tensor] = layer(x, attention_mask=None, position_embeddings=angles)
    return found[0] if isinstance(found, tuple) else found


def _plan() -> dict[str, str]:
    return {
        "**.embed_tokens": "vocabulary",
        "lm_head": "vocabulary",
        f"{LAYER}.self_attn": "heads",
        **{f"{LAYER}.self_attn.{name}_proj": "column" for name in "qkv"},
        f"{LAYER}.self_attn.[qk]_norm": "shared",
        f"{LAYER}.self_attn.o_proj": "row",
        f"{LAYER}.mlp.gate_proj": "column",
        f"{LAYER}.mlp.up_proj": "column",
        f"{LAYER}.mlp.down_proj": "row",
        f"{LAYER}.*_layernorm": "sequence",
    }
