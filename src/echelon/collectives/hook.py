"""The communication hook of DistributedDataParallel: gradients of a bucket are reduced while backward still runs."""

# DDP compares the annotations of a hook with the types themselves: no `from __future__ import annotations` here.

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives.wire import WireCount, numel_by_group, ring_bytes


class GradientHook:
    """Reduces the gradients of a DDP model: sums them, or averages them as plain DDP does.

        hook = GradientHook(group, "topk(0.01)", average=True)
        hook.attach(ddp)                                    # or:
        ddp.register_comm_hook(state=hook, hook=hook.function)

    Attributes:
        wire: bytes sent by this rank, by group of parameters.
        last_ready_s: time.perf_counter() when backward handed over its last bucket: what follows only waits.
        last_ready_event: the same as a recorded CUDA event; None on a CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        compression: str = "none",
        collective: str = "auto",
        *,
        average: bool,
        seed: int = 0,
    ) -> None:
        """Prepare; every rank of the group calls this.

        Args:
            group: ranks to reduce over; None: all.
            compression: spec of the codec.
            collective: spec of the path.
            average: divide the sum by the number of ranks.
            seed: of the codec's draws, the same on every rank.
        """
        self.group = group if group is not None else dist.group.WORLD
        self.average = average
        self.wire = WireCount()
        self.last_ready_s = 0.0
        self.last_ready_event: torch.cuda.Event | None = None
        self._size = dist.get_world_size(self.group)
        self._counts: dict[tuple[int, int], dict[str, int]] = {}

    @staticmethod
    def function(state: "GradientHook", bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook as `register_comm_hook` wants it, with the GradientHook as its state."""
        return state(state, bucket)

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register on a model."""
        ddp.register_comm_hook(self, GradientHook.function)

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to reduce a bucket; called by DDP in backward, in the same order on every rank."""
        if bucket.is_last():
            self._mark_ready(bucket)
        return self._direct(bucket)

    def _mark_ready(self, bucket: dist.GradBucket) -> None:
        self.wire.steps += 1
        self.last_ready_s = time.perf_counter()
        if bucket.buffer().is_cuda:
            self.last_ready_event = torch.cuda.Event(enable_timing=True)
            self.last_ready_event.record()

    def _direct(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The backend reduces the bucket in place; nothing of ours runs beside it."""
        buffer = bucket.buffer()
        key = (bucket.index(), buffer.numel())
        if key not in self._counts:
            numel = numel_by_group(bucket.parameters())
            size = buffer.element_size()
            self._counts[key] = {name: ring_bytes(n * size, self._size) for name, n in numel.items()}
        for name, n_bytes in self._counts[key].items():
            self.wire.add(name, n_bytes)
        if self.average:
            buffer.div_(self._size)
        return dist.all_reduce(buffer, group=self.group, async_op=True).get_future().then(_first)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart: tensors and numbers under flat keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if state:
            raise ValueError(f"this hook keeps no state, but the saved one has {sorted(state)[:3]}")


def _first(future: Future[Any]) -> Tensor:
    return future.value()[0]
