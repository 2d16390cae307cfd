"""Machines of which several may lead, on loopback: they meet, one of them is lost, and the next one goes on."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.patience import Patience
from echelon.core.terms import Term
from echelon.launch import voters
from echelon.launch.addresses import own_number
from echelon.launch.meeting import Arrival, AskLater, SecretSource
from echelon.launch.rounds import (
    Continue,
    Finished,
    Go,
    Order,
    Over,
    Ready,
    Round,
    RoundSettings,
    Running,
    State,
    TermLead,
)
from echelon.launch.voters import TERMS, VoterMachine, VoterSetup
from echelon.launch.voting import Ballot, Stamp, Vote
from echelon.messages.identity import PUBLIC_SECRET, write_secret
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Steps

SETTINGS = RoundSettings(1, 4, 1, arrival_s=30.0, return_s=4.0, elastic=True)
DEADLINE_S = 30.0


def _addresses(count: int) -> tuple[Address, ...]:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(Address("127.0.0.1", each.getsockname()[1]) for each in free)


class Machine:
    """A machine with a run folder of its own, and the state of its processes."""

    def __init__(self, root: Path, voters: tuple[Address, ...], number: int | None, name: str) -> None:
        self.folder = root / name
        shared = self.folder / "machines"
        shared.mkdir(parents=True, exist_ok=True)
        write_secret(shared, PUBLIC_SECRET)
        scratch = root / f"{name}-scratch-{time.monotonic_ns()}"
        scratch.mkdir()
        setup, secret = VoterSetup(voters, number, self.folder, shared), SecretSource(shared, trusted_network=True)
        patience = Patience(self.folder)
        self.rounds = VoterMachine(setup, secret, Arrival(name, 1, {}), SETTINGS, scratch, patience)
        self.state: State = Ready()
        self.round: Round | None = None
        self.has_vanished = False

    def tick(self) -> Order:
        """Do what is ordered, as a supervisor does."""
        order = self.rounds.order(self.state)
        if isinstance(order, Go) and isinstance(self.state, Ready):
            self.round, self.state = order.round, Running(order.round.number)
            self.folder_of_terms = self.rounds.open_terms(order.round)
        return order

    def lead(self) -> TermLead | None:
        return self.rounds.lead(self.round) if self.round is not None else None

    def vanish(self) -> None:
        """Say nothing more to anybody, as a machine does that is lost."""
        self.rounds._over = True
        self.rounds._thread.join()
        self.rounds._other._known = False  # so that it tells nobody
        if not self.has_vanished:
            self.rounds._other.close()
        self.has_vanished = True


@contextmanager
def machines(tmp_path: Path, voters: int = 3, others: int = 0) -> Iterator[list[Machine]]:
    addresses = _addresses(voters)
    numbers = [*range(voters), *[None] * others]
    made = [Machine(tmp_path, addresses, number, f"m{i}") for i, number in enumerate(numbers)]
    try:
        yield made
    finally:
        for machine in made:
            machine.vanish()


def until(ready: Callable[[], object], *ticking: Machine) -> None:
    """Let machines ask until something is so."""
    ends = time.monotonic() + DEADLINE_S
    while not ready():
        orders = [machine.tick() for machine in ticking]
        assert time.monotonic() < ends, orders
        time.sleep(0.01)


def begin(*group: Machine) -> None:
    """Bring machines into a round, in their order."""
    until(lambda: group[0].rounds.leads, *group)
    until(lambda: all(isinstance(machine.state, Running) for machine in group), *group)
    assert [machine.round.number if machine.round else 0 for machine in group] == [1] * len(group)


class FullDisk:
    """A disk that takes nothing below a folder while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.full, self.refused = folder, False, 0
        monkeypatch.setattr(voters, "write_atomic", self.write)

    def write(self, path: Path, text: str) -> None:
        """Write a file, or refuse it."""
        if self.full and path.is_relative_to(self.folder):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, text)


def test_a_vote_is_given_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, tmp_path)
    machine, ballot = Machine(tmp_path, _addresses(3), 1, "m1"), Ballot(1, 0, Stamp(), is_trial=False)
    answers = list[object]()
    try:
        saved = machine.folder / "machines" / "voter-1.json"
        until(saved.exists, machine)
        disk.full = True
        for _ in range(2):
            assert machine.rounds.answer(ballot) == AskLater()
            assert '"voted_for": 0' in saved.read_text()
        disk.full = False
        until(lambda: answers.append(machine.rounds.answer(ballot)) or answers[-1] != AskLater())
    finally:
        machine.vanish()
    assert isinstance(answers[-1], Vote) and answers[-1].is_granted and '"voted_for": 1' in saved.read_text()


