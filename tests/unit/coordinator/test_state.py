"""The coordinator's state without sockets, files or sleeps: time is an argument, and what it wants done is returned."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from echelon.coordinator.config import CONTINUES, CoordinationPolicy, CoordinatorConfig, TrainingPlan
from echelon.coordinator.effects import Began, Effect, Save, Send, Tell, WindowClosed
from echelon.coordinator.journal import (
    Best,
    Counted,
    CountedBefore,
    Journal,
    JournalEntry,
    SetUp,
    Stagnant,
    journal_line,
    read_entry,
)
from echelon.coordinator.messages import (
    UNFREEZE,
    AskTask,
    BecomeStandby,
    CatchUp,
    CopyKept,
    Died,
    Drain,
    EvaluateTask,
    EvaluationDone,
    JoinAgain,
    JoinServer,
    JoinWorker,
    KeepCopy,
    LeaveRun,
    Members,
    MovedBytes,
    Promote,
    RunEnded,
    ServerHolds,
    SetupDone,
    SetupTask,
    Stop,
    TaskDone,
    TaskHeard,
    TaskReport,
    TrainTask,
    Welcome,
    WorkerBeat,
)
from echelon.coordinator.state import Coordinator
from echelon.core.patience import Patience
from echelon.core.task import BestResult, Stagnation
from echelon.messages.framing import Content, Message
from echelon.messages.plain import Malformed
from echelon.records.events import (
    ChangeRefused,
    EvaluationLate,
    ServerGone,
    ServerLost,
    ServerSettled,
    WorkerGone,
    WorkerLeft,
)

STEPS = 12
PLAN = TrainingPlan(2, 0, 1, None, None)
SHARED = CoordinationPolicy(servers=1, shared=True)
AHEAD = replace(SHARED, ahead=True)
FREE = CoordinationPolicy(servers=1)
REPORT = TaskReport(1.0, 1.0, 8, 0.1, [], 0)
NOTHING = MovedBytes()
READY = JoinServer(0, "ipc://server0", 1, ready=True, standby=False, restored=False, empty=False)


@dataclass
class Run:
    """A coordinator, and all that it wanted done since the last look."""

    policy: CoordinationPolicy = FREE
    plan: TrainingPlan = PLAN
    journal: list[JournalEntry] = field(default_factory=list)
    now_s: float = 100.0
    effects: list[Effect] = field(default_factory=list)
    sessions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.state = Coordinator(CoordinatorConfig(self.policy, self.plan, 60.0), 1, self.now_s)
        self._numbers = count()

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects
        self.journal += [effect.entry for effect in effects if isinstance(effect, Save)]

    def say(self, sender: str, content: Content) -> None:
        message = Message(content, sender, self.sessions[sender], next(self._numbers))
        self.take(self.state.handle(message, sender.encode(), self.now_s))

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.take(self.state.tick(self.now_s))

    def sent(self, to: str, kind: type[Content]) -> list[Content]:
        """Return what was sent to a member since the last look, and forget it."""
        wanted = [
            e for e in self.effects if isinstance(e, Send) and e.peer == to.encode() and isinstance(e.content, kind)
        ]
        self.effects = [effect for effect in self.effects if effect not in wanted]
        return [effect.content for effect in wanted if isinstance(effect, Send)]

    def told(self, kind: type) -> list[object]:
        return [e.record for e in self.effects if isinstance(e, Tell) and isinstance(e.record, kind)]

    def begin(self, *workers: str) -> None:
        """Let a server and workers join, and the first one set up."""
        self.say("server0", READY)
        for worker in workers:
            self.say(worker, JoinWorker("model"))
        self.say(workers[0], AskTask())
        assert self.sent(workers[0], SetupTask)
        self.say(workers[0], SetupDone(SetupTask().task, "model", STEPS // 2, 0, []))

    def ask(self, worker: str) -> TrainTask:
        self.say(worker, AskTask())
        (task,) = self.sent(worker, TrainTask)
        assert isinstance(task, TrainTask)
        return task

    def done(self, worker: str, task: int, late: bool = False) -> None:
        self.say(worker, TaskDone(task, late, REPORT, NOTHING))

    def counted(self) -> list[int]:
        return [entry.task for entry in self.journal if isinstance(entry, Counted)]


def train(run: Run, *workers: str, share_s: float = 0.0) -> None:
    """Do all that is asked until the run is over: leases, copies, evaluations; so many seconds after each share."""
    for worker in workers:
        run.say(worker, AskTask())
    for _ in range(20 * STEPS):
        for copy in run.sent("server0", KeepCopy):
            assert isinstance(copy, KeepCopy)
            run.say("server0", CopyKept(copy.tag, 0))
        for worker in workers:
            for task in run.sent(worker, TrainTask):
                assert isinstance(task, TrainTask)
                run.done(worker, task.task)
                run.say("server0", READY)
                for name in workers:
                    run.say(name, WorkerBeat({}, 0, 0))  # a sign of life
                run.tick(share_s)
                run.say(worker, AskTask())
            for evaluation in run.sent(worker, EvaluateTask):
                assert isinstance(evaluation, EvaluateTask)
                run.say(worker, EvaluationDone(evaluation.task))
                run.say(worker, AskTask())
        run.tick(0.01)
        if run.state.status:
            return
    raise AssertionError("the run did not end")


@pytest.mark.parametrize(
    "policy", [FREE, SHARED, AHEAD, replace(FREE, bound=1)], ids=["free", "shared", "ahead", "bound"]
)
def test_a_run_goes_to_its_end_and_counts_every_step_once(policy: CoordinationPolicy) -> None:
    run = Run(policy)
    run.begin("a", "b")
    train(run, "a", "b")
    assert run.state.status == "completed"
    steps = {task // 4096 for task in run.counted()} if policy.shared else set(run.counted())
    assert steps == set(range(STEPS)) and len(run.counted()) == len(set(run.counted()))
    run.take(run.state.say_farewell(run.now_s))
    assert all(run.sent(worker, RunEnded)[-1] == RunEnded("completed") for worker in ("a", "b"))
    losses = [loss for e in run.effects if isinstance(e, WindowClosed) for loss in e.steps.losses]
    assert len(losses) == STEPS
    run.say("a", LeaveRun(MovedBytes(1, 2, 3)))
    assert run.state.bytes_left == 6 and [m.name for m in run.state.members.workers] == ["b"]


@pytest.mark.parametrize("share_s", [0.01, 0.17, 0.6], ids=["several-steps", "within-a-step", "each-share"])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_each_step_has_one_loss_wherever_windows_close(workers: int, share_s: float) -> None:
    """A window that is due between two shares of a step leaves that step to the next one."""
    run, names = Run(SHARED), [f"worker{i}" for i in range(workers)]
    run.begin(*names)
    train(run, *names, share_s=share_s)
    run.take(run.state.say_farewell(run.now_s))
    windows = [e.steps for e in run.effects if isinstance(e, WindowClosed)]
    assert [loss for window in windows for loss in window.losses] == [float(workers)] * STEPS
    ends = [window.step for window in windows]
    assert ends == [sum(w.count for w in windows[: i + 1]) for i in range(len(windows))]
    assert len(windows) >= (STEPS // 2 if share_s > 0.5 else 2)


def test_the_leases_of_a_dead_worker_go_to_another() -> None:
    run = Run()
    run.begin("a", "b")
    lost = run.ask("a")
    assert run.ask("b").task != lost.task
    run.say("launcher", Died("a", "died: signal 9"))
    assert [event.leases for event in run.told(WorkerGone)] == [1]  # type: ignore[attr-defined]
    assert run.ask("b").task == lost.task


def test_a_report_of_another_process_of_the_name_ends_nobody() -> None:
    run = Run()
    run.begin("a")
    run.say("server0", replace(READY, pid=7))
    run.say("launcher", Died("server0", pid=6))
    assert [m.name for m in run.state.members.servers] == ["server0"]
    run.say("launcher", Died("server0", pid=7))
    assert not run.state.members.servers


def test_the_setup_waits_for_the_workers_that_a_run_begins_with_but_not_for_long() -> None:
    """The start tells of them all, in order of their numbers."""
    run = Run()
    run.state = Coordinator(CoordinatorConfig(FREE, PLAN, 60.0, workers=3), 1, run.now_s)
    run.say("server0", READY)
    for number in (10, 2):
        run.say(f"worker{number}", JoinWorker("model", pid=number))
        run.say(f"worker{number}", AskTask())
    run.tick(1.0)
    assert not run.sent("worker10", SetupTask)
    run.tick(0.9)
    for number in (10, 2):
        run.say(f"worker{number}", WorkerBeat({}, 0, 0))
    run.say("server0", READY)
    run.tick(0.2)
    assert run.sent("worker10", SetupTask)
    run.say("worker10", SetupDone(SetupTask().task, "model", STEPS // 2, 0, []))
    (began,) = (effect for effect in run.effects if isinstance(effect, Began))
    assert [join.pid for join in began.workers] == [2, 10]


def test_the_servers_that_workers_wait_for_are_known_until_the_first_step() -> None:
    run = Run(CoordinationPolicy(servers=2))
    assert run.state.awaited == []  # nobody waits
    run.say("worker0", JoinWorker("model"))
    assert run.state.awaited == ["server0", "server1"]
    run.say("server0", READY)
    assert run.state.awaited == ["server1"]
    run.say("server1", replace(READY, index=1))
    assert run.state.awaited == []


def test_a_pause_of_one_worker_is_its_own_and_told_with_the_windows_that_it_lasts_over() -> None:
    run = Run()
    run.begin("a", "b")
    for _ in range(STEPS // 2):
        run.done("b", run.ask("b").task)
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    run.say("a", AskTask())
    (evaluation,) = run.sent("a", EvaluateTask)
    assert isinstance(evaluation, EvaluateTask)
    for _ in range(2):
        task = run.ask("b").task
        run.now_s += 0.6
        run.done("b", task)
        run.tick()
    run.say("a", EvaluationDone(evaluation.task))
    task = run.ask("b").task
    run.now_s += 1.0
    run.done("b", task)
    run.tick()
    windows = [effect.steps for effect in run.effects if isinstance(effect, WindowClosed)][-3:]
    assert [dict(zip(w.pause_names, zip(*w.pauses, strict=True), strict=True))["evaluation"] for w in windows] == [
        pytest.approx((0.6, 0.0)), pytest.approx((0.6, 0.0)), (0.0, 0.0),
    ]  # fmt: skip
    assert [window.seconds for window in windows] == pytest.approx([0.3, 0.3, 1.0])


def test_a_window_ends_with_its_epoch() -> None:
    run = Run()
    run.begin("a")
    for _ in range(STEPS // 2 - 1):
        run.done("a", run.ask("a").task)
    assert not [effect for effect in run.effects if isinstance(effect, WindowClosed)]
    run.done("a", run.ask("a").task)
    (window,) = (effect.steps for effect in run.effects if isinstance(effect, WindowClosed))
    assert (window.epoch, window.step, window.count) == (0, STEPS // 2, STEPS // 2)


def test_who_is_silent_is_gone_and_joins_again_with_what_it_holds() -> None:
    run = Run()
    run.begin("a", "b")
    task = run.ask("a")
    for _ in range(30):
        run.tick(0.1)
        for name in ("b", "server0"):
            run.say(name, WorkerBeat({}, 0, 0) if name == "b" else READY)
    assert [m.name for m in run.state.members.workers] == ["b"]
    run.say("a", WorkerBeat({}, 0, 0))
    assert run.sent("a", JoinAgain) == [JoinAgain()]
    run.say("a", JoinWorker("model", holding=[task.task]))
    run.done("a", task.task)
    run.done("b", task.task)
    assert run.counted().count(task.task) == 1


def test_a_server_that_was_wrongly_taken_for_dead_has_longer_from_now_on() -> None:
    run = Run()
    run.begin("a")
    run.tick(5.0)
    assert len(run.told(ServerGone)) == 1
    run.say("server0", READY)
    for _ in range(40):
        run.tick(0.2)
        run.say("a", WorkerBeat({}, 0, 0))
    assert len(run.told(ServerGone)) == 1
    run.tick(4.0)
    assert len(run.told(ServerGone)) == 2


def test_a_member_that_comes_back_in_another_life_replaces_the_one_before() -> None:
    run = Run()
    run.begin("a")
    task = run.ask("a")
    run.sessions["a"] += 1
    run.say("a", JoinWorker("model"))
    assert run.ask("a").task == task.task
    assert run.sent("a", Welcome)[-1] == Welcome(set_up=True)


def test_a_report_that_comes_twice_counts_once_and_is_confirmed_twice() -> None:
    run = Run()
    run.begin("a")
    task = run.ask("a").task
    run.done("a", task)
    run.done("a", task)
    assert run.counted() == [task]
    assert run.sent("a", TaskHeard)[-2:] == [TaskHeard(task)] * 2


def test_an_overdue_lease_is_offered_to_another_worker() -> None:
    run = Run(plan=TrainingPlan(1, 1, 0, None, None))
    run.begin("a", "b")
    task = run.ask("a")
    run.say("b", AskTask())
    assert not run.sent("b", TrainTask)
    for _ in range(70):
        run.now_s += 1.0
        run.say("a", WorkerBeat({}, 0, 0))
        run.say("b", WorkerBeat({}, 0, 0))
        run.say("server0", READY)
        run.tick()
    assert [t.task for t in run.sent("b", TrainTask)] == [task.task]  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [FREE, SHARED, AHEAD], ids=["free", "shared", "ahead"])
@pytest.mark.parametrize("entries", [1, 3, 9, 14])
def test_a_journal_is_taken_up_wherever_it_ends(policy: CoordinationPolicy, entries: int) -> None:
    first = Run(policy)
    first.begin("a", "b")
    train(first, "a", "b")
    second = Run(policy, journal=list(first.journal[:entries]))
    second.take(second.state.restore(list(second.journal), second.now_s))
    second.say("server0", READY)
    for worker in ("a", "b"):
        second.say(worker, JoinWorker("model"))
    train(second, "a", "b")
    steps = {task // 4096 for task in second.counted()} if policy.shared else second.counted()
    assert sorted(steps) == list(range(STEPS))


@pytest.mark.parametrize("policy", [FREE, SHARED, AHEAD], ids=["free", "shared", "ahead"])
@pytest.mark.parametrize("entries", [1, 3, 9, 14, 100])
def test_a_journal_in_few_entries_says_the_same(policy: CoordinationPolicy, entries: int) -> None:
    first = Run(policy)
    first.begin("a", "b")
    train(first, "a", "b")
    long, again = Run(policy), Run(policy)
    long.take(long.state.restore(first.journal[:entries], long.now_s))
    short = [entry for line in map(journal_line, long.state.journal()) if (entry := read_entry(line)) is not None]
    assert len(short) <= 6
    again.take(again.state.restore(short, again.now_s))
    assert {e.kind: e for e in again.state.journal()} == {e.kind: e for e in long.state.journal()}
    again.journal = [*short]
    again.say("server0", READY)
    for worker in ("a", "b"):
        again.say(worker, JoinWorker("model"))
    train(again, "a", "b")
    before = {entry.task for entry in first.journal[:entries] if isinstance(entry, Counted)}
    steps = {task // 4096 if policy.shared else task for task in [*before, *again.counted()]}
    assert sorted(steps) == list(range(STEPS))


def test_a_journal_is_written_anew_in_one_piece(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "scheduler.jsonl", Patience(tmp_path))
    for task in range(100):
        journal.write(Counted(task, "a", 1, False))
    assert journal.lines == 100
    journal.replace([CountedBefore(90, [92, 99], 0)])
    journal.write(Counted(100, "b", 1, False))
    journal.close()
    again = Journal(tmp_path / "scheduler.jsonl", Patience(tmp_path))
    assert again.lines == 2
    assert list(again.read()) == [CountedBefore(90, [92, 99], 0), Counted(100, "b", 1, False)]
    again.close()


def test_a_run_that_ended_stays_so() -> None:
    first = Run()
    first.begin("a")
    train(first, "a")
    second = Run()
    second.state.restore(first.journal, second.now_s)
    assert second.state.status == "completed"
    second.say("a", JoinWorker("model"))
    assert second.sent("a", RunEnded) == [RunEnded("completed")]


def stand_by(run: Run) -> JoinServer:
    """Let a standby join, and say that it has all; returns its last word."""
    join = replace(READY, address="ipc://standby0", standby=True, ready=False)
    run.say("standby0", join)
    members = run.sent("standby0", Members)[-1]
    assert isinstance(members, Members) and members.servers[0].membership
    join = replace(join, ready=True, membership=members.servers[0].membership)
    run.say("standby0", join)
    return join


def test_a_standby_that_was_taken_for_gone_has_to_take_everything_again() -> None:
    """The primary did not wait for it meanwhile, so what it had when it was silent is no copy any more."""
    run = Run(replace(FREE, standbys=1))
    run.begin("a")
    ready = stand_by(run)
    run.say("a", AskTask())
    assert run.sent("a", TrainTask)
    run.say("launcher", Died("standby0"))  # it lives, and says once more what it said before
    run.say("standby0", ready)
    again = run.sent("standby0", Members)[-1]
    assert isinstance(again, Members) and again.servers[0].membership not in (0, ready.membership)
    run.say("launcher", Died("server0"))
    assert not run.sent("standby0", Promote)


def test_a_standby_that_is_ready_takes_over() -> None:
    run = Run(replace(FREE, standbys=1))
    run.begin("a")
    run.say("a", AskTask())
    assert not run.sent("a", TrainTask)  # before the first gradient the standby must be there
    stand_by(run)
    run.tick()
    assert run.sent("a", TrainTask)
    run.say("launcher", Died("server0"))
    assert run.sent("standby0", Promote) and run.told(ServerGone)
    run.say("standby0", replace(READY, address="ipc://standby0"))
    run.sessions["server0"] += 1
    run.say("server0", replace(READY, empty=True))
    assert run.sent("server0", BecomeStandby)
    (members,) = run.sent("a", Members)[-1:]
    assert isinstance(members, Members) and members.servers[0].address == "ipc://standby0"
    assert members.servers[0].standby == "server0" and not run.state.status
    run.say("launcher", Died("standby0"))
    assert not run.sent("server0", Promote)  # it was ready as what it was before, and has nothing of its successor yet


@pytest.mark.parametrize(("name", "standby"), [("server1", False), ("standby0", True), ("standby1", True)])
def test_who_has_no_place_takes_none(name: str, standby: bool) -> None:
    """A server that was silent for too long comes back as what it was: nobody else may have taken its place."""
    run = Run()
    run.begin("a")
    with pytest.raises(Malformed):
        run.say(name, replace(READY, address="ipc://elsewhere", standby=standby))
    run.tick(5.0)
    assert run.told(ServerGone)
    run.say("server0", READY)
    assert not run.sent("server0", BecomeStandby) and not run.sent(name, Promote)
    (members,) = run.sent("server0", Members)[-1:]
    assert isinstance(members, Members) and members.servers[0].address == READY.address


def test_a_run_whose_server_and_standby_are_gone_is_given_up() -> None:
    run = Run(replace(FREE, standbys=1))
    run.begin("a")
    stand_by(run)
    run.ask("a")
    for name in ("server0", "standby0"):
        run.say("launcher", Died(name))
    run.sessions["standby0"] += 1
    for _ in range(40):
        run.say("standby0", replace(READY, address="ipc://standby0", standby=True, ready=False, empty=True))
        run.say("a", JoinWorker("model"))
        run.tick(1.6)
    assert run.state.status == "failed" and len(run.told(ServerLost)) == 1


def test_an_empty_server_after_the_first_gradient_ends_the_run() -> None:
    run = Run()
    run.begin("a")
    run.ask("a")
    run.say("launcher", Died("server0"))
    run.sessions["server0"] += 1
    run.say("server0", replace(READY, empty=True, ready=False))
    assert run.state.status == "failed" and run.told(ServerLost)


def test_a_server_that_comes_back_says_what_it_holds() -> None:
    run = Run()
    run.begin("a")
    for _ in range(3):
        run.done("a", run.ask("a").task)
    run.say("server0", ServerHolds(0, 1, [1, 1], 9))
    run.say("server0", ServerHolds(0, 1, [1, 1], 9))
    assert [event.tasks for event in run.told(ServerSettled)] == [[2]]  # type: ignore[attr-defined]
    assert run.sent("server0", CatchUp) == [CatchUp(0)] * 2


def test_a_stop_saves_before_it_ends() -> None:
    run = Run(SHARED)
    run.begin("a", "b")
    own = run.ask("a").task
    run.say("launcher", Stop("stop"))
    run.tick()
    assert not run.sent("server0", KeepCopy), "a step is under way"
    run.done("b", run.ask("b").task)
    run.done("a", own)
    run.tick()
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    run.say("a", AskTask())
    (task,) = run.sent("a", EvaluateTask)
    assert isinstance(task, EvaluateTask) and task.reason == "stop" and not task.evaluate
    run.say("a", EvaluationDone(task.task))
    assert run.state.status == "stopped"


def test_a_stop_waits_for_the_step_that_was_begun_ahead_and_begins_none_behind_it() -> None:
    run = Run(AHEAD)
    run.begin("a", "b")
    present = {worker: run.ask(worker).task for worker in ("a", "b")}
    ahead = {worker: run.ask(worker).task for worker in ("a", "b")}
    for worker in ("a", "b"):
        run.say(worker, AskTask())
    run.say("launcher", Stop("stop"))
    for tasks in (present, ahead):
        run.tick()
        assert not run.sent("server0", KeepCopy), "a step is under way"
        for worker, task in tasks.items():
            run.done(worker, task)
    run.tick()
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy) and not any(run.sent(worker, TrainTask) for worker in ("a", "b"))
    run.say("server0", CopyKept(copy.tag, 0))
    (task,) = run.sent("a", EvaluateTask)
    assert isinstance(task, EvaluateTask) and (task.reason, task.step) == ("stop", 2)


def test_a_checkpoint_that_time_asks_for_is_of_the_step_that_was_begun_ahead() -> None:
    run = Run(AHEAD, TrainingPlan(2, 0, 0, None, 1.0))
    run.begin("a", "b")
    present = {worker: run.ask(worker).task for worker in ("a", "b")}
    ahead = {worker: run.ask(worker).task for worker in ("a", "b")}
    run.now_s += 1.0
    for tasks in (present, ahead):
        assert not run.sent("server0", KeepCopy)
        for worker, task in tasks.items():
            run.done(worker, task)
    run.tick()
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    for worker in ("a", "b"):
        run.say(worker, AskTask())
        assert not run.sent(worker, TrainTask), "the copy is not kept yet"
    run.say("server0", CopyKept(copy.tag, 0))
    (task,) = run.sent("a", EvaluateTask)
    assert isinstance(task, EvaluateTask) and task.step == 2
    assert run.sent("b", TrainTask)


def test_the_time_of_a_step_that_was_begun_ahead_counts_from_the_end_of_the_one_before() -> None:
    run = Run(AHEAD)
    run.begin("a", "b")
    for _ in range(2):
        for worker in ("a", "b"):
            run.ask(worker)
    for step in range(2):
        run.now_s += 1.0
        for share, worker in enumerate(("a", "b")):
            run.done(worker, 4096 * step + share)
    assert run.state._leases is not None and run.state._leases.task_s == 1.0


def test_a_stop_before_anything_was_trained_waits_for_no_server() -> None:
    run = Run(replace(FREE, standbys=1))
    run.begin("a")
    run.say("a", AskTask())
    assert not run.sent("a", TrainTask), "the standby is not there"
    run.say("launcher", Stop("stop"))
    run.tick()
    assert run.state.status == "stopped" and not run.sent("server0", KeepCopy)


def test_a_stop_waits_for_no_share_that_does_not_come() -> None:
    run = Run(SHARED)
    run.begin("a", "b")
    run.done("a", run.ask("a").task)
    run.say("launcher", Stop("stop"))
    run.tick()
    assert not run.sent("server0", KeepCopy)
    run.now_s += 5.1
    for name in ("a", "b", "server0"):  # all live
        run.say(name, READY if name == "server0" else WorkerBeat({}, 0, 0))
    run.tick()
    assert len(run.sent("server0", KeepCopy)) == 1


def test_a_stop_waits_for_steps_under_way_but_not_for_one_that_takes_too_long() -> None:
    run = Run()
    run.begin("a", "b", "c")
    run.done("a", run.ask("a").task)
    under_way, _ = run.ask("a").task, run.ask("b").task
    run.say("launcher", Stop("stop"))
    run.tick()
    assert not run.sent("server0", KeepCopy)
    run.done("a", under_way)
    run.tick()
    assert not run.sent("server0", KeepCopy)
    run.now_s += 5.1
    for name in ("b", "server0"):  # both live
        run.say(name, WorkerBeat({}, 0, 0) if name == "b" else READY)
    run.tick()
    assert len(run.sent("server0", KeepCopy)) == 1


def test_evaluations_without_improvement_end_a_run_and_a_coordinator_that_comes_back_knows_of_them() -> None:
    run = Run(plan=TrainingPlan(1, 0, 1, None, None, early_stop=3))
    run.begin("a")
    earlier = Run(plan=run.plan)
    earlier.take(earlier.state.restore([*run.journal, Stagnant(Stagnation(0.5, 3))], run.now_s))
    assert earlier.state.stopping == earlier.state.reason == "early_stop"
    run.say("a", AskTask())
    for number in range(STEPS // 2):  # an epoch
        (task,) = run.sent("a", TrainTask)
        assert isinstance(task, TrainTask) and task.task == number
        run.done("a", task.task)
        run.say("a", AskTask())
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    (job,) = run.sent("a", EvaluateTask)
    assert isinstance(job, EvaluateTask) and job.counts and job.stagnation == Stagnation()


@pytest.mark.parametrize("every", [0, 1])
def test_a_launch_ends_where_more_is_trained_and_says_that_the_run_goes_on(every: int) -> None:
    run = Run(plan=TrainingPlan(2, 0, every, None, None, until_epoch=1))
    run.begin("a")
    run.say("a", AskTask())
    for number in range(STEPS // 2):
        (task,) = run.sent("a", TrainTask)
        assert isinstance(task, TrainTask) and task.task == number
        run.done("a", task.task)
        run.say("a", AskTask())
    assert not run.sent("a", TrainTask)
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    (job,) = run.sent("a", EvaluateTask)
    assert isinstance(job, EvaluateTask) and job.evaluate == job.counts == bool(every) and job.reason == UNFREEZE
    run.say("a", EvaluationDone(job.task))
    assert run.state.status == CONTINUES


def test_a_run_completes_in_its_time_with_an_evaluation() -> None:
    run = Run(plan=TrainingPlan(2, 0, 0, None, None, time_left_s=60.0))
    run.begin("a")
    run.say("a", AskTask())
    (task,) = run.sent("a", TrainTask)
    assert isinstance(task, TrainTask)
    run.now_s += 1.0
    run.done("a", task.task)
    for seconds in [5.0] * 10 + [5.1]:  # 1 s for a step, 3 s for the end
        assert not run.state.stopping
        run.now_s += seconds
        run.say("a", WorkerBeat({}, 0, 0))
        run.say("server0", READY)
        run.tick()
    assert run.state.stopping == run.state.reason == "max_time"
    run.say("a", AskTask())
    assert not run.sent("a", TrainTask)
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    (job,) = run.sent("a", EvaluateTask)
    assert isinstance(job, EvaluateTask) and job.evaluate and job.reason == "end"
    run.say("a", EvaluationDone(job.task))
    assert (run.state.status, run.state.reason) == ("completed", "max_time")


@pytest.mark.parametrize("policy", [FREE, SHARED, AHEAD], ids=["free", "shared", "ahead"])
def test_a_coordinator_that_comes_back_leaves_time_for_the_evaluation(policy: CoordinationPolicy) -> None:
    """As long as 2 x 40 of the steps that two workers divide, which take 1 s each, before one was timed."""
    plan = TrainingPlan(2, 0, 0, None, None, time_left_s=120.0)
    first = Run(policy, plan)
    first.begin("a", "b")
    (setup,) = (entry.setup for entry in first.journal if isinstance(entry, SetUp))
    setup = replace(setup, about={"batch_size": 8, "eval_size": 320}, parts=1 if policy.shared else 2)
    run = Run(policy, plan)
    run.take(run.state.restore([SetUp(setup), *first.journal[1:]], run.now_s))
    run.say("server0", READY)
    for worker in ("a", "b"):
        run.say(worker, JoinWorker("model"))
    tasks = {worker: run.ask(worker).task for worker in ("a", "b")}
    run.now_s += 1.0
    for worker, task in tasks.items():
        run.done(worker, task)
    for seconds in (1.0, 13.0, 1.5):
        assert not run.state.reason
        run.now_s += seconds
        for worker in ("a", "b"):
            run.say(worker, WorkerBeat({}, 0, 0))
        run.say("server0", READY)
        run.tick()
    assert run.state.reason == "max_time"


def test_a_copy_that_is_lost_is_kept_again_and_another_worker_reads_it() -> None:
    run = Run(plan=TrainingPlan(1, 1, 1, None, None))
    run.begin("a", "b")
    run.done("a", run.ask("a").task)
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    run.say("a", AskTask())
    (task,) = run.sent("a", EvaluateTask)
    assert isinstance(task, EvaluateTask)
    run.say("a", EvaluationDone(task.task, lost=True))
    (again,) = run.sent("server0", KeepCopy)
    assert isinstance(again, KeepCopy) and again.tag != copy.tag
    run.say("launcher", Died("a"))
    run.say("server0", CopyKept(again.tag, 0))
    run.say("b", AskTask())
    (task,) = run.sent("b", EvaluateTask)
    assert isinstance(task, EvaluateTask) and task.tag == again.tag


def test_what_is_evaluated_next_is_of_its_own_step_though_an_earlier_copy_comes_late() -> None:
    run = Run(SHARED, plan=TrainingPlan(3, 0, 1, None, None))
    run.begin("a", "b")

    def epoch() -> None:
        """Train an epoch; who asks is given its share."""
        for _ in range(STEPS // 2):
            for worker in ("a", "b"):
                run.done(worker, run.ask(worker).task)

    epoch()
    first = _evaluation(run, "a")
    run.say("a", EvaluationDone(first.task, lost=True))  # with the server that kept it: once more
    epoch()
    (again,) = run.sent("server0", KeepCopy)
    assert isinstance(again, KeepCopy)
    run.say("server0", CopyKept(again.tag, 0))
    run.say("a", AskTask())
    (second,) = run.sent("a", EvaluateTask)
    run.say("b", AskTask())
    assert not run.sent("b", TrainTask), "the copy of the second epoch is not kept yet"
    assert isinstance(second, EvaluateTask)
    run.say("a", EvaluationDone(second.task))
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    assert run.sent("b", TrainTask)


def _evaluation(run: Run, worker: str) -> EvaluateTask:
    """Let a server keep the copy that it is asked for, and a worker take what is to be done with it."""
    for copy in run.sent("server0", KeepCopy):
        assert isinstance(copy, KeepCopy)
        run.say("server0", CopyKept(copy.tag, 0))
    run.say(worker, AskTask())
    (task,) = run.sent(worker, EvaluateTask)
    assert isinstance(task, EvaluateTask)
    return task


@pytest.mark.parametrize(("machine", "deadline_s"), [(0, 10.0), (1, 60.0)])
def test_a_worker_that_is_stuck_in_an_evaluation_holds_up_no_other_s_checkpoints(
    machine: int, deadline_s: float
) -> None:
    """It lives and beats: another worker evaluates and saves after the learned deadline, and it is named.

    A worker of another machine, whose disk may be another one, does after --timeout.
    """
    run = Run(plan=TrainingPlan(20, 0, 0, 1, None))
    run.begin("a")
    run.say("b", JoinWorker("model", machine=machine))

    def wait(seconds: float) -> None:
        """Let time pass in which all live."""
        for _ in range(round(seconds * 2)):
            for name in ("a", "b"):
                run.say(name, WorkerBeat({}, 0, 0))
            run.say("server0", READY)
            run.tick(0.5)

    for _ in range(2):  # it learns that this takes a second
        run.done("b", run.ask("b").task)
        first = _evaluation(run, "a")
        wait(1.0)
        run.say("a", EvaluationDone(first.task))
    run.done("b", run.ask("b").task)
    stuck = _evaluation(run, "a")
    run.done("b", run.ask("b").task)
    wait(deadline_s - 1.0)
    run.done("b", run.ask("b").task)
    assert not run.told(EvaluationLate)
    wait(2.0)
    late = run.told(EvaluationLate)
    assert [event.worker for event in late] == ["a"]  # type: ignore[attr-defined]
    taken = _evaluation(run, "b")
    assert taken.tag == stuck.tag and taken.takes_over and not stuck.takes_over
    run.say("a", EvaluationDone(stuck.task, best=9.0))  # it wakes: what it has to say counts no more
    assert not [entry for entry in run.journal if isinstance(entry, Best)]
    run.say("b", EvaluationDone(taken.task, best=5.0))
    assert [entry.best for entry in run.journal if isinstance(entry, Best)] == [5.0]


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_due_while_the_first_machine_s_worker_starts_again_waits_for_it(asked: bool) -> None:
    """Only its disk surely holds the run's checkpoints. A worker that was asked to leave is not waited for."""
    run = Run(plan=TrainingPlan(20, 0, 0, 1, None))
    run.begin("a")
    run.say("b", JoinWorker("model", machine=1))
    run.tick()
    run.done("b", run.ask("b").task)
    if asked:
        run.say("launcher", Drain(["a"]))
    run.say("launcher", Died("a"))
    (copy,) = run.sent("server0", KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))  # type: ignore[attr-defined]
    run.say("b", AskTask())
    assert bool(run.sent("b", EvaluateTask)) == asked
    if asked:
        return
    run.sessions["a"] += 1
    run.say("a", JoinWorker("model"))
    assert _evaluation(run, "a").reason == "interval"
    run.say("launcher", Died("a"))
    run.say("b", AskTask())
    assert not run.sent("b", EvaluateTask)
    for _ in range(122):  # longer than --timeout, while the others live
        run.say("b", WorkerBeat({}, 0, 0))
        run.say("b", AskTask())
        run.say("server0", READY)
        run.tick(0.5)
    assert run.sent("b", EvaluateTask)


