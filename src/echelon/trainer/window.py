"""Statistics of a few steps, added over the ranks in one small all-reduce so that no step waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.times import ReduceTimes
from echelon.collectives.wire import GROUPS, SHOWN
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PAUSES, PHASE_NAMES, PHASES, RECORDING, Phase, PhaseClock
from echelon.observe.resources import Sampler, peak_resident_bytes
from echelon.records.kinds import RESOURCE_NAMES, Steps
from echelon.trainer.step import StepResult
from echelon.trainer.step_watch import RankFacts, SlowestStep, StepWatch
from echelon.trainer.world import World

TARGET_S = 2.0  # closing a window takes some milliseconds: well below 1% of it
MOST_STEPS = 100
LOOK_S = 0.2  # between looks, within a window, for a rank that was asked to stop
_HEAD = 7  # numbers that are not of one step, nor of one rank, nor of one group of bytes
_USED = len(PHASES) + 1 + len(RESOURCE_NAMES)  # of a rank: seconds by phase, memory, what it uses of its machine
_COLUMNS = _USED + RankFacts.COLUMNS
_MOST_WAITS = 1024  # numbers: they are a few KB, which no link feels every two seconds


@dataclass(frozen=True)
class WindowEnd:
    """Where a window of steps ends: the last step's epoch (from 0) and number (from 1), its learning rate.

    `density`: share of the encoded elements that the last message carried; None without a sparse codec.
    """

    epoch: int
    step: int
    lr: float
    density: float | None


@dataclass(frozen=True)
class ClosedWindow:
    """What all ranks did in a window, and what they agreed on.

    Attributes:
        steps: as the record has it.
        resources: a row for each rank, in the order of `RESOURCE_NAMES`; empty where nothing new was sampled.
        slowest: each rank's longest step; None where it had none.
        pauses: what happened before each step since the one before.
        stop: some rank was asked to stop.
        checkpoint_due, time_is_up: by rank 0's clock.
    """

    steps: Steps
    resources: list[list[float]]
    slowest: list[SlowestStep | None]
    pauses: list[list[str]]
    stop: bool
    checkpoint_due: bool
    time_is_up: bool


@dataclass(frozen=True)
class Wishes:
    """What a rank wants all to do once a window is closed.

    Attributes:
        stop: it was asked to.
        checkpoint_due: by the clock; rank 0's word counts.
        time_is_up: the command's time; rank 0's word counts.
    """

    stop: bool = False
    checkpoint_due: bool = False
    time_is_up: bool = False


class _StopLooks:
    """Tells all ranks within a window that one of them was asked to stop, at the same step.

    Each look begins a sum over the ranks, on the CPU, and reads the one that the look before began: no rank waits for
    it, unless another is behind by as many steps as lie between two looks.
    """

    def __init__(self, world: World, clock: PhaseClock) -> None:
        self._world, self._clock = world, clock
        self._every = 0  # steps; 0: none within a window
        self._begun: tuple[Tensor, dist.Work] | None = None
        self.count = 0

    def begin_window(self, steps: int, step_s: float) -> None:
        """Look so often that `LOOK_S` passes in between; all ranks give the same steps of a window, and time of one."""
        self.count = 0
        self._every = max(1, round(LOOK_S / max(step_s, 1e-9))) if self._world.group is not None else 0
        if self._every >= steps:
            self._every = 0

    def look(self, step: int, stop: bool) -> bool:
        """Return whether a rank was asked to stop before the last look; all call it after the same step of a window."""
        if not self._every or step % self._every:
            return False
        seen = self.settle()
        asked = torch.tensor([float(stop)], dtype=torch.float64)
        work = dist.all_reduce(asked, group=self._world.group, async_op=True)
        assert work is not None
        self._begun, self.count = (asked, work), self.count + 1
        return seen

    def settle(self) -> bool:
        """Wait for the sum that was begun last; returns whether a rank was asked to stop."""
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        asked, work = begun
        if not work.is_completed():  # another rank is behind
            self._clock.enter(Phase.COMMUNICATE)
            work.wait()
            self._clock.enter(Phase.OTHER)
        work.wait()  # raises what it failed for
        return bool(asked > 0)


@dataclass
class TimedPause:
    """A pause between steps, and how long it was once it is over."""

    name: str
    seconds: float = 0.0


@dataclass(frozen=True)
class WindowTraffic:
    """Bytes that this rank sent in a window: so that replicas agree, by group (of `GROUPS`), and for checkpoints."""

    by_group: Mapping[str, int]
    other_bytes: int

    def in_order(self) -> list[int]:
        """Return the bytes of each of `GROUPS`."""
        if unknown := self.by_group.keys() - set(GROUPS):
            raise ValueError(f"bytes of unknown groups: {', '.join(sorted(unknown))}")
        return [self.by_group.get(group, 0) for group in GROUPS]


@dataclass(frozen=True)
class _Sums:
    """What all ranks added up in a window.

    Attributes:
        head: numbers that are not of one step, nor of one rank, nor of one group of bytes.
        by_group: bytes of each of `GROUPS`.
        losses, scores: of each step.
        ranks: (ranks, `_COLUMNS`) rows, and the facts that are their last columns.
        waits: (ranks, steps) seconds; empty where they are not told.
    """

    head: list[float]
    by_group: list[float]
    losses: list[float]
    scores: list[float]
    ranks: list[list[float]]
    facts: list[RankFacts]
    waits: list[list[float]]

    def steps(self, end: WindowEnd) -> Steps:
        """Return the window as the record has it."""
        return Steps(
            epoch=end.epoch,
            step=end.step,
            losses=self.losses,
            correct=round(sum(self.scores)),
            samples=round(self.head[0]),
            lr=end.lr,
            seconds=self.head[4],
            phase_names=PHASE_NAMES,
            phases=[row[: len(PHASES)] for row in self.ranks],
            wire_bytes=round(sum(self.by_group)),
            wire_bytes_by_group={g: round(n) for g, n in zip(GROUPS, self.by_group, strict=True) if n},
            other_wire_bytes=round(self.head[1]),
            density=end.density,
            memory_bytes=[round(row[len(PHASES)]) for row in self.ranks],
            gc_s=[facts.gc_s for facts in self.facts],
            comm_busy_s=[facts.busy_s for facts in self.facts],
            comm_spread_s=[facts.spread_s for facts in self.facts],
            pause_names=PAUSES,
            pauses=[facts.pauses for facts in self.facts],
            waits=[[round(s, 6) for s in row] for row in self.waits],
        )


class Window:
    """Collects steps until it is full; all ranks close it after the same step.

    Its length follows the measured step time of rank 0, which tells the others when they add up, so that statistics
    come about every two seconds; a signal to stop is answered sooner (`stops`).
    """

    def __init__(self, world: World, clock: PhaseClock, garbage: GarbageClock) -> None:
        self._world, self._clock = world, clock
        self._length = 1
        self._sampler = Sampler(gpu_uuid(world.device))
        self.watch = StepWatch(clock, garbage)
        self._looks = _StopLooks(world, clock)
        self.meet()  # else waiting for the one that still records the start would be a step's communication
        clock.drain()  # what came before is no step's time
        self._begin(time.perf_counter())

    def _begin(self, now_s: float) -> None:
        self._began = now_s
        self._losses: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._samples = 0

    def add(self, result: StepResult) -> None:
        """Add one step."""
        self._losses.append(result.loss)
        self._scores.append(result.score)
        self._samples += result.samples

    @property
    def spent_s(self) -> float:
        """Seconds since the window began, without pauses."""
        return time.perf_counter() - self._began

    def take_over(self, results: Sequence[StepResult], seconds: float) -> None:
        """Begin with steps that were made before the ranks changed, in so many seconds."""
        for result in results:
            self.add(result)
            self.watch.take_over()
        self._began -= seconds

    def stops(self, stop: bool) -> bool:
        """Whether a rank was asked to stop, so that all are to close the window; all call it after each step.

        Args:
            stop: this rank was asked to, or its time is up.
        """
        return self._looks.look(self.steps, stop)

    def end_step(self) -> None:
        """The step that was added is over, its update too."""
        self.watch.end_step()

    @property
    def steps(self) -> int:
        """Steps collected so far."""
        return len(self._losses)

    @property
    def full(self) -> bool:
        """Whether it is time to close."""
        return self.steps >= self._length

    @contextmanager
    def pause(self, name: str) -> Iterator[TimedPause]:
        """Surround what interrupts the steps: it counts for no window and no phase."""
        pause, began = TimedPause(name), time.perf_counter()
        self._clock.enter(None)
        self._world.notes.enter(name)
        try:
            yield pause
        finally:
            pause.seconds = time.perf_counter() - began
            self._resume(name, pause.seconds)

    def meet(self) -> None:
        """Wait for the slowest rank before a pause ends: in the next step, the wait would count as communication."""
        self._sum([0.0])

    def _resume(self, name: str, paused_s: float) -> None:
        self._began += paused_s
        self.watch.paused(name, paused_s)
        self._clock.enter(Phase.OTHER)

    def go_on(self) -> None:
        """Call it on all ranks when what `close` told has been recorded: from now on time counts again."""
        self.meet()
        self._resume(RECORDING, time.perf_counter() - self._began)

    def close(self, end: WindowEnd, sent: WindowTraffic, times: ReduceTimes | None, wishes: Wishes) -> ClosedWindow:
        """Add up over all ranks and begin anew, with a pause until `go_on`. All ranks call it after the same step.

        Args:
            end: of the window.
            sent: bytes that this rank sent in this window.
            times: of the strategy's communication in backward.
            wishes: this rank's.
        """
        self._looks.settle()
        world, count, watch = self._world, self.steps, self.watch
        numbers = [x * world.counts for x in _read([*self._losses, *self._scores])]
        now = time.perf_counter()
        seconds, phases = now - self._began, self._clock.drain()
        watch.settle()
        self._clock.enter(None)
        world.notes.enter(RECORDING)
        leads, pauses, waits = float(world.leads), watch.pauses, self._waits()
        sampled, facts = self._sampler.sample(), watch.close(phases, times)
        rows = self._in_row([*phases, peak_bytes(world.device), *self._sampler.row, *facts.row()])
        groups = sent.in_order()
        sizes = [_HEAD, len(groups), len(numbers), len(rows), len(waits)]
        head = [
            self._samples * world.counts,
            sent.other_bytes + self._own_bytes(sum(sizes)) + self._looks.count * self._own_bytes(1),
            wishes.stop,
            leads * wishes.checkpoint_due,
            leads * seconds,
            leads * self._next_length(seconds),
            leads * wishes.time_is_up,
        ]
        summed = iter(self._sum([*head, *groups, *numbers, *rows, *waits]))
        head, by_group, numbers, rows, waits = (list(islice(summed, size)) for size in sizes)
        ranks = _rows(rows, world.size)
        by_rank = [RankFacts.of(row[_USED:]) for row in ranks]
        self._length = max(1, int(head[5]))
        self._looks.begin_window(self._length, head[4] / count)
        self._begin(now)
        sums = _Sums(head, by_group, numbers[:count], numbers[count:], ranks, by_rank, _rows(waits, world.size))
        resources = [row[len(PHASES) + 1 : _USED] for row in ranks] if sampled else []
        slowest = [rank.slowest for rank in by_rank]
        stop, checkpoint_due, time_is_up = (head[i] > 0 for i in (2, 3, 6))
        return ClosedWindow(sums.steps(end), resources, slowest, pauses, stop, checkpoint_due, time_is_up)

    def _sum(self, numbers: list[float]) -> list[float]:
        """Add up over all ranks."""
        if self._world.group is None:
            return numbers
        flat = torch.tensor(numbers, dtype=torch.float64, device=self._world.device)
        dist.all_reduce(flat, group=self._world.group)
        summed: list[float] = flat.tolist()
        return summed

    def _waits(self) -> list[float]:
        """Return this rank's waits in its row of a table of all ranks (ranks, steps), or nothing."""
        size, waits = self._world.size, self.watch.waits
        if size == 1 or size * len(waits) > _MOST_WAITS:
            return []
        return self._in_row(waits)

    def _in_row(self, row: list[float]) -> list[float]:
        """Return a table (ranks, columns), flat, in which the other ranks' rows are zero."""
        before, after = self._world.rank, self._world.size - self._world.rank - 1
        return [0.0] * (before * len(row)) + row + [0.0] * (after * len(row))

    def _own_bytes(self, numbers: int) -> int:
        """What adding up costs: so many float64 numbers through the backend's all-reduce."""
        size = self._world.size
        return 2 * (size - 1) * 8 * numbers // size

    def _next_length(self, seconds: float) -> int:
        return max(1, min(MOST_STEPS, round(TARGET_S * max(1, self.steps) / max(seconds, 1e-9))))


