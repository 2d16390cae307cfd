"""What a worker's connection does with the tasks that come."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echelon.compression.registry import read
from echelon.coordinator.messages import AskTask, TaskHeard, TrainTask, WithdrawTask
from echelon.messages.framing import Content, Message
from echelon.messages.identity import derive_keys
from echelon.ps.connection import Connection
from echelon.ps.worker_state import ClientConfig, ClientFailed


def test_who_waits_for_others_work_asks_again_while_the_scheduler_lives(tmp_path: Path) -> None:
    keys = derive_keys(bytes(32))
    connection = Connection(ClientConfig("worker0", keys, f"ipc://{tmp_path}/none", read("none"), 0, 0, 1.0))
    asked = list[float]()

    def done() -> bool:
        if len(asked) < 2:
            connection._heard_s = time.monotonic()
        return False

    with pytest.raises(ClientFailed, match=r"waited 0\.1 s for a task"):
        connection.wait_until(done, "a task", 0.1, again=lambda: asked.append(time.monotonic()))
    assert len(asked) == 2
    connection.close()


def test_a_task_that_comes_twice_is_done_once_and_another_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long is offered once more: the worker may have it, or be done meanwhile and wait for another."""
    keys = derive_keys(bytes(32))
    connection = Connection(ClientConfig("worker0", keys, f"ipc://{tmp_path}/none", read("none"), 0, 0, 1.0))
    sent: list[Content] = []
    monkeypatch.setattr(connection._scheduler, "send", sent.append)
    task = TrainTask(7, 7, 0, 7)

    def hear(content: Content) -> None:
        connection._from_scheduler(Message(content, "scheduler", 1, 1))

    connection.ask()
    hear(task)
    assert connection.tasks.popleft() == task
    connection.ask()  # the next one travels while this one is worked on
    hear(task)
    assert not connection.tasks and sent == [AskTask()] * 3
    hear(TaskHeard(task.task))
    connection.ask()
    assert sent == [AskTask()] * 3, "one is asked for"
    connection.close()


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_task_that_is_withdrawn_is_left_wherever_it_is(tmp_path: Path, comes_again: bool) -> None:
    """Also between the moment when it was taken and that when it waits for a value: its batch is being read."""
    keys = derive_keys(bytes(32))
    connection = Connection(ClientConfig("worker0", keys, f"ipc://{tmp_path}/none", read("none"), 0, 0, 1.0))

    def hear(content: Content) -> None:
        connection._from_scheduler(Message(content, "scheduler", 1, 1))

    present, ahead = TrainTask(7, 7, 0, 7), TrainTask(8, 8, 0, 8)
    hear(present)
    hear(ahead)
    assert connection.take_task() == [present]
    hear(WithdrawTask(ahead.task))
    assert connection.take_task() == [] and not connection.withdrawn, "the present one goes on"
    hear(ahead)
    assert connection.take_task() == [ahead]
    hear(WithdrawTask(ahead.task))
    if comes_again:
        hear(ahead)
    connection.open_task(ahead.task, 3)
    assert connection.abandon() != comes_again and not connection.abandon()
    hear(ahead)
    assert connection.take_task() == ([] if comes_again else [ahead])
    connection.close()
