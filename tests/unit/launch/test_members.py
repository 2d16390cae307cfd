"""Terms of a group whose survivors go on: who is in them, who is told, and what the supervisor does."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core import terms
from echelon.core.errors import LEFT_EXIT_CODE
from echelon.core.stop import StopFlag
from echelon.core.terms import MEMBER_VARIABLE, TERMS_VARIABLE, Term, TermFolder
from echelon.launch.changes import Change
from echelon.launch.members import GroupMembers, TermKeeper
from echelon.launch.places.base import Exited, Group, Job, Process, Restart
from echelon.launch.rounds import Continue, Finished, Go, Left, Order, Over, Ready, Round, Running, State, TermLead
from echelon.launch.supervisor import Aftermath, Death, Watch, supervise
from tests.unit.launch.no_files import no_file_left
from tests.unit.launch.test_supervisor import Script


def _members(folder: Path) -> tuple[GroupMembers, TermFolder]:
    members = GroupMembers(["a", "b", "c"])
    terms = TermFolder(folder / "store.terms")
    terms.make()
    members.begin(Round(1, {}, 0), terms)
    for name in "abc":
        terms.begin(f"{name}.0")
    return members, terms


def test_survivors_keep_their_order_and_newcomers_come_last(tmp_path: Path) -> None:
    members, folder = _members(tmp_path)
    assert folder.newest() is None and members.lose(["a"]) is True
    assert folder.newest() == Term(1, ("b.0", "c.0"), lost_by=1)
    environment = members.start_again("a")
    assert environment == {TERMS_VARIABLE: str(folder.path), MEMBER_VARIABLE: "a.1"}
    members.look()
    assert members.booting() == ["a"]
    folder.arrive("a.1")
    members.look()
    assert members.booting() == []
    assert folder.newest() == Term(2, ("b.0", "c.0", "a.1"), lost_by=1)
    assert [members.rank_of(name, at_start) for at_start, name in enumerate("abc")] == [2, 0, 1]


def test_a_full_temporary_disk_keeps_the_others_waiting_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    members, folder = _members(tmp_path)
    with no_file_left():
        assert members.lose(["a"]) is None

    def write(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(terms, "write_atomic", write)
        assert members.lose(["a"]) is None  # what is empty may still have room
        members.look()
        assert folder.newest() is None
    assert members.lose(["a"]) is True and folder.newest() == Term(1, ("b.0", "c.0"), lost_by=1)
    [told] = caplog.messages
    assert "Too many open files" in told and "TMPDIR" in told


def test_nobody_goes_on_while_it_cannot_be_written_that_nobody_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, _ = _members(tmp_path)
    say = TermFolder._say

    def refuse(folder: TermFolder, mark: str) -> None:
        if mark.endswith(".missed"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        say(folder, mark)

    with monkeypatch.context() as full:
        full.setattr(TermFolder, "_say", refuse)
        assert members.lose(["a", "b", "c"]) is None
    assert members.lose(["a", "b", "c"]) is False


def test_a_group_of_which_nobody_lives_waits_for_a_disk_no_longer_than_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = TermFolder._say

    def refuse(folder: TermFolder, mark: str) -> None:
        if mark.endswith(".dead"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        say(folder, mark)

    class KilledOnce(Script):
        """A place whose processes are killed the first time."""

        def start(self, processes: Sequence[Process]) -> None:
            super().start(processes)
            exit_code = -9 if len(self.starts) <= 2 else 0
            self.queue += [Exited(process.name, exit_code) for process in processes]

    monkeypatch.setattr(TermFolder, "_say", refuse)
    place, dead = KilledOnce(), list[str]()
    place.patience_s = 0.2
    job = Job((Group((Process("a", "m:f"), Process("b", "m:f")), Restart.BESIDE),), 0)
    watch = Watch(lambda death, _: dead.append(death.name))
    assert not supervise(job, place, watch, StopFlag(), _OneRound(tmp_path / "store", begin=False)), "it completed"
    assert dead == ["a"] and place.starts == ["a", "b", "a", "b"], "all of them start again"


def test_newcomers_alone_have_nothing_to_go_on_from(tmp_path: Path) -> None:
    members, folder = _members(tmp_path)
    members.lose(["c"])
    members.start_again("c")
    folder.begin("c.1")
    folder.arrive("c.1")
    keeper = TermKeeper(folder, ["a.0", "b.0", "c.1"])
    assert keeper.survivors(["a.0"]) == ["b.0", "c.1"] and keeper.survivors(["a.0", "b.0"]) == []
    folder.agree("c.1")
    assert keeper.survivors(["a.0", "b.0"]) == ["c.1"]


def test_nobody_is_taken_in_once_all_is_trained(tmp_path: Path) -> None:
    members, folder = _members(tmp_path)
    members.lose(["c"])
    members.start_again("c")
    folder.arrive("c.1")
    folder.close(None)
    members.look()
    assert members.too_late() == ["c"] and folder.newest() == Term(1, ("a.0", "b.0"), lost_by=1)


def test_members_leave_as_long_as_one_stays(tmp_path: Path) -> None:
    members, folder = _members(tmp_path)
    assert "no such member" in members.drain([]) and "nobody would be left" in members.drain(["a", "b", "c"])
    assert members.drain(["b"]) == "" and folder.may_leave("b.0") and not folder.may_leave("a.0")
    assert "nobody would be left" in members.drain(["a", "c"])
    assert members.release("b") and not members.release("a")


def test_a_term_begins_when_all_of_its_members_have_entered_it(tmp_path: Path) -> None:
    folder, term = TermFolder(tmp_path), Term(3, ("a.0", "b.1"))
    folder.enter(term, "b.1")
    assert folder.missing(term) == ["a.0"]
    folder.enter(term, "a.0")
    assert folder.missing(term) == []


class _OneRound:
    """Rounds of one start, whose ranks meet in a file."""

    restarts_left = None

    def __init__(self, store: Path, begin: bool, machine: int = 0) -> None:
        self._store, self._number, self._begin, self._machine = store, 0, begin, machine

    def order(self, state: State) -> Order:
        match state:
            case Ready():
                self._number += 1
                return Go(Round(self._number, {}, 0, self._machine))
            case Running():
                return Continue()
        return Over("stopped" if isinstance(state, Finished) and state.stopped else "completed")

    def saved(self, checkpoints: int) -> None:
        pass

    def resize(self, workers: int) -> None:
        self.workers = workers

    def open_terms(self, round_: Round) -> TermFolder:
        folder = TermFolder(Path(f"{self._store}{round_.number}.terms"))
        folder.make()
        if self._begin:
            self._begin = False
            for name in "abc":
                folder.begin(f"{name}.0")
        return folder

    def begin_anew(self) -> None:
        pass

    def lead(self, round_: Round) -> TermLead:
        return TermLead()

    def checkpoints_told(self) -> int:
        return 0


def _supervised(place: Script, store: Path, restarts: int = 3, begin: bool = True) -> list[tuple[Death, Aftermath]]:
    deaths: list[tuple[Death, Aftermath]] = []
    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    watch = Watch(lambda death, then: deaths.append((death, then)))
    assert not supervise(Job((group,), restarts), place, watch, StopFlag(), _OneRound(store, begin))
    return deaths


def test_the_others_of_a_killed_process_go_on_and_it_alone_starts_again(tmp_path: Path) -> None:
    place = Script([("b", -9)], [("a", 0), ("c", 0)])
    [(death, then)] = _supervised(place, tmp_path / "store")
    assert place.starts == ["a", "b", "c", "b"] and death.rank == 1
    assert then.others == "the others go on, and it joins them again" and then.restarts_left == 2
    assert place.signals[0] == ("b", 9)  # which had yet to come when the others were done
    assert TermFolder(tmp_path / "store1.terms").newest() == Term(1, ("a.0", "c.0"), lost_by=1)


def test_a_death_is_of_the_rank_that_the_process_had_last_and_its_log_is_what_it_was_started_with(
    tmp_path: Path,
) -> None:
    place = Script([("b", -9)], [("c", -9)], [("a", 0)])
    deaths = [death for death, _ in _supervised(place, tmp_path / "store")]
    assert [(death.name, death.rank, death.log) for death in deaths] == [("b", 1, "rank1"), ("c", 1, "rank2")]


@pytest.mark.parametrize(("machine", "log"), [(0, "b.out"), (2, "machine2-b.out")])
def test_machines_that_share_a_disk_write_to_logs_of_their_own(tmp_path: Path, machine: int, log: str) -> None:
    class Logging(Script):
        """A place that notes where output goes."""

        def start(self, processes: Sequence[Process]) -> None:
            logs.extend(process.log for process in processes)
            super().start(processes)

    logs, prefix = list[str](), "machine2-" if machine else ""
    group = Group(tuple(Process(n, "m:f", log=f"/logs/{n}.out" if n != "a" else "") for n in "abc"), Restart.BESIDE)
    place = Logging([("b", -9)], [("a", 0), ("c", 0)])
    rounds = _OneRound(tmp_path / "store", begin=False, machine=machine)
    terms = tmp_path / "store1.terms"
    watch = Watch(
        lambda death, then: None, on_start=lambda _: [TermFolder(terms).begin(f"{prefix}{n}.0") for n in "abc"]
    )
    assert not supervise(Job((group,), 3), place, watch, StopFlag(), rounds)
    assert logs[:2] == ["", f"/logs/{log}"] and logs[3:] == [f"/logs/{log}"]


def test_without_restarts_left_the_others_go_on_alone(tmp_path: Path) -> None:
    place = Script([("b", -9)], [("a", 0), ("c", 0)])
    [(_, then)] = _supervised(place, tmp_path / "store", restarts=0)
    assert place.starts == ["a", "b", "c"] and "without it" in then.others and "no restarts are left" in then.others


def test_an_error_is_all_processes_matter(tmp_path: Path) -> None:
    place = Script([("b", 1)], [("a", 0), ("b", 0), ("c", 0)])
    [(_, then)] = _supervised(place, tmp_path / "store")
    assert place.starts == [*"abc", *"abc"] and not then.others


def test_the_group_starts_again_where_all_were_killed(tmp_path: Path) -> None:
    place = Script([("a", -9), ("b", -9), ("c", -9)], [("a", 0), ("b", 0), ("c", 0)])
    [(_, then)] = _supervised(place, tmp_path / "store")
    assert place.starts == [*"abc", *"abc"] and not then.others


def test_the_group_starts_again_where_not_all_had_begun(tmp_path: Path) -> None:
    place = Script([("b", -9)], [("a", 0), ("b", 0), ("c", 0)])
    [(_, then)] = _supervised(place, tmp_path / "store", begin=False)
    assert place.starts == [*"abc", *"abc"] and not then.others


def test_a_run_that_stops_does_not_wait_for_who_has_yet_to_come(tmp_path: Path) -> None:
    place, stop = Script([("b", -9)], [("a", 3), ("c", 3)]), StopFlag()

    def died(death: Death, then: Aftermath) -> None:
        """Ask the run to stop while the one that died is on its way."""
        stop.signum = 15

    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    rounds = _OneRound(tmp_path / "store", begin=True)
    assert supervise(Job((group,), 3), place, Watch(died), stop, rounds)
    assert ("b", 9) in place.signals


@pytest.mark.parametrize(
    ("signum", "restart", "tells"),
    [
        (signal.SIGINT, Restart.BESIDE, True),
        (signal.SIGTERM, Restart.TOGETHER, True),
        (signal.SIGTERM, Restart.BESIDE, False),  # where a machine is taken away, the others go on
    ],
)
def test_a_stop_while_a_machine_waits_for_a_round_is_told_to_the_others(
    tmp_path: Path, signum: int, restart: Restart, tells: bool
) -> None:
    class Waits(_OneRound):
        """Rounds of which none begins."""

        def order(self, state: State) -> Order:
            asked.append(state)
            return Continue()

    asked, stop = list[State](), StopFlag()
    stop.signum = signum
    group = Group((Process("a", "module:function"),), restart)
    assert supervise(Job((group,)), Script(), Watch(lambda *_: None), stop, Waits(tmp_path, begin=False))
    assert (Left(stops=True) in asked) == tells


def test_who_was_asked_to_leave_is_not_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    """Its number of restarts stays what it was; a later start of the whole group is of those that stayed."""
    place = Script([], [("b", LEFT_EXIT_CODE)], [("a", 1), ("c", 0)], [("a", 0), ("c", 0)])
    asked = [[], [Change(pids=[102])]]
    left: list[tuple[str, int]] = []
    deaths: list[Aftermath] = []
    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    watch = Watch(
        lambda death, then: deaths.append(then),
        changes=lambda: asked.pop(0) if asked else [],
        on_leave=lambda started, stay: left.append((started.name, stay)),
    )
    rounds = _OneRound(tmp_path / "store", begin=True)
    assert not supervise(Job((group,), 3), place, watch, StopFlag(), rounds)
    assert left == [("b", 2)] and rounds.workers == 2 and place.starts == [*"abc", *"ac"]
    assert TermFolder(tmp_path / "store1.terms").newest() == Term(1, ("a.0", "c.0"), lost_by=1) and len(deaths) == 1


def test_more_come_beside_the_others_those_that_left_first(tmp_path: Path) -> None:
    """A later start of the whole group is of all that have come."""
    place = Script([], [("b", LEFT_EXIT_CODE)], [], [("a", 1)], [(name, 0) for name in "acbd"])
    asked = [[], [Change(pids=[102])], [], [Change(add=2)]]
    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    watch = Watch(
        lambda death, then: None,
        changes=lambda: asked.pop(0) if asked else [],
        another=lambda number: Process("defg"[number], "module:function"),
    )
    rounds = _OneRound(tmp_path / "store", begin=True)
    assert not supervise(Job((group,), 3), place, watch, StopFlag(), rounds)
    assert place.starts == [*"abc", *"bd", *"acbd"] and rounds.workers == 4


def test_what_a_group_is_not_asked_for_is_refused_in_words(tmp_path: Path) -> None:
    place = Script([], [], [("a", 0), ("b", 0), ("c", 0)])
    asked = [[], [Change(pids=[101, 102, 103])], [Change(pids=[7]), Change(add=1)]]
    refused: list[str] = []
    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    watch = Watch(lambda death, then: None, changes=lambda: asked.pop(0) if asked else [], on_refused=refused.append)
    assert not supervise(Job((group,), 3), place, watch, StopFlag(), _OneRound(tmp_path / "store", begin=True))
    assert ["nobody would be left" in refused[0], "no member now" in refused[1], "no more" in refused[2]] == [True] * 3


def test_processes_that_restart_alone_leave_and_come(tmp_path: Path) -> None:
    place = Script([], [("b", LEFT_EXIT_CODE)], [], [("b", 0), ("c", 0)], [("a", 0)])
    asked = [[], [], [], [Change(add=2)]]
    roles = [Process(name, "module:function", leads=name == "a", stops_on_signal=False) for name in "abc"]
    group = Group(tuple(roles[:2]), Restart.ALONE)
    watch = Watch(
        lambda death, then: None,
        changes=lambda: asked.pop(0) if asked else [],
        another=lambda number: roles[2 + number],
    )
    assert not supervise(Job((group,), 3), place, watch, StopFlag())
    assert place.starts == ["a", "b", "b", "c"] and not place.signals


def test_who_has_left_stays_away_where_an_error_ends_the_others_at_that_moment(tmp_path: Path) -> None:
    place = Script([], [("b", LEFT_EXIT_CODE), ("a", 1)], [("c", 0), ("a", 0)], [("c", 0), ("a", 0)])
    asked = [[], [Change(pids=[102])]]
    group = Group(tuple(Process(name, "module:function") for name in "abc"), Restart.BESIDE)
    watch = Watch(lambda death, then: None, changes=lambda: asked.pop(0) if asked else [])
    assert not supervise(Job((group,), 3), place, watch, StopFlag(), _OneRound(tmp_path / "store", begin=True))
    assert place.starts == [*"abc", *"ac"]


def test_who_was_asked_to_leave_stays_in_a_new_start(tmp_path: Path) -> None:
    members, _ = _members(tmp_path)
    members.drain(["b"])
    folder = TermFolder(tmp_path / "store2.terms")
    folder.make()
    members.begin(Round(2, {}, 0), folder)
    assert not members.release("b")  # it was asked in the round before


def test_another_machine_makes_the_terms_after_those_of_one_that_is_lost(tmp_path: Path) -> None:
    members, folder = GroupMembers(["rank0"]), TermFolder(tmp_path / "terms")
    folder.make(shared=True)
    all_three = ("rank0.0", "machine1-rank0.0", "machine2-rank0.0")
    for member in all_three:
        folder.begin(member)
    members.begin(Round(1, {}, 1, machine=1), folder, None)
    members.look()
    assert folder.newest() is None, "another machine leads"
    folder.lose_machine("")
    told: list[Term] = []
    lead = TermLead(told.append, all_three, after=1_000_000, store="b:1")
    members.take_lead(lead)
    members.look()
    assert told == [Term(1_000_001, ("machine1-rank0.0", "machine2-rank0.0"), 1_000_001, "b:1")]
    folder.arrive("machine0b1-rank0.1")
    members.take_lead(lead)
    members.look()
    assert told[-1].members == ("machine1-rank0.0", "machine2-rank0.0", "machine0b1-rank0.1"), "its own come first"


def test_members_wait_while_their_machine_leads_and_hears_too_few_others(tmp_path: Path) -> None:
    members, folder = GroupMembers(["rank0"]), TermFolder(tmp_path / "terms")
    folder.make(shared=True)
    told: list[Term] = []
    lead = TermLead(told.append)
    members.begin(Round(1, {}, 0, others=("machine1-rank0.0",)), folder, lead)
    members.take_lead(replace(lead, holds=True))
    members.look()
    assert folder.newest() == Term(1, (), lost_by=1) and not told
    members.take_lead(lead)
    members.look()
    assert told == [Term(2, ("rank0.0", "machine1-rank0.0"), lost_by=2)]
    members.take_lead(None)
    members.look()
    assert not members.span_machines and len(told) == 1
