"""Which of a worker's two threads is woken by a message: waking both, or one for the other, costs more than a message.

Sockets' descriptors are in an inner epoll. It lies in an outer one, on which the conversation's own thread sleeps,
except while the training thread waits: then that one sleeps on the inner epoll itself.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from echelon.messages.sockets import Socket


class ThreadWakeups:
    """The descriptors, and one signal for each of the two threads."""

    def __init__(self) -> None:
        self._sockets, self._all = select.epoll(), select.epoll()
        self._own, self._training = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self._sockets.register(self._training, select.EPOLLIN)
        self._all.register(self._own, select.EPOLLIN)
        self._all.register(self._sockets.fileno(), select.EPOLLIN)

    def add(self, socket: Socket) -> None:
        """Watch a socket; what came on it before is not told of."""
        self._sockets.register(_descriptor(socket), select.EPOLLIN)

    def remove(self, socket: Socket) -> None:
        """Watch a socket no longer; to be called before it is closed."""
        self._sockets.unregister(_descriptor(socket))

    def rouse(self) -> None:
        """Wake the conversation's own thread."""
        os.eventfd_write(self._own, 1)

    def call(self) -> None:
        """Wake the training thread, if it waits."""
        os.eventfd_write(self._training, 1)

    def sleep(self, most_s: float) -> None:
        """Sleep until something comes, as the conversation's own thread."""
        for which, _ in self._all.poll(most_s):
            if which == self._own:
                os.eventfd_read(self._own)

    @contextmanager
    def by_training_thread(self) -> Iterator[None]:
        """Let messages wake the training thread alone."""
        self._all.unregister(self._sockets.fileno())
        try:
            yield
        finally:
            self._all.register(self._sockets.fileno(), select.EPOLLIN)

    def wait(self, most_s: float) -> None:
        """Sleep until something comes, as the training thread."""
        for which, _ in self._sockets.poll(most_s):
            if which == self._training:
                os.eventfd_read(self._training)

    def close(self) -> None:
        """Free the descriptors."""
        self._sockets.close()
        self._all.close()
        os.close(self._own)
        os.close(self._training)


def _descriptor(socket: Socket) -> int:
    return int(socket.getsockopt(zmq.FD))
