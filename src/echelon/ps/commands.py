"""How the first rank of a split worker tells the others what to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

from echelon.parallel.base import Group

_BYTES = 256
_IDLE_A_TIMEOUT = 4


@dataclass(frozen=True)
class Command:
    """What comes next for all ranks of a worker.

    Attributes:
        kind: `train`: make a part of a batch; `values`: take parameters, and compute; `evaluate`: evaluate what the
            first rank has; `collect`: bring together what reports show of its samples; `idle`: nothing yet; `over`: the
            run is.
        epoch, batch, share, shares: of `train`: which part of which batch the worker has.
        buffers: of `values`: BatchNorm statistics come too.
    """

    kind: Literal["train", "values", "evaluate", "collect", "idle", "over"]
    epoch: int = 0
    batch: int = 0
    share: int = 0
    shares: int = 1
    buffers: bool = False


class CommandChannel:
    """What the first rank of a group tells the others, in order.

    Args:
        group: ranks that can send tensors in the processor's memory.
        timeout_s: how long they wait for a command.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group = group
        self._returned: list[Command] = []
        self._is_over = False
        self.idle_s = timeout_s / _IDLE_A_TIMEOUT

    def tell(self, command: Command) -> None:
        """Tell a command, as the first rank; the others hear it."""
        text = json.dumps(asdict(command)).encode()
        assert len(text) <= _BYTES
        self._is_over = command.kind == "over"
        self._broadcast(torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8))

    def tell_idle(self) -> None:
        """Tell that there is nothing to do yet, every `idle_s`: the others wait no longer than a timeout.

        Once the run is over nobody hears it: the first rank waits for the disk alone.
        """
        if not self._is_over:
            self.tell(Command("idle"))

    def hear(self) -> Command:
        """Wait for a command, as one of the others."""
        if self._returned:
            return self._returned.pop()
        while True:
            command = Command(**json.loads(bytes(self._broadcast(torch.empty(_BYTES, dtype=torch.uint8)))))
            if command.kind != "idle":
                return command

    def hear_again(self, command: Command) -> None:
        """Put back a command that was heard too early: it is the next one."""
        self._returned.append(command)

    def _broadcast(self, text: torch.Tensor) -> list[int]:
        dist.broadcast(text, group=self._group, group_src=0)
        return text.tolist()
