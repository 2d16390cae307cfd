"""Where a rank stands in a layout: the device mesh, the groups of ranks, and which samples it reads.

Axes from the outermost (slowest links) to the innermost: dp, pp, fsdp, tp. Consecutive ranks are tensor-parallel, so
that with ranks numbered machine by machine they share one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.core.axes import Axis
from echelon.core.layout import Layout

ORDER = (Axis.DP, Axis.PP, Axis.FSDP, Axis.TP)
Group = dist.ProcessGroup


@dataclass(frozen=True)
class Placement:
    """Where this rank stands. Groups of one rank are None, and so is the mesh of one process.

    Attributes:
        layout: with every size known.
        coordinates: of this rank, by axis.
        mesh: its axes are those with more than one rank, by name.
        replica_group: the ranks that hold the same piece of the model in other replicas: `sync` acts among them.
        model_group: the ranks of this replica (pp x fsdp x tp).
        data_group: the ranks with other samples and the same piece of tp and pp (dp x fsdp).
        table_group: where tables are cut, the ranks that together have their rows; no other work goes through it.
        same_rows_group: those that have the same rows, one of each such group; None: no other rank has them.
    """

    layout: Layout
    coordinates: Mapping[Axis, int]
    mesh: DeviceMesh | None
    replica_group: Group | None
    model_group: Group | None
    data_group: Group | None
    table_group: Group | None = None
    same_rows_group: Group | None = None

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank reads, of `data_size`; tp and pp ranks of a replica read the same."""
        return self.coordinates[Axis.DP] * self.layout.fsdp + self.coordinates[Axis.FSDP]

    @property
    def data_size(self) -> int:
        """Parts that a batch is cut into."""
        return self.layout.dp * self.layout.fsdp

    @property
    def counts(self) -> bool:
        """Whether this rank's losses and samples enter sums over the world: one of those that read the same ones."""
        return self.coordinates[Axis.TP] == 0 and self.coordinates[Axis.PP] == 0

    def axis(self, axis: Axis) -> DeviceMesh | None:
        """Return the 1-D mesh along an axis; None where it has one rank."""
        return self.mesh[axis.value] if self.mesh is not None and self.layout.size(axis) > 1 else None

    def group(self, axis: Axis) -> Group | None:
        """Return the ranks along an axis; None where there is one."""
        mesh = self.axis(axis)
        return None if mesh is None else mesh.get_group()


def place(layout: Layout, rank: int, device_type: str, timeout: timedelta) -> Placement:
    """Build the mesh and the groups of a resolved layout; all ranks of the default group call it together.

    Args:
        timeout: how long a rank waits for the others of its group.
    """
    shape = tuple(layout.size(axis) for axis in ORDER)
    coordinates = dict(zip(ORDER, _coordinates(rank, shape), strict=True))
    made: dict[tuple[int, ...], Group] = {}

    def group(*axes: Axis) -> Group | None:
        """Return the process group of the ranks that differ from this one along `axes` alone; None: it is alone."""
        ranks = _ranks_along(axes, coordinates, layout)
        if len(ranks) == 1:
            return None
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in made:
            new = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
            assert isinstance(new, Group)
            made[ranks] = new
        return made[ranks]

    by_axis = {axis: found for axis in ORDER if (found := group(axis)) is not None}
    mesh = None
    if by_axis:
        grid = torch.arange(dist.get_world_size()).view([layout.size(axis) for axis in by_axis])
        names = tuple(axis.value for axis in by_axis)
        groups = list(by_axis.values())
        mesh = DeviceMesh.from_group(groups if len(groups) > 1 else groups[0], device_type, grid, mesh_dim_names=names)
    return Placement(
        layout,
        coordinates,
        mesh,
        replica_group=by_axis.get(Axis.DP),
        model_group=group(Axis.PP, Axis.FSDP, Axis.TP),
        data_group=group(Axis.DP, Axis.FSDP),
        table_group=_own_group(_table_ranks(rank, layout), timeout),
        same_rows_group=_own_group(range(rank % layout.table, layout.dp, layout.table), timeout, layout.table > 1),
    )


def _table_ranks(rank: int, layout: Layout) -> range:
    """Return the ranks that cut tables among them: neighbours, whose links are the fastest."""
    first = rank - rank % layout.table
    return range(first, first + layout.table)


def _own_group(ranks: range, timeout: timedelta, wanted: bool = True) -> Group | None:
    """Make a group that nothing else uses, for rows travel inside of forward and backward; None of one rank."""
    if len(ranks) == 1 or not wanted:
        return None
    made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, Group)
    return made


def alone() -> Placement:
    """Return the placement of a single process."""
    return Placement(Layout({Axis.DP: 1}), dict.fromkeys(ORDER, 0), None, None, None, None)


def _coordinates(rank: int, shape: tuple[int, ...]) -> Iterator[int]:
    """Yield a rank's coordinates in a row-major grid."""
    for i, size in enumerate(shape):
        inner = 1
        for each in shape[i + 1 :]:
            inner *= each
        yield rank // inner % size


def _ranks_along(axes: tuple[Axis, ...], coordinates: Mapping[Axis, int], layout: Layout) -> tuple[int, ...]:
    """Return the ranks, in order, that differ from these coordinates along some axes only."""
    free = [range(layout.size(axis)) if axis in axes else [coordinates[axis]] for axis in ORDER]
    ranks = []
    for point in product(*free):
        rank = 0
        for axis, at in zip(ORDER, point, strict=True):
            rank = rank * layout.size(axis) + at
        ranks.append(rank)
    return tuple(ranks)
