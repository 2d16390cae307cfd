"""The scheduler: who takes part, who works on what, when copies are evaluated and saved, and when the run is over."""

from __future__ import annotations

import time
from typing import Any

import zmq

from echelon.coordinator.assignment import Assignment
from echelon.coordinator.bookkeeping import Bookkeeping
from echelon.coordinator.journal import Journal
from echelon.coordinator.members import RunMember
from echelon.coordinator.membership import Membership
from echelon.coordinator.reviewing import Reviewing
from echelon.coordinator.scheduling import SETUP_TASK, Callbacks, SchedulerConfig, TrainingPlan
from echelon.messages.endpoint import Listener, Sender
from echelon.messages.protocol import UNSOUND, Kind, Malformed, Message
from echelon.messages.sockets import Limits
from echelon.records.events import Event
from echelon.records.file import Recorder

__all__ = ["SETUP_TASK", "Callbacks", "Scheduler", "SchedulerConfig", "TrainingPlan"]

_FRAME_BYTES = 1 << 20
_FAREWELL_S = 2.0
_LAST_WORDS_S = 0.6


class Scheduler:
    """One thread, one poll loop; `run` returns how the run ended."""

    def __init__(self, config: SchedulerConfig, record: Recorder, callbacks: Callbacks) -> None:
        self.config, self.record, self.callbacks = config, record, callbacks
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.voice = Sender(config.keys, "scheduler")
        self.listener = Listener(self.context, self.voice, config.address, Limits(_FRAME_BYTES))
        self.status, self.stopping = "", ""
        self.last_member_s = time.monotonic()
        self._members_s = 0.0
        self.journal = Journal(config.folder / "scheduler.jsonl")
        self.roster = Membership(self, config.policy.servers)
        self.bookkeeping = Bookkeeping(self)
        self.reviewing = Reviewing(self)
        self.assignment = Assignment(self)
        self.assignment.restore()

    def run(self) -> str:
        """Serve until the run is over; returns `completed`, `stopped` or `failed`."""
        poller = zmq.Poller()
        self.listener.register(poller)
        while not self.status:
            poller.poll(50)
            while self.listener.pump(self._take):
                pass
            self._turn(time.monotonic())
        self.bookkeeping.close_window()
        self._farewell(poller)
        return self.status

    def end(self, status: str) -> None:
        """The run is over, and stays so in the scheduler's next life."""
        self.status = status
        self.journal.write("ended", status=status)

    def _farewell(self, poller: zmq.Poller) -> None:
        """Tell everyone that the run is over, until all have gone or had the time to.

        One that came back for this knows nobody yet: it waits until those who live have been heard.
        """
        began = time.monotonic()
        until_s = began + (0.0 if self.roster.members.all() else _LAST_WORDS_S)
        self.tell_all(Kind.END, {"status": self.status})
        while time.monotonic() < until_s or self.roster.members.of_role("worker"):
            if time.monotonic() > began + _FAREWELL_S:
                break
            poller.poll(50)
            self.listener.pump(self._take_farewell)
        for server in self.roster.members.of_role("server"):
            self.bookkeeping.report_server(server)
        self.listener.socket.close(linger=1000)
        self.listener.check.socket.close()
        self.context.term()
        self.journal.close()

    def _take_farewell(self, peer: bytes, message: Message) -> None:
        if message.kind is Kind.LEAVE:
            if self.roster.members.remove(message.sender) is not None:
                try:
                    self.bookkeeping.add_bytes(message.body["bytes"])
                except UNSOUND as error:
                    raise Malformed("content") from error
        elif message.kind in (Kind.ASK, Kind.JOIN, Kind.BEAT, Kind.DONE):
            self.reply(peer, Kind.END, {"status": self.status})

    # Messages

    def _take(self, peer: bytes, message: Message) -> None:
        now_s = time.monotonic()
        if message.kind is Kind.JOIN:
            self._join(peer, message, now_s)
            return
        if message.kind in (Kind.DIED, Kind.STOP):
            self._from_launcher(message)
            return
        member = self.roster.members.heard(message.sender, peer, message.session, now_s)
        if member is None:
            if message.kind is Kind.BEAT:
                self.reply(peer, Kind.WELCOME, {"info": {"again": True}})
            return
        try:
            self._dispatch(member, message.kind, message.body, now_s)
        except UNSOUND as error:
            raise Malformed("content") from error

    def _join(self, peer: bytes, message: Message, now_s: float) -> None:
        try:
            self.roster.join(peer, message, now_s)
        except UNSOUND as error:
            self.roster.members.remove(message.sender)
            raise Malformed("content") from error

    def _dispatch(self, member: RunMember, kind: Kind, body: dict[str, Any], now_s: float) -> None:
        match kind:
            case Kind.BEAT:
                member.beat = body["info"]
            case Kind.ASK:
                self.assignment.asking[member.name] = None
                self.assignment.give_all(now_s)
            case Kind.DONE:
                self._done(member, body["task"], body["info"], now_s)
            case Kind.RESULT:
                self._result(member, body)
            case Kind.TAGGED:
                self.reviewing.tagged(body["tag"], int(body["info"]["index"]))
            case Kind.LOST:
                self.roster.lost(body["info"])
            case Kind.LEAVE:
                self.bookkeeping.add_bytes(body["bytes"])
                self.roster.gone(member.name, "left", now_s)
            case _:
                raise Malformed("unexpected")

    def _result(self, member: RunMember, body: dict[str, Any]) -> None:
        task, info = body["task"], body["info"]
        moved = info.pop("bytes")
        self.reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        if task == SETUP_TASK:
            self.assignment.set_up(info)
        else:
            self.reviewing.result(member, task, info)
        self.bookkeeping.add_bytes(moved)  # what is counted begins with the setup

    def reply(self, peer: bytes, kind: Kind, body: dict[str, Any]) -> None:
        """Send to one member."""
        self.voice.reply(self.listener.socket, peer, kind, body)

    def tell_all(self, kind: Kind, body: dict[str, Any]) -> None:
        """Send to every member."""
        for member in self.roster.members.all():
            self.reply(member.peer, kind, body)

    def _from_launcher(self, message: Message) -> None:
        if message.kind is Kind.STOP:
            self.stopping = self.stopping or message.body["reason"] or "stop"
            return
        name, info = message.body["name"], message.body["info"]
        member = self.roster.members.get(name)
        if member is not None and info.get("pid") in (None, member.info.get("pid")):  # not one that took its place
            self.roster.gone(name, str(info.get("how", "died")), time.monotonic())

    def _done(self, member: RunMember, task: int, info: dict[str, Any], now_s: float) -> None:
        self.assignment.done(member, task, info, now_s)
        self.reply(member.peer, Kind.DONE, {"task": task, "info": {}})
        if self.assignment.leases is not None:
            if self.assignment.leases.complete:
                self.bookkeeping.close_window()
            self.reviewing.look(now_s)
            self.assignment.give_all(now_s)

    # Time

    def _turn(self, now_s: float) -> None:
        for member in self.roster.members.silent(now_s):
            self.roster.gone(member.name, f"was silent for {now_s - member.heard_s:.1f} s", now_s)
        if self.stopping and self.assignment.setup is None:
            self.end("stopped")
        if self.assignment.leases is not None:
            self.reviewing.turn(now_s)
        self.assignment.give_all(now_s)
        self.bookkeeping.turn(now_s)
        if now_s >= self._members_s:
            self._members_s = now_s + 2.0
            if self.assignment.setup is not None:
                self.roster.tell_members()
        if self.roster.members.of_role("worker"):
            self.last_member_s = now_s
        elif now_s - self.last_member_s > self.config.timeout_s:
            message = f"no worker for {self.config.timeout_s:g} s: the run is given up"
            self.record.write(Event(message, name="no_workers"))
            self.end("failed")
