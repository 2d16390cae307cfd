"""The path that is fastest here, by the size of the vector: tried at the start of the run, the same after a resume.

Helps: Several ranks on one machine without GPUs, and vectors of mixed sizes; small ones gain most.
Needs: 3 ranks or more on CPUs, and no compression: elsewhere it is backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep


@dataclass(frozen=True)
class Auto(Path):
    """Before the first step all ranks sum vectors of 4 KiB to 16 MiB along each path, for three seconds at the most.

    A size gets another path than the backend's own only where that was at least a tenth faster in nearly every turn.
    What was chosen stands in the record and in `paths.json` of the run's folder, and a resume on as many ranks uses it
    again: another path sums in another order.
    """

    name: ClassVar[str] = "auto"
    is_choice: ClassVar[bool] = True
    by_backend: ClassVar[bool] = True  # until paths were tried: see `chooser`

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return no steps: what is chosen has its own."""
        raise TypeError("auto has no schedule: what it chooses has")


PATH = Auto
