"""Who takes part: the scheduler's side of joining, leaving and dying."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.coordinator.leases import FreeLeases
from echelon.coordinator.members import Members, RunMember, Serving
from echelon.messages.protocol import Kind, Malformed, Message
from echelon.records.events import Event, ServerGone, ServerLost, WorkerGone
from echelon.records.kinds import WorkerJoined

if TYPE_CHECKING:
    from echelon.coordinator.scheduler import Scheduler


class Membership:
    """The members of a run, and who serves which keys."""

    def __init__(self, scheduler: Scheduler, servers: int) -> None:
        self._scheduler = scheduler
        self.members = Members()
        self.serving = {i: Serving() for i in range(servers)}

    def join(self, peer: bytes, message: Message, now_s: float) -> None:
        """Take a process in; one of the same name in another life is gone."""
        name, role, info = message.sender, message.body["role"], message.body["info"]
        if role not in ("worker", "server"):
            raise Malformed("content")
        known = self.members.get(name)
        if known is not None and known.session != message.session:
            self.gone(name, "was replaced", now_s)
            known = None
        if known is None and role == "worker":
            joined = WorkerJoined(name, info.get("host"), info.get("pid"), info.get("affinity"))
            self._scheduler.record.write(joined)
        member = RunMember(name, role, peer, message.session, now_s, message.body["address"], info)
        self.members.add(member)
        self._scheduler.last_member_s = now_s
        if role == "server":
            self._server_joined(member)
        else:
            self._worker_joined(member, now_s)
        self.tell_members()

    def _worker_joined(self, member: RunMember, now_s: float) -> None:
        assignment = self._scheduler.assignment
        self._scheduler.reply(member.peer, Kind.WELCOME, {"info": {"set_up": assignment.setup is not None}})
        if assignment.setup is None or assignment.leases is None:
            return
        if assignment.setup["fingerprint"] != member.info["fingerprint"]:
            words = f"{member.name} has another model or data and was sent away"
            self._scheduler.record.write(Event(words, name="refused_worker"))
            self._scheduler.reply(member.peer, Kind.END, {"status": "refused"})
            self.members.remove(member.name)
            return
        assignment.leases.join(member.name, member.info.get("held", []), now_s)

    def _server_joined(self, member: RunMember) -> None:
        info, index = member.info, int(member.info["index"])
        serving = self.serving[index]
        other = serving.primary != member.name and self.members.get(serving.primary) is not None
        if other or (info["standby"] and serving.primary != member.name):
            serving.standby, serving.standby_ready = member.name, bool(info["ready"])
            if not info["standby"]:  # its standby has taken over: now it is the standby
                self._scheduler.reply(member.peer, Kind.WELCOME, {"info": {"standby": True}})
        else:
            if info["empty"] and not info["standby"]:
                self._came_back_empty(member.name, index)
            serving.primary, serving.ready = member.name, bool(info["ready"])
            if serving.standby == member.name:
                serving.standby, serving.standby_ready = "", False
            self._scheduler.reviewing.tell_server(index)
        if info.get("restored") and info["ready"]:
            words = f"{member.name} took its snapshot and waits for what workers kept"
            self._scheduler.record.write(Event(words, name="server_restored"))

    def _came_back_empty(self, name: str, index: int) -> None:
        if self._scheduler.assignment.setup is None or self._scheduler.assignment.set_up_again():
            return
        words = f"what {name} held is lost: it has neither a snapshot nor a standby; resume the run"
        self._scheduler.record.write(ServerLost(words, index))
        self._scheduler.end("failed")

    def tell_members(self) -> None:
        """Tell all who serves what, where."""
        assignment, servers = self._scheduler.assignment, {}
        for index, serving in self.serving.items():
            primary, standby = self.members.get(serving.primary), self.members.get(serving.standby)
            servers[str(index)] = {
                "address": primary.address if primary else "", "life": primary.session if primary else 0,
                "ready": serving.ready and primary is not None, "standby": standby.name if standby else "",
                "empty": assignment.setup is None and primary is not None and bool(primary.info["empty"]),
            }  # fmt: skip
        workers = [m.name for m in self.members.of_role("worker")]
        below = assignment.leases.done_steps if isinstance(assignment.leases, FreeLeases) else 0
        self._scheduler.tell_all(Kind.MEMBERS, {"servers": servers, "workers": workers, "watermark": below})

    def gone(self, name: str, how: str, now_s: float) -> None:
        """Let a member go that left, died or is silent; its work goes to others."""
        member = self.members.remove(name)
        self._scheduler.assignment.asking.pop(name, None)
        if member is None:
            return
        if member.role == "worker":
            self._worker_gone(name, how)
        else:
            self._server_gone(name, how)
        self.tell_members()
        self._scheduler.assignment.give_all(now_s)

    def _worker_gone(self, name: str, how: str) -> None:
        back = self._scheduler.assignment.worker_gone(name)
        self._scheduler.reviewing.worker_gone(name)
        if how != "left":
            words = f"{name} {how}; {back} of its leases go to others"
            self._scheduler.record.write(WorkerGone(words, name, back))

    def _server_gone(self, name: str, how: str) -> None:
        for index, serving in self.serving.items():
            if serving.standby == name:
                serving.standby, serving.standby_ready = "", False
            if serving.primary != name:
                continue
            standby = self.members.get(serving.standby)
            then = "waits for its next life"
            if standby is not None and serving.standby_ready:
                self._scheduler.reply(standby.peer, Kind.PROMOTE, {})
                serving.primary, serving.standby, serving.ready = standby.name, "", False
                serving.standby_ready = False
                then = f"{standby.name} takes over"
            else:
                serving.primary, serving.ready = "", False
            self._scheduler.record.write(ServerGone(f"{name} {how}; {then}", index))
            self._scheduler.reviewing.again()

    def lost(self, info: dict[str, Any]) -> None:
        """A server came back: it says what it has, and then what it had to do without."""
        if "lacking" in info:
            self._scheduler.assignment.tell_lost(int(info["index"]), int(info["lacking"]), [])
        else:
            self._scheduler.assignment.settled(info)

    def catch_up(self, index: int, step: int) -> None:
        """Let a server complete every version before a step with what it has."""
        server = self.members.get(self.serving[index].primary)
        if server is not None:
            self._scheduler.reply(server.peer, Kind.CATCH_UP, {"step": step})
