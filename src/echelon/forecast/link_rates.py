"""What messages between a run's ranks take, measured where its training ends: a latency, and seconds of a byte.

Sums and messages are timed apart: over one link, two ranks that send each other long messages at once can take twice as
long as a sum of as many bytes, for the acknowledgements of one direction stand behind the data of the other. Sizes grow
until one takes long enough to tell its rate, so that a slow link is not kept busy for longer than a fast one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from echelon.collectives.messages import Mailbox
from echelon.collectives.schedule import Ring
from echelon.collectives.wire import ring_bytes
from echelon.trainer.world import World

_PINGS = 10
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1 << 14, 1 << 24, 4
_LONG_S = 0.1  # a shaped link's burst, and a connection's first window, are little beside it
_TIMES = 2


@dataclass(frozen=True)
class LinkRates:
    """Seconds of a round without its bytes, and of a byte that a rank sends: in sums, and in messages to others."""

    latency_s: float
    sum_byte_s: float
    message_byte_s: float

    def seconds(self, n_bytes: float, rounds: float, sums: bool) -> float:
        """Return what so many bytes take in so many rounds."""
        return self.latency_s * rounds + n_bytes * (self.sum_byte_s if sums else self.message_byte_s)


@dataclass
class LinkProbe:
    """Times what ranks send each other, who wait for one another before by a sum of one number.

    Attributes:
        sent_bytes: that this rank has sent for it.
    """

    world: World
    sent_bytes: int = 0

    def meet(self) -> None:
        """Wait for the others; all ranks call it together."""
        number = torch.zeros(1, device=self.world.device)
        dist.all_reduce(number, group=self.world.group)
        float(number)  # waits for a GPU
        self.sent_bytes += ring_bytes(4, self.world.size, number.is_cuda)

    def most(self, value: float) -> float:
        """Return the largest of the ranks' values; all ranks call it together."""
        tensor = torch.tensor([value], device=self.world.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.world.group)
        self.sent_bytes += ring_bytes(4, self.world.size, tensor.is_cuda)
        return float(tensor)

    def rates(self, sum_bytes: int, message_bytes: int) -> LinkRates:
        """Measure what sums and messages take, up to sizes that the run would send; all ranks call it together."""
        latency_s = min(_seconds(self.meet) for _ in range(_PINGS))
        sums = self._byte_s(self._sum, sum_bytes, latency_s)
        return LinkRates(latency_s, sums, self._byte_s(self._exchange, message_bytes, latency_s))

    def _byte_s(self, send: Callable[[int], int], largest: int, latency_s: float) -> float:
        """Return the seconds of a byte of what `send` sends, which returns how many."""
        size = min(_FIRST_BYTES, max(4, largest))
        while True:
            taken, sent = self._timed(send, size)
            if self.most(taken) >= _LONG_S or size >= min(largest, _LAST_BYTES):
                break
            size = min(_GROWTH * size, largest, _LAST_BYTES)
        times = [taken, *(self._timed(send, size)[0] for _ in range(_TIMES - 1))]
        return max(0.0, min(times) - latency_s) / sent if sent else 0.0

    def _timed(self, send: Callable[[int], int], size: int) -> tuple[float, int]:
        self.meet()
        began, sent_before = time.perf_counter(), self.sent_bytes
        self.sent_bytes += send(size)
        return time.perf_counter() - began, self.sent_bytes - sent_before

    def _sum(self, n_bytes: int) -> int:
        tensor = torch.zeros(n_bytes // 4, device=self.world.device)
        dist.all_reduce(tensor, group=self.world.group)
        float(tensor[0])
        return ring_bytes(tensor.nbytes, self.world.size, tensor.is_cuda)

    def _exchange(self, n_bytes: int) -> int:
        assert self.world.group is not None
        mailbox = Mailbox(self.world.group, Ring(range(self.world.size), self.world.rank))
        message = torch.zeros(n_bytes, dtype=torch.uint8, device=self.world.device)
        others = mailbox.others()
        received, sent = mailbox.exchange(dict.fromkeys(others, message), dict.fromkeys(others, n_bytes))
        float(next(iter(received.values()))[0])
        return sent


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
