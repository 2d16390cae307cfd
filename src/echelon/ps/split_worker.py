"""A parameter server's worker that is several ranks: the first holds the whole model, all compute on their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.axes import Axis
from echelon.core.listeners import closed_afterwards
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.shard_gather import ShardGather
from echelon.parallel.split import SplitModel
from echelon.ps.commands import Command, CommandChannel
from echelon.ps.strategy import ParameterServer, PsStrategy
from echelon.sync.base import StepAbandoned
from echelon.sync.buffers import averaged_buffers
from echelon.torch_compat import same_ranks_group


class SplitWorker(PsStrategy):
    """One rank of such a worker, between forward and backward. The first rank leads: it says what comes next.

    The whole model takes no part in forward and backward: it has the servers' parameters, is given gradients and
    BatchNorm statistics from all ranks, and is what is pushed and saved. A lease goes: `train` (all make their part of
    the batch) -> the leader waits for the servers' parameters, telling the others now and then that it does ->
    `values`, its pieces to each rank -> forward and backward -> gradients to the leader, which pushes them.

    Attributes:
        channel: by which the leader tells the others.
        servers: the leader's strategy, on the whole model; None on the others.
    """

    def __init__(
        self,
        split: SplitModel,
        whole_model: nn.Module | None,
        clock: PhaseClock,
        timeout_s: float,
        counts_samples: bool,
    ) -> None:
        """Take what this rank has of the model; `whole_model` on the first rank alone. All ranks call it together.

        Args:
            timeout_s: how long a rank waits for another.
            counts_samples: whether samples are the unit of the loss.

        Raises:
            RuntimeError: the pieces are not those of the whole model.
        """
        placement = split.pieces.placement
        assert placement.model_group is not None
        with closed_afterwards():
            group = same_ranks_group(placement.model_group, "gloo")
        self.split, self.whole, self.channel = split, whole_model, CommandChannel(group, timeout_s)
        self.servers: ParameterServer | None = None
        self._clock, self._fsdp = clock, placement.group(Axis.FSDP)
        self._parameters = {n: p for n, p in split.pieces.named_parameters() if p.requires_grad}
        regions = split.pieces.regions
        self._buffers = {n: b for n, b in split.pieces.named_buffers() if n in regions}
        dtype = next((p.dtype for p in self._parameters.values()), torch.float32)
        self._of_parameters = ShardGather({n: regions[n] for n in self._parameters}, dtype, group)
        self._of_buffers = ShardGather({n: regions[n] for n in self._buffers}, torch.float64, group)
        self._has_buffers = _any_rank(bool(self._buffers), group)
        self._buffers_shared = False
        self._counts_samples, self._samples, self._units = counts_samples, 0, (0, 0)
        if whole_model is not None:
            self._check(whole_model)

    @property
    def module(self) -> nn.Module:
        """What forward goes through."""
        return self.split.module

    def begin(self, samples: int) -> None:
        """Hear how many samples of the coming step are this rank's."""
        self._samples = samples

    def begin_step(self, units: int, global_units: int) -> int:
        """Take this rank's pieces of the newest parameters; sums over units are divided by those of the batch.

        Raises:
            StepAbandoned: the run ended before there were any.
        """
        self._units = units, global_units
        if self.servers is not None:
            self.servers.of_units(units, global_units)  # values are predicted with the rate of this task's update
            self.servers.load_all()
            self._clock.enter(Phase.COMMUNICATE)
            command = Command("values", buffers=not self._buffers_shared)
            self.channel.tell(command)
            self._buffers_shared = True
        else:
            command = self.channel.hear()
            if command.kind != "values":
                self.channel.hear_again(command)
                raise StepAbandoned("the run ended while the leader waited for parameters")
        self._share_parameters()
        if command.buffers:
            self._share_buffers()
        return global_units

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Nothing leaves the worker during backward."""
        return nullcontext()

    def silent(self) -> AbstractContextManager[object]:
        """Nothing leaves the worker during backward."""
        return nullcontext()

    def leave_out(self) -> None:
        """Push no gradient of this lease: it is done all the same."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self.step()

    def step(self) -> None:
        """Bring gradients and buffers to the leader's whole model; it pushes them."""
        self._clock.enter(Phase.COMMUNICATE)
        units, global_units = self._units
        (samples,) = self.summed([self._samples])
        self._gather_gradients()
        if self._has_buffers:
            with averaged_buffers(self.split.pieces, self._fsdp):
                self._of_buffers.gather(self._buffers, self._whole_buffers())
        if self.servers is not None:
            divisor = self.servers.begin_step(round(samples) if self._counts_samples else units, global_units)
            if divisor != global_units:
                self._scale_gradients(global_units / divisor)
            self._clock.enter(Phase.UPDATE)
            self.servers.step()

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers over the ranks that divide the worker's samples; all ranks call it together."""
        if self._fsdp is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        device = next(iter(self._parameters.values())).device
        sums = sums.to(device)
        dist.all_reduce(sums, group=self._fsdp)
        total: list[float] = sums.tolist()
        return total

    @contextmanager
    def agreed(self, averages: bool = False) -> Iterator[None]:
        """Give every rank its pieces of what the leader evaluates, and afterwards its own buffers back."""
        with self.servers.agreed() if self.servers is not None else nullcontext():
            if self.servers is not None:
                self.channel.tell(Command("evaluate"))
            own = {name: buffer.clone() for name, buffer in self._buffers.items()}
            self._share_parameters()
            self._share_buffers()
            yield
            for name, buffer in own.items():
                self._buffers[name].copy_(buffer)

    def close(self) -> None:
        """Leave the run, as the leader."""
        if self.servers is not None:
            self.servers.close()

    def _share_parameters(self) -> None:
        """Give every rank its pieces of the whole model's parameters."""
        self._of_parameters.scatter(self._whole_parameters(), self._parameters)

    def _share_buffers(self) -> None:
        """Give every rank its pieces of the whole model's buffers (BatchNorm statistics)."""
        if self._has_buffers:
            self._of_buffers.scatter(self._whole_buffers(), self._buffers)

    def _gather_gradients(self) -> None:
        self.split.pieces.take_gradients()
        used, whole = self._of_parameters.given({n: p.grad for n, p in self._parameters.items()}), {}
        for name, parameter in self._whole_parameters().items():
            whole[name] = torch.empty_like(parameter)
            parameter.grad = whole[name] if name in used else None
        self._of_parameters.gather({n: p.grad for n, p in self._parameters.items()}, whole)
        for parameter in self._parameters.values():
            parameter.grad = None

    def _scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the whole model."""
        for parameter in self._whole_parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _whole_parameters(self) -> dict[str, Tensor]:
        """Return the whole model's parameters by the names that the pieces have."""
        if self.whole is None:
            return {}
        named: dict[str, Tensor] = dict(self.whole.named_parameters(remove_duplicate=False))
        return {name: named[name] for name in self._of_parameters.shapes}

    def _whole_buffers(self) -> dict[str, Tensor]:
        return {} if self.whole is None else dict(self.whole.named_buffers())

    def _check(self, model: nn.Module) -> None:
        """Refuse pieces that do not make up the whole model's trainable parameters."""
        held = {id(tensor) for tensor in self._whole_parameters().values()}
        missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            raise RuntimeError(f"no rank of the worker holds {missing[0]}")


def _any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether it is so on any rank of a group; all ranks call it together."""
    flags = torch.tensor([flag], dtype=torch.int64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags)
