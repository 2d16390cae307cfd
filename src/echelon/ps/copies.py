"""The servers' parameters at one moment: what a worker evaluates, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.core.state_tree import StateView
from echelon.ps.keystore import counted_tasks


@dataclass(frozen=True)
class ServersCopy:
    """A copy that all servers kept: each key's whole state by the key's number, BatchNorm statistics as one vector.

    The copies of several servers are not of exactly one moment (see `counted`). Of rows that servers make it has how
    many there are; they are read from the servers' copy `tag`.
    """

    keys: Mapping[int, StateView]
    buffers: Tensor
    tag: int = 0

    @property
    def values(self) -> dict[int, Tensor]:
        """The parameters, 1-D by key, without those whose rows servers make."""
        return {index: torch.as_tensor(state["value"]) for index, state in self.keys.items() if "value" in state}

    @property
    def averages(self) -> dict[int, Tensor]:
        """Their moving averages, 1-D by key; a run has them with `--ema`."""
        return {index: torch.as_tensor(state["average"]) for index, state in self.keys.items()}

    @property
    def averaged_updates(self) -> int:
        """Updates that every key's average has seen."""
        return min(int(state["averaged"]) for state in self.keys.values())

    def counted(self) -> tuple[int, set[int]]:
        """Return which tasks every key has counted: all below a number, and those beyond it.

        A task may be in some keys and not in others: it is given out again, and the keys that have it know.
        """
        below = min(int(state["watermark"]) for state in self.keys.values())
        common: set[int] | None = None
        for state in self.keys.values():
            here = set(range(below, int(state["watermark"]))) | counted_tasks(state)
            common = here if common is None else common & here
        common = common or set()
        while below in common:  # so that what is left beyond it was counted out of turn
            common.remove(below)
            below += 1
        return below, common