def test_the_best_result_and_its_loss_outlive_the_coordinator() -> None:
    plan = TrainingPlan(20, 0, 0, 1, None)
    run = Run(plan=plan)
    run.begin("a")
    run.done("a", run.ask("a").task)
    run.say("a", EvaluationDone(_evaluation(run, "a").task, best=0.9, best_loss=0.4))
    lines = map(journal_line, run.state.journal())
    again = Run(plan=plan, journal=[entry for line in lines if (entry := read_entry(line)) is not None])
    again.take(again.state.restore(list(again.journal), again.now_s))
    for each in (run, again):
        assert each.state._evaluations.best == BestResult(0.9, 0.4)
    first = again.journal[0]
    assert isinstance(first, SetUp)
    resumed = SetUp(replace(first.setup, best=0.7, best_loss=0.6))
    for entries, best in (([resumed], BestResult(0.7, 0.6)), ([resumed, Best(0.9, 0.4)], BestResult(0.9, 0.4))):
        again.take(again.state.restore(entries, again.now_s))
        assert again.state._evaluations.best == best
    old = b'{"t": 1.0, "kind": "best", "best": 0.9}'  # before losses were written
    assert read_entry(old) == Best(0.9, None)


def test_one_worker_alone_evaluates_for_as_long_as_it_takes() -> None:
    run = Run(plan=TrainingPlan(20, 0, 0, 1, None))
    run.begin("a")
    run.done("a", run.ask("a").task)
    _evaluation(run, "a")
    for _ in range(400):
        run.say("a", WorkerBeat({}, 0, 0))
        run.say("server0", READY)
        run.tick(0.5)
    assert not run.told(EvaluationLate)


