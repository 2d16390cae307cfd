"""ResNets of timm and torchvision: the last two convolutions of each block by the channels between them.

A bottleneck's first convolution stays whole where its second has one group (its outputs would have to be gathered);
with groups (ResNeXt) all three are split, the second on the local channels.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.core.hints import Hints
from echelon.models.families import class_names

BLOCKS = ("layer1.*", "layer2.*", "layer3.*", "layer4.*")


def hints(model: nn.Module) -> Hints | None:
    """Return the hints; blocks of other kinds, and anti-aliasing between the convolutions, are not split."""
    names = class_names(model)
    if "timm.models.resnet.ResNet" in names:
        chain: tuple[str, ...] = ("conv1", "bn1", "act1", "maxpool", *BLOCKS, ":forward_head")
        glue: dict[str, tuple[str, ...]] = {":forward_head": ("global_pool", "fc")}
    elif "torchvision.models.resnet.ResNet" in names:
        chain = ("conv1", "bn1", "relu", "maxpool", *BLOCKS, "avgpool", "=flatten", "fc")
        glue = {}
    else:
        return None
    plans = [_plan(block) for i in range(1, 5) for block in model.get_submodule(f"layer{i}").children()]
    # One plan serves all blocks: they differ in width alone.
    plan = plans[0] if all(each == plans[0] for each in plans) else {}
    return Hints(BLOCKS, chain, glue, {f"layer[1-4].*.{name}": style for name, style in plan.items()})


def _plan(block: Any) -> dict[str, str]:
    if not isinstance(getattr(block, "aa", None), nn.Identity | None):
        return {}
    if type(block).__name__ == "BasicBlock":
        return {"conv1": "channels_out", "bn1": "channels", "conv2": "channels_in"}
    if type(block).__name__ != "Bottleneck":
        return {}
    if block.conv2.groups == 1:
        return {"conv2": "channels_out", "bn2": "channels", "conv3": "channels_in"}
    first = {"conv1": "channels_out", "bn1": "channels"}
    return {**first, "conv2": "channels", "bn2": "channels", "conv3": "channels_in"}
