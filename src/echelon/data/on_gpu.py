"""Batches on a GPU: copied there beside its computation, or cut there from images that stay on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.assemble import KeptImages, normalise
from echelon.data.augment import FLIP_CROP_DRAWS, PAD, crops_and_mirrors, cut, padded, windows
from echelon.data.base import DataInfo
from echelon.data.order import Indices, uniforms
from echelon.data.slots import Slots
from echelon.tasks import nest
from echelon.tasks.nest import Nest

RESIDENT_SHARE, FREE_SHARE = 1 / 16, 1 / 4  # of a GPU's memory, and of what is free, that images may take
_AT_ONCE = 64  # batches whose numbers are drawn and copied together: the host would be busy with each a millisecond
logger = logging.getLogger(__name__)


@dataclass
class Staged:
    """A batch on its way to the device; `done` is recorded behind its copy and normalisation."""

    inputs: Nest
    targets: Nest
    done: torch.cuda.Event


def fits_beside_training(n_bytes: int, device: torch.device) -> bool:
    """Whether data of that size is small beside a GPU's memory, and beside what training has left free of it."""
    free, total = torch.cuda.mem_get_info(device)
    return n_bytes <= min(RESIDENT_SHARE * total, FREE_SHARE * free)


class ResidentImages:
    """Small images that lie on a device, all of them: batches are cut and mirrored there, with the same bits.

    Args:
        images: what lies in the host's memory.
    """

    def __init__(self, images: KeptImages, device: torch.device) -> None:
        pixels, self._labels = (
            torch.from_numpy(np.require(array, requirements="W")).to(device) for array in (images.pixels, images.labels)
        )
        self._seed, self._side = images.seed, pixels.shape[-1]
        self._pixels = pixels if self._seed is None else padded(pixels)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # batches are made in another stream

    @staticmethod
    def n_bytes(images: KeptImages) -> int:
        """Return what images take of the device: with a margin where they are cropped."""
        side = images.pixels.shape[-1]
        margin = 1 if images.seed is None else ((side + 2 * PAD) / side) ** 2
        return round(images.pixels.nbytes * margin)

    def batches(self, epoch: int, draws: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each batch's draws, the images, uint8 `(N, C, S, S)`, and their labels `(N,)`."""
        for first in range(0, len(draws), _AT_ONCE):
            yield from self._some(epoch, draws[first : first + _AT_ONCE])

    def _some(self, epoch: int, draws: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        sizes, together = [len(each) for each in draws], np.concatenate(draws)
        samples = self._moved(together % len(self._labels))
        labels, numbers = self._labels.index_select(0, samples).split(sizes), samples.split(sizes)
        if self._seed is None:
            for which, of_these in zip(numbers, labels, strict=True):
                yield self._pixels.index_select(0, which), of_these
            return
        crops = self._moved(crops_and_mirrors(uniforms(self._seed, epoch, together, FLIP_CROP_DRAWS)))
        rows, columns = (lines.split(sizes) for lines in windows(crops, self._side))
        for which, down, across, of_these in zip(numbers, rows, columns, labels, strict=True):
            yield cut(self._pixels, which, down, across), of_these

    def _moved(self, numbers: NDArray[np.int64]) -> Tensor:
        """Copy numbers to the device without waiting for what it does."""
        host, device = torch.from_numpy(numbers), self._pixels.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class CudaFeed:
    """Copies batches to a GPU beside its computation."""

    def __init__(self, device: torch.device, info: DataInfo, slots: Slots | None) -> None:
        self._device, self._slots = device, slots
        self._stream = torch.cuda.Stream(device)
        self._mean = torch.tensor(info.mean).view(-1, 1, 1).mul_(255).to(device)
        self._std = torch.tensor(info.std).view(-1, 1, 1).mul_(255).to(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which has written these two
        if slots is not None and not _lock(slots):
            self._slots = None  # batches are copied into page-locked memory one by one

    def stage(self, inputs: Nest, targets: Nest) -> Staged:
        """Start to copy the arrays of a batch; their memory must stay as it is until `done`."""
        host = nest.map_leaves(torch.from_numpy, (inputs, targets))
        if self._slots is None:
            host = nest.map_leaves(torch.Tensor.pin_memory, host)
        with torch.cuda.stream(self._stream):
            return self._staged(*nest.to_device(host, self._device))

    def gather(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Staged:
        """Start to make the next batch of images `(N, C, S, S)` and labels `(N,)` that are on the GPU."""
        with torch.cuda.stream(self._stream):
            return self._staged(*next(batches))

    def normalised(self, pixels: Tensor, labels: Tensor) -> Staged:
        """Start to normalise images `(N, C, S, S)` with labels `(N,)` that are on the GPU, and known to be complete."""
        pixels.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return self._staged(pixels, labels)

    def use(self, staged: Staged) -> tuple[Nest, Nest]:
        """Return the batch for use on the present stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(staged.done)
        for leaf in nest.leaves((staged.inputs, staged.targets)):
            leaf.record_stream(stream)
        return staged.inputs, staged.targets

    def close(self) -> None:
        """Unlock the memory."""
        if self._slots is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._slots.address))
            self._slots = None

    def _staged(self, inputs: Nest, targets: Nest) -> Staged:
        if len(self._mean):
            inputs = normalise(inputs, self._mean, self._std, torch.empty_like(inputs, dtype=torch.float32))
        done = torch.cuda.Event()
        done.record(self._stream)
        return Staged(inputs, targets, done)


def _lock(slots: Slots) -> bool:
    """Page-lock memory that is there already: the GPU reads what the loaders wrote, without a copy between.

    Some systems refuse it (a low limit of locked memory, shared memory of some containers): returns whether it is.
    """
    code = torch.cuda.cudart().cudaHostRegister(slots.address, slots.n_bytes, 0)
    if int(code) == 0:
        return True
    logger.warning("the loaders' memory cannot be page-locked (CUDA error %s): each batch is copied once more", code)
    return False
