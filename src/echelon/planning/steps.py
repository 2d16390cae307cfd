"""The seconds of a training step on machines that were described, simulated from a calibration.

What a rank sends scales with the workers as a ring's bytes do, 2 (n - 1) / n, and its rounds with n - 1 where each
round is a message of a codec; a byte takes what the link or the processors need, whichever is more. The step waits
for the slowest of n ranks: the mean of the largest of n normal numbers times the jitter that was measured.

Where workers are of unlike speeds v, a step with equal parts of a batch waits for the slowest; with parts by speed
(`--balance auto`), of which each takes as long, its work of f seconds and p a sample takes

    T = (f + p b / n) / mean(v)        a worker has (T v - f) / p of the batch's b samples
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from echelon.config.machines import Machines
from echelon.core.layout import DEFAULT_SCHEDULE
from echelon.core.link import Link
from echelon.forecast.simulator import SimulatedTask, TaskSpan, makespan, simulate
from echelon.observe.phases import Phase
from echelon.parallel.pipeline.settings import SCHEDULES, stage_ranks
from echelon.planning.calibration import Calibration, expected_max
from echelon.planning.pipeline_costs import PhaseCost, PipelineCosts
from echelon.planning.pipelines import DELAY, StageTimes, idle_shares, pipeline_tasks, places_of
from echelon.records.kinds import TCP_HEADER_BYTES, Alternative

_MOST_BUCKETS = 24
_FRAMED = (1448 + TCP_HEADER_BYTES) / 1448  # bytes of a full frame on the link, over those of ours that it carries
FEWER_DOUBLINGS = 0.06
"""By how much an interval widens, relatively, for each doubling beyond what was measured."""
OTHER_LAYOUT = 0.3
"""Likewise for a layout that was not measured."""
MORE_STAGES = 0.1
"""Likewise for each doubling of a pipeline's stages beyond those that were measured."""
OTHER_LINK = 0.15
"""Likewise for a link that was not measured."""
RATED = 0.4
"""Likewise where a device's rate stands for a measurement."""
SUM_STRETCH, MESSAGE_STRETCH, GATHER_STRETCH = 1.08, 1.15, 1.5
"""What a byte takes over a link that ranks use in both directions, by the link's rate: in gloo's all-reduce, in the
messages of codecs, which go piece by piece, too, and in gloo's all-gather, which does not (benchmarks/RESULTS.md)."""
GATHERED_S = 2e-3
"""Of a processor for each all-gather or reduce-scatter of a block, beside its bytes (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Estimate:
    """A prediction with the bounds that it is expected to keep."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """Return it in other units."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def interval(value: float, relative: float) -> Estimate:
    """Return bounds that are as far in ratio on both sides."""
    return Estimate(value, value / (1 + relative), value * (1 + relative))


@dataclass(frozen=True)
class StepForecast:
    """A step of one way on some machines.

    Attributes:
        seconds: of a step; with periods, the mean.
        compute_s, communicate_s, waiting_s: parts of it: own work, exposed communication, waiting for slower ranks.
        sent_bytes: of a rank, in a step.
        spans: of the simulated step (of the one that communicates).
        bubble: of a pipeline, the mean over ranks of the share in which none of its computations goes on, from the
            first to the last; None of what is none.
    """

    seconds: Estimate
    compute_s: float
    communicate_s: float
    waiting_s: float
    sent_bytes: float
    spans: tuple[TaskSpan, ...]
    bubble: float | None = None

    @property
    def shown(self) -> list[TaskSpan]:
        """What a picture shows: spans that take time and occupy something, which messages on their way do not."""
        return [span for span in self.spans if span.end_s > span.begin_s and span.task.name != DELAY]


class Division(StrEnum):
    """How workers divide a batch: of unlike speeds, by these or into equal parts; values are the words of tables."""

    ALIKE = ""
    BY_SPEED = "by speed"
    EQUAL = "equal"


def divisions(known: Calibration, machines: Machines, batch: int, way: Way) -> tuple[Division, ...]:
    """Return how a way can go on some machines: with parts of a batch by speed where replicas can have such."""
    if machines.are_alike:
        return (Division.ALIKE,)
    shares = way.parts_by_speed(machines) and shares_of(known, machines, batch)
    return (Division.BY_SPEED, Division.EQUAL) if shares else (Division.EQUAL,)


