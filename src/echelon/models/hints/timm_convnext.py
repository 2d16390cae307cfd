"""timm's ConvNeXt: the two pointwise layers of each block by hidden channels."""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; ConvNeXt V2's response norm takes all channels together, so that its blocks are not split."""
    if "timm.models.convnext.ConvNeXt" not in class_names(model):
        return None
    stages = [name for name, _ in model.get_submodule("stages").named_children()]
    steps = [step for i in stages for step in (f"stages.{i}.downsample", f"stages.{i}.blocks.*")]
    mlps = {type(each) for name, each in model.named_modules() if name.endswith(".mlp")}
    plan: dict[str, str] = {}
    if {each.__name__ for each in mlps} == {"Mlp"}:
        plan = {"stages.*.blocks.*.mlp.fc1": "column", "stages.*.blocks.*.mlp.fc2": "row"}
    elif {each.__name__ for each in mlps} == {"ConvMlp"}:
        plan = {"stages.*.blocks.*.mlp.fc1": "channels_out", "stages.*.blocks.*.mlp.fc2": "channels_in"}
    return Hints(("stages.*.blocks.*",), ("stem", *steps, "norm_pre", "head"), {}, plan)
