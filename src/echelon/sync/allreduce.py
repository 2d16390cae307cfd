"""Synchronous SGD: every step, gradients are summed over all replicas while backward still runs (Goyal et al. 2017).

g = sum over replicas of (1 / global batch) * sum over local samples of grad(loss_i), so that an uneven share of the
batch weighs what it should.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives.hook import GradientHook
from echelon.collectives.memory import merge
from echelon.collectives.times import ReduceTimes
from echelon.sync.base import Sync, SyncContext
from echelon.sync.buffers import averaged_buffers
from echelon.sync.kept import Kept, Piece, by_hook


@dataclass(frozen=True)
class Settings:
    """`allreduce` has no settings."""


SETTINGS = Settings


class AllReduce:
    """DistributedDataParallel with our communication hook; a single process has nothing to agree on."""

    def __init__(self, context: SyncContext) -> None:
        self._context = context
        self._hook: GradientHook | None = None
        self.module: nn.Module = context.model
        self.replicas_differ = False
        self.wants_blank_step = False
        if context.group is None:
            return
        on_gpu = context.device.type == "cuda"
        self._ddp = DistributedDataParallel(
            context.model,
            device_ids=[context.device] if on_gpu else None,
            process_group=context.group,
            gradient_as_bucket_view=True,
            **_no_buffers_in_steps(),
        )
        self._hook = GradientHook(
            context.group, context.compression, context.collective, average=False, seed=context.seed
        )
        self._hook.attach(self._ddp)
        self.module = self._ddp
        # DDP orders its buckets anew after its first backward, and more than two ranks round differently in another
        # order: a resumed run would not repeat the bits. Codecs work on cells that do not depend on buckets; a
        # compiled model would be compiled twice.
        compiled = hasattr(context.model, "_orig_mod")
        self.wants_blank_step = self._hook.codec is None and context.group.size() > 2 and not compiled

    def begin_step(self, samples: int, global_size: int) -> int:
        """Gradients are summed over all replicas: they are divided by the size of the global batch."""
        return global_size

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Keep gradients local until the last micro-batch."""
        return nullcontext() if last or self._hook is None else self._ddp.no_sync()

    def communication_began(self) -> Any:
        """Return when the last bucket was handed over: from then on backward only waits."""
        if self._hook is None:
            return None
        return self._hook.last_ready_event if self._context.device.type == "cuda" else self._hook.last_ready_s

    def step(self) -> None:
        """Gradients are summed already: update."""
        self._context.update()

    def agreed(self, averages: bool = False) -> AbstractContextManager[object]:
        """Average BatchNorm statistics over the replicas; each keeps its own."""
        return averaged_buffers(self._context.model, self._context.group)

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes sent by this rank, by group of parameters."""
        return dict(self._hook.wire.by_group) if self._hook else {}

    def reduce_times(self) -> ReduceTimes | None:
        """Return the hook's; on a GPU the host does not see when the network is done."""
        return self._hook.times if self._hook and self._context.device.type == "cpu" else None

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did on this rank."""
        return self._hook.entropy_coded() if self._hook else {}

    def density(self) -> float | None:
        """Return the share of the encoded elements that this rank sent last."""
        return self._hook.density() if self._hook else None

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state: error-feedback memories and step counters."""
        return self._hook.state_dict() if self._hook else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the hook's state."""
        if self._hook and state:
            self._hook.load_state_dict(state)

    def load_former_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Divide the error-feedback memories of other ranks; the sum over all ranks is kept."""
        if self._hook and any(states):
            numels = {name: parameter.numel() for name, parameter in self._ddp.module.named_parameters()}
            self._hook.load_state_dict(merge(states, numels))

    def close(self) -> None:
        """End the hook's communication thread."""
        if self._hook:
            self._hook.close()


def _no_buffers_in_steps() -> dict[str, Any]:
    """Buffers are averaged for evaluation instead; torch 2.15 renamed the argument."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def kept(settings: Settings, compression: str, piece: Piece) -> Kept:
    """Reckon the memory that it keeps (see `sync.kept`)."""
    return by_hook(compression, piece)


def build(settings: Settings, context: SyncContext) -> Sync:
    """Build the strategy."""
    return AllReduce(context)
