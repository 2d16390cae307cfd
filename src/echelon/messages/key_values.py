"""A table of values by key, which the processes of a run share by messages: where the ranks of a group find each other.

Values are bytes, which nothing here looks into. A question that is asked again, because an answer was lost, is answered
as it was, and done once.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from echelon.messages.framing import Content, Message, content
from echelon.messages.plain import Malformed

_MOST_ASKERS = 65_536


class Operation(StrEnum):
    """What is asked of a table."""

    GET = "get"
    SET = "set"
    ADD = "add"
    APPEND = "append"
    COMPARE_SET = "compare_set"
    DELETE = "delete"
    CHECK = "check"
    COUNT = "count"


@content(66)
class KeyRequest(Content):
    """A question to a table; `number` rises with each question of a process."""

    table: str
    number: int
    operation: str
    keys: list[str] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)


@content(67)
class KeyAnswer(Content):
    """What came of question `number`: whether the keys were there, and a value."""

    number: int
    is_there: bool
    value: bytes = b""


class KeyValueTable:
    """Values by key. Pure state: `handle(asker, request) -> answer`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._answered: dict[tuple[str, int], KeyAnswer] = {}

    def handle(self, asker: tuple[str, int], request: KeyRequest) -> KeyAnswer:
        """Do what is asked, once for each number of an asker, which is a sender with its session.

        Raises:
            Malformed: the request makes no sense.
        """
        answer = self._answered.get(asker)
        if answer is None or answer.number != request.number:
            answer = self._do(request)
            if len(self._answered) >= _MOST_ASKERS:
                raise Malformed("askers")
            self._answered[asker] = answer
        return answer

    def _do(self, request: KeyRequest) -> KeyAnswer:
        number, values = request.number, self._values
        match request.operation, request.keys, request.values:
            case Operation.GET, [key], []:
                return KeyAnswer(number, key in values, values.get(key, b""))
            case Operation.SET, [key], [value]:
                values[key] = value
                return KeyAnswer(number, is_there=True)
            case Operation.ADD, [key], [value]:
                values[key] = b"%d" % (_number(values.get(key, b"0")) + _number(value))
                return KeyAnswer(number, is_there=True, value=values[key])
            case Operation.APPEND, [key], [value]:
                values[key] = values.get(key, b"") + value
                return KeyAnswer(number, is_there=True)
            case Operation.COMPARE_SET, [key], [expected, desired]:
                if values.get(key, b"") == expected:
                    values[key] = desired
                return KeyAnswer(number, key in values, values.get(key, expected))
            case Operation.DELETE, [key], []:
                return KeyAnswer(number, values.pop(key, None) is not None)
            case Operation.CHECK, keys, []:
                return KeyAnswer(number, all(key in values for key in keys))
            case Operation.COUNT, [], []:
                return KeyAnswer(number, is_there=True, value=b"%d" % len(values))
        raise Malformed("operation")


class KeyValueTables:
    """The newest table: what is asked of an earlier one is not answered."""

    def __init__(self) -> None:
        self._newest = ("", KeyValueTable())

    def open(self, name: str) -> None:
        """Begin an empty table."""
        self._newest = (name, KeyValueTable())

    def handle(self, message: Message, request: KeyRequest) -> KeyAnswer:
        """Return the answer to a message's request.

        Raises:
            Malformed: it is about another table, or makes no sense.
        """
        name, table = self._newest
        if not name or request.table != name:
            raise Malformed("table")
        return table.handle((message.sender, message.session), request)


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise Malformed("number") from None
