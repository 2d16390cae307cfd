"""A rank's batches in order, made in this process, by loader processes or on a GPU, delivered to its device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from echelon.data.assemble import ImageRows, StreamRows
from echelon.data.base import BadSample, Batch, DataInfo
from echelon.data.drawn import DrawnRows
from echelon.data.gpu_images import Decoded, GpuImages, check_library, nvimagecodec
from echelon.data.on_gpu import CudaFeed, ResidentImages, Staged, fits_beside_training
from echelon.data.order import Indices, numbers_in
from echelon.data.pool import Pool
from echelon.data.ragged import crop, padded_lengths
from echelon.data.recipe import LoaderConfig, Rows, loader_count
from echelon.tasks import nest
from echelon.tasks.nest import Nest

Pair = tuple[Nest, Nest]
"""Inputs and targets of a batch."""
Units = Callable[[Nest], int]


@dataclass(frozen=True)
class BatchJob:
    """A batch to make: its number in the epoch, this rank's indices, and those of all ranks.

    `everyone` is None where the indices of all ranks are not known, or nobody asks for the units of the whole batch.
    `sizes` are of all ranks' parts; empty: they are equal. `borrowed`: this rank has no samples, and `indices` is one
    of another rank's, whose inputs alone are given.
    """

    number: int
    indices: Indices
    global_size: int
    everyone: Indices | None = None
    sizes: tuple[int, ...] = ()
    borrowed: bool = False

    @property
    def padded_with(self) -> Indices:
        """Return the indices of the samples whose longest a batch is padded to."""
        return self.indices if self.everyone is None else self.everyone


@dataclass
class _OnDevice:
    staged: Staged
    bad: list[BadSample]


@dataclass
class _Made:
    """Inputs and targets of a batch without its bad samples, and the indices of those that are left.

    Attributes:
        left_out: why the others were, by their places in the batch.
    """

    inputs: Nest
    targets: Nest
    indices: Indices
    left_out: Mapping[int, str] = field(default_factory=dict)


class Feed:
    """Makes batches of one data set.

    Args:
        most: samples of this rank's largest batch.
        units: of targets, where batches are to know the units of the loss in the whole of them, and targets lie in
            memory; None: these are samples.
    """

    def __init__(self, rows: Rows, info: DataInfo, config: LoaderConfig, most: int, units: Units | None = None) -> None:
        self._rows, self._units = rows, units
        loaders = loader_count(rows, config)
        self.pool = Pool(rows, loaders, most, config.timeout_s) if loaders else None
        self._cuda: CudaFeed | None = None
        self._resident: ResidentImages | None = None
        self._device, self._info = config.device, info
        self._decoded: GpuImages | None = None
        files = rows.encoded if isinstance(rows, ImageRows) and config.decodes_on_gpu else None
        if files is not None and isinstance(rows, ImageRows):
            check_library()
            self._decoded = GpuImages(rows, files, config.device, nvimagecodec(config.device), config.timeout_s)
        self._copying: deque[tuple[int, torch.cuda.Event]] = deque()
        self.bad_images: list[tuple[str, str]] = []
        self._bad_paths: set[str] = set()

    def run(self, epoch: int, jobs: Sequence[BatchJob]) -> Iterator[Batch]:
        """Give the batches of `jobs` in order; may be left before its end."""
        if self._device.type == "cuda" and self._cuda is None:
            self._cuda = CudaFeed(self._device, self._info, self.pool.slots if self.pool else None)
        if self._cuda is not None and (resident := self._on_device()) is not None:
            yield from self._of_resident(resident, self._cuda, epoch, jobs)
            return
        if self._decoded is not None and self._cuda is not None:
            yield from self._of_files(self._decoded, self._cuda, epoch, jobs)
            return
        if self.pool is None:
            for job in jobs:
                yield self._batch(epoch, job, self._made_here(epoch, job))
            return
        self._settle()
        self.pool.forget()
        asked = self._ask(self.pool, epoch, jobs, 0)
        ahead: _OnDevice | None = None
        for i, job in enumerate(jobs):
            if self._cuda is None:
                made = self._from_slot(self.pool, job)
                asked = self._ask(self.pool, epoch, jobs, asked)
            else:
                now = ahead or self._stage(self.pool, self._cuda, job)
                asked = self._ask(self.pool, epoch, jobs, asked)
                following = jobs[i + 1] if i + 1 < len(jobs) else None
                is_there = following is not None and self.pool.ready(following.number)
                ahead = self._stage(self.pool, self._cuda, following) if following and is_there else None
                made = self._without_bad(job, *self._cuda.use(now.staged), now.bad)
            yield self._batch(epoch, job, made)

    def close(self) -> None:
        """End the loader processes and unlock their memory."""
        self._settle()
        if self._decoded is not None:
            self._decoded.close()
        if self._cuda is not None:
            self._cuda.close()
        if self.pool is not None:
            self.pool.close()

    def _ask(self, pool: Pool, epoch: int, jobs: Sequence[BatchJob], asked: int) -> int:
        while asked < len(jobs):
            while self._copying and (self._copying[0][1].query() or not pool.has_room):
                slot, copied = self._copying.popleft()
                copied.synchronize()
                pool.release(slot)
            if not pool.has_room:
                break
            pool.request(jobs[asked].number, epoch, jobs[asked].indices, padded_lengths(self._specs(jobs[asked])))
            asked += 1
        return asked

    def _from_slot(self, pool: Pool, job: BatchJob) -> _Made:
        slot, size, bad = pool.take(job.number)
        pair = nest.map_leaves(torch.from_numpy, crop(pool.slots[slot], self._specs(job), slice(size)))
        # copied, so that a batch stays what it is for as long as its user keeps it
        kept: Pair = pair if bad else nest.map_leaves(Tensor.clone, pair)
        made = self._without_bad(job, *kept, bad)
        pool.release(slot)
        return made

    def _stage(self, pool: Pool, cuda: CudaFeed, job: BatchJob) -> _OnDevice:
        slot, size, bad = pool.take(job.number)
        staged = cuda.stage(*crop(pool.slots[slot], self._specs(job), slice(size)))
        self._copying.append((slot, staged.done))
        return _OnDevice(staged, bad)

    def _on_device(self) -> ResidentImages | None:
        """Return the images where all of them lie on the device: from the epoch on before which all are decoded."""
        if self._resident is None and isinstance(self._rows, ImageRows):
            kept = self._rows.kept_images()
            if kept is not None and fits_beside_training(ResidentImages.n_bytes(kept), self._device):
                self._resident = ResidentImages(kept, self._device)
        return self._resident

    def _of_resident(
        self, images: ResidentImages, cuda: CudaFeed, epoch: int, jobs: Sequence[BatchJob]
    ) -> Iterator[Batch]:
        made = images.batches(epoch, [job.indices for job in jobs])
        for job in jobs:
            yield self._batch(epoch, job, self._without_bad(job, *cuda.use(cuda.gather(made)), []))

    def _of_files(self, images: GpuImages, cuda: CudaFeed, epoch: int, jobs: Sequence[BatchJob]) -> Iterator[Batch]:
        made: Iterator[Decoded] = images.run(epoch, [job.indices for job in jobs])
        for job in jobs:
            batch = next(made)
            pair = cuda.use(cuda.normalised(batch.pixels, batch.labels))
            yield self._batch(epoch, job, self._without_bad(job, *pair, batch.bad))

    def _made_here(self, epoch: int, job: BatchJob) -> _Made:
        if isinstance(self._rows, StreamRows):
            self._rows.read_batch(epoch, job.padded_with)
        inputs, targets = self._empty(job)
        bad = self._rows.fill(epoch, job.indices, inputs, targets)
        return self._without_bad(job, *self._delivered(inputs, targets), bad)

    def _delivered(self, inputs: Nest, targets: Nest) -> Pair:
        if self._cuda is not None:
            return self._cuda.use(self._cuda.stage(inputs, targets))
        tensors: Pair = nest.map_leaves(torch.from_numpy, (inputs, targets))
        return tensors

    def _specs(self, job: BatchJob) -> Pair:
        return self._rows.batch_specs(job.padded_with)

    def _empty(self, job: BatchJob) -> Pair:
        size = len(job.indices)
        pair: Pair = nest.map_leaves(lambda spec: np.empty((size, *spec.shape), spec.dtype), self._specs(job))
        return pair

    def _without_bad(self, job: BatchJob, inputs: Nest, targets: Nest, bad: Sequence[BadSample]) -> _Made:
        if job.borrowed:
            return _Made(*_stand_in(inputs, targets, bool(bad)), job.indices[:0])
        if not bad:
            return _Made(inputs, targets, job.indices)
        for each in bad:
            if each.path not in self._bad_paths:
                self._bad_paths.add(each.path)
                self.bad_images.append((each.path, each.reason))
        reasons = {each.position: each.reason for each in bad}
        places = [i for i in range(len(job.indices)) if i not in reasons]
        if not places:
            return _Made(*_stand_in(inputs, targets, True), job.indices[:0], reasons)
        good = torch.tensor(places, dtype=torch.int64, device=nest.leaves(inputs)[0].device)
        inputs, targets = nest.map_leaves(lambda leaf: leaf.index_select(0, good), (inputs, targets))
        return _Made(inputs, targets, job.indices[places], reasons)

    def _settle(self) -> None:
        """Wait for copies to the device under way and give their slots back."""
        while self._copying and self.pool is not None:
            slot, copied = self._copying.popleft()
            copied.synchronize()
            self.pool.release(slot)

    def _batch(self, epoch: int, job: BatchJob, made: _Made) -> Batch:
        units, numbers = self._global_units(job), functools.partial(self._numbers, made.indices)
        return Batch(
            made.inputs, made.targets, job.global_size, job.number, units, epoch, numbers, job.sizes,
            left_out=made.left_out,
        )  # fmt: skip

    def _numbers(self, draws: Indices) -> Indices:
        """Return the numbers that the samples of some draws have in the user's data."""
        return numbers_in(self._rows.origin, draws % max(1, self._info.train_size))

    def _global_units(self, job: BatchJob) -> int | None:
        if self._units is None or job.everyone is None:
            return None
        if isinstance(self._rows, DrawnRows) and self._rows.unit_counts is not None:
            return int(self._rows.unit_counts[job.everyone % self._info.train_size].sum())
        if self._rows.targets is None:
            return None
        return self._units(
            nest.map_leaves(torch.from_numpy, nest.take(self._rows.targets, job.everyone % self._info.train_size))
        )


def _stand_in(inputs: Nest, targets: Nest, is_bad: bool) -> Pair:
    """Return the inputs of the first sample, which count nothing, and no targets; real numbers that are bad as zeros.

    Backward passes through NaN would make gradients of NaN, which zero weights do not take away.
    """
    first = nest.first_sample(inputs)
    if is_bad:
        first = nest.map_leaves(lambda leaf: torch.zeros_like(leaf) if leaf.is_floating_point() else leaf, first)
    return first, nest.take(targets, slice(0))