def at_division(machines: Machines, division: Division) -> Machines:
    """Return machines whose speed is the one that a step goes at."""
    return replace(machines, speed=machines.mean_speed) if division is Division.BY_SPEED else machines


def shares_of(known: Calibration, machines: Machines, batch: int) -> tuple[float, ...]:
    """Return the samples of a worker of each group with which all are done together; none: a group would have none."""
    fixed_s = sum(cost.fixed_s for cost in known.phases.values())
    per_sample_s = sum(cost.per_sample_s for cost in known.phases.values())
    if not per_sample_s:
        return ()
    done_s = (fixed_s + per_sample_s * batch / machines.workers) / machines.mean_speed
    samples = tuple((done_s * group.busy_speed - fixed_s) / per_sample_s for group in machines.parts)
    return samples if min(samples) >= 1 else ()


class Way(Protocol):
    """How a step goes in a layout, with a strategy and a codec."""

    def parts_by_speed(self, machines: Machines) -> bool:
        """Whether its replicas can have parts of a batch by the speed of the workers that each consists of."""

    @property
    def label(self) -> str:
        """As one writes it."""

    @property
    def for_any_workers(self) -> bool:
        """Whether any number of workers can be laid out so."""

    def step(self, known: Calibration, machines: Machines, batch: int) -> StepForecast:
        """Predict a step of so many samples of the global batch."""


@dataclass(frozen=True)
class Replicated:
    """Each worker has the whole model, and sends gradients or parameters as `cost` says.

    Attributes:
        cost: measured with the calibration's workers.
    """

    cost: Alternative

    @property
    def label(self) -> str:
        """Its settings: `int8`, `local(period=8), sign`."""
        return ", ".join(self.cost.settings.values())

    @property
    def for_any_workers(self) -> bool:
        """Always: each more is a replica."""
        return True

    def step(self, known: Calibration, machines: Machines, batch: int) -> StepForecast:
        """Predict a step: gradients travel behind backward, or the model does once in a period."""
        n, cost = machines.workers, self.cost
        work = known.compute(batch / n, machines.busy_speed)
        sent = cost.wire_bytes * ring_share(n) / ring_share(known.workers)
        buckets = _buckets(cost, sent, known)
        passing = self._passing(machines, len(buckets))
        moving = [_moving_s(known, machines, bucket, passing, self._stretch) for bucket in buckets]
        coding_s = cost.coding_s / machines.busy_speed * _passes(n) / _passes(known.workers)
        rest_s = sum(work.values())
        late_s = max(0.0, sum(moving) - cost.overlap * rest_s)
        often = cost.often_beside(rest_s, coding_s + late_s)
        compute_s = rest_s + coding_s * often
        if cost.period > 1:
            exposed_s = late_s * often
            spans = simulate(_averaging_tasks(work, coding_s, sum(moving)))
        else:
            spans = simulate(_reducing_tasks(work, known.spread, coding_s, moving))
            exposed_s = max(0.0, makespan(spans) - compute_s)
        alone = 1 / often if cost.follows else cost.period  # steps
        waiting_s = known.jitter_s / machines.busy_speed * expected_max(n) / math.sqrt(alone)
        seconds = interval(compute_s + exposed_s + waiting_s, uncertainty(known, machines, batch))
        return StepForecast(seconds, compute_s, exposed_s, waiting_s, sent * often, tuple(spans))

    def _passing(self, machines: Machines, buckets: int) -> Passing:
        """Return what follows on what for a bucket: a sum passes 2 (n - 1) times around a ring; others pass directly.

        Messages from each to each are on their way at once, but processors handle them one by one.
        """
        rounds, n = max(1.0, self.cost.rounds / buckets), machines.workers
        outside, inside = machines.count - 1, n - machines.count
        if not self._sums:
            return Passing((rounds * outside, rounds * inside), (rounds if outside else 0.0, rounds if inside else 0.0))
        return _one_after_another(rounds * 2 * outside, rounds * 2 * inside)

    def parts_by_speed(self, machines: Machines) -> bool:
        """Return True: each worker is a replica."""
        return True

    @property
    def _sums(self) -> bool:
        return self.cost.sums or not self.cost.coding_s

    @property
    def _stretch(self) -> float:
        return SUM_STRETCH if self._sums else MESSAGE_STRETCH


