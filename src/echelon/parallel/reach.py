"""Which parameters a backward pass reaches, where ranks that work on one update may differ in it.

A parameter that no rank reached keeps no gradient, as in one process; one that some ranks reached has zeros on the
others. Ranks that share a model's pieces also have to enter its blocks in one order, for they gather each together.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.torch_compat import detect_fake_mode, is_dtensor

FIRST_STEPS = 16
"""In which all ranks are asked; later only in steps whose number is a power of two."""


def is_asked_in(step: int) -> bool:
    """Whether ranks compare in a step, counted from 0, though none was seen to differ yet."""
    return step < FIRST_STEPS or step & (step - 1) == 0


class ReachedMarks:
    """Asks the ranks of a group which parameters they reached: in some steps, and in all once one was left out.

    Args:
        device: of the numbers that are sent.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._steps, self._watching = 0, False

    @classmethod
    def along(cls, mesh: DeviceMesh | None) -> ReachedMarks | None:
        """Return what asks the ranks of an axis; None: there is no such axis."""
        return None if mesh is None else cls(mesh.get_group(), _device_of(mesh))

    def agreed(self, reached: Sequence[bool], left_out: bool) -> list[bool] | None:
        """Return which parameters any rank reached, the same on all; None: nobody is asked in this step.

        Args:
            reached: in this step, by this rank.
            left_out: whether this rank has left any out so far.
        """
        step, self._steps = self._steps, self._steps + 1
        if not self._watching and not is_asked_in(step):
            return None
        told = torch.tensor([left_out, *reached], dtype=torch.uint8, device=self._device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        if detect_fake_mode([told]) is not None:  # a rehearsal: there are no values
            return None
        any_left_out, *marks = told.tolist()
        self._watching = self._watching or bool(any_left_out)
        return [bool(mark) for mark in marks]


class ReachedShards:
    """Notes the parameters that backward passes reach in a model that `fully_shard` was applied to.

    Their shards have zeros as gradients in place of none, so that all ranks reduce the same ones.

    Attributes:
        names: of those reached since it was last cleared.
        gathered: the whole parameters that backward passes go through, once forward has made them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Watch sharded modules, by name; each has its own parameters gathered when its forward pass begins."""
        self.names: set[str] = set()
        self.gathered: list[nn.Parameter] = []
        self._watched: set[int] = set()
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(self._watch, f"{name}." if name else ""))

    def _watch(self, prefix: str, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._watched and _is_gathered(parameter):
                self._watched.add(id(parameter))  # it stays: gathering fills its memory again
                self.gathered.append(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self._note, prefix + name))

    def _note(self, name: str, parameter: Tensor) -> None:
        self.names.add(name)


def _is_gathered(parameter: Tensor) -> bool:
    return not is_dtensor(parameter) or Axis.FSDP not in (parameter.device_mesh.mesh_dim_names or ())


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type)  # of a GPU, the current one


@dataclass(frozen=True)
class _ToldLater:
    """Numbers on their way from a GPU, which is not waited for beyond them; of a CPU they are there."""

    numbers: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, numbers: Tensor) -> _ToldLater:
        """Begin to copy numbers to the host."""
        if not numbers.is_cuda or detect_fake_mode([numbers]) is not None:
            return cls(numbers, None)
        host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def read(self) -> list[int]:
        """Return them."""
        if self.done is not None:
            self.done.synchronize()
        numbers: list[int] = self.numbers.tolist()
        return numbers


class BlockOrder:
    """Refuses a block that some ranks leave out in training, or enter in another order: they gather each together.

    Before a block is gathered it is looked at in the steps of `is_asked_in`. At the end of each forward pass orders are
    compared, for the parts of another block of the same size would have come in the place of a block's own; on a GPU
    what came of it is looked at when the next pass begins, so that nothing waits for it.
    """

    def __init__(self, root: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
        """Watch the blocks of a model, by name; hooks come before those of `fully_shard`, so call it afterwards."""
        self._names, self._mesh = (*blocks, "its end"), mesh
        self._passes, self._order = -1, 0
        self._told: _ToldLater | None = None  # of the last comparison, until it is looked at
        root.register_forward_pre_hook(self._begin, prepend=True)
        for place, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(partial(self._enter, place), prepend=True)
        root.register_forward_hook(partial(self._enter, len(blocks)))

    def _begin(self, root: nn.Module, inputs: Any) -> None:
        self._look()
        self._passes, self._order = self._passes + torch.is_grad_enabled(), 0

    def _enter(self, place: int, module: nn.Module, *passed: Any) -> None:
        if not torch.is_grad_enabled():  # a rank without samples takes part in evaluation mode
            return
        self._order = zlib.crc32(bytes(str(place), "ascii"), self._order)
        is_asked, is_end = is_asked_in(max(0, self._passes)), place == len(self._names) - 1
        if not is_asked and not is_end:
            return
        device = _device_of(self._mesh)
        told = torch.tensor([place, -place, self._order, -self._order])
        waits = device.type == "cuda" and detect_fake_mode([told]) is None
        told = told.pin_memory().to(device, non_blocking=True) if waits else told.to(device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        self._told = _ToldLater.of(told)
        if is_asked or device.type == "cpu":
            self._look()

    def _look(self) -> None:
        if self._told is None:
            return
        told, self._told = self._told, None
        if detect_fake_mode([told.numbers]) is not None:  # a rehearsal: there are no values
            return
        last, first, highest, lowest = told.read()
        if last == -first and highest == -lowest:
            return
        where = "ranks have called the blocks of the model in different orders"
        if last != -first:
            where = f"a rank is at {self._names[-first]} of the model where another is at {self._names[last]}"
        raise UserError(
            f"--parallel fsdp={self._mesh.size()}: in one forward pass {where}: ranks gather each block together, so "
            "none may leave one out: use --parallel dp=N, or call the block always and multiply what it gives by 0"
        )
