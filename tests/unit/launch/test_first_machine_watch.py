"""What the other machines of a run with servers see of the first one: it answers, is silent, is back, or is another."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.launch import machines, meeting
from echelon.launch.machines import FirstMachineContact, FirstMachineWatch
from echelon.launch.meeting import Admission, Arrival, AskLater, Meeting, SecretSource
from echelon.launch.supervisor import FirstMachineGone
from echelon.messages.framing import Content
from echelon.messages.identity import make_secret

SCHEDULER = "tcp://127.0.0.1:4000"
LOST_S = 1.0
DEADLINE_S = 20.0


@dataclass
class First:
    """The first machine, which is there or not, and answers as it is told; `said` is what the other machine says."""

    folder: Path
    rendezvous: Address
    said: list[str] = field(default_factory=list)
    answer: Content = field(default_factory=lambda: Admission(1, 1, SCHEDULER))
    asked: int = 0
    seen: int = 0

    def is_asked(self, arrival: Arrival) -> Content:
        """Answer a machine."""
        self.asked += 1
        if arrival.settings:
            raise UserError("started with other settings")
        return self.answer

    def is_asked_again(self) -> bool:
        """Whether it was asked since it was looked at last."""
        before, self.seen = self.seen, self.asked
        return self.asked > before

    def said_so_many(self, sentences: int) -> bool:
        """Whether the other machine said so many sentences."""
        return len(self.said) == sentences

    def there(self) -> Meeting[Arrival]:
        """Return the meeting that it holds."""
        return Meeting(self.rendezvous, make_secret(self.folder), Arrival, self.is_asked)

    @contextmanager
    def watched(self, lost_s: float = DEADLINE_S, arrival: Arrival | None = None) -> Iterator[FirstMachineWatch]:
        """Watch it from another machine."""
        arrival = arrival or Arrival("other", 1, {})
        contact = FirstMachineContact(self.rendezvous, SecretSource(self.folder), arrival, SCHEDULER)
        watch = FirstMachineWatch(contact, self.said.append, lost_s, 600.0)
        try:
            yield watch
        finally:
            watch.close()


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> First:
    monkeypatch.setattr(machines, "AGAIN_S", 0.02)
    monkeypatch.setattr(machines, "_SILENT_S", LOST_S / 2)
    monkeypatch.setattr(meeting, "_ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return First(tmp_path, Address("127.0.0.1", free.getsockname()[1]))


def _look_until(watch: FirstMachineWatch, ready: Callable[[], object]) -> None:
    """Look as a supervisor does."""
    ends = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < ends
        watch.check()
        time.sleep(0.01)


def _never() -> bool:
    return False


def test_one_that_answers_is_there_for_as_long_as_it_does(first: First) -> None:
    with first.there(), first.watched(lost_s=LOST_S) as watch:
        ends = time.monotonic() + 1.2 * LOST_S
        _look_until(watch, lambda: time.monotonic() > ends)
    assert first.said == [] and first.asked > 2


def test_one_that_is_silent_and_comes_back_is_told_of_once_each_time(first: First) -> None:
    with first.watched() as watch:
        for number in (1, 2):
            with first.there():
                _look_until(watch, first.is_asked_again)
            _look_until(watch, partial(first.said_so_many, 2 * number - 1))
            with first.there():
                _look_until(watch, partial(first.said_so_many, 2 * number))
    where = f"the first machine at {first.rendezvous}"
    waits = (
        f"{where} gives no answer: waiting up to 10m 0s for its return (--machine-patience); "
        "if it does not come back by itself, give the run's command there again"
    )
    assert first.said == [waits, f"{where} answers again"] * 2


def test_one_that_stays_silent_is_gone(first: First) -> None:
    with first.watched(lost_s=LOST_S) as watch:
        began_s = time.monotonic()
        with pytest.raises(FirstMachineGone):
            _look_until(watch, _never)
        assert time.monotonic() - began_s >= 0.9 * LOST_S and len(first.said) == 1


def test_one_whose_scheduler_is_not_there_yet_is_waited_for(first: First) -> None:
    first.answer = AskLater()
    with first.there(), first.watched() as watch:
        _look_until(watch, lambda: first.said)
        first.answer = Admission(1, 1, SCHEDULER)
        _look_until(watch, partial(first.said_so_many, 2))


@pytest.mark.parametrize("settings, scheduler", [({}, "tcp://127.0.0.1:4001"), ({"--lr": "0.2"}, SCHEDULER)])
def test_one_that_began_anew_is_joined_at_once(first: First, settings: dict[str, str], scheduler: str) -> None:
    arrival = Arrival("other", 1, {})
    first.answer = Admission(1, 1, scheduler)
    with first.there(), first.watched(arrival=replace(arrival, settings=settings)) as watch:
        with pytest.raises(FirstMachineGone):
            _look_until(watch, _never)
        assert first.said == []


ASK_WITHOUT_FILES = """
import os, resource, sys, time
from pathlib import Path
from echelon.core.address import Address
from echelon.launch import meeting

def take_all():
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return taken

meeting._ASK_S = 0.1
secret, arrival = meeting.SecretSource(Path(), True), meeting.Arrival("m", 1, {})
asker = meeting.Asker(Address("127.0.0.1", int(sys.argv[1])), secret, arrival)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
for spare in range(6):
    taken = take_all()
    while more := time.sleep(0.1) or take_all():  # sockets are closed a little later
        taken += more
    for _ in range(spare):
        os.close(taken.pop())
    print(asker.ask()[1])
    for fd in taken:
        os.close(fd)
"""


def test_who_asks_has_no_file_left_for_a_while(first: First) -> None:
    command = [sys.executable, "-c", ASK_WITHOUT_FILES, str(first.rendezvous.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S * 3)
    reasons = done.stdout.splitlines()
    assert done.returncode == 0 and len(reasons) == 6, done.stderr
    assert reasons[0] == "cannot ask: Too many open files" and reasons[-1].startswith("no answer"), reasons
