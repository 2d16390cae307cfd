"""The backend's own all-reduce: NCCL's or gloo's choice of path.

Helps: Nearly always: NCCL and gloo choose a path by the network and the size of the message.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep


@dataclass(frozen=True)
class Backend(Path):
    """What `torch.distributed.all_reduce` does."""

    name: ClassVar[str] = "backend"
    by_backend: ClassVar[bool] = True

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return no steps: the backend has its own."""
        raise TypeError("the backend's own all-reduce has no schedule")


PATH = Backend
