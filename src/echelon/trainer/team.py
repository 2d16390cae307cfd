"""The ranks of one worker that is split: how they meet, and how the first one tells the others what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.core.axes import Axis
from echelon.parallel.base import Group, place
from echelon.ps.worker_rank import WorkerRank
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.world import World, _device

STORES_FOLDER = "teams"
_IDLE = "idle"
_WORD_BYTES = 1024
_WORDS_A_TIMEOUT = 4


@contextmanager
def join_team(run: ResolvedRun, seat: WorkerRank, roles: Path) -> Iterator[World]:
    """Join the other ranks of a worker, and leave them at the end; a worker that is one rank is its own world.

    They meet by a file that is named after this start of theirs, so that nothing of an earlier one is read.

    Raises:
        UserError: there is no GPU for this rank.
    """
    device = _device(run.config.training.device, seat.local)
    if seat.size == 1:
        yield World(seat.number, 1, seat.local, device, None)
        return
    timeout = timedelta(seconds=run.timeout_s)
    folder = roles / STORES_FOLDER
    folder.mkdir(exist_ok=True)
    store = dist.FileStore(str(folder / f"worker{seat.number}-{os.environ['ECHELON_ROUND']}"), seat.size)
    store.set_timeout(timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=timeout)
    whole = run.layout_for(seat.workers * seat.size)
    placement = place(replace(whole, sizes={**whole.sizes, Axis.DP: 1}), seat.rank, device.type, timeout)
    yield World(seat.rank, seat.size, seat.local, device, dist.group.WORLD, placement)
    dist.destroy_process_group()  # not after an error: that is recorded first, and then the process ends at once


class CommandChannel:
    """What the first rank of a group tells the others, in order: small JSON objects, each with a `kind`."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        """Take a group of ranks that can send tensors in the processor's memory, and how long they wait for a word."""
        self._group = group
        self.idle_s = timeout_s / _WORDS_A_TIMEOUT

    def tell(self, kind: str, **said: Any) -> None:
        """Tell a word, as the first rank; the others hear it."""
        text = json.dumps({"kind": kind, **said}).encode()
        assert len(text) <= _WORD_BYTES
        self._broadcast(torch.frombuffer(bytearray(text.ljust(_WORD_BYTES)), dtype=torch.uint8))

    def tell_idle(self) -> None:
        """Tell that there is nothing to do yet, every `idle_s`: the others wait for a word no longer than a timeout."""
        self.tell(_IDLE)

    def hear(self) -> dict[str, Any]:
        """Wait for a word, as one of the others."""
        while True:
            word: dict[str, Any] = json.loads(bytes(self._broadcast(torch.empty(_WORD_BYTES, dtype=torch.uint8))))
            if word["kind"] != _IDLE:
                return word

    def _broadcast(self, word: torch.Tensor) -> list[int]:
        dist.broadcast(word, group=self._group, group_src=0)
        return word.tolist()
