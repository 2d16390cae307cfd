"""A second copy of what one rank alone has, kept by a neighbour, so that its death costs no step.

The neighbour makes the same updates from the same gradients. Ranks that share parameters (FSDP) send theirs before the
update, once: a shard's gradients are what they are anyway after the sum. Where replicas divide the optimizer's state
(ZeRO stage 1), each has all gradients already, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.checkpoint import broadcast_state, copy_state
from echelon.core.axes import Axis
from echelon.core.state_tree import StateView
from echelon.core.units import format_bytes
from echelon.optim.build import EMA, build_optimizer
from echelon.optim.kernels import fuse_where_possible
from echelon.parallel.local_shards import LocalShard, LocalShards
from echelon.parallel.zero import DividedUpdate
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import RunParts
from echelon.trainer.update import GradientCopy, Rates
from echelon.trainer.world import World

_MOST_OF_FREE = 0.5  # of the memory that is free for a rank
_MOMENTS = 2  # numbers that an optimizer keeps for each it updates, at most

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class SecondCopy(GradientCopy, Protocol):
    """What this rank keeps of a neighbour's.

    Attributes:
        rank: the neighbour, whose state this is.
        bytes_sent: by this rank, to whoever keeps its copy.
    """

    rank: int
    bytes_sent: int

    def parts(self, run_parts: RunParts) -> RunParts:
        """Return the neighbour's parts of the run."""

    def regions(self) -> Mapping[str, LocalShard]:
        """Return what is written in the neighbour's place, by name."""


def _set_rate(optimizer: torch.optim.Optimizer, groups: Rates) -> None:
    """Take the rate of other groups, which have all the same."""
    for group in optimizer.param_groups:
        group["lr"] = groups[0]["lr"]


def _rotated(state: StateView, group: dist.ProcessGroup) -> tuple[StateView, int]:
    """Return what the next rank of a group gives, and the bytes that this rank sent; all of them call it."""
    size, sent, taken = group.size(), 0, None
    for source in range(size):
        received, n_bytes = broadcast_state(state if source == group.rank() else None, source, group)
        sent += n_bytes
        if source == (group.rank() + 1) % size:
            taken = copy_state(received)
    assert taken is not None
    return taken, sent


class ShardCopy:
    """The copy of a neighbour's shards: parameters, optimizer state, moving average."""

    def __init__(self, run_parts: RunParts, group: dist.ProcessGroup, build: BuildOptimizer) -> None:
        """Take over what the next rank has now; all ranks of the group call it.

        Args:
            group: the ranks that share the parameters.
        """
        assert run_parts.split is not None
        self._group, self._own = group, run_parts.split.pieces
        ranks = dist.get_process_group_ranks(group)
        own = group.rank()
        self.rank, self._keeper = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        told, self.bytes_sent = _rotated(_described(run_parts), group)
        self._pieces = _pieces_of(told["pieces"], told["parameters"], self._own)
        self._optimizer = build(self._pieces)
        self._optimizer.load_state_dict(told["optimizer"])
        self._ema: EMA | None = None
        if run_parts.ema is not None:
            self._ema = EMA(self._pieces, run_parts.ema.decay)
            own_buffers = {name: run_parts.ema.state_dict()["average"][name] for name, _ in self._own.named_buffers()}
            self._ema.load_state_dict({**told["ema"], "average": {**told["ema"]["average"], **own_buffers}})
        self._trained = self._pieces.trainable()
        self._received: list[tuple[nn.Parameter, Tensor]] = []

    def take(self) -> None:
        """Send this rank's gradients to who keeps its copy, and take the neighbour's."""
        self._received = []
        sent, received = _flat(self._own.trainable()), _room(self._trained)
        work = [dist.isend(each, self._keeper, group=self._group) for each in sent]
        work += [dist.irecv(each, self.rank, group=self._group) for each in received]
        for each in work:
            if each is not None:
                each.wait()
        self.bytes_sent += sum(each.nbytes for each in sent)
        self._received = list(_unpacked(self._trained, received))

    def update(self, rates: Rates) -> None:
        """Make the neighbour's update."""
        for parameter, gradient in self._received:
            parameter.grad = gradient
        _set_rate(self._optimizer, rates)
        self._optimizer.step()
        for parameter in self._trained:
            parameter.grad = None
        self._received = []
        if self._ema is not None:
            self._ema.update(self._pieces)

    def parts(self, run_parts: RunParts) -> RunParts:
        """Return the neighbour's parts of the run."""
        assert run_parts.split is not None
        split = replace(run_parts.split, pieces=self._pieces)
        return replace(run_parts, split=split, optimizer=self._optimizer, ema=self._ema)

    def regions(self) -> Mapping[str, LocalShard]:
        """Return what is written in the neighbour's place."""
        return {name: replace(region, writes=region.is_first) for name, region in self._pieces.regions.items()}


