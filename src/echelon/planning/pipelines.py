"""A step of a pipeline as tasks for the simulator: computations in the schedule's order, messages, shared processors.

Between two computations of a rank lies what torch's Python takes, and a result that another rank waits for travels
meanwhile. Its bytes have the sender's link for themselves, its delay does not occupy the link:

    begin of a computation = max(end of the rank's last one + between, end of what it needs elsewhere + link + message)

Replicas add up their gradients behind the last micro-batch, and then update.

The first stage of a schedule that divides backward has nothing to send back: it computes all of it as `weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.forecast.simulator import SimulatedTask, TaskSpan
from echelon.observe.phases import Phase
from echelon.parallel.pipeline.order import Computation, computation_order, needed

BETWEEN = "between"
DELAY = "delay"
_PROCESSORS = "processors"


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a pipeline's parts in one step.

    Attributes:
        forward, backward: of a micro-batch, by stage.
        weight_share: of backward, the half that gives the gradients of the parameters.
        between_s: from one computation of a rank to the next that waits for nothing.
        link_s: that the bytes of a micro-batch occupy the sender's link, by the stage before the cut; the gradient on
            its way back has as many.
        message_s: what else lies between the end of a computation and the begin of one on another rank that waited
            for it.
        before_s, after_s: of each rank, before its first and after all ranks' last computation.
        reduce_s: that replicas take for their gradients in between.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_share: float = 0.5
    between_s: float = 0.0
    link_s: tuple[float, ...] = ()
    message_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0
    reduce_s: float = 0.0

    def seconds(self, work: Computation) -> float:
        """Return the seconds of a computation."""
        if work.kind == "forward":
            return self.forward[work.stage]
        whole_s = self.backward[work.stage]
        if work.kind == "backward":
            return whole_s
        if work.stage == 0:
            return whole_s if work.kind == "weight" else 0.0
        return whole_s * (self.weight_share if work.kind == "weight" else 1 - self.weight_share)

    def at_speed(self, speed: float, update_share: float) -> StageTimes:
        """Return them on workers of another speed, with so much of the update; messages stay."""
        return StageTimes(
            tuple(each / speed for each in self.forward),
            tuple(each / speed for each in self.backward),
            self.weight_share,
            self.between_s / speed,
            self.link_s,
            self.message_s,
            self.before_s / speed,
            self.after_s * update_share / speed,
            self.reduce_s,
        )

    def on_link(self, work: Computation, source: Computation) -> float:
        """Return the seconds that what a computation needs of another stage occupies the link."""
        return self.link_s[min(work.stage, source.stage)] if self.link_s else 0.0

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.forward)


def pipeline_tasks(schedule: str, count: int, ranks: int, times: StageTimes, replicas: int = 1) -> list[SimulatedTask]:
    """Return the tasks of a step of `count` micro-batches.

    Args:
        replicas: pipelines beside each other, whose ranks may share processors (see `places_of`).
    """
    order = computation_order(schedule, count, ranks, times.stages)
    tasks: list[SimulatedTask] = []
    for replica in range(replicas):
        _add_replica(tasks, order, times, f" {replica}." if replicas > 1 else " ")
    return tasks


def _add_replica(
    tasks: list[SimulatedTask], order: Sequence[Sequence[Computation]], times: StageTimes, prefix: str
) -> None:
    """Append the tasks of one pipeline: data, computations with what lies between them, update; then messages."""
    at: dict[Computation, int] = {}
    ranks: dict[int, int] = {}
    place = len(tasks)
    for rank, works in enumerate(order):
        place += 1  # of data
        for work in works:
            at[work] = place + 1  # behind what lies before it
            ranks[work.stage] = rank
            place += 2
    last, first_message = times.stages - 1, place
    messages: list[SimulatedTask] = []
    ends = []
    for rank, works in enumerate(order):
        processor = f"processor{prefix}{rank}"
        tasks.append(SimulatedTask(Phase.DATA, processor, times.before_s, (), _PROCESSORS))
        for work in works:
            previous, after = len(tasks) - 1, [len(tasks)]
            source = needed(work, last)
            if source is not None and ranks[source.stage] != rank:
                if source not in at:  # its backward is divided
                    source = Computation(source.stage, source.microbatch, "input")
                link, place = f"link{prefix}{ranks[source.stage]}", first_message + len(messages)
                messages.append(SimulatedTask(Phase.COMMUNICATE, link, times.on_link(work, source), (at[source],)))
                messages.append(SimulatedTask(DELAY, f"{link} {place}", times.message_s, (place,)))
                after.append(place + 1)
            seconds = times.seconds(work)
            between_s = times.between_s if seconds else 0.0
            tasks.append(SimulatedTask(BETWEEN, processor, between_s, (previous,), _PROCESSORS))
            name = Phase.FORWARD if work.kind == "forward" else Phase.BACKWARD
            tasks.append(SimulatedTask(name, processor, seconds, tuple(after), _PROCESSORS))
        ends.append(len(tasks) - 1)
    tasks += messages
    tasks.append(SimulatedTask(Phase.COMMUNICATE, f"link{prefix}replicas", times.reduce_s, tuple(ends)))
    reduced = len(tasks) - 1
    for rank in range(len(order)):
        processor = f"processor{prefix}{rank}"
        tasks.append(SimulatedTask(Phase.UPDATE, processor, times.after_s, (reduced,), _PROCESSORS))


def places_of(processors: int, ranks: int) -> dict[str, int]:
    """Return what `simulate` is to know of processors that so many ranks share; 0: each has its own."""
    return {_PROCESSORS: min(processors or ranks, ranks)}


def idle_shares(spans: Sequence[TaskSpan]) -> dict[str, float]:
    """Return, by processor, the share of time from the first computation to the last in which it has none.

    A rank whose computation waits for a processor that others have is not idle: on a real machine it takes turns with
    them, and its computation takes longer.
    """
    works = [span for span in spans if span.task.name in (Phase.FORWARD, Phase.BACKWARD)]
    length = max(span.end_s for span in works) - min(span.begin_s for span in works)
    busy: dict[str, float] = {}
    for span in works:
        busy[span.task.resource] = busy.get(span.task.resource, 0.0) + span.end_s - span.ready_s
    return {name: 1 - seconds / length if length else 0.0 for name, seconds in busy.items()}
