"""Messages: a msgpack header, then raw frames. What does not fit its schema is dropped, never interpreted.

A header is `[version, run, kind, sender, session, sequence, body]`. `run` names the run; `session` is drawn when a
process starts; `sequence` rises within a session, so that a repeated message is known as such. `body` holds the fields
of the message's kind. Kinds whose header is followed by frames say how many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import zmq

VERSION = 1
MAX_HEADER_BYTES = 256 * 1024
MAX_FRAMES = 4096
_MAX_INT = 2**62
_NAME_BYTES = 64


class Kind(IntEnum):
    """What a message is. Below 20: to or from a server. From 20: to or from the scheduler."""

    SETUP = 1  # worker to server: the keys that it will hold
    PUT = 2  # the state of one key, value only or whole
    PUT_DONE = 3  # server: the key was taken
    PUSH = 4  # a gradient of one key; `pull`: the key's next value is wanted as well
    ACK = 5  # server: what became of a push
    PULL = 6  # wants a key's value of a version or newer
    VALUE = 7  # server: a key's value, and what became of the peer's pushes: number, fate, number, fate, ...
    DURABLE = 8  # server: pushes up to a number survive its death
    STATE = 9  # wants a key's whole state, or that of a tag
    STATE_OF = 10  # server: a key's whole state
    REPUSHED = 11  # worker: after a server's restart, everything not durable was pushed again
    OP = 12  # primary to standby: one operation
    OP_DONE = 13  # standby: operations up to a number are held
    ATTACH = 14  # standby to primary: send me your state, then every operation
    BUFFERS = 15  # worker to server: statistics that are no parameters
    JOIN = 20
    WELCOME = 21
    BEAT = 22  # any role to the scheduler: alive, with its numbers
    ASK = 23  # worker: give me a task
    TASK = 24
    DONE = 25  # worker: a task's gradients are acknowledged
    RESULT = 26  # worker: what a task other than training gave
    MEMBERS = 27  # scheduler: who serves what, where
    TAG = 28  # scheduler to server: keep a copy of now
    TAGGED = 29
    UNTAG = 30
    PROMOTE = 31  # scheduler to standby: you are the primary
    CATCH_UP = 32  # scheduler to server: complete every version before a step; what nobody has is lost
    DIED = 33  # launcher to scheduler: a process of mine ended
    STOP = 34  # launcher to scheduler: end the run early
    END = 35  # scheduler: the run is over
    LEAVE = 36  # worker: I go; the bytes that it has not told yet
    LOST = 37  # server: tasks that its restart lost


@dataclass(frozen=True)
class Schema:
    """Fields of a body by name, and how many frames may follow the header."""

    fields: Mapping[str, type[Any]] = field(default_factory=dict)
    frames: tuple[int, int] = (0, 0)


_ANY = (0, MAX_FRAMES)
SCHEMAS: dict[Kind, Schema] = {
    Kind.SETUP: Schema({}, (1, 1)),  # the table of keys
    Kind.PUT: Schema({"key": int, "meta": bytes}, _ANY),
    Kind.PUT_DONE: Schema({"key": int}),
    Kind.PUSH: Schema(
        {"key": int, "task": int, "step": int, "share": int, "shares": int, "samples": int, "batch": int,
         "base": int, "number": int, "lr": float, "pull": bool}, (1, MAX_FRAMES)),
    Kind.ACK: Schema({"key": int, "task": int, "number": int, "fate": int, "version": int, "life": int}),
    Kind.PULL: Schema({"key": int, "version": int, "exact": bool, "full": bool, "tag": int}),
    Kind.VALUE: Schema({"key": int, "version": int, "delta": bool, "tag": int, "life": int, "acks": list},
                       (1, MAX_FRAMES)),
    Kind.DURABLE: Schema({"number": int, "life": int}),
    Kind.STATE: Schema({"key": int, "tag": int}),
    Kind.STATE_OF: Schema({"key": int, "tag": int, "meta": bytes}, _ANY),
    Kind.REPUSHED: Schema({"life": int}),
    Kind.OP: Schema({"number": int, "op": bytes}, _ANY),
    Kind.OP_DONE: Schema({"number": int}),
    Kind.ATTACH: Schema(),
    Kind.BUFFERS: Schema({"task": int}, (1, 1)),
    Kind.JOIN: Schema({"role": str, "address": str, "info": dict}),
    Kind.WELCOME: Schema({"info": dict}),
    Kind.BEAT: Schema({"info": dict}),
    Kind.ASK: Schema({"held": list}),
    Kind.TASK: Schema({"info": dict}),
    Kind.DONE: Schema({"task": int, "info": dict}),
    Kind.RESULT: Schema({"task": int, "info": dict}),
    Kind.MEMBERS: Schema({"servers": dict, "workers": list, "watermark": int}),
    Kind.TAG: Schema({"tag": int, "full": bool}),
    Kind.TAGGED: Schema({"tag": int, "info": dict}),
    Kind.UNTAG: Schema({"tag": int}),
    Kind.PROMOTE: Schema(),
    Kind.CATCH_UP: Schema({"step": int}),
    Kind.DIED: Schema({"name": str, "info": dict}),
    Kind.STOP: Schema({"reason": str}),
    Kind.END: Schema({"status": str}),
    Kind.LEAVE: Schema({"bytes": dict}),
    Kind.LOST: Schema({"info": dict}),
}  # fmt: skip


_KINDS = {int(kind): kind for kind in Kind}
_NUMBERS: dict[str, type[Any]] = {"session": int, "sequence": int}
UNSOUND = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What the use of fields raises that have their schema's types and still make no sense, such as an infinite count."""


