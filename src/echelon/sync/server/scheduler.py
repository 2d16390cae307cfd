"""The scheduler: who takes part, who works on what, when copies are evaluated and saved, and when the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from echelon.observe.record import Recorder
from echelon.sync.server.endpoint import Listener, Voice
from echelon.sync.server.identity import RunKeys
from echelon.sync.server.journal import Journal
from echelon.sync.server.leases import FreeLeases, Work
from echelon.sync.server.members import Member
from echelon.sync.server.protocol import Kind, Malformed, Message
from echelon.sync.server.reviewing import Reviewing
from echelon.sync.server.reviews import REVIEW_BASE, Review
from echelon.sync.server.roster import Roster
from echelon.sync.server.settings import Settings
from echelon.sync.server.shares import MAX_SHARES, SharedLeases
from echelon.sync.server.sockets import Limits
from echelon.sync.server.tallies import Tally, WindowSums

SETUP_TASK = 2**50
REPORT_S = 2.0
_FRAME_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How long to train, and when to evaluate and save; 0 and None: never."""

    epochs: int
    max_steps: int
    eval_every: int
    save_steps: int | None
    save_s: float | None


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler is told when it starts."""

    settings: Settings
    keys: RunKeys
    address: str
    folder: Path
    plan: Plan
    timeout_s: float


@dataclass(frozen=True)
class Callbacks:
    """What others do with what happens: the run's record, the display."""

    started: Callable[[dict[str, Any]], None]
    window: Callable[[WindowSums], None]
    reviewed: Callable[[int, dict[str, Any]], None]