def _passes(ranks: int) -> float:
    """Return how often a rank's codec goes over a tensor: it encodes chunks for others, decodes theirs and adds them
    up, encodes the sum of its own chunk, and decodes all other sums.
    """
    return (3 * (ranks - 1) + 1) / ranks


def ring_share(ranks: int) -> float:
    """Return what a rank sends of a tensor, in its sizes, so that all have the sum."""
    return 2 * (ranks - 1) / ranks


def uncertainty(known: Calibration, machines: Machines, batch: int, layout: float = 0.0) -> float:
    """Return the relative half width of an interval: what was calibrated, and how far from that this is."""
    least, most = known.samples
    samples = batch / machines.workers
    speeds = [machines.speed, *(group.speed for group in machines.groups)]
    far = math.log2(least / samples) if samples < least else math.log2(max(1.0, samples / most))
    scale = abs(math.log2(machines.workers / known.workers)) if machines.workers else 0.0
    rated = 0.0 if known.precise else RATED
    speed = 0.1 * max(abs(math.log2(each)) for each in speeds)
    link = OTHER_LINK if machines.narrowest != known.link else 0.0
    terms = (known.residual, link, FEWER_DOUBLINGS * scale, 2 * FEWER_DOUBLINGS * far, layout, rated, speed)
    return math.hypot(*terms)


def seconds_per_byte(known: Calibration, machines: Machines, stretch: float = SUM_STRETCH) -> float:
    """Return what a byte takes through the narrowest link of a ring over all workers.

    Processors that were measured move no byte faster than they did; of devices that were not, a link that is told is
    all that is known.
    """
    link = machines.narrowest
    over_link_s = 8 * max(_FRAMED, stretch) / link.rate_bits_per_s if link else 0.0
    if not known.precise:
        return over_link_s or known.byte_s
    return max(known.byte_s / machines.slowest, over_link_s)


def _delay_s(link: Link | None) -> float:
    return link.delay_s if link else 0.0


@dataclass(frozen=True)
class Passing:
    """Messages that follow each other, between machines and inside one.

    Attributes:
        handled: that a rank's processor handles one after the other.
        delayed: whose delays add up.
    """

    handled: tuple[float, float]
    delayed: tuple[float, float]


def _moving_s(
    known: Calibration, machines: Machines, n_bytes: float, passing: Passing, stretch: float = SUM_STRETCH
) -> float:
    handled_s = sum(passing.handled) * known.hop_s / machines.slowest
    outside, inside = passing.delayed
    delayed_s = outside * _delay_s(machines.link) + inside * _delay_s(machines.inside)
    return n_bytes * seconds_per_byte(known, machines, stretch) + handled_s + delayed_s


def _one_after_another(outside: float, inside: float) -> Passing:
    return Passing((outside, inside), (outside, inside))


def _buckets(cost: Alternative, sent: float, known: Calibration) -> list[float]:
    """Return the bytes of each bucket, in the order in which backward fills them; the last is the tail."""
    exchanges = 2 if cost.coding_s else 1  # of records that do not tell
    count = min(_MOST_BUCKETS, cost.buckets or max(1, round(cost.rounds / exchanges)))
    if count == 1 or cost.period > 1:
        return [sent]
    tail = min(1.0, max(cost.tail, 0.0))
    return [sent * (1 - tail) / (count - 1)] * (count - 1) + [sent * tail]


def _before(work: dict[str, float]) -> list[SimulatedTask]:
    return [
        SimulatedTask(Phase.DATA, "processor", work[Phase.DATA]),
        SimulatedTask(Phase.FORWARD, "processor", work[Phase.FORWARD], (0,)),
    ]