class Malformed(ValueError):
    """A message that does not fit; `reason` is one word for the counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Message(NamedTuple):
    """One message. `frames` are what follows the header, not copied. A tuple: made thousands of times a second."""

    kind: Kind
    sender: str
    session: int
    sequence: int
    body: dict[str, Any]
    frames: Sequence[Any] = ()


def encode_header(run_id: bytes, message: Message) -> bytes:
    """Write a message's header."""
    return msgpack.packb(
        [VERSION, run_id, int(message.kind), message.sender, message.session, message.sequence, message.body]
    )


def decode(run_id: bytes, frames: Sequence[zmq.Frame]) -> Message:
    """Read a message from its frames, header first.

    Raises:
        Malformed: it is not of this version, run or schema.
    """
    if not frames or len(frames) > MAX_FRAMES:
        raise Malformed("frames")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise Malformed("oversized")
    kind, sender, session, sequence, body = _header(run_id, frames[0].bytes)
    schema = SCHEMAS[kind]
    if not schema.frames[0] <= len(frames) - 1 <= schema.frames[1]:
        raise Malformed("frames")
    if type(body) is not dict or body.keys() != schema.fields.keys():
        raise Malformed("fields")
    _check_fields(body, schema.fields)
    return Message(kind, sender, session, sequence, body, [frame.buffer for frame in frames[1:]])


def _header(run_id: bytes, raw: bytes) -> tuple[Kind, str, int, int, Any]:
    try:
        header = msgpack.unpackb(raw, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):  # TypeError: a list as a map's key
        raise Malformed("header") from None
    if not isinstance(header, list) or len(header) != 7:
        raise Malformed("header")
    version, run, kind, sender, session, sequence, body = header
    if version != VERSION or isinstance(version, bool):
        raise Malformed("version")
    if run != run_id:
        raise Malformed("run")
    if type(kind) is not int or kind not in _KINDS:
        raise Malformed("kind")
    if not isinstance(sender, str) or not 0 < len(sender) <= _NAME_BYTES:
        raise Malformed("sender")
    _check_fields({"session": session, "sequence": sequence}, _NUMBERS)
    return _KINDS[kind], sender, session, sequence, body


def _check_fields(body: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    for name, wanted in fields.items():
        value = body[name]
        if type(value) is not wanted:
            raise Malformed("type")
        if wanted is int:
            if not 0 <= value < _MAX_INT:
                raise Malformed("range")
        elif wanted is float:
            if not math.isfinite(value):
                raise Malformed("range")
        elif wanted in (dict, list) and not _has_names(value):
            raise Malformed("type")


def _has_names(value: Any) -> bool:
    """Whether all keys of nested maps are words, as records and journals can hold them."""
    if isinstance(value, dict):
        return all(type(name) is str and _has_names(inner) for name, inner in value.items())
    return not isinstance(value, list) or all(map(_has_names, value))


def pull_behind(push: Mapping[str, Any], aggregates: bool) -> dict[str, Any]:
    """Return the body of the pull that a push with `pull` stands for: one message less for each key.

    Where gradients are aggregated it is exactly the version that the push is part of, else whatever is newest.
    """
    version = push["step"] + 1 if aggregates else 0
    return {"key": push["key"], "version": version, "exact": aggregates, "full": False, "tag": 0}


class ReplayGuard:
    """Knows, per sender and session, the last sequence number: what does not rise is a repetition.

    Only so many sessions are remembered; the one silent for longest is forgotten first.
    """

    def __init__(self, most: int = 1024) -> None:
        self._last: dict[tuple[str, int], int] = {}
        self._most = most

    def admit(self, message: Message) -> None:
        """Take note of a message.

        Raises:
            Malformed: its number does not rise.
        """
        peer = (message.sender, message.session)
        last = self._last.pop(peer, -1)
        self._last[peer] = max(last, message.sequence)
        if message.sequence <= last:
            raise Malformed("replayed")
        if len(self._last) > self._most:
            del self._last[next(iter(self._last))]