class Traffic:
    """Turns running totals of bytes by group of parameters into what was sent since the last look.

    Args:
        at_start: bytes that this rank sent to bring all replicas to the same parameters.
    """

    def __init__(self, at_start: int = 0) -> None:
        self._before: dict[str, int] = {}
        self._others_before = -at_start

    def begin_anew(self, totals: Mapping[str, int], other_total: int, at_start: int) -> None:
        """Count from zero again, as new parts of a run do; what was not looked at yet is of anything else.

        Args:
            at_start: bytes that this rank sent to bring all replicas to the same parameters.
        """
        sent, others = self.since_last(totals, other_total)
        self._before, self._others_before = {}, -(sum(sent.values()) + others + at_start)

    def since_last(self, totals: Mapping[str, int], other_total: int) -> tuple[dict[str, int], int]:
        """Return the bytes since the last call: of training by group, and for anything else.

        Args:
            totals: by group since the start, as strategies count them.
            other_total: since the start, for checkpoints and statistics.
        """
        sent = {group: total - self._before.get(group, 0) for group, total in totals.items()}
        others = sent.pop(SHOWN, 0) + other_total - self._others_before
        self._before, self._others_before = dict(totals), other_total
        return sent, others


def _read(tensors: list[Tensor]) -> list[float]:
    """Return the numbers of scalar tensors: one by one on a CPU, which costs less than stacking; else in one copy."""
    if tensors[0].device.type == "cpu":
        return [t.item() for t in tensors]
    numbers: list[float] = torch.stack(tensors).double().tolist()
    return numbers


def _rows(table: list[float], size: int) -> list[list[float]]:
    columns = len(table) // size
    return [table[i : i + columns] for i in range(0, len(table), columns)] if table else []


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a rank's GPU; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def peak_bytes(device: torch.device) -> int:
    """Return the most memory so far: of the allocator on a GPU, of this process's resident set on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
