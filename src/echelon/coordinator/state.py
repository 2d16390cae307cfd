"""The coordinator's state: members, leases, evaluations. `handle` and `tick` change it and return what is to be done.

Nothing here touches a socket, a file or a clock: time comes in as an argument, effects go out as values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count

from echelon.coordinator.config import CONTINUES, CoordinatorConfig
from echelon.coordinator.effects import Began, Effect, Evaluated, Save, Send, Tell, WindowClosed
from echelon.coordinator.evaluations import Evaluations, TrainingProgress
from echelon.coordinator.journal import (
    Begun,
    Best,
    CheckpointSaved,
    Counted,
    CountedBefore,
    Ended,
    EpochSeen,
    JournalEntry,
    SetUp,
    Stagnant,
    StepCut,
)
from echelon.coordinator.leases import LeaseLedger, StepCount
from echelon.coordinator.members import MemberList, RunMember, ServingPair, may_serve, server_entry
from echelon.coordinator.messages import (
    SETUP_TASK,
    UNFREEZE,
    AskTask,
    BecomeStandby,
    CatchUp,
    CopyKept,
    Died,
    Drain,
    DropCopy,
    EvaluationDone,
    JoinAgain,
    JoinServer,
    JoinWorker,
    KeepCopy,
    LeaveRun,
    Members,
    Promote,
    RunEnded,
    ServerBeat,
    ServerHolds,
    ServerLacked,
    SetupDone,
    SetupTask,
    Stop,
    Task,
    TaskDone,
    TaskHeard,
    Welcome,
    WithdrawTask,
    WorkerBeat,
)
from echelon.coordinator.runs import from_runs, to_runs
from echelon.coordinator.shares import make_leases
from echelon.coordinator.window import WindowAccumulator
from echelon.core.errors import LEFT
from echelon.core.task import BestResult, Stagnation
from echelon.core.time_limit import TimeLimit
from echelon.messages.framing import Content, Message
from echelon.messages.plain import Malformed
from echelon.records.decode import decode
from echelon.records.events import (
    ChangeRefused,
    EvaluationLate,
    Event,
    SchedulerRestored,
    ServerGone,
    ServerLost,
    ServerSettled,
    SharesAgain,
    WorkerGone,
    WorkerLeft,
)
from echelon.records.kinds import (
    EARLY_STOP,
    MAX_TIME,
    EntropyCoding,
    Record,
    ServerWindow,
    WorkerJoined,
    WorkerWindow,
)

REPORT_S = 2.0
_SETUP_TIMES = 10  # the timeout: so long the setup may take while others wait
GATHER_S = 2.0  # what a run begins with waits so long for workers that are late: its start tells of all


class Coordinator:
    """Who takes part, who works on what, when copies are evaluated and saved, and when the run is over.

    `status` is empty until the run is over: `completed`, `stopped` or `failed`; `reason`: why it completed before its
    last step, `EARLY_STOP` or `MAX_TIME`. `begun`: a gradient may have been given
    out; until then a server that comes back empty is set up again.

    Args:
        first_tag: a number that no coordinator of this run has used for copies, or for a standby's membership.
    """

    def __init__(self, config: CoordinatorConfig, first_tag: int, now_s: float) -> None:
        self.status = self.stopping = self.reason = ""
        self.members = MemberList()
        self.setup: SetupDone | None = None
        self._config = config
        self._pairs = [ServingPair(now_s) for _ in range(config.policy.servers)]
        self._leases: LeaseLedger | None = None
        self._evaluations = Evaluations(config.plan, first_tag, now_s, config.timeout_s)
        self._memberships = count(first_tag)
        self._window = WindowAccumulator(now_s)
        self._setup_worker = ""
        self._asking: dict[str, None] = {}
        self._leaving: dict[str, bool] = {}  # who was asked to leave, and whether it has been told to go
        self._begun = self._recorded = False
        self._late = 0
        self._settled_lives = set[int]()
        self._began_s = self._last_worker_s = now_s
        self._asked_s = math.inf
        self._report_s = self._members_s = 0.0
        self._time = TimeLimit(now_s + config.plan.time_left_s, 0.0)
        self._effects: list[Effect] = []
        self._last_entries: dict[str, JournalEntry] = {}

    # In and out

    def restore(self, entries: Iterable[JournalEntry], now_s: float) -> list[Effect]:
        """Take up the journal of an earlier coordinator of this run."""
        below, done, shares, epochs, saved = 0, set[int](), dict[int, int](), 0, 0
        stagnation, best = Stagnation(), None
        for entry in entries:
            self._remember(entry)
            match entry:
                case SetUp():
                    self.setup, stagnation = entry.setup, entry.setup.stagnation
                    best = BestResult.of(entry.setup.best, entry.setup.best_loss)
                case Begun():
                    self._begun = True
                case StepCut():
                    shares[entry.step] = entry.shares
                case Counted():
                    done.add(entry.task)
                case CountedBefore():
                    below, done = entry.below, from_runs(entry.done)
                    shares = {below: entry.shares} if entry.shares else {}
                case EpochSeen():
                    epochs = max(epochs, entry.epoch)
                case Best():
                    best = BestResult(entry.best, entry.loss)
                case Stagnant():
                    stagnation = entry.stagnation
                case CheckpointSaved():
                    saved = entry.step
                case Ended():
                    self.status = entry.status
        self._evaluations.restore(epochs, best, saved)
        self._evaluations.stagnation = stagnation
        self._stop_if_stagnant()
        if self.setup is not None:
            leases = self._make_leases(self.setup)
            leases.replay(below, done, shares)
            steps = self._steps()
            self._tell(SchedulerRestored(f"the scheduler came back at step {steps}", steps))
        return self._drain()

    def journal(self) -> list[JournalEntry]:
        """Return what a journal has to say, in as few entries as can be: the same as all that were saved so far."""
        entries = list(self._last_entries.values())
        if self._leases is not None:
            below, done = self._leases.counted()
            cuts = self._leases.cuts()
            entries.append(CountedBefore(below, to_runs(done), cuts.pop(below, 0)))
            entries += [StepCut(step, shares) for step, shares in cuts.items()]
        return entries

    def handle(self, message: Message, peer: bytes, now_s: float) -> list[Effect]:
        """Take a message that a peer sent.

        Raises:
            Malformed: it says what cannot be.
        """
        if self.status:
            self._farewell(message, peer)
        else:
            self._take(message, peer, now_s)
        return self._drain()

    def tick(self, now_s: float) -> list[Effect]:
        """Do what time asks for: who is silent is gone, what is due is begun, written and told."""
        for member in self.members.silent(now_s):
            self._gone(member.name, f"was silent for {now_s - member.heard_s:.1f} s", now_s)
        if self.stopping and not (self._begun or self.reason):  # nothing was trained that could be saved
            self._end("stopped")
            return self._drain()
        if self._leases is not None:
            self._look_at_time(self._leases, now_s)
            self._turn_evaluations(self._leases, now_s)
        self._give_all(now_s)
        if self._leases is not None and self._window.due(now_s, self._leases.step_complete):
            self._close_window(now_s)
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_S
            self._tell_server_loads()
        sets_up = self.setup is None and now_s - self._began_s < _SETUP_TIMES * self._config.timeout_s
        if now_s >= self._members_s and (sets_up or self.setup is not None):  # who waits sees that the scheduler lives
            self._members_s = now_s + REPORT_S
            self._tell_members()
        self._look_at_servers(now_s)
        if self.members.workers:
            self._last_worker_s = now_s
        elif now_s - self._last_worker_s > self._config.timeout_s:
            words = f"no worker for {self._config.timeout_s:g} s: the run is given up"
            self._tell(Event(words, name="no_workers"))
            self._end("failed")
        return self._drain()

    def say_farewell(self, now_s: float) -> list[Effect]:
        """Close the window, and tell everyone that the run is over."""
        self._close_window(now_s)
        for member in self.members.all():
            self._send(member, RunEnded(self.status))
        return self._drain()

    def last_words(self) -> list[Effect]:
        """Write what the servers said last."""
        self._tell_server_loads()
        return self._drain()

    @property
    def awaited(self) -> list[str]:
        """The servers that workers who have joined wait for, before the first step; of a run under way none."""
        if self._begun or not self.members.workers:
            return []
        return [f"server{index}" for index, pair in enumerate(self._pairs) if not pair.primary]

    @property
    def stagnant(self) -> int:
        """Evaluations in a row without improvement."""
        return self._evaluations.stagnation.evaluations

    @property
    def bytes_left(self) -> int:
        """What workers moved that is in no window: after the last one, for the last evaluation and checkpoint."""
        return self._window.all_bytes

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _send(self, member: RunMember, content: Content) -> None:
        self._effects.append(Send(member.peer, content))

    def _tell(self, record: Record) -> None:
        self._effects.append(Tell(record))

    def _save(self, entry: JournalEntry) -> None:
        self._remember(entry)
        self._effects.append(Save(entry))

    def _remember(self, entry: JournalEntry) -> None:
        if not isinstance(entry, Counted | CountedBefore | StepCut):
            self._last_entries[entry.kind] = entry

    def _end(self, status: str) -> None:
        self.status = status
        self._save(Ended(status))

    # Messages

    def _farewell(self, message: Message, peer: bytes) -> None:
        match message.content:
            case LeaveRun(moved=moved):
                if self.members.remove(message.sender) is not None:
                    self._window.add_bytes(moved)
            case AskTask() | JoinWorker() | JoinServer() | WorkerBeat() | ServerBeat() | TaskDone():
                self._effects.append(Send(peer, RunEnded(self.status)))

    def _take(self, message: Message, peer: bytes, now_s: float) -> None:
        content = message.content
        match content:
            case JoinWorker() | JoinServer():
                self._join(RunMember(message.sender, peer, message.session, now_s, content), now_s)
            case Stop():
                self.stopping = self.stopping or content.reason or "stop"
            case Died():
                self._died(content, now_s)
            case Drain():
                self._drain_workers(content.workers, now_s)
            case _:
                member = self.members.heard(message.sender, peer, message.session, now_s)
                if member is not None:
                    self._from_member(member, content, now_s)
                elif isinstance(content, WorkerBeat | ServerBeat):
                    self._effects.append(Send(peer, JoinAgain()))

    def _from_member(self, member: RunMember, content: Content, now_s: float) -> None:
        match content:
            case WorkerBeat() | ServerBeat():
                member.beat = content
            case AskTask():
                self._asking[member.name] = None
                self._asked_s = min(self._asked_s, now_s)
                self._give_all(now_s)
            case TaskDone():
                self._task_done(member, content, now_s)
            case SetupDone() | EvaluationDone():
                self._send(member, TaskHeard(content.task))
                if isinstance(content, SetupDone):
                    self._set_up(member, content, now_s)
                else:
                    self._evaluated(member, content, now_s)
                self._window.add_bytes(content.moved)  # what is counted begins with the setup
            case CopyKept():
                if self._evaluations.kept(content.tag, content.index):
                    if self._leases is not None:  # the next copy is of where training stands
                        self._leases.hold_back(self._evaluations.is_next_due)
                    self._give_all(now_s)
            case ServerHolds():
                self._server_holds(content)
            case ServerLacked():
                self._tell_lost(content.index, content.lacking, [])
            case LeaveRun():
                self._window.add_bytes(content.moved)
                self._gone(member.name, "left", now_s)
            case _:
                raise Malformed("unexpected")

    def _died(self, word: Died, now_s: float) -> None:
        member = self.members.get(word.name)
        if member is not None and word.pid in (0, member.join.pid):  # not one that took its place
            self._gone(word.name, word.how, now_s)

    # Who takes part

    def _join(self, member: RunMember, now_s: float) -> None:
        join = member.join
        if isinstance(join, JoinServer) and not self._has_place(member.name, join.index):
            raise Malformed("content")
        known = self.members.get(member.name)
        if known is not None and (known.session != member.session or known.is_worker != member.is_worker):
            self._gone(member.name, "was replaced", now_s)
            known = None
        joined = None
        if known is None and isinstance(join, JoinWorker):
            joined = WorkerJoined(member.name, join.host or None, join.pid or None, join.affinity or None)
        self.members.add(member)
        self._last_worker_s = now_s
        if isinstance(join, JoinServer):
            self._server_joined(member, join)
        else:
            if joined is not None:
                self._tell(joined)
            self._worker_joined(member, join, now_s)
        self._tell_members()

    def _has_place(self, name: str, index: int) -> bool:
        """Whether the run has a server of this name at an index: another one would take the place of who serves it."""
        return index < len(self._pairs) and may_serve(name, index, self._config.policy.standbys)

    def _worker_joined(self, member: RunMember, join: JoinWorker, now_s: float) -> None:
        self._send(member, Welcome(self.setup is not None))
        if self.setup is not None and self._leases is not None:
            self._admit(self._leases, self.setup, member, join, now_s)

    def _admit(self, leases: LeaseLedger, setup: SetupDone, member: RunMember, join: JoinWorker, now_s: float) -> None:
        """Let a worker train, unless what it has is not what the run was set up with."""
        if setup.fingerprint == join.fingerprint:
            leases.join(member.name, join.holding, now_s)
            return
        self._tell(Event(f"{member.name} has another model or data and was sent away", name="refused_worker"))
        self._send(member, RunEnded("refused"))
        self.members.remove(member.name)
        self._asking.pop(member.name, None)

    def _server_joined(self, member: RunMember, join: JoinServer) -> None:
        pair = self._pairs[join.index]
        if pair.takes_as_standby(member.name, join):
            pair.join_standby(member.name, join, next(self._memberships))
            if not join.standby:  # its standby has taken over: now it is the standby, and has yet to take what that has
                self._send(member, BecomeStandby())
        else:
            if join.empty and not join.standby:
                self._came_back_empty(member.name, join.index)
            pair.join_primary(member.name, join.ready)
            self._ask_for_copy(join.index)
        if join.restored and join.ready:
            words = f"{member.name} took its snapshot and waits for what workers kept"
            self._tell(Event(words, name="server_restored"))

    def _came_back_empty(self, name: str, index: int) -> None:
        if self.setup is None:
            return
        if not self._begun:  # it is set up again
            self.setup, self._leases, self._setup_worker = None, None, ""
            return
        words = f"what {name} held is lost: it has neither a snapshot nor a standby; resume the run"
        self._tell(ServerLost(words, index))
        self._end("failed")

    def _look_at_servers(self, now_s: float) -> None:
        """Give the run up where a server and its standby are gone for too long: nobody else has what they held."""
        for index, pair in enumerate(self._pairs):
            if pair.primary or not self._begun or not self._config.policy.standbys:  # without one it has a snapshot
                pair.served_s = now_s
            elif now_s - pair.served_s > self._config.timeout_s and not self.status:
                words = f"server{index} and its standby are gone for {self._config.timeout_s:g} s, and what they held"
                self._tell(ServerLost(f"{words}; resume the run", index))
                self._end("failed")

    def _tell_members(self) -> None:
        """Tell all who serves what, where."""
        servers = [server_entry(pair, self.members, self.setup is not None) for pair in self._pairs]
        workers = [m.name for m in self.members.workers]
        watermark = 0 if self._leases is None else self._leases.watermark
        content = Members(servers, workers, watermark, 1 if self.setup is None else self.setup.parts)
        for member in self.members.all():
            self._send(member, content)

    def _gone(self, name: str, how: str, now_s: float) -> None:
        """Let a member go that left, died or is silent; its work goes to others."""
        member = self.members.remove(name)
        self._asking.pop(name, None)
        was_asked = self._leaving.pop(name, False)
        if member is None:
            return
        if member.is_worker:
            self._window.resume(name, now_s)
            self._evaluations.worker_gone(member, was_asked)
            self._worker_gone(name, "left" if was_asked else how)
        else:
            self._server_gone(name, how)
        self._tell_members()
        self._give_all(now_s)

    def _drain_workers(self, names: Sequence[str], now_s: float) -> None:
        """Let workers leave once they have done what they work on; one has to stay, which can set the run up."""
        asked = [member for member in self.members.workers if member.name in names]
        stay = [member for member in self.members.workers if member.name not in {*names, *self._leaving}]
        why = "" if asked else "the run has no such worker now"
        if not stay:
            why = "nobody would be left to train"
        elif self.setup is None and not any(member.is_home for member in stay):
            why = "the run has yet to be set up"
        if why:
            self._tell(ChangeRefused(f"{' and '.join(names)} cannot leave: {why}"))
            return
        self._leaving |= {member.name: False for member in asked if member.name not in self._leaving}
        self._give_all(now_s)

    def _let_go(self) -> None:
        """Let those go that were asked to leave, and have done what they worked on; they say farewell then."""
        for name, told in self._leaving.items():
            member = self.members.get(name)
            if member is None or not isinstance(join := member.join, JoinWorker) or told or self._is_busy(name):
                continue
            self._leaving[name] = True
            self._asking.pop(name, None)
            if self._leases is not None:
                self._leases.leave(name)
            self._send(member, RunEnded(LEFT))
            stay = sum(worker.name not in self._leaving for worker in self.members.workers)
            go = "1 other goes on" if stay == 1 else f"{stay} others go on"
            words = f"{name} leaves after step {self._steps()}, as it was asked to; {go}"
            self._tell(WorkerLeft(words, name, join.host or None, join.pid or None))

    def _is_busy(self, name: str) -> bool:
        at_setup = self.setup is None and self._setup_worker == name
        leased = self._leases is not None and self._leases.has_lease(name)
        return at_setup or leased or self._evaluations.has_task(name)

    def _worker_gone(self, name: str, how: str) -> None:
        if self._setup_worker == name and self.setup is None:
            self._setup_worker = ""
        back = len(self._leases.leave(name)) if self._leases is not None else 0
        if how != "left":
            self._tell(WorkerGone(f"{name} {how}; {back} of its leases go to others", name, back))

    def _server_gone(self, name: str, how: str) -> None:
        for index, pair in enumerate(self._pairs):
            if not pair.leave(name):
                continue
            then, successor = "waits for its next life", self.members.get(pair.primary)
            if successor is not None:
                self._send(successor, Promote())
                then = f"{successor.name} takes over"
            self._tell(ServerGone(f"{name} {how}; {then}", index))
            self._copies_again()

    def _server_holds(self, word: ServerHolds) -> None:
        """Take what a server says that came back: what was done and is not there is lost, or done again."""
        if word.index >= len(self._pairs):
            raise Malformed("content")
        if self._leases is None:
            return
        lost = self._leases.lost(from_runs(word.tasks), word.watermark)
        server = self.members.get(self._pairs[word.index].primary)
        if self._config.policy.shared:
            if lost:
                words = f"server{word.index} lacks {len(lost)} shares of the present step: they are done again"
                self._tell(SharesAgain(words, len(lost)))
        elif word.life not in self._settled_lives:
            self._settled_lives.add(word.life)
            self._tell_lost(word.index, len(lost), lost[:100])
        if server is not None:
            self._send(server, CatchUp(self._leases.done_steps if self._config.policy.shared else 0))

    def _tell_lost(self, index: int, lost: int, tasks: Sequence[int]) -> None:
        """Say in the record what a server's death cost."""
        words = f"{lost} updates are lost: nobody could push them again" if lost else "nothing is lost"
        self._tell(ServerSettled(f"server{index} is back; {words}", index, lost, tasks))

    # Who works on what

    def _steps(self) -> int:
        """Return how many steps are done."""
        return 0 if self._leases is None else self._leases.steps

    def _make_leases(self, setup: SetupDone) -> LeaseLedger:
        work = StepCount(self._config.plan.last_step(setup.steps_per_epoch), setup.steps_per_epoch)
        leases = make_leases(work, self._config.policy, setup.parts, self._config.plan.save_steps)
        self._leases = leases
        leases.restore(setup.done_below, from_runs(setup.done_beyond))
        self._evaluations.begin_at(self._steps(), setup.steps_per_epoch)
        return leases

    def _set_up(self, by: RunMember, setup: SetupDone, now_s: float) -> None:
        """The servers hold what they begin with, as a worker says that gave it to them."""
        if setup.task != SETUP_TASK or not setup.steps_per_epoch or setup.parts < 1:
            raise Malformed("content")
        if self.setup is not None:
            return
        leases = self._make_leases(setup)
        self.setup = setup
        self._save(SetUp(setup))
        self._evaluations.set_up(BestResult.of(setup.best, setup.best_loss), setup.stagnation, now_s)
        self._stop_if_stagnant()  # so it was saved
        self._window = WindowAccumulator(now_s)
        for member in self.members.workers:
            if member.name == by.name:  # what the run begins with is what it has
                leases.join(member.name, (), now_s)
            elif isinstance(join := member.join, JoinWorker):
                self._admit(leases, setup, member, join, now_s)
        if not self._recorded:
            self._recorded = True
            self._effects.append(Began(setup, self.members.worker_joins))
        self._tell_members()  # into how many leases a batch is cut
        self._look(leases, now_s)
        self._give_all(now_s)

    def _give_all(self, now_s: float) -> None:
        """Give every worker that asks a task, where there is one; who was asked to leave goes instead."""
        self._let_go()
        self._withdraw()  # so that who is ahead is free for a share that is nobody's
        for name in list(self._asking):
            member = self.members.get(name)
            task = None if member is None else self._task_for(member, now_s)
            if member is None:
                del self._asking[name]
            elif task is not None:
                del self._asking[name]
                self._send(member, task)
        self._withdraw()

    def _withdraw(self) -> None:
        """Take back what workers have begun that cannot end without a share of the present step that nobody has."""
        for name, task in self._leases.withdraw() if self._leases is not None else []:
            member = self.members.get(name)
            if member is not None:
                self._send(member, WithdrawTask(task))

    def _task_for(self, member: RunMember, now_s: float) -> Task | None:
        if member.name in self._leaving:
            return None
        if self.setup is None:
            if self._setup_worker or not all(pair.primary for pair in self._pairs) or not member.is_home:
                return None
            if len(self.members.workers) < self._config.workers and now_s - self._asked_s < GATHER_S:
                return None
            self._setup_worker = member.name
            return SetupTask()
        if self._leases is None:
            return None
        evaluation = self._evaluations.task_for(member, self.members.workers, now_s)
        if evaluation is not None:
            self._leases.pause(member.name, True)
            self._window.pause(member.name, "evaluation" if evaluation.evaluate else "checkpoint", now_s)
            return evaluation
        if (self.stopping and not self._leases.finishes) or not self._servers_ready():
            return None
        if self.stopping:
            self._leases.hold_back(True)  # the present step ends, and no further one is begun behind it
        task = self._leases.take(member.name, now_s)
        for step, shares in self._leases.new_cuts():
            self._save(StepCut(step, shares))
        return task

    def _servers_ready(self) -> bool:
        """Whether every server can take gradients; before the first of them, also whether every standby is there."""
        ready = all(pair.ready for pair in self._pairs)
        standbys = not self._config.policy.standbys or all(pair.standby_ready for pair in self._pairs)
        if ready and standbys and not self._begun:
            self._begun = True
            self._save(Begun())
        return ready and self._begun

    def _task_done(self, member: RunMember, done: TaskDone, now_s: float) -> None:
        leases = self._leases
        if leases is not None:
            counted = leases.finish(done.task, member.name, now_s, done.late)
            if counted or (done.late and self._config.policy.shared):
                self._save(Counted(done.task, member.name, done.report.samples, done.late))
            self._late += done.late
            self._window.add(member.name, leases.step_of(done.task), done.report, counted, now_s)
        self._window.add_bytes(done.moved)
        self._send(member, TaskHeard(done.task))
        if leases is not None:
            if leases.complete:
                self._close_window(now_s)
            self._look(leases, now_s)
            self._give_all(now_s)

    # Evaluations and checkpoints

    def _look_at_time(self, leases: LeaseLedger, now_s: float) -> None:
        """End the run in time, with a last evaluation and checkpoint."""
        self._time.step_s, self._time.evaluation_steps = leases.task_s, self._evaluation_tasks()
        if self._time.is_up(now_s):
            self._complete_early(MAX_TIME)

    def _evaluation_tasks(self) -> float:
        """Return how many tasks have as many samples as an evaluation."""
        assert self.setup is not None
        about, parts = self.setup.about, self.setup.parts
        if self._config.policy.shared:
            parts = max(1, len(self.members.workers))
        return (about.get("eval_size") or 0) * parts / (about.get("batch_size") or 1)

    def _stop_if_stagnant(self) -> None:
        if self._evaluations.is_stagnant:
            self._complete_early(EARLY_STOP)

    def _complete_early(self, reason: str) -> None:
        """Give out no further step: the run completes before its last one."""
        if not self.stopping:
            self.stopping = self.reason = reason
            self._evaluations.begin_closing()

    def _turn_evaluations(self, leases: LeaseLedger, now_s: float) -> None:
        if self.stopping and self.setup is not None and not leases.under_way(now_s):
            epoch = self._steps() // self.setup.steps_per_epoch
            # A step that stays half done is not in the checkpoint; it is trained again after a resume.
            if self._evaluations.stop_early(epoch, self._steps(), bool(self.reason)) and not leases.at_boundary:
                leases.restore(leases.done_steps, ())
        self._look(leases, now_s)
        self._advance(leases)
        self._take_from_late(leases, now_s)

    def _take_from_late(self, leases: LeaseLedger, now_s: float) -> None:
        """Let another worker evaluate and save where one does not answer: it may be stuck, and the others go on."""
        self._evaluations.first_guess_s = max(self._config.timeout_s, 10 * self._time.evaluation_steps * leases.task_s)
        late = self._evaluations.take_from_late(self.members.workers, now_s)
        if late is None:
            return
        what = "evaluated" if late.job.evaluate else "saved"
        words = f"{late.worker} has not {what} step {late.job.step} after {late.seconds:.1f} s; another worker does it"
        self._tell(EvaluationLate(words, late.worker, late.seconds))
        self._give_all(now_s)

    def _look(self, leases: LeaseLedger, now_s: float) -> None:
        assert self.setup is not None
        progress = TrainingProgress(leases.done_steps, self._steps(), self.setup.steps_per_epoch, leases.complete)
        due = self._evaluations.look(progress, now_s)
        if due.epoch is not None:
            self._close_window(now_s, due.epoch - 1)  # no window is of two epochs
            if not self._evaluations.owes_result:  # else once there is one: until then another scheduler asks again
                self._save(EpochSeen(due.epoch))
            self._tell_members()  # with the new watermark
        if due.asked:
            leases.hold_back(True)
            self._advance(leases)

    def _advance(self, leases: LeaseLedger) -> None:
        """Begin what waits, once every server can keep a copy."""
        if self._evaluations.waiting and leases.at_boundary and all(pair.ready for pair in self._pairs):
            self._evaluations.begin(range(len(self._pairs)), self._steps())
            for index in range(len(self._pairs)):
                self._ask_for_copy(index)

    def _copies_again(self) -> None:
        """A copy was lost with its server: let all keep new ones."""
        job = self._evaluations.present
        if job is not None:
            self._drop_copies(job.tag)
            self._evaluations.begin_again(job, range(len(self._pairs)))
            for index in range(len(self._pairs)):
                self._ask_for_copy(index)

    def _ask_for_copy(self, index: int) -> None:
        """Let a server keep its copy for the present evaluation, where it owes one and can."""
        job, server = self._evaluations.present, self.members.get(self._pairs[index].primary)
        if job is not None and index in job.missing and server is not None and self._pairs[index].ready:
            # The best checkpoint is whole, and whether this is the best only the evaluation tells.
            self._send(server, KeepCopy(job.tag, full=True))

    def _drop_copies(self, tag: int) -> None:
        for server in self.members.servers:
            self._send(server, DropCopy(tag))

    def _evaluated(self, member: RunMember, result: EvaluationDone, now_s: float) -> None:
        if self._leases is None:
            return
        self._leases.pause(member.name, False)
        self._window.resume(member.name, now_s)
        job = self._evaluations.present
        answers = self._evaluations.answered(member.name)  # one that was late has no say any more
        if job is None or not answers or not self._evaluations.is_present(result.task):
            return
        if result.lost:
            self._copies_again()
            return
        self._drop_copies(job.tag)
        self._evaluations.end(now_s)
        if result.best is not None:
            self._evaluations.best = BestResult(result.best, result.best_loss)
            self._save(Best(result.best, result.best_loss))
        if result.stagnation != self._evaluations.stagnation:
            self._evaluations.stagnation = result.stagnation
            self._save(Stagnant(result.stagnation))
        self._stop_if_stagnant()
        self._time.took("evaluation" if job.evaluate else "checkpoint", now_s - job.began_s)
        self._effects.append(Evaluated(job.epoch, result))
        if job.counts:
            self._save(EpochSeen(job.epoch + 1))
        if job.reason:
            self._save(CheckpointSaved(job.step))
        if job.is_last:
            self.reason = "" if self._leases.complete else self.reason
            self._end({"end": "completed", UNFREEZE: CONTINUES}.get(job.reason, "stopped"))
        self._advance(self._leases)
        self._give_all(now_s)

    # The record

    def _close_window(self, now_s: float, epoch: int | None = None) -> None:
        """Write what is summed of whole steps, however short, and begin the next window.

        Args:
            epoch: that is over with it; None: the present one, whose steps are not all done.
        """
        if self.setup is None or self._leases is None or not self._window.has_steps(self._leases.step_complete):
            return
        step = self._steps()
        if epoch is None:
            done = self._leases.done_steps
            epoch = max(0, done - self._leases.complete) // self.setup.steps_per_epoch
        workers = self.members.workers
        names = [m.name for m in workers]
        resources = [self._window.resources.get(name, []) for name in names]
        steps, self._window = self._window.close(epoch, step, names, now_s, self._leases.step_complete)
        self._effects.append(WindowClosed(steps, resources))
        beats = {m.name: m.beat for m in workers if isinstance(m.beat, WorkerBeat)}
        window = WorkerWindow(
            step=step, clocks=self._leases.finished, late=self._late,
            waited_s={name: beat.waited_s for name, beat in beats.items()},
            sent_bytes={name: beat.sent_bytes for name, beat in beats.items()},
            received_bytes={name: beat.received_bytes for name, beat in beats.items()},
            overlapped_s={name: beat.overlapped_s for name, beat in beats.items() if beat.overlapped_s},
        )  # fmt: skip
        self._tell(window)
        if coded := self._window.entropy_coded():
            self._tell(_entropy_coding(step, coded))

    def _tell_server_loads(self) -> None:
        """Write the servers' last numbers."""
        for server in self.members.servers:
            if isinstance(server.beat, ServerBeat) and self.setup is not None:
                self._tell(ServerWindow(name=server.name, step=self._steps(), **asdict(server.beat)))


def _entropy_coding(step: int, coded: Mapping[str, float]) -> EntropyCoding:
    """Return the record of what entropy coding did, by what workers said.

    Raises:
        Malformed: they are no counts.
    """
    try:
        return decode(EntropyCoding, {**coded, "step": step})
    except ValueError as error:
        raise Malformed("content") from error
