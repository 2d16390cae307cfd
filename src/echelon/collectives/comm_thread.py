"""One thread that does all communication of a hook, first come first served.

Buckets arrive in the same order on every rank, one thread works on them in that order, in a process group of its own:
so all ranks issue their collectives in one order, however long backward or a codec takes on any of them.
"""

from __future__ import annotations

import queue
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from echelon.core.state_tree import StateTree, StateView


@dataclass
class DdpBucket:
    """A bucket handed over by DDP.

    Attributes:
        names: of its parameters.
        gradients: views into `buffer`, one for each parameter.
        future: gets `buffer` when it is reduced.
        first, last: place in this backward.
        ready: on CUDA, recorded when the gradients were complete.
    """

    names: list[str]
    gradients: list[Tensor]
    buffer: Tensor
    future: Future[Tensor]
    first: bool
    last: bool
    ready: torch.cuda.Event | None = None


class BucketWork(Protocol):
    """Reduces buckets in the order in which they come."""

    def work(self, bucket: DdpBucket) -> None:
        """Take a bucket; its future is set when it is reduced, perhaps after later ones came."""

    def fail(self, bucket: DdpBucket, error: BaseException) -> None:
        """Let the future of this bucket, of every unfinished and every later one raise the error."""

    def state_dict(self) -> StateTree:
        """Return what must survive a restart."""

    def load_state_dict(self, saved: StateView) -> None:
        """Take it back."""


_Jobs = queue.SimpleQueue["tuple[BucketWork, DdpBucket] | None"]


class CommThread:
    """Hands buckets to their work on a thread of its own, which ends with the hook."""

    def __init__(self, owner: object, device: torch.device) -> None:
        self._queue: _Jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, device), name="echelon-communication", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(owner, self._queue.put, None)

    def submit(self, work: BucketWork, bucket: DdpBucket) -> None:
        """Queue a bucket; returns at once."""
        self._queue.put((work, bucket))

    def close(self) -> None:
        """End the thread after what is queued."""
        self._end()
        self._thread.join()


def _serve(jobs: _Jobs, device: torch.device) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
        while (job := jobs.get()) is not None:
            work, bucket = job
            try:
                if stream is not None and bucket.ready is not None:
                    stream.wait_event(bucket.ready)
                work.work(bucket)
            except BaseException as error:  # noqa: BLE001 - backward raises it where it waits for the future
                work.fail(bucket, error)
            del job, work, bucket  # the hook can go while this waits