def _reducing_tasks(work: dict[str, float], spread: float, coding_s: float, moving: list[float]) -> list[SimulatedTask]:
    """Return a step: buckets leave while backward goes on, the update comes when all sums are there."""
    tasks, backward_s = _before(work), work[Phase.BACKWARD] + coding_s
    pieces = [backward_s * (1 - spread)] + [backward_s * spread / max(1, len(moving) - 1)] * (len(moving) - 1)
    if len(moving) == 1:
        pieces = [backward_s]
    sends, last = [], 1
    for piece, seconds in zip(pieces, moving, strict=True):
        tasks.append(SimulatedTask(Phase.BACKWARD, "processor", piece, (last,)))
        last = len(tasks) - 1
        tasks.append(SimulatedTask(Phase.COMMUNICATE, "link", seconds, (last,)))
        sends.append(len(tasks) - 1)
    tasks.append(SimulatedTask(Phase.UPDATE, "processor", work[Phase.UPDATE] + work[Phase.OTHER], (last, *sends)))
    return tasks


def _averaging_tasks(work: dict[str, float], coding_s: float, moving_s: float) -> list[SimulatedTask]:
    """Return the step of a period in which the model travels, after the update."""
    tasks = _before(work)
    tasks.append(SimulatedTask(Phase.BACKWARD, "processor", work[Phase.BACKWARD], (1,)))
    tasks.append(SimulatedTask(Phase.UPDATE, "processor", work[Phase.UPDATE] + work[Phase.OTHER] + coding_s, (2,)))
    tasks.append(SimulatedTask(Phase.COMMUNICATE, "link", moving_s, (3,)))
    return tasks


@dataclass(frozen=True)
class Sharded:
    """Parameters are cut over `size` ranks (FSDP), replicas of them reduce each their piece.

    Attributes:
        size: ranks that share the parameters; they divide the batch, too.
        blocks: in which a layer's parameters are gathered at a time.
    """

    size: int
    replicas: int
    blocks: int

    @property
    def label(self) -> str:
        """The layout."""
        return f"fsdp={self.size}" if self.replicas == 1 else f"dp={self.replicas},fsdp={self.size}"

    @property
    def for_any_workers(self) -> bool:
        """Where all share the parameters of one replica."""
        return self.replicas == 1

    def parts_by_speed(self, machines: Machines) -> bool:
        """Whether there are several replicas, each of workers that are alike."""
        return self.replicas > 1 and all(group.workers % self.size == 0 for group in machines.parts)

    def step(self, known: Calibration, machines: Machines, batch: int) -> StepForecast:
        """Predict a step: blocks are gathered for forward and backward, their gradients cut up behind it.

        On GPUs a block travels while the one before computes. gloo works in turn with the processor, and cuts gradients
        up by reducing all of them on every rank, which sends twice as much.
        """
        work = known.compute(batch / machines.workers, machines.busy_speed)
        work[Phase.UPDATE] /= self.size
        inside = self.size <= machines.per_machine
        piece = known.parameters * 4 * (self.size - 1) / self.size / self.blocks
        hops = _one_after_another(*((0, self.size - 1) if inside else (self.size - 1, 0)))
        group = machines if not inside else _one_machine(machines)
        each_s = GATHERED_S / machines.busy_speed if known.on_cpu else 0.0
        cut = 2 * piece if known.on_cpu else piece
        gather_s = each_s + _moving_s(known, group, piece, hops, GATHER_STRETCH if known.on_cpu else SUM_STRETCH)
        scatter_s = each_s + _moving_s(known, group, cut, hops)
        own = known.parameters * 4 / self.size
        between = own * ring_share(self.replicas) if self.replicas > 1 else 0.0
        reduce_s = _between_replicas_s(known, machines, between, self.replicas)
        spans = simulate(_sharded_tasks(work, self.blocks, (gather_s, scatter_s, reduce_s), not known.on_cpu))
        compute_s = sum(work.values())
        waiting_s = known.jitter_s / machines.busy_speed * expected_max(machines.workers)
        exposed_s = max(0.0, makespan(spans) - compute_s)
        relative = uncertainty(known, machines, batch, OTHER_LAYOUT)
        sent = (2 * piece + cut) * self.blocks + between
        total = interval(compute_s + exposed_s + waiting_s, relative)
        return StepForecast(total, compute_s, exposed_s, waiting_s, sent, tuple(spans))


