"""What the supervisor starts, ends and tells, at a place where nothing runs and the test says what happens."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from echelon.core.errors import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, JobFailed, UserError
from echelon.core.stop import StopFlag
from echelon.launch import supervisor
from echelon.launch.link import Host
from echelon.launch.places import PlaceChoice
from echelon.launch.places.base import Event, Exited, Group, Job, Place, Process, Restart, Started
from echelon.launch.supervisor import Aftermath, Death, Refused, Remedy, StopCut, Watch, supervise


class Script(Place):
    """A place whose processes end as a script says: one list of events for each wait."""

    name: ClassVar[str] = "script"

    def __init__(self, *script: list[tuple[str, int]]) -> None:
        self.script = list(script)
        self.starts: list[str] = []
        self.signals: list[tuple[str, int]] = []
        self.queue: list[Event] = []
        self.alive: set[str] = set()
        self.silent: set[str] = set()

    def start(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self.starts.append(process.name)
            self.alive.add(process.name)
            self.queue.append(Started(process.name, 100 + len(self.starts), "here"))

    def events(self, timeout_s: float) -> list[Event]:
        events, self.queue = self.queue, []
        if not events and self.script:
            events = [Exited(name, code) for name, code in self.script.pop(0)]
            self.alive -= {event.name for event in events}
        return events

    def signal(self, names: Sequence[str], signum: int) -> None:
        for name in names:
            self.signals.append((name, signum))
            if signum == signal.SIGKILL and name in self.alive:
                self.alive.discard(name)
                self.queue.append(Exited(name, -signum))

    def is_silent(self, name: str) -> bool:
        return name in self.silent

    def close(self) -> None:
        self.alive.clear()


def _group(*names: str, restart: Restart = Restart.TOGETHER, **settings: bool) -> Group:
    return Group(tuple(Process(name, "module:function", **settings) for name in names), restart)


def _run(place: Script, *groups: Group, max_restarts: int = 1) -> tuple[bool, list[tuple[Death, bool]]]:
    deaths: list[tuple[Death, bool]] = []
    watch = Watch(lambda death, then: deaths.append((death, not then.no_restart)))
    return supervise(Job(groups, max_restarts), place, watch, StopFlag()), deaths


def test_a_group_restarts_together_and_processes_alone() -> None:
    place = Script([("b", -9)], [("a", 0), ("b", 0)])
    stopped, [(death, goes_on)] = _run(place, _group("a", "b"))
    assert not stopped and goes_on and place.starts == ["a", "b", "a", "b"]
    assert str(death) == "b (pid 102 on here) died: SIGKILL" and death.others == (("a", 101),)

    place = Script([("b", -9)], [("a", 0), ("b", 0)])
    _, [(death, _)] = _run(place, _group("a", "b", restart=Restart.ALONE))
    assert place.starts == ["a", "b", "b"] and death.others == ()


@pytest.mark.parametrize("restart", list(Restart))
def test_a_death_whose_cause_was_eased_costs_no_restart_and_one_without_hope_ends_the_run(restart: Restart) -> None:
    remedies = [Remedy("2 micro-batches"), Remedy("4 micro-batches"), Remedy(hopeless="one sample each")]
    ends: list[str] = []
    watch = Watch(lambda death, then: ends.append(then.no_restart), remedy=lambda death: remedies.pop(0))
    place = Script([("a", 1)], [("a", 1)], [("a", 1)])
    with pytest.raises(JobFailed):
        supervise(Job((_group("a", restart=restart),), 0), place, watch, StopFlag())
    assert ends == ["", "", "one sample each"] and place.starts == ["a", "a", "a"]


def test_the_run_ends_with_those_that_lead() -> None:
    place = Script([("leads", 0)], [("serves", 0)])
    assert _run(place, _group("leads"), _group("serves", leads=False)) == (False, [])


@pytest.mark.parametrize(
    "exits, silent, culprit",
    [
        ([("a", 1), ("b", -11)], set(), ("b", -11)),  # a signal came from outside
        ([("b", 1), ("a", 1)], set(), ("b", 1)),  # who was first
        ([("a", 1)], {"b"}, ("b", None)),  # who does not answer made the other fail
    ],
)
def test_who_died_first_is_named(
    exits: list[tuple[str, int]], silent: set[str], culprit: tuple[str, int | None]
) -> None:
    place = Script(exits, [("a", 0), ("b", 0)])
    place.silent = silent
    _, [(death, _)] = _run(place, _group("a", "b"))
    assert (death.name, death.exit_code) == culprit


def test_restarts_are_used_up_over_all_processes() -> None:
    place = Script([("a", 1)], [("b", 1)], [("a", 1)])
    deaths: list[str] = []
    watch = Watch(lambda death, then: deaths.append(then.no_restart))
    with pytest.raises(JobFailed):
        supervise(Job((_group("a", "b", restart=Restart.ALONE),), 1), place, watch, StopFlag())
    assert deaths[:2] == ["", ""] and "no restarts are left" in deaths[2]  # the second one died of the same incident
    assert not place.alive


def test_a_new_checkpoint_gives_restarts_back() -> None:
    place = Script(*[[("a", -9)]] * 4, [("a", 0)])
    saved = iter([1, 0, 1, 1, 1, 0, 0])
    deaths: list[str] = []
    left: list[int | None] = []

    def on_death(death: Death, then: Aftermath) -> None:
        deaths.append(then.no_restart)
        left.append(then.restarts_left)

    watch = Watch(on_death, saved=lambda: next(saved, 0))
    assert not supervise(Job((_group("a"),), 1), place, watch, StopFlag())
    assert deaths == [""] * 4 and left == [0] * 4  # each one used up what its checkpoint had given back


def test_the_same_failure_twice_before_the_first_step_ends_the_run() -> None:
    place = Script([("a", 1)], [("a", 1)])
    deaths: list[str] = []
    watch = Watch(lambda death, then: deaths.append(then.no_restart), failures=lambda _: ["ValueError at model.py:1"])
    with pytest.raises(JobFailed):
        supervise(Job((_group("a"),), 5), place, watch, StopFlag())
    assert deaths[0] == "" and "in the same way twice" in deaths[1]


def test_what_refuses_the_input_is_not_restarted() -> None:
    place = Script([("a", 1), ("b", USER_ERROR_EXIT_CODE)])
    with pytest.raises(Refused, match="b"):
        _run(place, _group("a", "b"))
    assert place.starts == ["a", "b"] and not place.alive


def test_who_stops_after_a_checkpoint_stops_the_run() -> None:
    stopped, deaths = _run(Script([("a", STOPPED_EXIT_CODE)], [("b", STOPPED_EXIT_CODE)]), _group("a", "b"))
    assert stopped and not deaths


@pytest.mark.parametrize("heeds, told", [(True, [("a", signal.SIGTERM)]), (False, [])])
def test_a_stop_is_a_signal_or_a_message(heeds: bool, told: list[tuple[str, int]]) -> None:
    class Asked(Script):
        def events(self, timeout_s: float) -> list[Event]:
            if self.starts and not messages and not self.queue:
                stop.signum = signal.SIGINT
            return super().events(timeout_s) if messages or self.queue else []

    stop = StopFlag()
    messages: list[str] = []
    place = Asked([("a", STOPPED_EXIT_CODE if heeds else 0)])
    on_stop: Callable[[], None] = lambda: messages.append("stop")  # noqa: E731
    assert supervise(Job((_group("a", stops_on_signal=heeds),)), place, Watch(lambda *_: None, on_stop), stop)
    assert place.signals == told and messages == ["stop"]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_stop_ends_what_has_not_begun(heeds: bool) -> None:
    class Imports(Script):
        """A place that cannot start anything yet."""

        def start(self, processes: Sequence[Process]) -> None:
            self.starts += [process.name for process in processes]
            stop.signum = signal.SIGTERM

        def signal(self, names: Sequence[str], signum: int) -> None:
            self.queue += [Exited(name, -signum) for name in names]

    stop, deaths = StopFlag(), list[Death]()
    watch = Watch(lambda death, _: deaths.append(death))
    together, alone = _group("a", "b", stops_on_signal=heeds), _group("c", restart=Restart.ALONE, stops_on_signal=heeds)
    assert supervise(Job((together, alone)), Imports(), watch, stop)
    assert not deaths


@pytest.mark.parametrize("code, fails", [(-signal.SIGTERM, False), (1, True), (-signal.SIGKILL, True)])
def test_a_run_that_fails_over_its_last_checkpoint_was_not_stopped(code: int, fails: bool) -> None:
    stop, deaths = StopFlag(), list[str]()
    stop.signum = signal.SIGTERM
    watch = Watch(lambda death, then: deaths.append(then.no_restart))
    place = Script([("a", code)])
    if fails:
        with pytest.raises(JobFailed):
            supervise(Job((_group("a", "b"),), 1), place, watch, stop)
    else:
        assert supervise(Job((_group("a", "b"),), 1), place, watch, stop)
    assert deaths == (["no restart: the run was being stopped"] if fails else []) and place.starts == ["a", "b"]


@pytest.mark.parametrize("heeds", [True, False])
def test_what_does_not_end_in_the_time_of_its_place_is_ended(heeds: bool) -> None:
    stop, place = StopFlag(), Script()
    place.stop_s = 0.05
    stop.signum = signal.SIGTERM
    began = time.monotonic()
    with pytest.raises(StopCut):
        supervise(Job((_group("a", "b", stops_on_signal=heeds),)), place, Watch(lambda *_: None), stop)
    assert place.saving_s <= time.monotonic() - began and not place.alive


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_what_the_kernel_does_not_let_end_is_told_and_waited_for_no_longer_than_io_patience(
    asked_to_stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(Script):
        """A place with a process in uninterruptible sleep."""

        def signal(self, names: Sequence[str], signum: int) -> None:
            pass

    def waits(words: str) -> None:
        said.append(words)
        stop.signum = signal.SIGINT * asked_to_stop

    stop, said, ends = StopFlag(), list[str](), list[str]()
    place = Held([("b", -9)])
    place.patience_s = 60.0 if asked_to_stop else 0.1
    monkeypatch.setattr(supervisor, "KILL_S", 0.05)
    watch = Watch(lambda death, then: ends.append(f"{death}: {then.no_restart}"), on_wait=waits)
    with pytest.raises(JobFailed):
        supervise(Job((_group("a", "b"),), 1), place, watch, stop)
    held = "a (pid 101) cannot be ended: the kernel holds it in a call, as to a disk or a GPU that does not answer"
    assert ends == [f"b (pid 102 on here) died: SIGKILL: {held}"]
    assert said == [f"{held}; waiting up to {'1m 0s' if asked_to_stop else '100 ms'} for it (--io-patience)"]


def test_a_process_is_the_same_as_text() -> None:
    host = Host("/n", "/s", "10.0.0.1", "10.128.0.1", ("data0",), ("port0",))
    process = Process("a", "m:f", ("run", host, None, 3), {"OMP_NUM_THREADS": "1"}, host, "a.out", folder="/work")
    assert Process.from_json(process.to_json()) == Process(
        "a", "m:f", ("run", host, None, 3), {"OMP_NUM_THREADS": "1"}, host, "a.out", folder="/work"
    )
    with pytest.raises(UserError, match="module:function"):
        Process("a", "m:f", (object(),)).to_json()


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean local"):
        PlaceChoice("locl").build()
