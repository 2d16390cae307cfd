"""timm's Vision Transformers (`vit_*`, `deit_*`): attention by heads, MLPs by hidden units."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

NORMS_AND_SCALES = ("norm1", "norm2", "ls1", "ls2", "drop_path1", "drop_path2")
HEAD = ("attn_pool", "fc_norm", "head_drop", "head")


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; blocks of other kinds than timm's `Block` are not split."""
    if "timm.models.vision_transformer.VisionTransformer" not in class_names(model):
        return None
    chain = ("patch_embed", ":_pos_embed", "patch_drop", "norm_pre", "blocks.*", "norm", ":forward_head")
    glue = {":_pos_embed": ("pos_embed", "cls_token", "reg_token", "pos_drop"), ":forward_head": HEAD}
    splits = all(_is_plain(block) for block in model.get_submodule("blocks").children())
    follows_grid = getattr(model, "dynamic_img_size", False)  # so do positions then
    whole = (
        None if follows_grid or hasattr(model, "dist_token") else chain
    )  # a distilled one has a second token and head
    return Hints(("blocks.*",), whole, glue, _plan() if splits else {})


def _is_plain(block: Any) -> bool:
    """Whether a block is attention and an MLP as in the paper: no norm over split heads or hidden units."""
    if type(block).__name__ != "Block" or type(block.attn).__name__ != "Attention" or type(block.mlp).__name__ != "Mlp":
        return False
    norms = (getattr(block.attn, "norm", None), getattr(block.mlp, "norm", None))
    return all(norm is None or isinstance(norm, nn.Identity) for norm in norms)


def _plan() -> dict[str, str]:
    return {
        "blocks.*.attn": "heads",
        "blocks.*.attn.qkv": "column(parts=3)",
        "blocks.*.attn.gate": "column",
        "blocks.*.attn.[qk]_norm": "shared",
        "blocks.*.attn.proj": "row",
        "blocks.*.mlp.fc1": "column",
        "blocks.*.mlp.fc2": "row",
        **{f"blocks.*.{name}": "sequence" for name in NORMS_AND_SCALES},
    }