def test_who_led_and_changed_its_workers_says_so_to_who_leads_next(tmp_path: Path) -> None:
    with machines(tmp_path, voters=2) as (a, b):
        until(lambda: a.rounds.leads, a, b)
        a.rounds.resize(3)
    assert a.rounds._arrival.workers == a.rounds._other._arrival.workers == 3


@pytest.mark.long
def test_a_leader_whose_disk_is_full_for_a_while_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, tmp_path / "m0")
    with machines(tmp_path) as (a, b, c):
        begin(a, b, c)
        disk.full = True
        a.rounds.saved(1)
        until(lambda: disk.refused > 1, a, b, c)
        disk.full = False
        saved = a.folder / "machines" / "voter-0.json"
        until(lambda: '"checkpoints": 1' in saved.read_text(), a, b, c)


@pytest.mark.long
def test_the_next_voter_goes_on_with_terms_and_record_of_one_that_is_lost(tmp_path: Path) -> None:
    with machines(tmp_path, others=1) as (a, b, c, d):
        begin(a, b, c, d)
        lead = a.lead()
        assert a.rounds.number == 0 and b.lead() is None and lead is not None and not lead.holds
        members = [m.folder_of_terms for m in (a, b, c, d)]
        names = [f"{'' if m is a else f'machine{m.rounds.number}-'}rank0.0" for m in (a, b, c, d)]
        for folder, name in zip(members, names, strict=True):
            assert folder is not None
            folder.begin(name)
        record = Recorder(a.folder)
        record.write(Steps(7, [1.0], 1.0))
        assert lead.publish is not None
        lead.publish(Term(1, tuple(names), store=lead.store))
        until(lambda: all(f and (t := f.newest()) and t.number == 1 for f in members), a, b, c, d)
        until(lambda: (b.folder / "machines" / "record-copy.jsonl").exists(), a, b, c, d)
        until(lambda: b'"step": 7' in (b.folder / "machines" / "record-copy.jsonl").read_bytes(), a, b, c, d)
        record.close()
        a.vanish()
        until(lambda: b.rounds.leads and b.lead(), b, c, d)
        after = b.lead()
        assert (
            after is not None and after.members == tuple(names) and after.after == TERMS and after.publish is not None
        )
        assert members[1] is not None and members[1].is_gone("rank0.0") and not members[1].is_gone(names[2])
        assert [window.step for window in read_records(b.folder, Steps)] == [7]
        after.publish(Term(TERMS + 1, tuple(names[1:]), TERMS + 1, after.store))
        until(lambda: all(f and (t := f.newest()) and t.number == TERMS + 1 for f in members[1:]), b, c, d)
        again = Machine(tmp_path, a.rounds._setup.voters, 0, "m0")
        until(lambda: again.round, b, c, d, again)
        assert again.round is not None and (again.round.machine, again.round.beside) == (0, 1)
        assert not again.rounds.leads and again.lead() is None
        for machine in (b, c, d, again):
            machine.state = Finished(1, stopped=False)
        over = dict.fromkeys((b, c, d, again), False)

        def all_over() -> bool:
            for machine in over:
                over[machine] = over[machine] or machine.rounds.order(machine.state) == Over("completed")
            return all(over.values())

        until(all_over)
        again.vanish()


@pytest.mark.long
def test_who_leads_decides_nothing_without_more_than_half_and_gives_up_in_the_end(tmp_path: Path) -> None:
    with machines(tmp_path) as (a, b, c):
        begin(a, b, c)
        lead = a.lead()
        assert lead is not None and lead.publish is not None and a.folder_of_terms is not None
        b.vanish()
        c.vanish()
        until(lambda: (now := a.lead()) and now.holds, a)
        lead.publish(Term(1, ("rank0.0",), 1, lead.store))
        until(lambda: isinstance(order := a.tick(), Continue) and "more than half of the voters" in order.reason, a)
        until(lambda: isinstance(a.rounds.order(a.state), Over))
        assert a.folder_of_terms.newest() is None, "the term does not count"


def test_a_machine_that_is_to_be_among_the_voters_and_is_not_is_refused() -> None:
    elsewhere = tuple(Address(f"127.0.0.{i}", 1) for i in (1, 2))
    with pytest.raises(UserError, match=r"127.0.0.1:1 and 127.0.0.2:1 are both this machine"):
        own_number(elsewhere, 3)