class Scheduler:
    """One thread, one poll loop; `run` returns how the run ended."""

    def __init__(self, config: SchedulerConfig, record: Recorder, callbacks: Callbacks) -> None:
        self.config, self.settings, self.record, self.callbacks = config, config.settings, record, callbacks
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.voice = Voice(config.keys, "scheduler")
        self.listener = Listener(self.context, self.voice, config.address, Limits(_FRAME_BYTES))
        self.roster = Roster(self, config.settings.servers)
        self.journal = Journal(config.folder / "scheduler.jsonl")
        self.leases: FreeLeases | SharedLeases | None = None
        self.reviewing = Reviewing(self)
        self.tally = Tally()
        self.status = ""
        self.asking: dict[str, None] = {}
        self.setup: dict[str, Any] | None = None
        self.setup_worker = ""
        self._stopping = ""
        self._report_s = 0.0
        self.last_member_s = time.monotonic()
        self._late = 0
        self._begun = False
        self._restore()

    def run(self) -> str:
        """Serve until the run is over; returns `completed`, `stopped` or `failed`."""
        poller = zmq.Poller()
        self.listener.register(poller)
        while not self.status:
            poller.poll(50)
            while self.listener.pump(self._take):
                pass
            self._turn(time.monotonic())
        self._flush(force=True)
        self._farewell(poller)
        return self.status

    def _farewell(self, poller: zmq.Poller) -> None:
        """Tell everyone that the run is over, until all have gone or had the time to."""
        ends = time.monotonic() + 2.0
        self.tell_all(Kind.END, {"status": self.status})
        while time.monotonic() < ends and self.roster.members.of_role("worker"):
            poller.poll(50)
            self.listener.pump(self._take_farewell)
        for server in self.roster.members.of_role("server"):
            self._report_server(server)
        self.listener.socket.close(linger=1000)
        self.listener.check.socket.close()
        self.context.term()
        self.journal.close()

    def _take_farewell(self, peer: bytes, message: Message) -> None:
        if message.kind is Kind.LEAVE:
            self.roster.members.remove(message.sender)
        elif message.kind in (Kind.ASK, Kind.JOIN, Kind.BEAT, Kind.DONE):
            self.voice.reply(self.listener.socket, peer, Kind.END, {"status": self.status})

    # Messages

    def _take(self, peer: bytes, message: Message) -> None:
        now_s = time.monotonic()
        if message.kind is Kind.JOIN:
            self.roster.join(peer, message, now_s)
            return
        if message.kind in (Kind.DIED, Kind.STOP):
            self._from_launcher(message)
            return
        member = self.roster.members.heard(message.sender, peer, message.session, now_s)
        if member is None:
            if message.kind is Kind.BEAT:
                self.reply(peer, Kind.WELCOME, {"info": {"again": True}})
            return
        body = message.body
        try:
            self._dispatch(member, message.kind, body, now_s)
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed("content") from error

    def _dispatch(self, member: Member, kind: Kind, body: dict[str, Any], now_s: float) -> None:
        match kind:
            case Kind.BEAT:
                member.beat = body["info"]
            case Kind.ASK:
                self.asking[member.name] = None
                self.give_all(now_s)
            case Kind.DONE:
                self._done(member, body["task"], body["info"], now_s)
            case Kind.RESULT:
                self._result(member, body["task"], body["info"])
            case Kind.TAGGED:
                self.reviewing.tagged(body["tag"], int(body["info"]["index"]))
            case Kind.LOST:
                self.roster.lost(body["info"])
            case Kind.LEAVE:
                self.roster.gone(member.name, "left", now_s)
            case _:
                raise Malformed("unexpected")

    def reply(self, peer: bytes, kind: Kind, body: dict[str, Any]) -> None:
        self.voice.reply(self.listener.socket, peer, kind, body)

    def tell_all(self, kind: Kind, body: dict[str, Any]) -> None:
        for member in self.roster.members.all():
            self.reply(member.peer, kind, body)

    def _from_launcher(self, message: Message) -> None:
        if message.kind is Kind.STOP:
            self._stopping = self._stopping or message.body["reason"] or "stop"
        else:
            self.roster.gone(message.body["name"], str(message.body["info"].get("how", "died")), time.monotonic())

    # Work

    def _restore(self) -> None:
        """Take up what a former life wrote down."""
        shares: dict[int, int] = {}
        done: dict[int, dict[str, Any]] = {}
        for entry in self.journal.read():
            match entry["kind"]:
                case "setup":
                    self.setup = entry["info"]
                case "shares":
                    shares[entry["step"]] = entry["shares"]
                case "done":
                    done[entry["task"]] = entry
                case "epoch":
                    self.reviewing.epochs_seen = entry["epoch"]
                case "best":
                    self.reviewing.best = entry["best"]
                case "saved":
                    self.reviewing.saved_step = entry["step"]
        if self.setup is None:
            return
        self._begun = True
        self._make_leases(self.setup)
        self._replay(done, shares)
        self.record.event("scheduler_restored", f"the scheduler came back at step {self.steps()}", step=self.steps())

    def _replay(self, done: dict[int, dict[str, Any]], shares: dict[int, int]) -> None:
        assert self.setup is not None and self.leases is not None
        if isinstance(self.leases, FreeLeases):
            below, beyond = self.leases.done_steps, self.leases.done_beyond
            self.leases.restore(below, beyond | set(done))
            return
        backup, step = self.settings.backup, self.leases.done_steps
        by_step: dict[int, set[int]] = {}
        for task in done:
            by_step.setdefault(task // MAX_SHARES, set()).add(task)
        while step in shares and len(by_step.get(step, ())) >= max(1, shares[step] - backup):
            step += 1
        self.leases.restore(step, ())
        if step in shares:
            self.leases.cut(step, shares[step], by_step.get(step, set()))

    def _make_leases(self, setup: dict[str, Any]) -> None:
        per_epoch = int(setup["steps_per_epoch"])
        plan = self.config.plan
        steps = plan.epochs * per_epoch
        work = Work(min(steps, plan.max_steps or steps), per_epoch)
        if self.settings.aggregates:
            self.leases = SharedLeases(work, self.settings.backup)
        else:
            bound = self.settings.staleness if self.settings.mode == "ssp" else None
            self.leases = FreeLeases(work, bound)
        runs = setup["done_beyond"]
        beyond = [t for a, b in zip(runs[::2], runs[1::2], strict=True) for t in range(a, b + 1)]
        self.leases.restore(int(setup["done_below"]), beyond)
        self.reviewing.epochs_seen = max(self.reviewing.epochs_seen, self.steps() // per_epoch)
        self.reviewing.saved_step = max(self.reviewing.saved_step, self.steps())

    def steps(self) -> int:
        if self.leases is None:
            return 0
        return self.leases.done_steps + len(self.leases.done_beyond)

    def give_all(self, now_s: float) -> None:
        for name in list(self.asking):
            member = self.roster.members.get(name)
            if member is None:
                del self.asking[name]
                continue
            task = self._task_for(member, now_s)
            if task is not None:
                del self.asking[name]
                self.reply(member.peer, Kind.TASK, {"info": task})

    def _task_for(self, member: Member, now_s: float) -> dict[str, Any] | None:
        if self.setup is None:
            if self.setup_worker or not all(s.primary for s in self.roster.serving.values()):
                return None
            self.setup_worker = member.name
            return {"task": SETUP_TASK, "kind": "setup"}
        if self.leases is None or (
            self._stopping and not (self.reviewing.queue.present and self.reviewing.queue.present.copied)
        ):
            return None
        review = self.reviewing.queue.present
        if review is not None and review.copied and not review.worker and self._leads(member):
            review.worker, review.best, self.reviewing.lead = member.name, self.reviewing.best, member.name
            self.leases.pause(member.name, True)
            return review.as_task()
        if self._stopping or not self._servers_ready():
            return None
        before = self.leases.shares if isinstance(self.leases, SharedLeases) else 0
        task = self.leases.take(member.name, now_s)
        if task is not None and before == 0 and isinstance(self.leases, SharedLeases):
            self.journal.write("shares", step=task["step"], shares=task["shares"])
        return task

    def _servers_ready(self) -> bool:
        """Whether every server can take gradients; before the first of them, also whether every standby is there."""
        ready = all(s.ready for s in self.roster.serving.values())
        if ready and not self._begun:
            self._begun = not self.settings.replicas or all(s.standby_ready for s in self.roster.serving.values())
        return ready and self._begun

    def _leads(self, member: Member) -> bool:
        """Whether a worker is the one that evaluates: the one that did so last, else the first by name."""
        lead = (
            self.reviewing.lead
            if self.roster.members.get(self.reviewing.lead)
            else self.roster.members.of_role("worker")[0].name
        )
        return member.name == lead

    def _done(self, member: Member, task: int, info: dict[str, Any], now_s: float) -> None:
        if self.leases is None:
            return
        step = task // MAX_SHARES if isinstance(self.leases, SharedLeases) else task
        late = bool(info.get("late"))
        counted = self.leases.finish(task, member.name, now_s, late)
        self._late += late
        if counted or (late and isinstance(self.leases, SharedLeases)):
            self.journal.write("done", task=task, worker=member.name, samples=int(info["samples"]), late=late)
        self.tally.add(member.name, step, info, counted)
        self.reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        self.reviewing.look(now_s)
        self.give_all(now_s)

    def _result(self, member: Member, task: int, info: dict[str, Any]) -> None:
        self.reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        if task == SETUP_TASK:
            self._set_up(info)
            return
        review = self.reviewing.queue.present
        if review is None or task != REVIEW_BASE + review.tag:
            return
        if self.leases is not None:
            self.leases.pause(member.name, False)
        if info.get("lost"):
            self.reviewing.begin(self.reviewing.queue.again(set(self.roster.serving)))
            return
        for server in self.roster.members.of_role("server"):
            self.reply(server.peer, Kind.UNTAG, {"tag": review.tag})
        self.reviewing.queue.end()
        if "best" in info:
            self.reviewing.best = float(info["best"])
            self.journal.write("best", best=self.reviewing.best)
        self.callbacks.reviewed(review.epoch, info)
        if review.reason:
            self.journal.write("saved", step=review.step)
        if review.reason in ("end", "stop"):
            self.status = "completed" if review.reason == "end" else "stopped"
        self.reviewing.advance()
        self.give_all(time.monotonic())

    def _set_up(self, info: dict[str, Any]) -> None:
        if self.setup is not None:
            return
        self.setup, self.reviewing.best = info, info.get("best")
        self.journal.write("setup", info=info)
        self._make_leases(info)
        assert self.leases is not None
        self.callbacks.started(info)
        now_s = time.monotonic()
        for member in self.roster.members.of_role("worker"):
            self.leases.join(member.name, (), now_s)
        self.reviewing.saved_s = now_s
        self.reviewing.look(now_s)
        self.give_all(now_s)

    # Time

    def _turn(self, now_s: float) -> None:
        for member in self.roster.members.silent(now_s):
            self.roster.gone(member.name, f"was silent for {now_s - member.heard_s:.1f} s", now_s)
        if self._stopping and self.setup is None:
            self.status = "stopped"
        if self._stopping and not self.reviewing.final_asked and self.leases is not None:
            self.reviewing.final_asked = True
            self._stop_early()
        if self.leases is not None and not self.reviewing.final_asked:
            self.reviewing.look(now_s)
        self.reviewing.advance()
        self.give_all(now_s)
        self._flush()
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_S
            if self.setup is not None:
                self.roster.tell_members()
            for server in self.roster.members.of_role("server"):
                self._report_server(server)
        if self.roster.members.of_role("worker"):
            self.last_member_s = now_s
        elif now_s - self.last_member_s > self.config.timeout_s:
            self.record.event("no_workers", f"no worker for {self.config.timeout_s:g} s: the run is given up")
            self.status = "failed"

    def _stop_early(self) -> None:
        assert self.leases is not None and self.setup is not None
        if isinstance(self.leases, SharedLeases) and not self.leases.at_boundary:
            # The half-done step is not in the checkpoint; it is trained again after a resume.
            self.leases.restore(self.leases.done_steps, ())
        self.reviewing.queue.ask(
            Review(self.steps() // int(self.setup["steps_per_epoch"]), self.steps(), False, "stop")
        )

    def _flush(self, force: bool = False) -> None:
        if self.setup is None or not (self.tally.due(time.monotonic()) or (force and self.tally.losses)):
            return
        workers = [m.name for m in self.roster.members.of_role("worker")]
        step = self.steps()
        epoch = max(0, step - 1) // int(self.setup["steps_per_epoch"])
        sums = self.tally.close(epoch, step, workers)
        self.callbacks.window(sums)
        self._record_workers(step)

    def _record_workers(self, step: int) -> None:
        assert self.leases is not None
        beats = {m.name: m.beat for m in self.roster.members.of_role("worker")}
        self.record.write(
            "staleness", step=step, clocks=self.leases.clocks, late=self._late,
            waited_s={name: beat.get("waited_s", {}) for name, beat in beats.items()},
            sent_bytes={name: beat.get("sent_bytes", 0) for name, beat in beats.items()},
            received_bytes={name: beat.get("received_bytes", 0) for name, beat in beats.items()},
        )  # fmt: skip

    def _report_server(self, server: Member) -> None:
        if server.beat and self.setup is not None:
            self.record.write("server", name=server.name, step=self.steps(), **server.beat)
