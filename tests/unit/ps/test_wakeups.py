"""Which of a worker's two threads a message wakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from echelon.messages.sockets import give, take
from echelon.ps.wakeups import ThreadWakeups

LONG_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    yield here, there
    here.close(0)
    there.close(0)
    context.term()


def took(action: object, most_s: float) -> float:
    began = time.monotonic()
    action(most_s)  # type: ignore[operator]
    return time.monotonic() - began


def test_a_message_wakes_the_own_thread_except_while_the_training_thread_waits(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    here, there = pair
    watch = ThreadWakeups()
    watch.add(here)
    give(there, [b"a", zmq.Frame(b"b" * 100), memoryview(b"c" * 100)])
    assert took(watch.sleep, LONG_S) < LONG_S / 2
    with watch.by_training_thread():
        assert took(watch.wait, LONG_S) < LONG_S / 2
        assert took(watch.sleep, 0.05) >= 0.05
        assert [len(frame) for frame in take(here)] == [1, 100, 100]
    here.getsockopt(zmq.EVENTS)  # takes note that nothing is left
    assert took(watch.sleep, 0.05) >= 0.05
    watch.remove(here)
    give(there, [b"again"])
    assert took(watch.sleep, 0.05) >= 0.05
    watch.close()


def test_each_thread_can_be_woken_by_the_other() -> None:
    watch = ThreadWakeups()
    with watch.by_training_thread():
        threading.Timer(0.02, watch.call).start()
        assert took(watch.wait, LONG_S) < LONG_S / 2
        assert took(watch.wait, 0.05) >= 0.05
    threading.Timer(0.02, watch.rouse).start()
    assert took(watch.sleep, LONG_S) < LONG_S / 2
    watch.close()
