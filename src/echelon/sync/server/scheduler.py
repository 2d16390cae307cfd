"""The scheduler: who takes part, who works on what, when copies are evaluated and saved, and when the run is over."""

from __future__ import annotations

import random
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
from echelon.sync.server.leases import MAX_SHARES, FreeLeases, SharedLeases, Work
from echelon.sync.server.members import Member, Members, Serving
from echelon.sync.server.protocol import Kind, Malformed, Message
from echelon.sync.server.reviews import REVIEW_BASE, Review, Reviews
from echelon.sync.server.settings import Settings
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
        self.members = Members()
        self.serving = {i: Serving() for i in range(config.settings.servers)}
        self.journal = Journal(config.folder / "scheduler.jsonl")
        self.leases: FreeLeases | SharedLeases | None = None
        self.reviews = Reviews(random.randrange(1, 2**30))
        self.tally = Tally()
        self.status = ""
        self._asking: dict[str, None] = {}
        self._setup: dict[str, Any] | None = None
        self._setup_worker = ""
        self._stopping = ""
        self._final_asked = False
        self._epochs_seen = 0
        self._saved_step, self._saved_s = 0, time.monotonic()
        self._report_s = 0.0
        self._last_member_s = time.monotonic()
        self._late = 0
        self._lead = ""
        self._begun = False
        self._best: float | None = None
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
        self._tell_all(Kind.END, {"status": self.status})
        while time.monotonic() < ends and self.members.of_role("worker"):
            poller.poll(50)
            self.listener.pump(self._take_farewell)
        for server in self.members.of_role("server"):
            self._report_server(server)
        self.listener.socket.close(linger=1000)
        self.listener.check.socket.close()
        self.context.term()
        self.journal.close()

    def _take_farewell(self, peer: bytes, message: Message) -> None:
        if message.kind is Kind.LEAVE:
            self.members.remove(message.sender)
        elif message.kind in (Kind.ASK, Kind.JOIN, Kind.BEAT, Kind.DONE):
            self.voice.reply(self.listener.socket, peer, Kind.END, {"status": self.status})

    # Messages

    def _take(self, peer: bytes, message: Message) -> None:
        now_s = time.monotonic()
        if message.kind is Kind.JOIN:
            self._join(peer, message, now_s)
            return
        if message.kind in (Kind.DIED, Kind.STOP):
            self._from_launcher(message)
            return
        member = self.members.heard(message.sender, peer, message.session, now_s)
        if member is None:
            if message.kind is Kind.BEAT:
                self._reply(peer, Kind.WELCOME, {"info": {"again": True}})
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
                self._asking[member.name] = None
                self._give_all(now_s)
            case Kind.DONE:
                self._done(member, body["task"], body["info"], now_s)
            case Kind.RESULT:
                self._result(member, body["task"], body["info"])
            case Kind.TAGGED:
                self._tagged(body["tag"], int(body["info"]["index"]))
            case Kind.LOST:
                self._lost(body["info"])
            case Kind.LEAVE:
                self._gone(member.name, "left", now_s)
            case _:
                raise Malformed("unexpected")

    def _reply(self, peer: bytes, kind: Kind, body: dict[str, Any]) -> None:
        self.voice.reply(self.listener.socket, peer, kind, body)

    def _tell_all(self, kind: Kind, body: dict[str, Any]) -> None:
        for member in self.members.all():
            self._reply(member.peer, kind, body)

    def _from_launcher(self, message: Message) -> None:
        if message.kind is Kind.STOP:
            self._stopping = self._stopping or message.body["reason"] or "stop"
        else:
            self._gone(message.body["name"], str(message.body["info"].get("how", "died")), time.monotonic())

    # Members

    def _join(self, peer: bytes, message: Message, now_s: float) -> None:
        name, role, info = message.sender, message.body["role"], message.body["info"]
        if role not in ("worker", "server"):
            raise Malformed("content")
        known = self.members.get(name)
        if known is not None and known.session != message.session:
            self._gone(name, "was replaced", now_s)
            known = None
        member = Member(name, role, peer, message.session, now_s, message.body["address"], info)
        self.members.add(member)
        self._last_member_s = now_s
        if role == "server":
            self._server_joined(member)
        else:
            self._worker_joined(member, now_s)
        self._tell_members()

    def _worker_joined(self, member: Member, now_s: float) -> None:
        self._reply(member.peer, Kind.WELCOME, {"info": {"set_up": self._setup is not None}})
        if self._setup is not None and self.leases is not None:
            if self._setup["fingerprint"] != member.info["fingerprint"]:
                self.record.event("refused_worker", f"{member.name} has another model or data and was sent away")
                self._reply(member.peer, Kind.END, {"status": "refused"})
                self.members.remove(member.name)
                return
            self.leases.join(member.name, member.info.get("held", []), now_s)

    def _server_joined(self, member: Member) -> None:
        info = member.info
        serving = self.serving[int(info["index"])]
        other = serving.primary != member.name and self.members.get(serving.primary) is not None
        if other or (info["standby"] and serving.primary != member.name):
            serving.standby, serving.standby_ready = member.name, bool(info["ready"])
            if not info["standby"]:  # its standby has taken over: now it is the standby
                self._reply(member.peer, Kind.WELCOME, {"info": {"standby": True}})
        else:
            if self._setup is not None and info["empty"] and not info["standby"]:
                words = f"what {member.name} held is lost: it has neither a snapshot nor a standby; resume the run"
                self.record.event("server_lost", words, server=int(info["index"]))
                self.status = "failed"
            serving.primary, serving.ready = member.name, bool(info["ready"])
            if serving.standby == member.name:
                serving.standby, serving.standby_ready = "", False
            review = self.reviews.present
            if serving.ready and review is not None and int(info["index"]) in review.missing:
                self._reply(member.peer, Kind.TAG, {"tag": review.tag, "full": review.full})
        if info.get("restored") and info["ready"]:
            self.record.event("server_restored", f"{member.name} took its snapshot and waits for what workers kept")

    def _tell_members(self) -> None:
        servers = {}
        for index, serving in self.serving.items():
            primary, standby = self.members.get(serving.primary), self.members.get(serving.standby)
            servers[str(index)] = {
                "address": primary.address if primary else "", "life": primary.session if primary else 0,
                "ready": serving.ready and primary is not None, "standby": standby.name if standby else "",
            }  # fmt: skip
        workers = [m.name for m in self.members.of_role("worker")]
        below = self.leases.done_steps if isinstance(self.leases, FreeLeases) else 0
        self._tell_all(Kind.MEMBERS, {"servers": servers, "workers": workers, "watermark": below})

    def _gone(self, name: str, how: str, now_s: float) -> None:
        member = self.members.remove(name)
        self._asking.pop(name, None)
        if member is None:
            return
        if member.role == "worker":
            self._worker_gone(name, how)
        else:
            self._server_gone(name, how)
        self._tell_members()
        self._give_all(now_s)

    def _worker_gone(self, name: str, how: str) -> None:
        back = self.leases.leave(name) if self.leases is not None else []
        review = self.reviews.present
        if review is not None and review.worker == name:
            review.worker = ""
        if self._setup_worker == name:
            self._setup_worker = ""
        if how != "left":
            self.record.event("worker_gone", f"{name} {how}; {len(back)} of its leases go to others", worker=name,
                              leases=len(back))  # fmt: skip

    def _server_gone(self, name: str, how: str) -> None:
        for index, serving in self.serving.items():
            if serving.standby == name:
                serving.standby, serving.standby_ready = "", False
            if serving.primary != name:
                continue
            standby = self.members.get(serving.standby)
            then = "waits for its next life"
            if standby is not None and serving.standby_ready:
                self._reply(standby.peer, Kind.PROMOTE, {})
                serving.primary, serving.standby, serving.ready = standby.name, "", False
                serving.standby_ready = False
                then = f"{standby.name} takes over"
            else:
                serving.primary, serving.ready = "", False
            self.record.event("server_gone", f"{name} {how}; {then}", server=index)
            if self.reviews.present is not None:
                self._begin_review(self.reviews.again(set(self.serving)))

    # Work

    def _restore(self) -> None:
        """Take up what a former life wrote down."""
        shares: dict[int, int] = {}
        done: dict[int, dict[str, Any]] = {}
        for entry in self.journal.read():
            match entry["kind"]:
                case "setup":
                    self._setup = entry["info"]
                case "shares":
                    shares[entry["step"]] = entry["shares"]
                case "done":
                    done[entry["task"]] = entry
                case "epoch":
                    self._epochs_seen = entry["epoch"]
                case "best":
                    self._best = entry["best"]
                case "saved":
                    self._saved_step = entry["step"]
        if self._setup is None:
            return
        self._begun = True
        self._make_leases(self._setup)
        self._replay(done, shares)
        self.record.event("scheduler_restored", f"the scheduler came back at step {self._steps()}", step=self._steps())

    def _replay(self, done: dict[int, dict[str, Any]], shares: dict[int, int]) -> None:
        assert self._setup is not None and self.leases is not None
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
        self._epochs_seen = max(self._epochs_seen, self._steps() // per_epoch)
        self._saved_step = max(self._saved_step, self._steps())

    def _steps(self) -> int:
        if self.leases is None:
            return 0
        return self.leases.done_steps + len(self.leases.done_beyond)

    def _give_all(self, now_s: float) -> None:
        for name in list(self._asking):
            member = self.members.get(name)
            if member is None:
                del self._asking[name]
                continue
            task = self._task_for(member, now_s)
            if task is not None:
                del self._asking[name]
                self._reply(member.peer, Kind.TASK, {"info": task})

    def _task_for(self, member: Member, now_s: float) -> dict[str, Any] | None:
        if self._setup is None:
            if self._setup_worker or not all(s.primary for s in self.serving.values()):
                return None
            self._setup_worker = member.name
            return {"task": SETUP_TASK, "kind": "setup"}
        if self.leases is None or (self._stopping and not (self.reviews.present and self.reviews.present.copied)):
            return None
        review = self.reviews.present
        if review is not None and review.copied and not review.worker and self._leads(member):
            review.worker, review.best, self._lead = member.name, self._best, member.name
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
        ready = all(s.ready for s in self.serving.values())
        if ready and not self._begun:
            self._begun = not self.settings.replicas or all(s.standby_ready for s in self.serving.values())
        return ready and self._begun

    def _leads(self, member: Member) -> bool:
        """Whether a worker is the one that evaluates: the one that did so last, else the first by name."""
        lead = self._lead if self.members.get(self._lead) else self.members.of_role("worker")[0].name
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
        self._reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        self._milestones(now_s)
        self._give_all(now_s)

    def _milestones(self, now_s: float) -> None:
        """Ask for evaluations and checkpoints that are due."""
        assert self.leases is not None and self._setup is not None
        plan, per_epoch = self.config.plan, int(self._setup["steps_per_epoch"])
        epochs = self.leases.done_steps // per_epoch
        steps = self._steps()
        every = plan.save_steps
        due = (every is not None and steps // every > self._saved_step // every) or (
            plan.save_s is not None and now_s - self._saved_s >= plan.save_s
        )
        if self.leases.complete:
            if not self._final_asked:
                self._final_asked = True
                self._review(Review(max(0, epochs - 1), steps, True, "end"))
            return
        if epochs > self._epochs_seen:
            self._epochs_seen = epochs
            self.journal.write("epoch", epoch=epochs)
            self._tell_members()  # with the new watermark
            if plan.eval_every and epochs % plan.eval_every == 0:
                self._review(Review(epochs - 1, steps, True, "interval" if due else ""))
                return
        if due and self.reviews.idle:
            self._review(Review(epochs, steps, False, "interval"))

    def _review(self, review: Review) -> None:
        if review.reason:
            self._saved_step, self._saved_s = review.step, time.monotonic()
        self.reviews.ask(review)
        if isinstance(self.leases, SharedLeases):
            self.leases.held_back = True
        self._advance_reviews()

    def _advance_reviews(self) -> None:
        boundary = not isinstance(self.leases, SharedLeases) or self.leases.at_boundary
        if self.reviews.waiting and boundary and all(s.ready for s in self.serving.values()):
            self._begin_review(self.reviews.begin(set(self.serving)))

    def _begin_review(self, review: Review) -> None:
        for index in self.serving:
            server = self.members.get(self.serving[index].primary)
            if server is not None and self.serving[index].ready:
                self._reply(server.peer, Kind.TAG, {"tag": review.tag, "full": review.full})

    def _tagged(self, tag: int, index: int) -> None:
        review = self.reviews.present
        if review is None or review.tag != tag:
            return
        review.missing.discard(index)
        if review.copied:
            if isinstance(self.leases, SharedLeases):
                self.leases.held_back = False
            self._give_all(time.monotonic())

    def _result(self, member: Member, task: int, info: dict[str, Any]) -> None:
        self._reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        if task == SETUP_TASK:
            self._set_up(info)
            return
        review = self.reviews.present
        if review is None or task != REVIEW_BASE + review.tag:
            return
        if self.leases is not None:
            self.leases.pause(member.name, False)
        if info.get("lost"):
            self._begin_review(self.reviews.again(set(self.serving)))
            return
        for server in self.members.of_role("server"):
            self._reply(server.peer, Kind.UNTAG, {"tag": review.tag})
        self.reviews.end()
        if "best" in info:
            self._best = float(info["best"])
            self.journal.write("best", best=self._best)
        self.callbacks.reviewed(review.epoch, info)
        if review.reason:
            self.journal.write("saved", step=review.step)
        if review.reason in ("end", "stop"):
            self.status = "completed" if review.reason == "end" else "stopped"
        self._advance_reviews()
        self._give_all(time.monotonic())

    def _set_up(self, info: dict[str, Any]) -> None:
        if self._setup is not None:
            return
        self._setup, self._best = info, info.get("best")
        self.journal.write("setup", info=info)
        self._make_leases(info)
        assert self.leases is not None
        self.callbacks.started(info)
        now_s = time.monotonic()
        for member in self.members.of_role("worker"):
            self.leases.join(member.name, (), now_s)
        self._saved_s = now_s
        self._milestones(now_s)
        self._give_all(now_s)

    def _lost(self, info: dict[str, Any]) -> None:
        """A server came back and says what it has: what was done and is not there is lost."""
        if not isinstance(self.leases, FreeLeases):
            return
        runs = info["tasks"]
        held = {t for a, b in zip(runs[::2], runs[1::2], strict=True) for t in range(a, b + 1)}
        done = set(range(int(info["watermark"]), self.leases.done_steps)) | self.leases.done_beyond
        lost = sorted(done - held)
        words = f"{len(lost)} updates are lost: nobody could push them again" if lost else "nothing is lost"
        self.record.event("server_settled", f"server{info['index']} is back; {words}", lost=len(lost), tasks=lost[:100])

    # Time

    def _turn(self, now_s: float) -> None:
        for member in self.members.silent(now_s):
            self._gone(member.name, f"was silent for {now_s - member.heard_s:.1f} s", now_s)
        if self._stopping and self._setup is None:
            self.status = "stopped"
        if self._stopping and not self._final_asked and self.leases is not None:
            self._final_asked = True
            self._stop_early()
        if self.leases is not None and not self._final_asked:
            self._milestones(now_s)
        self._advance_reviews()
        self._give_all(now_s)
        self._flush()
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_S
            if self._setup is not None:
                self._tell_members()
            for server in self.members.of_role("server"):
                self._report_server(server)
        if self.members.of_role("worker"):
            self._last_member_s = now_s
        elif now_s - self._last_member_s > self.config.timeout_s:
            self.record.event("no_workers", f"no worker for {self.config.timeout_s:g} s: the run is given up")
            self.status = "failed"

    def _stop_early(self) -> None:
        assert self.leases is not None and self._setup is not None
        if isinstance(self.leases, SharedLeases) and not self.leases.at_boundary:
            # The half-done step is not in the checkpoint; it is trained again after a resume.
            self.leases.restore(self.leases.done_steps, ())
        self.reviews.ask(Review(self._steps() // int(self._setup["steps_per_epoch"]), self._steps(), False, "stop"))

    def _flush(self, force: bool = False) -> None:
        if self._setup is None or not (self.tally.due(time.monotonic()) or (force and self.tally.losses)):
            return
        workers = [m.name for m in self.members.of_role("worker")]
        step = self._steps()
        epoch = max(0, step - 1) // int(self._setup["steps_per_epoch"])
        sums = self.tally.close(epoch, step, workers)
        self.callbacks.window(sums)
        self._record_workers(step)

    def _record_workers(self, step: int) -> None:
        assert self.leases is not None
        beats = {m.name: m.beat for m in self.members.of_role("worker")}
        self.record.write(
            "staleness", step=step, clocks=self.leases.clocks, late=self._late,
            waited_s={name: beat.get("waited_s", {}) for name, beat in beats.items()},
            sent_bytes={name: beat.get("sent_bytes", 0) for name, beat in beats.items()},
            received_bytes={name: beat.get("received_bytes", 0) for name, beat in beats.items()},
        )  # fmt: skip

    def _report_server(self, server: Member) -> None:
        if server.beat and self._setup is not None:
            self.record.write("server", name=server.name, step=self._steps(), **server.beat)