class MomentsCopy:
    """The copy of a neighbour's share of the optimizer's state, where replicas divide it."""

    bytes_sent = 0

    def __init__(
        self, run_parts: RunParts, divided: DividedUpdate, group: dist.ProcessGroup, build: BuildOptimizer
    ) -> None:
        """Take over what the next rank has now; all ranks of the group call it."""
        self.rank, self._divided = (group.rank() + 1) % group.size(), divided
        self._pieces = run_parts.local_model
        self._optimizer = build(self._pieces)
        divided.keep(self._optimizer, self.rank)
        told, self.bytes_sent = _rotated({"optimizer": run_parts.optimizer.state_dict()}, group)
        self._optimizer.load_state_dict(told["optimizer"])

    def take(self) -> None:
        """Do nothing: this rank has all gradients."""

    def update(self, rates: Rates) -> None:
        """Make the neighbour's update, of this replica's parameters: the neighbour sends the same."""
        _set_rate(self._optimizer, rates)
        self._optimizer.step()

    def parts(self, run_parts: RunParts) -> RunParts:
        """Return the neighbour's parts of the run."""
        return replace(run_parts, optimizer=self._optimizer)

    def regions(self) -> Mapping[str, LocalShard]:
        """Return what is written in the neighbour's place."""
        assert isinstance(self._pieces, LocalShards)
        return share_regions(self._pieces, self._divided, self.rank, with_buffers=False)


def share_regions(pieces: LocalShards, divided: DividedUpdate, rank: int, with_buffers: bool) -> dict[str, LocalShard]:
    """Return the regions of whole tensors by name, of which a rank writes those whose updates are its own."""
    parameters = dict(pieces.named_parameters(remove_duplicate=False))
    return {
        name: replace(region, writes=divided.owns(parameters[name], rank) if name in parameters else with_buffers)
        for name, region in pieces.regions.items()
    }


