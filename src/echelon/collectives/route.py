"""A path opened for one process group: sums tensors along it and knows what that sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor

from echelon.collectives import registry
from echelon.collectives.base import Path
from echelon.collectives.transfer import PeerLostError, Plan, make_plan, planned_bytes, run_plan
from echelon.collectives.wire import ring_bytes

PLANS = 256
"""Plans that are kept: as many as there are lengths of vectors in a training, and more."""


@lru_cache(maxsize=PLANS)
def _plan(path: Path, rank: int, size: int, numel: int, element_size: int) -> Plan:
    return make_plan(path.schedule(rank, size, numel), element_size)


@dataclass(frozen=True)
class Route:
    """A path and the ranks it runs between."""

    path: Path
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def sum_(self, tensor: Tensor) -> int:
        """Sum a float tensor of any shape over the ranks, in place, the same bits on all; returns the bytes sent.

        The backend's own all-reduce does it along `backend`, and between two ranks along any path: between two, all
        paths are one: each rank sums a half and sends it back, which is what the backend does too.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        if self.size == 1:
            return 0
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        path = self.path.for_bytes(flat.nbytes)
        if path.by_backend or self.size == 2:
            self._sum_by_backend(flat)
            sent = ring_bytes(flat.nbytes, self.size, flat.is_cuda)
        else:
            sent = run_plan(flat, _plan(path, self.rank, self.size, flat.numel(), flat.element_size()), self.group)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return sent

    def sends(self, numel: int, element_size: int) -> int:
        """Return the bytes that this rank sends to sum a vector in a processor's memory."""
        path = self.path.for_bytes(numel * element_size)
        if path.by_backend or self.size <= 2:
            return ring_bytes(numel * element_size, self.size, on_gpu=False) if self.size > 1 else 0
        return planned_bytes(_plan(path, self.rank, self.size, numel, element_size), element_size)

    def begin_sum_(self, flat: Tensor) -> Callable[[], None]:
        """Begin to sum a contiguous 1-D tensor in place; returns what waits until it is summed, as `sum_` does it.

        Along a path with a schedule it is summed by who waits, so that all ranks wait in the order in which they began.
        """
        if self.size > 1 and (self.size == 2 or self.path.for_bytes(flat.nbytes).by_backend):
            with self.losing():
                work = dist.all_reduce(flat, group=self.group, async_op=True)
            return lambda: self._wait(work)
        return lambda: self._sum(flat)

    def _sum(self, flat: Tensor) -> None:
        self.sum_(flat)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is of the group"
        with self.losing():
            work.wait()

    def _sum_by_backend(self, flat: Tensor) -> None:
        with self.losing():
            dist.all_reduce(flat, group=self.group)

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Say of an error of the backend which rank was lost."""
        try:
            yield
        except RuntimeError as error:
            other = f"rank {1 - self.rank}" if self.size == 2 else "a rank"
            raise PeerLostError(f"rank {self.rank} of the group lost {other} that it sums with: {error}") from error


def open_route(path: Path, group: dist.ProcessGroup | None = None) -> Route:
    """Open a path for a group (None: all ranks)."""
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None, "torch.distributed.init_process_group comes first"
    return Route(path, chosen)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None, path: str = "backend") -> int:
    """Sum a float tensor, any shape, over a group's ranks along a path, in place; returns the bytes that it sent.

    With a codec, which remembers what it left out, build a reducer once instead: `reducer.make_reducer`.

    Example: `all_reduce(x, path="hierarchical(group=4)")`.

    Raises:
        UserError: an unknown path or setting.
        PeerLostError: a rank did not answer before the group's timeout.
    """
    return open_route(registry.build(path), group).sum_(tensor)
