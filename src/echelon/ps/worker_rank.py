"""Which process of which worker of a parameter server this is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerRank:
    """A process of a worker: which worker, and where it stands in it.

    Attributes:
        number: of the worker in the run.
        local: number of this process among its machine's.
        machine: its machine's number; 0: the first one.
        rank: of this process in its worker, which is several where the model is split; the first one leads.
        size: processes of a worker.
        workers: of all machines.
    """

    number: int
    local: int
    machine: int = 0
    rank: int = 0
    size: int = 1
    workers: int = 1

    @property
    def name(self) -> str:
        """The name of the process: that of its worker, with the rank behind it where it does not lead."""
        return worker_name(self.number, self.rank)

    @property
    def leads(self) -> bool:
        """Whether this process talks to scheduler and servers."""
        return self.rank == 0


def worker_name(number: int, rank: int = 0) -> str:
    """Return the name of a process of a worker.

    >>> worker_name(3), worker_name(3, 1)
    ('worker3', 'worker3.1')
    """
    return f"worker{number}.{rank}" if rank else f"worker{number}"
