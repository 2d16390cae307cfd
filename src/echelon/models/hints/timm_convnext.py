"""timm's ConvNeXt: the two pointwise layers of each block by hidden channels."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; ConvNeXt V2's response norm takes all channels together, so that its blocks are not split."""
    if "timm.models.convnext.ConvNeXt" not in class_names(model):
        return None
    stages = [name for name, _ in model.get_submodule("stages").named_children()]
    steps = [step for i in stages for step in (f"stages.{i}.downsample", f"stages.{i}.blocks.*")]
    mlps: list[Any] = [each for name, each in model.named_modules() if name.endswith(".mlp")]
    plan: dict[str, str] = {}
    if all(type(each).__name__ == "Mlp" and isinstance(each.norm, nn.Identity) for each in mlps):
        convolved = isinstance(mlps[0].fc1, nn.Conv2d)
        first, second = ("channels_out", "channels_in") if convolved else ("column", "row")
        plan = {"stages.*.blocks.*.mlp.fc1": first, "stages.*.blocks.*.mlp.fc2": second}
    return Hints(("stages.*.blocks.*",), ("stem", *steps, "norm_pre", "head"), {}, plan)
