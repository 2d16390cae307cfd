"""For each vector size the path that is fastest here, measured when the run starts; the same after a resume.

Helps: Several ranks on one machine without GPUs, and vectors of mixed sizes; small ones gain most.
Costs: at most three seconds at the start. Two new runs may choose differently, and then differ in their last bits.
Needs: 3 ranks or more on CPUs, and no compression; otherwise it is the same as backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep


@dataclass(frozen=True)
class Auto(Path):
    """Before the first step, all ranks sum vectors of 4 KiB to 16 MiB along each path, in turns.

    A size uses another path than the backend's only if that was at least a tenth faster in nearly every turn. The
    record and the run's `paths.json` keep the choice. A resume on as many ranks uses it again, because another path
    sums in another order.
    """

    name: ClassVar[str] = "auto"
    is_choice: ClassVar[bool] = True
    by_backend: ClassVar[bool] = True  # until paths were tried: see `chooser`

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return no steps: what is chosen has its own."""
        raise TypeError("auto has no schedule: what it chooses has")


PATH = Auto
