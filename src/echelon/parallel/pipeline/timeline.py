"""What each rank computed when, in one step of a pipeline: measured around the stages' own computations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from echelon.records.kinds import PipelineAction

Kind = Literal["forward", "backward", "input", "weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class ActionRecorder:
    """Takes the times of this rank's actions while `recording`; on a GPU by events, which wait for nothing.

    Attributes:
        on_change: told, in every step, what begins: a computation, or with None what is between computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[tuple[int, int, int, Any, Any]] = []
        self._began: Any = None
        self._began_s = 0.0
        self.recording = False
        self.on_change: Callable[[Kind | None], None] = _ignore

    def start(self) -> None:
        """Begin a step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rows, self.recording = [], True
        self._began, self._began_s = self._mark(), time.time()

    @contextmanager
    def action(self, stage: int, microbatch: int, kind: Kind) -> Iterator[None]:
        """Surround a computation."""
        began = self._mark() if self.recording else None
        with self.telling(kind):
            yield
        if self.recording:
            self._rows.append((stage, microbatch, KINDS.index(kind), began, self._mark()))

    @contextmanager
    def telling(self, kind: Kind) -> Iterator[None]:
        """Say that a computation begins, and that it is over, also where it fails."""
        self.on_change(kind)
        try:
            yield
        finally:
            self.on_change(None)

    def finish(self, group: dist.ProcessGroup) -> list[PipelineAction]:
        """End the step; return the actions of all ranks, on each of them, by rank and time."""
        self.recording = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rows = [[*row[:3], *(self._began_s + self._since(mark) for mark in row[3:])] for row in self._rows]
        size = torch.tensor([len(rows), -self._began_s], dtype=torch.float64)
        sizes = _gathered(size, group, self._device)
        most = int(max(each[0].item() for each in sizes))
        table = torch.zeros(most, 5, dtype=torch.float64)
        table[: len(rows)] = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
        tables = _gathered(table, group, self._device)
        zero = min(-each[1].item() for each in sizes)
        return [
            PipelineAction(rank, int(stage), int(microbatch), KINDS[int(kind)], begin - zero, end - zero)
            for rank, (each, count) in enumerate(zip(tables, sizes, strict=True))
            for stage, microbatch, kind, begin, end in each[: int(count[0].item())].tolist()
        ]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return float(mark - self._began)
        return float(self._began.elapsed_time(mark)) / 1000


def _ignore(kind: Kind | None) -> None:
    """Nobody wants to know."""


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    mine = tensor.to(device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [each.cpu() for each in found]
