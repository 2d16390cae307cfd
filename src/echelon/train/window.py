"""Statistics of a few steps, added over the ranks in one small all-reduce so that no step waits for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.observe.phases import PHASES, PhaseClock
from echelon.train.step import StepResult
from echelon.train.world import World

TARGET_S = 0.5
MOST_STEPS = 100


@dataclass(frozen=True)
class WindowTotals:
    """What all ranks did in a window; `phases` has one row per rank, in seconds."""

    losses: list[float]
    correct: int
    samples: int
    seconds: float
    phases: list[list[float]]
    memory_bytes: list[int]
    wire_bytes: int
    other_wire_bytes: int
    stop: bool
    checkpoint_due: bool


@dataclass(frozen=True)
class Sent:
    """Bytes that this rank sent in a window: so that replicas agree, and for checkpoints."""

    wire_bytes: int
    other_bytes: int


class Window:
    """Collects steps until it is full; all ranks close it after the same step.

    Its length follows the measured step time of rank 0, which tells the others when they add up, so that statistics
    (and the answer to a signal) come about twice a second.
    """

    def __init__(self, world: World, clock: PhaseClock) -> None:
        self._world, self._clock = world, clock
        self._length = 1
        self._begin()

    def _begin(self) -> None:
        self._losses: list[Tensor] = []
        self._correct: list[Tensor] = []
        self._samples = 0
        self._began = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Add one step."""
        self._losses.append(result.loss)
        self._correct.append(result.correct)
        self._samples += result.samples

    @property
    def steps(self) -> int:
        """Steps collected so far."""
        return len(self._losses)

    @property
    def full(self) -> bool:
        """Whether it is time to close."""
        return self.steps >= self._length

    def close(self, sent: Sent, stop: bool, checkpoint_due: bool) -> WindowTotals:
        """Add up over all ranks and begin anew. All ranks must call it after the same step.

        Args:
            sent: bytes that this rank sent in this window.
            stop: this rank was asked to stop.
            checkpoint_due: a checkpoint is due by the clock; rank 0's word counts.
        """
        world, steps = self._world, self.steps
        numbers = torch.stack([*self._losses, *self._correct]).double().cpu() * world.counts
        seconds = time.perf_counter() - self._began
        leads = float(world.leads)
        head = [
            self._samples * world.counts,
            sent.wire_bytes,
            sent.other_bytes + self._own_bytes(steps),
            stop,
            leads * checkpoint_due,
            leads * seconds,
            leads * self._next_length(seconds),
        ]
        table = torch.zeros(world.size, len(PHASES) + 1, dtype=torch.float64)
        table[world.rank] = torch.tensor([*self._clock.drain(), resident_bytes(world.device)])
        flat = torch.cat([torch.tensor(head, dtype=torch.float64), numbers, table.reshape(-1)])
        if world.group is not None:
            flat = flat.to(world.device)
            dist.all_reduce(flat, group=world.group)
        values = flat.tolist()
        head, numbers_, rows = values[:7], values[7 : 7 + 2 * steps], values[7 + 2 * steps :]
        width = len(PHASES) + 1
        self._length = max(1, int(head[6]))
        self._begin()
        return WindowTotals(
            losses=numbers_[:steps],
            correct=round(sum(numbers_[steps:])),
            samples=round(head[0]),
            seconds=head[5],
            phases=[rows[r * width : r * width + len(PHASES)] for r in range(world.size)],
            memory_bytes=[round(rows[r * width + len(PHASES)]) for r in range(world.size)],
            wire_bytes=round(head[1]),
            other_wire_bytes=round(head[2]),
            stop=head[3] > 0,
            checkpoint_due=head[4] > 0,
        )

    def _own_bytes(self, steps: int) -> int:
        """What adding up costs: float64 numbers through the backend's all-reduce."""
        size = self._world.size
        numbers = 7 + 2 * steps + size * (len(PHASES) + 1)
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

    def since_last(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes by group since the last call."""
        sent = {group: n_bytes - self._before.get(group, 0) for group, n_bytes in totals.items()}
        self._before = dict(totals)
        return sent

    def others_since_last(self, total: int) -> int:
        """Return the bytes sent for anything else since the last call."""
        sent, self._others_before = total - self._others_before, total
        return sent


def resident_bytes(device: torch.device) -> int:
    """Return the memory in use: the allocator's peak on a GPU, this process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)
