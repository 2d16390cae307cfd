"""What this rank holds of a model that is split: plain local tensors under the whole model's names.

Optimizer, averages, clipping, strategies and checkpoints see these and no DTensor: they cost what plain tensors cost,
and work on a piece as on a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.core.axes import Axis
from echelon.core.shards import Region, Spans, chunk
from echelon.parallel.base import Placement
from echelon.parallel.reach import ReachedMarks, ReachedShards
from echelon.parallel.tables import CutTables
from echelon.parallel.zero import DividedUpdate
from echelon.torch_compat import foreach_mul_, foreach_norm, is_dtensor, is_persistent, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement as TensorPlacement


@dataclass(frozen=True)
class LocalShard(Region):
    """The region of a tensor that this rank holds.

    Attributes:
        copies: ranks of the replica that hold this same region.
        writes: whether this rank is the one of all replicas that writes it into a checkpoint.
        is_first: whether it is the first of those of its replica that hold it.
    """

    copies: int = 1
    writes: bool = True
    is_first: bool = True


class LocalShards(nn.Module):
    """The local tensors of modules, as parameters and buffers of the same names that share their memory.

    An empty piece (of a tensor with fewer rows than ranks) is left out. `hand_over` gives it the gradients.

    Attributes:
        regions: where each parameter and persistent buffer lies, by name.
        divided: where replicas divide the updates, which ones are this rank's.
        cut: tables that replicas have some rows of each; None: none is cut.
    """

    divided: DividedUpdate | None = None

    def __init__(
        self,
        modules: Sequence[nn.Module],
        placement: Placement,
        reached: Sequence[ReachedShards] = (),
        cut: CutTables | None = None,
    ) -> None:
        """Take the local tensors.

        Args:
            reached: of each module that is sharded, which parameters backward passes reach.
            cut: the modules' tables that are cut already.
        """
        super().__init__()
        self.cut = cut
        self._reached, self._marks = reached, ReachedMarks.along(placement.axis(Axis.FSDP)) if reached else None
        self._trained: list[tuple[str, nn.Parameter]] = []
        self.regions: dict[str, LocalShard] = {}
        self.placement = placement
        self._sources: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._no_decay = {n for m in modules for n in getattr(m, "no_weight_decay", tuple)()}
        self._pending: list[Tensor] = []
        made: dict[int, nn.Parameter] = {}
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                self._add_parameter(name, parameter, made)
            for prefix, owner in module.named_modules():
                self._add_buffers(f"{prefix}." if prefix else "", owner)

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The whole parameters of sharded modules that backward passes go through, once forward has made them."""
        return [parameter for reached in self._reached for parameter in reached.gathered]

    def _add_parameter(self, name: str, parameter: nn.Parameter, made: dict[int, nn.Parameter]) -> None:
        if id(parameter) not in made:
            if parameter.requires_grad:
                self._trained.append((name, parameter))
            made[id(parameter)] = piece = _local_parameter(parameter)
            if piece is not parameter:
                self._sources.append((piece, parameter))
        if made[id(parameter)].numel() or not parameter.numel():
            self.regions[name] = self._cut_rows(name) or _local_shard(parameter, self.placement)
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, made[id(parameter)])

    def _cut_rows(self, name: str) -> LocalShard | None:
        """Return the rows that this rank has of a table that is cut; the first group of ranks writes its rows."""
        if self.cut is None or name not in self.cut.regions:
            return None
        region, layout = self.cut.regions[name], self.placement.layout
        return LocalShard(region.shape, region.spans, writes=self.placement.coordinates[Axis.DP] < layout.table)

    def _add_buffers(self, prefix: str, owner: nn.Module) -> None:
        for name, buffer in owner.named_buffers(recurse=False):
            persistent = is_persistent(owner, name)
            node, leaf = self._owner(prefix + name)
            node.register_buffer(leaf, local_of(buffer), persistent=persistent)
            if persistent:
                self.regions[prefix + name] = _local_shard(buffer, self.placement)

    def hold(self, name: str, parameter: nn.Parameter, region: LocalShard) -> None:
        """Hold a parameter of any shape, and where it lies in the whole one: what another rank has."""
        owner, leaf = self._owner(name)
        owner.register_parameter(leaf, parameter)
        self.regions[name] = region

    def hold_buffers_of(self, other: LocalShards) -> None:
        """Hold another's buffers, the same memory, and leave out of weight decay what it does."""
        self._no_decay = other.no_weight_decay()
        for name, buffer in other.named_buffers():
            owner, leaf = self._owner(name)
            owner.register_buffer(leaf, buffer, persistent=name in other.regions)
            if name in other.regions:
                self.regions[name] = other.regions[name]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        node: nn.Module = self
        for part in path:
            child = dict(node.named_children()).get(part)
            if child is None:
                child = nn.Module()
                node.add_module(part, child)
            node = child
        return node, leaf

    def no_weight_decay(self) -> set[str]:
        """Return what the model lists as having no weight decay: timm asks for it."""
        return self._no_decay

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Take this rank's piece out of a whole tensor, any shape, where it has one of that name."""
        held = self._tensors().get(name)
        if held is not None:
            held.copy_(cut_out(tensor, self.regions[name]) if name in self.regions else tensor)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients of the model's parameters to their pieces, shared memory and all.

        What no rank of those that share the pieces has reached keeps none.
        """
        unreached = self._unreached()
        for piece, source in self._sources:
            if source.grad is not None and piece.numel() and id(source) not in unreached:
                piece.grad = _local_gradient(source)
            source.grad = None

    def drop_gradients(self) -> None:
        """Forget the gradients of the model's parameters."""
        for _, parameter in self._trained:
            parameter.grad = None
        for reached in self._reached:
            reached.names.clear()

    def _unreached(self) -> set[int]:
        """Return the ids of parameters that no rank has reached, which have zeros in place of no gradient."""
        if self._marks is None:
            return set()
        names = {name for reached in self._reached for name in reached.names}
        own = [name in names for name, _ in self._trained]
        for reached in self._reached:
            reached.names.clear()
        marks = self._marks.agreed(own, not all(own))
        if marks is None:
            return set()
        return {id(parameter) for (_, parameter), mark in zip(self._trained, marks, strict=True) if not mark}

    def updated(self) -> set[str]:
        """Return the names of the parameters that this rank's optimizer updates."""
        return {n for n, p in self.named_parameters() if self.divided is None or self.divided.owns(p)}

    def pending(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients that the next `forward` is to have, in the order of `trainable` and of their shapes."""
        self._pending = list(gradients)

    def trainable(self) -> list[nn.Parameter]:
        """Return the trainable pieces, each once."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self) -> Tensor:
        """Return a zero whose backward gives the trainable pieces their pending gradients.

        So that DistributedDataParallel and its hooks, which reduce what backward gives, reduce the pieces too.
        """
        gradients, self._pending = self._pending, []
        zero: Tensor = _HandOver.apply(gradients, *self.trainable())
        return zero


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Return a zero that depends on the parameters."""
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the pending gradients, whatever the gradient of the zero."""
        return None, *ctx.gradients


def gradient_norm(parameters: Mapping[str, nn.Parameter], pieces: LocalShards) -> Tensor:
    """Return the norm of all gradients of the replica: pieces added over its ranks, each counted once.

    norm^2 = sum over ranks and pieces of |g|^2 / copies
    """
    by_copies: dict[int, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            by_copies.setdefault(pieces.regions[name].copies, []).append(parameter.grad)
    device = _device_of(pieces)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        norms = torch.stack([norm.double() for norm in foreach_norm(gradients)])
        total += norms.square().sum() / copies
    if pieces.placement.model_group is not None:
        torch.distributed.all_reduce(total, group=pieces.placement.model_group)
    if pieces.cut is not None:
        total += pieces.cut.squared_norm({name: p.grad for name, p in parameters.items()}, device)
    return total.sqrt()


@torch.no_grad()
def clip_by_norm(pieces: LocalShards, clip_norm: float) -> None:
    """Scale the gradients so that their norm over the replica is at most `clip_norm`, as `clip_grad_norm_` does."""
    parameters = {name: p for name, p in pieces.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    scale = (clip_norm / (gradient_norm(parameters, pieces) + 1e-6)).clamp(max=1.0)
    kept = [p.grad for p in parameters.values() if p.grad is not None]
    gradients = [gradient.values() if gradient.is_sparse else gradient for gradient in kept]
    if gradients:
        for same in {gradient.dtype: None for gradient in gradients}:
            foreach_mul_([each for each in gradients if each.dtype == same], scale.to(same))


def _device_of(pieces: LocalShards) -> torch.device:
    """Return where a rank's pieces are, of which it may have none."""
    held = next(iter(pieces.parameters()), None)
    mesh = pieces.placement.mesh
    return held.device if held is not None else torch.device(mesh.device_type if mesh is not None else "cpu")


def cut_out(tensor: Tensor, region: Region) -> Tensor:
    """Return a copy of what lies in a region of a whole tensor, any shape."""
    for dim, spans in enumerate(region.spans):
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in spans], dim)
    return tensor.clone()


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, any shape, in the same memory."""
    if not is_dtensor(tensor):
        return tensor
    return local_tensor(tensor).detach()


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not is_dtensor(parameter):
        return parameter
    return nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)


def _local_gradient(source: nn.Parameter) -> Tensor:
    gradient = source.grad
    assert is_dtensor(source) and is_dtensor(gradient)
    if gradient.placements != source.placements:  # a sum over ranks that is still to be made
        gradient = gradient.redistribute(placements=source.placements)
    return local_tensor(gradient)


def _local_shard(tensor: Tensor, placement: Placement) -> LocalShard:
    """Find where this rank's part lies: tensor parallelism splits first, sharding splits what that leaves."""
    layout, at = placement.layout, placement.coordinates
    copies = layout.fsdp * layout.tp
    first = {axis: at[axis] == 0 for axis in (Axis.FSDP, Axis.TP)}
    spans: list[Spans] = [*Region.whole(tensor.shape).spans]
    by_axis = dict(_placements(tensor))
    for axis in (Axis.TP, Axis.FSDP):
        how = by_axis.get(axis)
        if how is not None and (how.is_shard() or hasattr(how, "split_factor")):
            dim = how.dim  # type: ignore[attr-defined]
            parts = getattr(how, "split_factor", 1) if axis is Axis.TP else 1
            spans[dim] = chunk(spans[dim], parts, layout.size(axis), at[axis])
            copies //= layout.size(axis)
            first[axis] = True
    is_first = all(first.values())
    return LocalShard(tuple(tensor.shape), tuple(spans), copies, is_first and at[Axis.DP] == 0, is_first)


def _placements(tensor: Tensor) -> Iterator[tuple[Axis, TensorPlacement]]:
    if is_dtensor(tensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, how in zip(names, tensor.placements, strict=True):
            yield Axis(name), how
