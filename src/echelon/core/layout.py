"""A parallel layout, read from its spec: how many ranks each axis has, and the options of sharding and pipelines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from echelon.core.axes import Axis
from echelon.core.errors import UserError, nearest

AUTO = "auto"  # in place of a layout: it is to be chosen before the run starts
FILL = -1  # a size that takes what is left of the world
SWITCHES = ("zero1", "sequence")
OPTIONS = (*SWITCHES, "table", "schedule", "microbatches")
DEFAULT_SCHEDULE = "1f1b"
ABOUT_AXES = {
    Axis.DP: """data parallelism: replicas, each with the whole model and its own part of every batch

dp=4 makes four replicas; --sync says how they agree. With dp=-1, or without dp, all remaining workers are replicas.

Helps: Models that fit on one device, to train more samples per second.
Costs: what --sync sends: with allreduce, the gradients in each step.
Needs: a batch with a sample for each replica.""",
    Axis.PP: """a pipeline: each rank has some of the layers, and micro-batches pass through them in turn

A rank sends activations to the next one, and gets their gradients back.

Helps: Models that do not fit on one device, over links too slow for tp.
Costs: idle time: (S - 1) / (m + S - 1) of a step with S stages and m micro-batches; less with schedule=interleaved.
Needs: a model that is a chain of blocks; microbatches=N of at least twice the stages.""",
    Axis.FSDP: """sharded parameters, gradients and optimizer state, gathered layer by layer (Zhao et al. 2023)

Each of N ranks keeps 1 / N of all three, and gathers a layer's parameters just before it computes the layer
(arXiv:2304.11277; ZeRO 3, arXiv:1910.02054). Each rank trains its own part of every batch.

Helps: Models whose parameters and optimizer state do not fit on one device.
Costs: traffic: all parameters are sent twice in each step, and gradients once.
Needs: fast links.""",
    Axis.TP: """tensor parallelism: each rank has a part of every layer (Shoeybi et al. 2019, arXiv:1909.08053)

Of two linear layers in a row, the first is split by outputs and the second by inputs; ranks then add their results. The
same holds for the heads of attention. All ranks of a group compute the same samples.

Helps: Layers that do not fit on one device, and small batches.
Costs: an all-reduce of activations in each block, forward and backward.
Needs: links as fast as inside one machine; a model that Echelon can split, or --tensor-plan.""",
}
ABOUT_OPTIONS = {
    "zero1": """with dp: each replica updates a part of the parameters, and keeps the optimizer state of that part only

Written as dp=4,zero1. After the update, replicas send each other the new parameters (ZeRO 1, arXiv:1910.02054).

Helps: Optimizers whose state does not fit, such as Adam with two values per parameter.
Costs: traffic: updated parameters are sent as well as gradients.
Needs: --sync allreduce.""",
    "table": """with dp: sparse tables are cut by rows over N of the replicas, which have all else in common

Written as dp=4,table=4: the same four workers. Each keeps, updates and saves a quarter of the rows of every table. It
fetches the rows that its part of a batch looks up from the workers that have them, and sends their gradients back
(model-parallel tables, data-parallel layers: Naumov et al. 2019, arXiv:1906.00091). N divides dp.

Helps: Tables, with the optimizer's state of their rows, that do not fit on one worker.
Costs: rows are fetched in the forward pass; with dp alone they are there.
Needs: sparse tables (--sparse-tables), and --sync allreduce.""",
    "sequence": """with tp: activations of transformers are also split by tokens, between the blocks' matrices

Written as tp=2,sequence. Layers such as normalisation then compute a part of the tokens on each rank.

Helps: Transformers whose activations do not fit with tp alone.
Costs: about as much traffic as tp alone.
Needs: a transformer.""",
    "schedule": """with pp: in which order micro-batches pass: 1f1b, gpipe, interleaved, zero_bubble and others

Written as pp=4,schedule=interleaved. 1f1b, the default, needs the least memory for activations. interleaved and
zero_bubble give each rank several stages and idle less.

Helps: zero_bubble, if there are few micro-batches.
Costs: schedules with several stages per rank send activations more often.
Needs: at least twice as many blocks as ranks, for schedules with several stages per rank.""",
    "microbatches": """with pp: how many pieces a batch is cut into on its way through the pipeline

Written as pp=4,microbatches=16. Left out: as many as the schedule needs to fill the ranks.