def test_without_workers_the_run_is_given_up() -> None:
    run = Run()
    run.say("server0", READY)
    run.tick(61.0)
    assert run.state.status == "failed"


@pytest.mark.parametrize(
    "content",
    [
        replace(READY, index=1),
        ServerHolds(7, 0, [], 0),
        ServerHolds(0, 0, [5], 0),
        ServerHolds(0, 0, [0, 2**61], 0),
        ServerHolds(0, 0, [9, 3], 0),
        SetupDone(0, "model", 4, 0, []),
        SetupDone(SetupTask().task, "model", 0, 0, []),
    ],
)
def test_what_cannot_be_changes_nothing(content: Content) -> None:
    run = Run()
    run.begin("a")
    run.say("b", JoinWorker("model"))
    with pytest.raises(Malformed):
        run.say("c" if isinstance(content, JoinWorker | JoinServer) else "b", content)
    assert sorted(m.name for m in run.state.members.all()) == ["a", "b", "server0"]
    train(run, "a", "b")
    assert run.state.status == "completed"


def test_a_worker_of_another_model_is_sent_away() -> None:
    run = Run()
    run.begin("a")
    run.say("b", JoinWorker("another"))
    assert run.sent("b", RunEnded) == [RunEnded("refused")]
    assert [m.name for m in run.state.members.workers] == ["a"]


