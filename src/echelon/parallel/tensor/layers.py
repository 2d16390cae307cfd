"""What a style does to one module: how its parameters are split, what its forward sees, what goes in and out.

No process group is needed: a plan is checked, divisibility and all, before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Shard

from echelon.core.adapters import DOWN
from echelon.core.errors import UserError
from echelon.core.hints import Style
from echelon.parallel.tensor.local import Sight
from echelon.torch_compat import BatchNormBase, ConvNd, DropoutNd, conv_forward, strided_shard

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_key_value_heads", "num_kv_heads")
HEAD_WIDTH = "head_dim"  # of modules that count no heads: as many as their layers have outputs for
HEAD_WIDTHS = ("attn_dim", "all_head_size", "split_size", "inner_dim")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Split:
    """How one module is split.

    Attributes:
        placements: of its parameters and buffers; those not named are whole on every rank.
        sights: what forward sees of them, where that is not the local part.
        attributes: its numbers that become local ones.
        first: `enter`: the first input is whole, and its gradient is added over the ranks.
        last: `add`: the ranks' results are added, then the bias; `gather`: they are joined along the last dim.
        shared: its whole parameters are used on split data: their gradients are added over the ranks.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)
    sights: Mapping[str, Sight] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    first: Literal["pass", "enter"] = "pass"
    last: Literal["pass", "add", "gather", "rows"] = "pass"
    shared: bool = False


def split_of(name: str, module: nn.Module, style: Style, tp: int) -> Split:
    """Find how a style splits a module over `tp` ranks.

    Raises:
        UserError: the style does not fit this kind of module, or `tp` does not divide it; names the module.
    """
    return _STYLES[style.name](_Case(name, module, style, tp))


@dataclass(frozen=True)
class _Case:
    name: str
    module: Any
    style: Style
    tp: int

    def local(self, size: int, what: str) -> int:
        """Return the size on one rank.

        Raises:
            UserError: it does not divide.
        """
        if size % self.tp:
            everywhere = re.sub(r"\.\d+(?=\.|$)", ".*", self.name)
            raise UserError(
                f"tp={self.tp} does not divide the {size} {what} of {self.name}: take a tp that does, or keep it whole "
                f"with --tensor-plan {everywhere}=replicate,{everywhere}.*=replicate"
            )
        return size // self.tp

    def misfit(self, fits: str) -> UserError:
        """Return the refusal of a style that does not fit the module."""
        kind = type(self.module).__name__
        return UserError(f"--tensor-plan: {self.style} is a style of {fits}; {self.name} is a {kind}")


def adapter_split(name: str, module: nn.Module, style: Style, tp: int) -> Split:
    """Find how one side of a low-rank adapter follows the layer that it is in: the layer's input and result are as its
    own, and what goes from side to side is whole on no rank that has a part of either.

    A layer whose outputs are split splits lora_B, one whose inputs are split lora_A; the other side is whole, and its
    gradient on each rank is a share of a sum.

    Args:
        name: of the side's module.
        style: of the layer.
    """
    down = name.rpartition(".")[2] == DOWN
    if style.name in ("column", "vocabulary", "channels_out") and not down:
        return Split({"weight": _shard(0, style.parts)})
    if style.name in ("row", "channels_in") and down:
        return Split({"weight": Shard(1)})
    return Split(shared=style.name in ("column", "row", "vocabulary", "channels_out", "channels_in", "shared"))


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes exactly what nn.Linear does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_convolution(module: nn.Module) -> bool:
    """Whether a module computes exactly what nn.Conv1d, 2d or 3d does."""
    return any(
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and conv_forward(type(module)) is conv_forward(kind)
        for kind in CONVOLUTIONS
    )


def drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training."""
    return isinstance(module, DropoutNd) and module.p > 0


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's Conv1D: a linear layer with its weight transposed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _column(case: _Case) -> Split:
    # Hidden units of a plain pair need not divide: DTensor gives the last rank fewer.
    module, parts = case.module, case.style.parts
    if not is_linear(module) and not _is_conv1d(module):
        raise case.misfit("Linear layers")
    transposed = _is_conv1d(module)
    outputs = module.nf if transposed else module.out_features
    if outputs % parts:
        raise UserError(f"--tensor-plan: {case.name} has {outputs} outputs, which are not {parts} equal parts")
    if transposed or parts > 1 or outputs < case.tp:
        case.local(outputs // parts, "outputs" if parts == 1 else f"outputs in each of the {parts} parts")
    placements = {"weight": _shard(1 if transposed else 0, parts), "bias": _shard(0, parts)}
    return Split(placements, attributes={"nf": outputs // case.tp} if transposed else {}, first="enter")


def _row(case: _Case) -> Split:
    module = case.module
    if is_linear(module):
        if module.in_features < case.tp:
            case.local(module.in_features, "inputs")
        return Split({"weight": Shard(1)}, {"bias": Sight.HIDDEN}, last="add")
    if _is_conv1d(module):
        case.local(module.nx, "inputs")
        return Split({"weight": Shard(0)}, {"bias": Sight.ZERO}, last="add")
    raise case.misfit("Linear layers")


def _vocabulary(case: _Case) -> Split:
    module = case.module
    if is_linear(module):
        return Split({"weight": Shard(0), "bias": Shard(0)}, first="enter", last="gather")
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise case.misfit("Embedding and Linear layers")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UserError(
            f"--tensor-plan: {case.name} has max_norm, scale_grad_by_freq or sparse gradients, which vocabulary "
            f"does not split: give it the style replicate"
        )
    rows = module.num_embeddings
    if -(-rows // -(-rows // case.tp)) < case.tp:  # the last rank would have none
        case.local(rows, "rows")
    return Split({"weight": Shard(0)}, last="rows")


def _heads(case: _Case) -> Split:
    module = case.module
    counts = {each: size for each in HEAD_COUNTS if isinstance(size := getattr(module, each, None), int)}
    width = getattr(module, HEAD_WIDTH, None)
    if not (counts or isinstance(width, int)) or list(module.parameters(recurse=False)):
        raise UserError(
            f"--tensor-plan: heads is a style of attention modules with {', '.join(HEAD_COUNTS[:2])} or so, "
            f"their weights in Linear layers of their own; {case.name} ({type(module).__name__}) is none"
        )
    if type(module).__module__.startswith("timm.") and not hasattr(module, "attn_dim"):
        raise UserError(f"{case.name}: this version of timm computes with all heads: tp needs timm>=1.0.20")
    widths = {each: size for each in HEAD_WIDTHS if isinstance(size := getattr(module, each, None), int)}
    local = {each: case.local(size, "heads") for each, size in counts.items()}
    if isinstance(width, int):  # keys and values may have fewer heads than queries
        for layer in module.children():
            if is_linear(layer) and layer.out_features % width == 0:
                case.local(layer.out_features // width, f"times {width} outputs of a layer")
    return Split(attributes=local | {each: size // case.tp for each, size in widths.items()}, first="enter")


def _channels_out(case: _Case) -> Split:
    module = case.module
    if not is_convolution(module) or module.groups != 1:
        raise case.misfit("convolutions with one group")
    case.local(module.out_channels, "output channels")
    return Split({"weight": Shard(0), "bias": Shard(0)}, first="enter")


def _channels_in(case: _Case) -> Split:
    module = case.module
    if not is_convolution(module) or module.groups != 1:
        raise case.misfit("convolutions with one group")
    case.local(module.in_channels, "input channels")
    return Split({"weight": Shard(1)}, {"bias": Sight.HIDDEN}, last="add")


def _channels(case: _Case) -> Split:
    module = case.module
    names = ("weight", "bias", "running_mean", "running_var")
    placements: dict[str, Placement] = {name: Shard(0) for name in names}
    if isinstance(module, BatchNormBase):
        case.local(module.num_features, "channels")
        return Split(placements)
    if isinstance(module, nn.GroupNorm):
        return Split(placements, attributes={"num_groups": case.local(module.num_groups, "groups of channels")})
    if isinstance(module, ConvNd) and is_convolution(module) and module.groups > 1:
        return Split(placements, attributes={"groups": case.local(module.groups, "groups of channels")})
    raise case.misfit("BatchNorm, GroupNorm and convolutions with groups")


def _shard(dim: int, groups: int) -> Placement:
    # Of each of the fused parts one chunk, so that q, k and v of a head stay together.
    return Shard(dim) if groups == 1 else strided_shard(dim, groups)


_STYLES: Mapping[str, Callable[[_Case], Split]] = {
    "column": _column,
    "row": _row,
    "vocabulary": _vocabulary,
    "heads": _heads,
    "channels_out": _channels_out,
    "channels_in": _channels_in,
    "channels": _channels,
    "sequence": lambda case: Split(),
    "shared": lambda case: Split(shared=True),
    "replicate": lambda case: Split(),
}
