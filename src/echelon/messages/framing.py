"""Messages: a msgpack header, then raw frames. What does not fit is dropped, never interpreted.

A header is `[version, run, kind, sender, session, sequence, body]`. `run` names the run; `session` is drawn when a
process starts; `sequence` rises within a session, so that a repeated message is known as such. `body` holds the fields
of the content that `kind` numbers. Contents whose header is followed by frames say how many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import msgpack
import zmq

from echelon.messages.plain import Malformed, from_plain, to_plain

VERSION = 2
MAX_HEADER_BYTES = 256 * 1024
MAX_FRAMES = 4096
ANY_FRAMES = (0, MAX_FRAMES)
_MAX_INT = 2**62
_NAME_BYTES = 64

ContentT = TypeVar("ContentT", bound="Content")


@dataclass(frozen=True, slots=True)
class Content:
    """What a message says. Subclasses (see `content`) have fields as `plain` reads them.

    Attributes:
        kind: a number of its own.
        frames: how few and how many frames follow the header.
    """

    kind: ClassVar[int]
    frames: ClassVar[tuple[int, int]] = (0, 0)


@dataclass_transform(frozen_default=True)
def content(kind: int, frames: tuple[int, int] = (0, 0)) -> Callable[[type[ContentT]], type[ContentT]]:
    """Make a class of fields a kind of content: a frozen dataclass with a number of its own.

    Args:
        frames: how few and how many frames follow the header.
    """

    def numbered(cls: type[ContentT]) -> type[ContentT]:
        """Return the class as a content."""
        cls.kind, cls.frames = kind, frames
        return dataclass(frozen=True, slots=True)(cls)

    return numbered


Vocabulary = Mapping[int, type[Content]]
"""The contents that one end understands, by number."""


def vocabulary(*contents: type[Content]) -> Vocabulary:
    """Return contents by their numbers.

    Raises:
        ValueError: two have the same number.
    """
    by_kind = {content.kind: content for content in contents}
    if len(by_kind) != len(contents):
        raise ValueError("two contents have one number")
    return by_kind


class Message(NamedTuple):
    """One message. `frames` are what follows the header, not copied. A tuple: made thousands of times a second."""

    content: Content
    sender: str
    session: int
    sequence: int
    frames: Sequence[Any] = ()


def encode_header(run_id: bytes, message: Message) -> bytes:
    """Write a message's header."""
    content = message.content
    return msgpack.packb(
        [VERSION, run_id, content.kind, message.sender, message.session, message.sequence, to_plain(content)]
    )


def decode(run_id: bytes, frames: Sequence[zmq.Frame], known: Vocabulary) -> Message:
    """Read a message from its frames, header first.

    Raises:
        Malformed: it is not of this version or run, or none of the contents that are known.
    """
    if not frames or len(frames) > MAX_FRAMES:
        raise Malformed("frames")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise Malformed("oversized")
    kind, sender, session, sequence, body = _header(run_id, frames[0].bytes)
    cls = known.get(kind)
    if cls is None:
        raise Malformed("kind")
    if not cls.frames[0] <= len(frames) - 1 <= cls.frames[1]:
        raise Malformed("frames")
    return Message(from_plain(cls, body), sender, session, sequence, [frame.buffer for frame in frames[1:]])


def _header(run_id: bytes, raw: bytes) -> tuple[int, str, int, int, Any]:
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
    if type(kind) is not int:
        raise Malformed("kind")
    if not isinstance(sender, str) or not 0 < len(sender) <= _NAME_BYTES:
        raise Malformed("sender")
    for number in (session, sequence):
        if type(number) is not int:
            raise Malformed("type")
        if not 0 <= number < _MAX_INT:
            raise Malformed("range")
    return kind, sender, session, sequence, body


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
