"""Means that travel on a thread of their own; on a GPU in a stream of its own too, or training would wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

Means = dict[str, Tensor] | None


class PendingMean:
    """A mean on its way, or one that is there.

    Attributes:
        future: of the mean.
    """

    def __init__(self, future: Future[Means], done: torch.cuda.Event | None = None, keeps: object = None) -> None:
        """Wrap a future; `keeps`: what the other stream reads, which must not be reused before it is done."""
        self.future, self._done, self._keeps = future, done, keeps

    @staticmethod
    def at_once(means: Means) -> PendingMean:
        """Wrap a mean that is there."""
        future: Future[Means] = Future()
        future.set_result(means)
        return PendingMean(future)

    def result(self) -> Means:
        """Wait for the mean: this thread, and on a GPU its stream.

        Raises:
            PeerLostError, RuntimeError: what the exchange raised.
        """
        means = self.future.result()
        if self._done is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            for mean in (means or {}).values():  # made in the other stream: not to be reused while this one reads
                if mean.is_cuda:
                    mean.record_stream(stream)
        return means


class Background:
    """Works on one exchange after another, in the order in which they were handed over."""

    def __init__(self, device: torch.device) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="echelon-averaging")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], Means]) -> PendingMean:
        """Start it; on a GPU after what the present stream has queued."""
        stream = self._stream
        if stream is None:
            return PendingMean(self._executor.submit(work))
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(stream.device))

        def in_stream() -> Means:
            """Work in the stream of the averages, after what was queued when it was submitted."""
            with torch.cuda.stream(stream):  # also makes its device this thread's
                stream.wait_event(ready)
                means = work()
                done.record(stream)
                return means

        return PendingMean(self._executor.submit(in_stream), done, keeps=work)

    def close(self) -> None:
        """End the thread; what has not begun is given up."""
        self._executor.shutdown(cancel_futures=True)