def _between_replicas_s(known: Calibration, machines: Machines, n_bytes: float, replicas: int) -> float:
    """Return the seconds of a sum over replicas, which nothing hides."""
    if not n_bytes:
        return 0.0
    outside = replicas > 1 and machines.count > 1
    rounds = 2 * (replicas - 1)
    return _moving_s(known, machines, n_bytes, _one_after_another(*((rounds, 0) if outside else (0, rounds))))


def _one_machine(machines: Machines) -> Machines:
    """Return one of the machines; of groups, with the slowest workers."""
    speed = machines.slowest if machines.groups else machines.speed
    return replace(machines, workers=machines.per_machine, speed=speed, groups=())


def _sharded_tasks(
    work: dict[str, float], blocks: int, seconds: tuple[float, float, float], ahead: bool
) -> list[SimulatedTask]:
    """Return a step of blocks that are gathered twice, and whose gradients are cut up once.

    Args:
        seconds: to gather a block, to cut its gradients up, and to reduce these between replicas.
        ahead: blocks travel beside computing, gathered one ahead; else in turn with it.
    """
    gather_s, scatter_s, reduce_s = seconds
    tasks = [SimulatedTask(Phase.DATA, "processor", work[Phase.DATA])]
    last = 0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for _ in range(blocks):
            behind = (max(0, last - 1),) if ahead and last > 1 else ()
            before = behind if ahead else (len(tasks) - 1,)
            tasks.append(SimulatedTask(Phase.COMMUNICATE, "link", gather_s, before))
            tasks.append(SimulatedTask(phase, "processor", work[phase] / blocks, (len(tasks) - 1, last)))
            last = len(tasks) - 1
            if phase is Phase.BACKWARD:
                tasks.append(SimulatedTask(Phase.COMMUNICATE, "link", scatter_s, (last,)))
    tasks.append(SimulatedTask(Phase.COMMUNICATE, "link", reduce_s, (len(tasks) - 1,)))
    tasks.append(
        SimulatedTask(Phase.UPDATE, "processor", work[Phase.UPDATE] + work[Phase.OTHER], (last, len(tasks) - 1))
    )
    return tasks