def make_copy(
    resolved: ResolvedRun, run_parts: RunParts, world: World, note: Callable[[str, str], None]
) -> SecondCopy | None:
    """Let each rank keep what its neighbour alone has, where no other replica has it; all ranks call it.

    Args:
        note: tells the user something, by its kind.
    """
    assert world.placement is not None and run_parts.split is not None and world.group is not None
    divided, fsdp = run_parts.split.pieces.divided, world.placement.group(Axis.FSDP)
    if divided is None and (world.placement.layout.dp > 1 or fsdp is None):
        return None
    why = _why_none(run_parts, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    none_fits = torch.tensor([bool(why)], dtype=torch.uint8, device=world.device)
    dist.all_reduce(none_fits, dist.ReduceOp.MAX, group=world.group)
    if none_fits:
        told = why or "there is no room for it with another worker"
        note("copies", f"what a worker alone has is not kept twice, and its death loses steps: {told}")
        return None
    config = resolved.config

    def build(model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer that the neighbour has."""
        made = build_optimizer(model, config.optimizer, config.data.batch_size, resolved.optimizer.factory)
        fuse_where_possible(made, model)
        return made

    if divided is not None:
        return MomentsCopy(run_parts, divided, world.group, build)
    assert fsdp is not None
    n_bytes = sum(p.nbytes for p in run_parts.split.pieces.trainable())
    note(
        "copies",
        "each worker keeps a copy of what its neighbour alone has, so that a death loses no step: it sends "
        f"{format_bytes(n_bytes)} more in each step (--elastic off: none)",
    )
    return ShardCopy(run_parts, fsdp, build)


def _why_none(run_parts: RunParts, local_ranks: int) -> str:
    if not any(parameter.requires_grad for parameter in run_parts.local_model.parameters()):
        return "a worker has nothing that is trained"
    averages = run_parts.ema.state_dict()["average"].values() if run_parts.ema else ()
    n_bytes = sum(p.nbytes for p in run_parts.local_model.parameters()) * (1 + _MOMENTS)
    n_bytes += sum(average.nbytes for average in averages)
    free = psutil.virtual_memory().available / max(1, local_ranks)
    if n_bytes <= _MOST_OF_FREE * free:
        return ""
    return f"it would take up to {format_bytes(n_bytes)} of the {format_bytes(free)} that are free for each worker"


@dataclass(frozen=True)
class _Described:
    """A parameter of a rank: `first` is the first of its names, where it has several."""

    name: str
    first: str
    region: LocalShard
    trained: bool

    @classmethod
    def of(cls, values: StateView) -> _Described:
        """Return what `plain` gave."""
        spans = tuple(tuple((start, stop) for start, stop in dim) for dim in values["spans"])
        region = LocalShard(tuple(values["shape"]), spans, values["copies"], writes=False, is_first=values["is_first"])
        return cls(values["name"], values["first"], region, values["trained"])

    def plain(self) -> StateView:
        """Return it as plain values."""
        region = self.region
        spans = [[list(span) for span in dim] for dim in region.spans]
        return {
            "name": self.name, "first": self.first, "shape": list(region.shape), "spans": spans,
            "copies": region.copies, "is_first": region.is_first, "trained": self.trained,
        }  # fmt: skip


def _described(run_parts: RunParts) -> StateView:
    assert run_parts.split is not None
    pieces = run_parts.split.pieces
    first: dict[int, str] = {}
    listed = [
        _Described(name, first.setdefault(id(p), name), pieces.regions[name], p.requires_grad)
        for name, p in pieces.named_parameters(remove_duplicate=False)
    ]
    return {
        "pieces": [each.plain() for each in listed],
        "parameters": {name: parameter.detach() for name, parameter in pieces.named_parameters()},
        "optimizer": run_parts.optimizer.state_dict(),
        "ema": run_parts.ema.state_dict() if run_parts.ema else {},
    }


def _pieces_of(listed: Sequence[StateView], values: StateView, like: LocalShards) -> LocalShards:
    """Build what another rank holds; its buffers are those of `like`, which this rank holds."""
    pieces = LocalShards((), like.placement)
    made: dict[str, nn.Parameter] = {}
    for described in map(_Described.of, listed):
        if described.first not in made:
            made[described.first] = nn.Parameter(values[described.first], requires_grad=described.trained)
        pieces.hold(described.name, made[described.first], described.region)
    pieces.hold_buffers_of(like)
    return pieces


def _by_type(parameters: Sequence[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    return {dtype: [p for p in parameters if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in parameters)}


def _flat(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return which parameters have a gradient, and the gradients flat, a vector for each type; zeros where none is."""
    marks = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    flat = [
        torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in same])
        for same in _by_type(parameters).values()
    ]
    return [marks, *flat]


def _room(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return vectors for what `_flat` gives on the rank whose copy the parameters are."""
    by_type = _by_type(parameters)
    return [
        torch.empty(len(parameters), dtype=torch.uint8),
        *(torch.empty(sum(p.numel() for p in same), dtype=dtype) for dtype, same in by_type.items()),
    ]


def _unpacked(parameters: Sequence[nn.Parameter], vectors: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the parameters that have a gradient, with it."""
    marks = dict(zip(map(id, parameters), vectors[0].tolist(), strict=True))
    for same, flat in zip(_by_type(parameters).values(), vectors[1:], strict=True):
        for parameter, gradient in zip(same, flat.split([p.numel() for p in same]), strict=True):
            if marks[id(parameter)]:
                yield parameter, gradient.view_as(parameter)
