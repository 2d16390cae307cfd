"""A rank's batches in order, made in this process or by loader processes, on the host or on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.assemble import Rows
from echelon.data.base import BadImage, Batch, DataInfo
from echelon.data.device import CudaFeed, Staged
from echelon.data.order import Indices
from echelon.data.pool import Pool
from echelon.data.recipe import LoaderConfig, loader_count


@dataclass(frozen=True)
class Job:
    """A batch to make: its number in the epoch, this rank's indices, and the samples of all ranks."""

    number: int
    indices: Indices
    global_size: int


@dataclass
class _OnDevice:
    staged: Staged
    bad: list[BadImage]
    size: int


class Feed:
    """Makes batches of one data set.

    Args:
        most: samples of this rank's largest batch.
    """

    def __init__(self, rows: Rows, info: DataInfo, config: LoaderConfig, most: int) -> None:
        self._rows = rows
        loaders = loader_count(rows, config)
        self.pool = Pool(rows, loaders, most, config.timeout_s) if loaders else None
        self._cuda: CudaFeed | None = None
        self._device, self._info = config.device, info
        self._copying: deque[tuple[int, torch.cuda.Event]] = deque()
        self.bad_images: list[tuple[str, str]] = []
        self._bad_paths: set[str] = set()

    def run(self, epoch: int, jobs: Sequence[Job]) -> Iterator[Batch]:
        """Give the batches of `jobs` in order; may be left before its end."""
        if self._device.type == "cuda" and self._cuda is None:
            self._cuda = CudaFeed(self._device, self._info, self.pool.slots if self.pool else None)
        if self.pool is None:
            for job in jobs:
                yield self._batch(job, *self._made_here(epoch, job))
            return
        self._settle()
        self.pool.forget()
        asked = self._ask(self.pool, epoch, jobs, 0)
        ahead: _OnDevice | None = None
        for i, job in enumerate(jobs):
            if not len(job.indices):
                yield self._batch(job, *self._nothing())
                continue
            if self._cuda is None:
                tensors = self._from_slot(self.pool, job)
                asked = self._ask(self.pool, epoch, jobs, asked)
            else:
                now = ahead or self._stage(self.pool, self._cuda, job)
                asked = self._ask(self.pool, epoch, jobs, asked)
                following = jobs[i + 1] if i + 1 < len(jobs) else None
                is_there = following is not None and self.pool.ready(following.number)
                ahead = self._stage(self.pool, self._cuda, following) if following and is_there else None
                tensors = self._without_bad(*self._cuda.use(now.staged), now.bad, now.size)
            yield self._batch(job, *tensors)

    def close(self) -> None:
        """End the loader processes and unlock their memory."""
        self._settle()
        if self._cuda is not None:
            self._cuda.close()
        if self.pool is not None:
            self.pool.close()

    def _ask(self, pool: Pool, epoch: int, jobs: Sequence[Job], asked: int) -> int:
        while asked < len(jobs):
            if not len(jobs[asked].indices):
                asked += 1
                continue
            while self._copying and (self._copying[0][1].query() or not pool.has_room):
                slot, copied = self._copying.popleft()
                copied.synchronize()
                pool.release(slot)
            if not pool.has_room:
                break
            pool.request(jobs[asked].number, epoch, jobs[asked].indices)
            asked += 1
        return asked

    def _from_slot(self, pool: Pool, job: Job) -> tuple[Tensor, Tensor]:
        slot, size, bad = pool.take(job.number)
        inputs, targets = (torch.from_numpy(each[:size]) for each in pool.slots[slot])
        # copied, so that a batch stays what it is for as long as its user keeps it
        tensors = self._without_bad(inputs, targets, bad, size) if bad else (inputs.clone(), targets.clone())
        pool.release(slot)
        return tensors

    def _stage(self, pool: Pool, cuda: CudaFeed, job: Job) -> _OnDevice:
        slot, size, bad = pool.take(job.number)
        inputs, targets = pool.slots[slot]
        staged = cuda.stage(inputs[:size], targets[:size])
        self._copying.append((slot, staged.done))
        return _OnDevice(staged, bad, size)

    def _made_here(self, epoch: int, job: Job) -> tuple[Tensor, Tensor]:
        size = len(job.indices)
        inputs, targets = self._empty(size)
        bad = self._rows.fill(epoch, job.indices, inputs, targets) if size else []
        if self._cuda is None:
            return self._without_bad(torch.from_numpy(inputs), torch.from_numpy(targets), bad, size)
        return self._without_bad(*self._cuda.use(self._cuda.stage(inputs, targets)), bad, size)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self._empty(0)
        if self._cuda is None:
            return torch.from_numpy(inputs), torch.from_numpy(targets)
        return self._cuda.use(self._cuda.stage(inputs, targets))

    def _empty(self, size: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        return np.empty((size, *self._rows.shape), self._rows.dtype), np.empty(size, np.int64)

    def _without_bad(
        self, inputs: Tensor, targets: Tensor, bad: Sequence[BadImage], size: int
    ) -> tuple[Tensor, Tensor]:
        if not bad:
            return inputs, targets
        for each in bad:
            if each.path not in self._bad_paths:
                self._bad_paths.add(each.path)
                self.bad_images.append((each.path, each.reason))
        positions = {each.position for each in bad}
        good = torch.tensor([i for i in range(size) if i not in positions], dtype=torch.int64, device=inputs.device)
        return inputs.index_select(0, good), targets.index_select(0, good)

    def _settle(self) -> None:
        """Wait for copies to the device under way and give their slots back."""
        while self._copying and self.pool is not None:
            slot, copied = self._copying.popleft()
            copied.synchronize()
            self.pool.release(slot)

    def _batch(self, job: Job, inputs: Tensor, targets: Tensor) -> Batch:
        return Batch(inputs, targets, job.global_size, job.number)