@dataclass(frozen=True)
class Pipelined:
    """Layers are cut into stages, each replica is a pipeline of them.

    Attributes:
        shares: of the compute, by stage, as they were timed alone.
        passed_bytes: that a sample's activations have between two stages, by cut.
        largest: the largest rank's share of the parameters, whose gradients replicas reduce.
        schedule: its name (Narayanan et al. 2019 and others: `parallel/pipeline/settings.py`).
        ranks: of a replica, several stages each where the schedule asks for them; 0: as many as stages.
    """

    shares: tuple[float, ...]
    replicas: int
    microbatches: int
    passed_bytes: tuple[float, ...]
    largest: float
    schedule: str = DEFAULT_SCHEDULE
    ranks: int = 0

    @property
    def label(self) -> str:
        """The layout."""
        layout = pipeline_layout(self.depth, self.microbatches, self.schedule)
        return layout if self.replicas == 1 else f"dp={self.replicas},{layout}"

    @property
    def depth(self) -> int:
        """Ranks of a replica."""
        return self.ranks or len(self.shares)

    @property
    def for_any_workers(self) -> bool:
        """Never: blocks are cut into so many stages."""
        return False

    def parts_by_speed(self, machines: Machines) -> bool:
        """Return False: stages of equal work go at the pace of the slowest."""
        return False

    def step(self, known: Calibration, machines: Machines, batch: int) -> StepForecast:
        """Predict a step: micro-batches pass through the stages, then replicas reduce each stage's gradients."""
        costs = known.pipelines or self._of_replicas(known)
        samples = batch / self.replicas / self.microbatches
        gradient = known.parameters * 4 * self.largest
        between = gradient * ring_share(self.replicas) if self.replicas > 1 else 0.0
        times = costs.times(costs.shares.get(len(self.shares), (self.shares, self.shares)), samples, self.microbatches)
        reduce_s = _between_replicas_s(known, machines, between, self.replicas)
        times = replace(self._over_links(times, known, machines, samples), reduce_s=reduce_s)
        times = times.at_speed(machines.speed, costs.ranks / self.depth)
        spans = self._simulated(times, machines)
        compute_s = sum((*times.forward, *times.backward)) * self.microbatches / self.depth
        total_s = makespan(spans) + costs.around_s / machines.busy_speed
        waiting_s = known.jitter_s / machines.busy_speed * expected_max(machines.workers) if self.replicas > 1 else 0.0
        total = interval(total_s + waiting_s, uncertainty(known, machines, batch, self._beyond(costs, samples)))
        sent = max(self._passed_by_rank()) * samples * self.microbatches + between
        idle = idle_shares(spans).values()
        bubble = sum(idle) / len(idle)
        return StepForecast(total, compute_s, max(0.0, total_s - compute_s), waiting_s, sent, tuple(spans), bubble)

    def _simulated(self, times: StageTimes, machines: Machines) -> list[TaskSpan]:
        """Return a step of one replica, or of those that share the processors of a machine."""
        shared = 0 < machines.processors < min(machines.workers, machines.per_machine)
        beside = max(1, min(self.replicas, machines.per_machine // self.depth)) if shared else 1
        tasks = pipeline_tasks(self.schedule, self.microbatches, self.depth, times, beside)
        return simulate(tasks, places_of(machines.processors if shared else 0, beside * self.depth))

    def _beyond(self, costs: PipelineCosts, samples: float) -> float:
        """Return by how much the interval widens, for what was measured of pipelines and their micro-batches."""
        if not costs.source:
            return OTHER_LAYOUT
        least, most = costs.samples
        far = math.log2(least / samples) if samples < least else math.log2(max(1.0, samples / most))
        deeper = math.log2(max(1.0, len(self.shares) / max(costs.shares)))
        return math.hypot(MORE_STAGES * deeper, 2 * FEWER_DOUBLINGS * far)

    def _over_links(self, times: StageTimes, known: Calibration, machines: Machines, samples: float) -> StageTimes:
        """Return them with messages as measured, or on the links between the ranks of a replica, whichever is more."""
        within = machines.per_machine % self.depth == 0  # ranks of a replica follow each other
        there = _one_machine(machines) if within else machines
        hop_s = times.message_s if known.pipelines else known.hop_s / machines.busy_speed
        if known.pipelines and there.narrowest in (None, known.link):
            return times
        byte_s = seconds_per_byte(known, there, MESSAGE_STRETCH)
        moving = [n_bytes * samples * byte_s for n_bytes in self.passed_bytes]
        link_s = tuple(max(each) for each in zip(times.link_s, moving, strict=True))
        return replace(times, link_s=link_s, message_s=hop_s + _delay_s(there.narrowest))

    def _passed_by_rank(self) -> list[float]:
        """Return the bytes that each rank sends of a sample: activations forward, their gradients back."""
        sent = [0.0] * self.depth
        where = stage_ranks(SCHEDULES[self.schedule], len(self.shares), self.depth)
        for before, after, n_bytes in zip(where, where[1:], self.passed_bytes, strict=False):
            if before != after:
                sent[before] += n_bytes
                sent[after] += n_bytes
        return sent

    def _of_replicas(self, known: Calibration) -> PipelineCosts:
        """Return what whole replicas tell of a pipeline: what Python takes between computations is not among that."""
        update = known.phases[Phase.UPDATE].fixed_s + known.phases[Phase.OTHER].fixed_s
        return PipelineCosts(
            "", known.phases[Phase.FORWARD], known.phases[Phase.BACKWARD], 0.0, PhaseCost(0.0, 0.0),
            known.phases[Phase.DATA], update * self.largest * self.depth, 0.0, self.depth, {},
        )  # fmt: skip


def pipeline_layout(ranks: int, microbatches: int, schedule: str) -> str:
    """Return the spec of one pipeline.

    >>> pipeline_layout(2, 8, "gpipe")
    'pp=2,microbatches=8,schedule=gpipe'
    """
    ending = "" if schedule == DEFAULT_SCHEDULE else f",schedule={schedule}"
    return f"pp={ranks},microbatches={microbatches}{ending}"