def test_a_worker_of_another_model_that_came_before_the_setup_is_sent_away() -> None:
    run = Run(SHARED)
    run.say("server0", READY)
    for worker, model in (("a", "model"), ("b", "another"), ("c", "model")):
        run.say(worker, JoinWorker(model))
    for worker in ("a", "b"):
        run.say(worker, AskTask())
    run.say("a", SetupDone(SetupTask().task, "model", STEPS // 2, 0, []))
    assert run.sent("b", RunEnded) == [RunEnded("refused")] and not run.sent("b", TrainTask)
    assert [m.name for m in run.state.members.workers] == ["a", "c"]
    (began,) = (effect for effect in run.effects if isinstance(effect, Began))
    assert len(began.workers) == 2
    train(run, "a", "c")
    assert run.state.status == "completed"


def test_steps_that_are_cut_while_a_worker_evaluates_outlive_the_coordinator() -> None:
    policy, plan = replace(SHARED, backup=1), TrainingPlan(20, 0, 0, 1, None)
    run = Run(policy, plan)
    run.begin("a", "b", "c")
    for worker in ("b", "c"):
        run.done(worker, run.ask(worker).task)
    _evaluation(run, "a")
    run.say("a", AskTask())
    for _ in range(3):
        for task in [run.ask(worker).task for worker in ("b", "c")][: 2 - policy.backup]:
            run.done("b", task)
        run.tick()
    steps = run.state._steps()
    assert steps == 4 and not run.sent("a", TrainTask)
    again = Run(policy, plan)
    again.take(again.state.restore(run.journal, again.now_s))
    assert again.state._steps() == steps


def test_a_worker_that_evaluates_has_no_lease_and_gets_one_when_it_has_answered() -> None:
    run = Run(plan=TrainingPlan(20, 0, 0, 1, None))
    run.begin("a", "b")
    run.done("b", run.ask("b").task)
    task = _evaluation(run, "a")
    run.say("a", AskTask())
    for _ in range(3):
        run.done("b", run.ask("b").task)
    run.say("b", LeaveRun(NOTHING))
    run.tick()
    assert not run.sent("a", TrainTask) and run.state._leases is not None and run.state._leases.watermark == 4
    run.say("a", EvaluationDone(task.task))
    (lease,) = run.sent("a", TrainTask)
    assert isinstance(lease, TrainTask) and lease.task == 4


@pytest.mark.parametrize("policy", [FREE, SHARED, AHEAD])
def test_a_worker_that_is_asked_to_leave_finishes_its_lease_and_goes(policy: CoordinationPolicy) -> None:
    run = Run(policy)
    run.begin("worker0", "worker1")
    first, task = run.ask("worker0"), run.ask("worker1")
    run.say("worker1", AskTask())  # for the next one, while it works
    held = [task, *run.sent("worker1", TrainTask)]
    run.say("launcher", Drain(["worker1"]))
    for lease in held:
        assert not run.sent("worker1", RunEnded) and not run.told(WorkerLeft)
        assert isinstance(lease, TrainTask)
        run.done("worker1", lease.task)
    assert len(run.counted()) == len(held) and run.sent("worker1", RunEnded) == [RunEnded("left")]
    (left,) = run.told(WorkerLeft)
    assert isinstance(left, WorkerLeft) and left.worker == "worker1" and "1 other goes on" in left.message
    run.say("worker1", WorkerBeat({}, 0, 0))  # it says farewell, and is not asked to join again
    assert not run.sent("worker1", JoinAgain) and not run.sent("worker1", TrainTask)
    run.say("worker1", LeaveRun(NOTHING))
    assert not run.told(WorkerGone)
    run.done("worker0", first.task)
    train(run, "worker0")
    assert run.state.status == "completed"


def test_who_died_on_its_way_out_gives_its_lease_back() -> None:
    run = Run(FREE)
    run.begin("worker0", "worker1")
    task = run.ask("worker1")
    run.say("launcher", Drain(["worker1"]))
    run.say("launcher", Died("worker1"))
    assert run.told(WorkerGone) and not run.told(WorkerLeft)
    assert run.ask("worker0").task == task.task


def test_one_worker_has_to_stay() -> None:
    run = Run(FREE)
    run.begin("worker0", "worker1")
    run.say("launcher", Drain(["worker0", "worker1"]))
    run.say("launcher", Drain(["worker7"]))
    reasons = [refused.message for refused in run.told(ChangeRefused) if isinstance(refused, ChangeRefused)]
    assert ["nobody would be left" in reasons[0], "no such worker" in reasons[1]] == [True, True]
    assert run.ask("worker0") and run.ask("worker1")


def test_a_worker_that_evaluates_leaves_when_it_has_answered() -> None:
    run = Run(FREE, replace(PLAN, save_steps=1))
    run.begin("worker0", "worker1")
    run.done("worker1", run.ask("worker1").task)
    (copy,) = run.sent("server0", KeepCopy)
    assert isinstance(copy, KeepCopy)
    run.say("server0", CopyKept(copy.tag, 0))
    run.say("worker0", AskTask())
    (task,) = run.sent("worker0", EvaluateTask)
    run.say("launcher", Drain(["worker0"]))
    assert isinstance(task, EvaluateTask) and not run.sent("worker0", RunEnded)
    run.say("worker0", EvaluationDone(task.task))
    assert run.sent("worker0", RunEnded) == [RunEnded("left")]