Helps: Pipelines that idle: more micro-batches mean less idle time.
Costs: smaller micro-batches use a device less well.
Needs: a batch with at least as many samples per replica.""",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes and what goes with them.

    Attributes:
        sizes: ranks per axis; -1: what is left. An axis that is left out has 1, but `dp`, which takes what is left.
        zero1: each replica updates a part of the parameters and keeps the optimizer state of that part alone.
        sequence: sequence parallelism beside tensor parallelism (transformers).
        table: replicas over which sparse tables are cut by rows; 1: each has whole tables.
        schedule: of the pipeline.
        microbatches: of the pipeline; 0: as many as it has ranks.
    """

    sizes: Mapping[Axis, int] = field(default_factory=dict)
    zero1: bool = False
    sequence: bool = False
    table: int = 1
    schedule: str = DEFAULT_SCHEDULE
    microbatches: int = 0

    def size(self, axis: Axis) -> int:
        """Return the ranks along an axis of a resolved layout."""
        return self.sizes.get(axis, 1)

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.size(Axis.DP)

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return self.size(Axis.PP)

    @property
    def fsdp(self) -> int:
        """Ranks that share a replica's parameters and divide its samples."""
        return self.size(Axis.FSDP)

    @property
    def tp(self) -> int:
        """Ranks that share each operation."""
        return self.size(Axis.TP)

    @property
    def model_size(self) -> int:
        """Ranks of one replica: pp x fsdp x tp; only where none of these is -1."""
        return math.prod(self.size(axis) for axis in (Axis.PP, Axis.FSDP, Axis.TP))

    @property
    def splits(self) -> bool:
        """Whether a replica is more than one rank."""
        return any(self.size(axis) != 1 for axis in (Axis.PP, Axis.FSDP, Axis.TP))

    @property
    def ranks(self) -> int | None:
        """Return the world that this layout asks for; None when it fits several (an axis is -1, or dp is left out)."""
        open_ended = FILL in self.sizes.values() or Axis.DP not in self.sizes
        return None if open_ended else math.prod(self.sizes.values())

    @property
    def fixed(self) -> int:
        """Return the product of the sizes that are given."""
        return math.prod(size for size in self.sizes.values() if size != FILL)

    def resolve(self, world_size: int) -> Layout:
        """Return the layout with every size known, for a number of ranks.

        Raises:
            UserError: the product of the sizes is not the world, what is left of it is no whole number, or `table` does
                not divide the replicas.
        """
        if self.ranks is not None:
            if self.ranks != world_size:
                others = self.ranks // self.size(Axis.DP)
                fill = "" if world_size % others else "dp=-1 or "
                there = "is 1 worker" if world_size == 1 else f"are {world_size} workers"
                raise UserError(
                    f"--parallel {self}: {self.ranks} ranks, but there {there}; write {fill}--workers {self.ranks}"
                )
            return self._checked()
        rest, odd = divmod(world_size, self.fixed)
        if odd or not rest:
            raise UserError(
                f"--parallel {self}: {self.fixed} ranks do not divide {world_size} workers; "
                f"use --workers {self.fixed * max(1, rest)}, or other sizes"
            )
        open_axis = next((axis for axis, size in self.sizes.items() if size == FILL), Axis.DP)
        return replace(self, sizes={**self.sizes, open_axis: rest})._checked()

    def _checked(self) -> Layout:
        if self.dp % self.table:
            raise UserError(
                f"--parallel {self}: {self.table} does not divide {self.dp} replicas, over which tables are cut: use a "
                f"table=N that does, or dp={self.table * max(1, self.dp // self.table)}"
            )
        return self

    def __str__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.sizes.items()]
        parts += [switch for switch in SWITCHES if getattr(self, switch)]
        parts += [f"table={self.table}"] if self.table > 1 else []
        parts += [f"schedule={self.schedule}"] if self.schedule != DEFAULT_SCHEDULE else []
        parts += [f"microbatches={self.microbatches}"] if self.microbatches else []
        return ",".join(parts)


def parse_layout(text: str) -> Layout:
    """Read a layout such as `dp=2,tp=2` or `pp=4,schedule=interleaved,microbatches=8`.

    >>> parse_layout("tp=2,dp=-1").sizes
    {<Axis.TP: 'tp'>: 2, <Axis.DP: 'dp'>: -1}

    Raises:
        UserError: an unknown axis or option, a size that is not -1 or positive, something given twice, or an option
            without its axis.
    """
    if text == AUTO:
        raise UserError("--parallel auto is for `echelon train`, which chooses before a run starts: give a layout here")
    sizes: dict[Axis, int] = {}
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if name in sizes or name in options:
            raise UserError(f"--parallel {text!r}: {'axis ' if name in list(Axis) else ''}{name} stands twice")
        if name in list(Axis):
            sizes[Axis(name)] = _size(text, name, value)
        elif name in OPTIONS:
            options[name] = value if equals else "true"
        else:
            known = [*Axis, *OPTIONS]
            raise UserError(
                f"--parallel {text!r}: unknown axis or option {name!r}: {nearest(name, known)}known: {', '.join(known)}"
            )
    if list(sizes.values()).count(FILL) > 1:
        raise UserError(f"--parallel {text!r}: only one axis can be -1")
    layout = Layout(
        sizes,
        zero1=_switch(text, "zero1", options.get("zero1", "false")),
        sequence=_switch(text, "sequence", options.get("sequence", "false")),
        schedule=options.get("schedule", DEFAULT_SCHEDULE),
        table=_count(text, "table", options.get("table", "1")),
        microbatches=_count(text, "microbatches", options["microbatches"]) if "microbatches" in options else 0,
    )
    _check_options(text, layout, options)
    return layout


def _size(text: str, name: str, value: str) -> int:
    if not re.fullmatch(r"-1|[1-9]\d*", value):
        raise UserError(f"--parallel {text!r}: write {name}=N with N at least 1, or {name}=-1 for what is left")
    return int(value)


def _switch(text: str, name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UserError(f"--parallel {text!r}: write {name} alone to turn it on")
    return value == "true"


def _count(text: str, name: str, value: str) -> int:
    if not value.isdigit() or not int(value):
        raise UserError(f"--parallel {text!r}: write {name}=N with N at least 1")
    return int(value)


def _check_options(text: str, layout: Layout, options: Mapping[str, str]) -> None:
    for name, axis in (("schedule", Axis.PP), ("microbatches", Axis.PP), ("sequence", Axis.TP)):
        if name in options and layout.size(axis) == 1:
            raise UserError(f"--parallel {text!r}: {name} belongs to {axis}=N with N above 1")
    if layout.zero1 and layout.splits:
        raise UserError(
            f"--parallel {text!r}: zero1 divides the optimizer state of whole replicas; "
            "fsdp=N divides it too, so leave zero1 out, or write dp=N,zero1"
        )
    if layout.table > 1 and (layout.splits or layout.zero1):
        raise UserError(
            f"--parallel {text!r}: table=N cuts tables over whole replicas: leave out fsdp, tp, pp and zero1, or table"
        )
