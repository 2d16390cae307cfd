"""A parameter server's worker that is several ranks: the first holds the whole model, all compute on their pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.axes import Axis
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.shard_gather import ShardGather
from echelon.parallel.split import SplitModel
from echelon.sync.buffers import averaged_buffers
from echelon.tasks.base import SAMPLE, Batch
from echelon.torch_compat import same_ranks_group
from echelon.trainer.step import Step
from echelon.trainer.team import CommandChannel


@dataclass(frozen=True)
class Sums:
    """Over the samples of a worker: loss divided by the units of the global batch, and the task's training score."""

    loss: float
    score: float
    samples: int
    units: int
    global_units: int


class Replica:
    """One rank of such a worker. The first rank says by `words` what comes next; then all call the same method.

    The whole model takes no part in forward and backward: it has the servers' parameters, is given gradients and
    BatchNorm statistics from all ranks, and is what is pushed and saved.
    """

    needs_warmup_backward = False

    def __init__(self, split: SplitModel, whole: nn.Module | None, timeout_s: float) -> None:
        """Take what this rank has of the model; `whole` on the first rank alone. All ranks call it together.

        Raises:
            RuntimeError: the pieces are not those of the whole model.
        """
        placement = split.pieces.placement
        assert placement.model_group is not None
        group = same_ranks_group(placement.model_group, "gloo")
        self.split, self.whole, self.words = split, whole, CommandChannel(group, timeout_s)
        self._fsdp = placement.group(Axis.FSDP)
        self._parameters = {n: p for n, p in split.pieces.named_parameters() if p.requires_grad}
        regions = split.pieces.regions
        self._buffers = {n: b for n, b in split.pieces.named_buffers() if n in regions}
        dtype = next((p.dtype for p in self._parameters.values()), torch.float32)
        self._of_parameters = ShardGather({n: regions[n] for n in self._parameters}, dtype, group)
        self._of_buffers = ShardGather({n: regions[n] for n in self._buffers}, torch.float64, group)
        self._has_buffers = _agreed(bool(self._buffers), group)
        if whole is not None:
            self._check(whole)

    @property
    def module(self) -> nn.Module:
        """What forward goes through."""
        return self.split.module

    def begin_step(self, units: int, global_units: int) -> int:
        """Gradients are sums over units divided by those of the batch, whichever worker has them."""
        return global_units

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Nothing leaves the replica during backward."""
        return nullcontext()

    def communication_began(self) -> Any:
        """Nothing leaves the replica during backward."""
        return None

    def share_parameters(self) -> None:
        """Give every rank its pieces of the whole model's parameters."""
        self._of_parameters.scatter(self._whole_parameters(), self._parameters)

    def share_buffers(self) -> None:
        """Give every rank its pieces of the whole model's buffers (BatchNorm statistics)."""
        if self._has_buffers:
            self._of_buffers.scatter(self._whole_buffers(), self._buffers)

    def compute(self, step: Step, batch: Batch, clock: PhaseClock) -> Sums:
        """Forward and backward; then the whole model has the gradients and buffers of the replica."""
        result = step.forward_backward(batch, self)
        clock.enter(Phase.COMMUNICATE)
        sums = torch.tensor([float(result.loss), float(result.score), result.samples], dtype=torch.float64)
        if self._fsdp is not None:
            sums = sums.to(result.loss.device)
            dist.all_reduce(sums, group=self._fsdp)
        self._gather_gradients()
        if self._has_buffers:
            with averaged_buffers(self.split.pieces, self._fsdp):
                self._of_buffers.gather(self._buffers, self._whole_buffers())
        loss, score, samples = sums.tolist()
        units = round(samples) if step.task.unit == SAMPLE else result.units
        return Sums(loss, score, round(samples), units, result.global_units)

    @contextmanager
    def as_whole(self) -> Iterator[nn.Module]:
        """Give the module with the whole model's parameters and buffers; its own buffers come back after it."""
        own = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self.share_parameters()
        self.share_buffers()
        yield self.module
        self.split.settle()
        for name, buffer in own.items():
            self._buffers[name].copy_(buffer)

    def _gather_gradients(self) -> None:
        self.split.pieces.take_gradients()
        whole = {}
        for name, parameter in self._whole_parameters().items():
            whole[name] = parameter.grad = torch.empty_like(parameter)
        self._of_parameters.gather({n: p.grad for n, p in self._parameters.items()}, whole)
        for parameter in self._parameters.values():
            parameter.grad = None

    def _whole_parameters(self) -> dict[str, Tensor]:
        """Return the whole model's parameters by the names that the pieces have."""
        if self.whole is None:
            return {}
        named: dict[str, Tensor] = dict(self.whole.named_parameters(remove_duplicate=False))
        return {name: named[name] for name in self._of_parameters.shapes}

    def _whole_buffers(self) -> dict[str, Tensor]:
        return {} if self.whole is None else dict(self.whole.named_buffers())

    def _check(self, whole: nn.Module) -> None:
        """Refuse pieces that do not make up the whole model's trainable parameters."""
        held = {id(tensor) for tensor in self._whole_parameters().values()}
        missing = [n for n, p in whole.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            raise RuntimeError(f"no rank of the replica holds {missing[0]}")


def _agreed(own: bool, group: dist.ProcessGroup) -> bool:
    """Whether it is so on any rank of a group."""
    flag = torch.tensor([own], dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)
