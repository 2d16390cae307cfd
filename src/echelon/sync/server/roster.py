"""Who takes part: the scheduler's side of joining, leaving and dying."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.sync.server.leases import FreeLeases
from echelon.sync.server.members import Member, Members, Serving
from echelon.sync.server.protocol import Kind, Malformed, Message

if TYPE_CHECKING:
    from echelon.sync.server.scheduler import Scheduler


class Roster:
    """The members of a run, and who serves which keys."""

    def __init__(self, scheduler: Scheduler, servers: int) -> None:
        self._scheduler = scheduler
        self.members = Members()
        self.serving = {i: Serving() for i in range(servers)}

    def join(self, peer: bytes, message: Message, now_s: float) -> None:
        name, role, info = message.sender, message.body["role"], message.body["info"]
        if role not in ("worker", "server"):
            raise Malformed("content")
        known = self.members.get(name)
        if known is not None and known.session != message.session:
            self.gone(name, "was replaced", now_s)
            known = None
        member = Member(name, role, peer, message.session, now_s, message.body["address"], info)
        self.members.add(member)
        self._scheduler.last_member_s = now_s
        if role == "server":
            self._server_joined(member)
        else:
            self._worker_joined(member, now_s)
        self.tell_members()

    def _worker_joined(self, member: Member, now_s: float) -> None:
        self._scheduler.reply(member.peer, Kind.WELCOME, {"info": {"set_up": self._scheduler.setup is not None}})
        if self._scheduler.setup is not None and self._scheduler.leases is not None:
            if self._scheduler.setup["fingerprint"] != member.info["fingerprint"]:
                self._scheduler.record.event(
                    "refused_worker", f"{member.name} has another model or data and was sent away"
                )
                self._scheduler.reply(member.peer, Kind.END, {"status": "refused"})
                self.members.remove(member.name)
                return
            self._scheduler.leases.join(member.name, member.info.get("held", []), now_s)

    def _server_joined(self, member: Member) -> None:
        info = member.info
        serving = self.serving[int(info["index"])]
        other = serving.primary != member.name and self.members.get(serving.primary) is not None
        if other or (info["standby"] and serving.primary != member.name):
            serving.standby, serving.standby_ready = member.name, bool(info["ready"])
            if not info["standby"]:  # its standby has taken over: now it is the standby
                self._scheduler.reply(member.peer, Kind.WELCOME, {"info": {"standby": True}})
        else:
            if self._scheduler.setup is not None and info["empty"] and not info["standby"]:
                words = f"what {member.name} held is lost: it has neither a snapshot nor a standby; resume the run"
                self._scheduler.record.event("server_lost", words, server=int(info["index"]))
                self._scheduler.status = "failed"
            serving.primary, serving.ready = member.name, bool(info["ready"])
            if serving.standby == member.name:
                serving.standby, serving.standby_ready = "", False
            review = self._scheduler.reviewing.queue.present
            if serving.ready and review is not None and int(info["index"]) in review.missing:
                self._scheduler.reply(member.peer, Kind.TAG, {"tag": review.tag, "full": review.full})
        if info.get("restored") and info["ready"]:
            self._scheduler.record.event(
                "server_restored", f"{member.name} took its snapshot and waits for what workers kept"
            )

    def tell_members(self) -> None:
        servers = {}
        for index, serving in self.serving.items():
            primary, standby = self.members.get(serving.primary), self.members.get(serving.standby)
            servers[str(index)] = {
                "address": primary.address if primary else "", "life": primary.session if primary else 0,
                "ready": serving.ready and primary is not None, "standby": standby.name if standby else "",
            }  # fmt: skip
        workers = [m.name for m in self.members.of_role("worker")]
        below = self._scheduler.leases.done_steps if isinstance(self._scheduler.leases, FreeLeases) else 0
        self._scheduler.tell_all(Kind.MEMBERS, {"servers": servers, "workers": workers, "watermark": below})

    def gone(self, name: str, how: str, now_s: float) -> None:
        member = self.members.remove(name)
        self._scheduler.asking.pop(name, None)
        if member is None:
            return
        if member.role == "worker":
            self._worker_gone(name, how)
        else:
            self._server_gone(name, how)
        self.tell_members()
        self._scheduler.give_all(now_s)

    def _worker_gone(self, name: str, how: str) -> None:
        back = self._scheduler.leases.leave(name) if self._scheduler.leases is not None else []
        review = self._scheduler.reviewing.queue.present
        if review is not None and review.worker == name:
            review.worker = ""
        if self._scheduler.setup_worker == name:
            self._scheduler.setup_worker = ""
        if how != "left":
            words = f"{name} {how}; {len(back)} of its leases go to others"
            self._scheduler.record.event("worker_gone", words, worker=name, leases=len(back))

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
            self._scheduler.record.event("server_gone", f"{name} {how}; {then}", server=index)
            if self._scheduler.reviewing.queue.present is not None:
                self._scheduler.reviewing.begin(self._scheduler.reviewing.queue.again(set(self.serving)))

    def lost(self, info: dict[str, Any]) -> None:
        """A server came back and says what it has: what was done and is not there is lost."""
        if not isinstance(self._scheduler.leases, FreeLeases):
            return
        runs = info["tasks"]
        held = {t for a, b in zip(runs[::2], runs[1::2], strict=True) for t in range(a, b + 1)}
        done = (
            set(range(int(info["watermark"]), self._scheduler.leases.done_steps)) | self._scheduler.leases.done_beyond
        )
        lost = sorted(done - held)
        words = f"{len(lost)} updates are lost: nobody could push them again" if lost else "nothing is lost"
        self._scheduler.record.event(
            "server_settled", f"server{info['index']} is back; {words}", lost=len(lost), tasks=lost[:100]
        )
