"""Which machine gets which numbers, and which is refused in words."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.launch.meeting import Admission, Arrival, AskLater, Meeting, Register, SecretSource, Shape, join_meeting
from echelon.messages.identity import PUBLIC_SECRET

FIRST = Arrival("a", 2, {"--lr": "0.1", "--sync": "ps", "torch": "2.11"})


def test_numbers_follow_each_other_and_stay_when_a_machine_comes_back() -> None:
    register = Register(Shape(2, 3, 2, 0), FIRST)
    second, third = replace(FIRST, machine="b", workers=3), replace(FIRST, machine="c", workers=1)
    assert register.admit(second) == Admission(1, 2)
    assert register.admit(third) == Admission(2, 5)
    assert register.admit(second) == Admission(1, 2)


def test_a_machine_whose_launch_ended_waits_for_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text('{"address": "tcp://there:1"}')
    guest = replace(FIRST, machine="b", since=2)
    assert isinstance(Register(Shape(2, 2, 1, 0), FIRST, epoch=1).answer(file, guest), AskLater)
    assert Register(Shape(2, 2, 1, 0), FIRST, epoch=2).answer(file, guest) == Admission(1, 2, "tcp://there:1", 2)


@pytest.mark.parametrize("arrival, words", [
    (replace(FIRST, machine="b", settings={**FIRST.settings, "--lr": "0.2"}), "--lr 0.2, the first machine with 0.1"),
    (replace(FIRST, machine="b", settings={}), "--lr None"),
    (replace(FIRST, machine="b", settings={**FIRST.settings, "torch": "2"}), "has torch 2, the first machine has 2.11"),
    (replace(FIRST, workers=3), "had 2"),
    (replace(FIRST, machine="c"), "has its 2 machines"),
])  # fmt: skip
def test_what_is_refused(arrival: Arrival, words: str) -> None:
    register = Register(Shape(2, 2, 1, 0), FIRST)
    register.admit(replace(FIRST, machine="first guest"))
    with pytest.raises(UserError, match=words):
        register.admit(arrival)


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_every_server_is_somewhere_once_and_its_standby_elsewhere(least: int, servers: int) -> None:
    shape = Shape(least, least + 1, servers, 1)
    machines = range(least + 1)
    assert sorted(i for m in machines for i in shape.servers_of(m)) == list(range(servers))
    assert sorted(i for m in machines for i in shape.standbys_of(m)) == list(range(servers))
    if least > 1:
        assert not any(set(shape.servers_of(m)) & set(shape.standbys_of(m)) for m in machines)


def test_a_disk_that_fails_for_a_while_keeps_machines_waiting(tmp_path: Path) -> None:
    disk = [OSError(errno.ESTALE, "stale"), OSError(errno.EMFILE, "too many")]

    def answer(arrival: Arrival) -> Admission:
        """Read the scheduler's address from a disk of moods."""
        if disk:
            raise disk.pop()
        return Admission(1, 1, "tcp://there:1")

    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = Address("127.0.0.1", free.getsockname()[1])
    with Meeting(rendezvous, PUBLIC_SECRET, Arrival, answer):
        place = join_meeting(rendezvous, SecretSource(tmp_path, True), FIRST, 20.0, print)
    assert place == Admission(1, 1, "tcp://there:1")
