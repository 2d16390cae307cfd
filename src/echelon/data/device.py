"""From host memory to the device: pinned, on a stream of its own, normalised there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.data.assemble import normalise
from echelon.data.base import DataInfo
from echelon.data.slots import Slots
from echelon.tasks import nest
from echelon.tasks.nest import Nest


@dataclass
class Staged:
    """A batch on its way to the device; `done` is recorded behind its copy and normalisation."""

    inputs: Nest
    targets: Nest
    done: torch.cuda.Event


class CudaFeed:
    """Copies batches to a GPU beside its computation."""

    def __init__(self, device: torch.device, info: DataInfo, slots: Slots | None) -> None:
        self._device, self._slots = device, slots
        self._stream = torch.cuda.Stream(device)
        self._mean = torch.tensor(info.mean).view(-1, 1, 1).mul_(255).to(device)
        self._std = torch.tensor(info.std).view(-1, 1, 1).mul_(255).to(device)
        if slots is not None:
            # page-locks memory that is there already: the GPU reads what the loaders wrote, without a copy between
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slots.address, slots.n_bytes, 0))

    def stage(self, inputs: Nest, targets: Nest) -> Staged:
        """Start to copy the arrays of a batch; their memory must stay as it is until `done`."""
        host = nest.map_leaves(torch.from_numpy, (inputs, targets))
        if self._slots is None:
            host = nest.map_leaves(torch.Tensor.pin_memory, host)
        with torch.cuda.stream(self._stream):
            moved, moved_targets = nest.to_device(host, self._device)
            if len(self._mean):
                moved = normalise(moved, self._mean, self._std, torch.empty_like(moved, dtype=torch.float32))
            done = torch.cuda.Event()
            done.record(self._stream)
        return Staged(moved, moved_targets, done)

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
