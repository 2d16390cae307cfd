"""A table of values: what torch's stores promise, a question that is asked twice, and what makes no sense."""

from __future__ import annotations

import pytest

from echelon.messages.framing import Message
from echelon.messages.key_values import KeyRequest, KeyValueTable, KeyValueTables, Operation
from echelon.messages.plain import Malformed

RANK = ("rank", 1)


def _ask(
    table: KeyValueTable, number: int, operation: str, *keys: str, values: tuple[bytes, ...] = ()
) -> tuple[bool, bytes]:
    answer = table.handle(RANK, KeyRequest("t", number, operation, list(keys), list(values)))
    assert answer.number == number
    return answer.is_there, answer.value


def test_operations() -> None:
    table = KeyValueTable()
    assert _ask(table, 1, Operation.GET, "a") == (False, b"")
    assert _ask(table, 2, Operation.SET, "a", values=(b"1",)) == (True, b"")
    assert _ask(table, 3, Operation.GET, "a") == (True, b"1")
    assert _ask(table, 4, Operation.ADD, "a", values=(b"-5",)) == (True, b"-4")
    assert _ask(table, 5, Operation.APPEND, "a", values=(b"x",)) == (True, b"")
    assert _ask(table, 6, Operation.CHECK, "a", "b") == (False, b"")
    assert _ask(table, 7, Operation.COUNT) == (True, b"1")
    assert _ask(table, 8, Operation.DELETE, "a") == (True, b"")
    assert _ask(table, 9, Operation.DELETE, "a") == (False, b"")


def test_compare_and_set_as_torch_does() -> None:
    table = KeyValueTable()
    assert _ask(table, 1, Operation.COMPARE_SET, "a", values=(b"old", b"new"))[1] == b"old"
    assert _ask(table, 2, Operation.COMPARE_SET, "a", values=(b"", b"new"))[1] == b"new"
    assert _ask(table, 3, Operation.COMPARE_SET, "a", values=(b"other", b"x"))[1] == b"new"
    assert _ask(table, 4, Operation.COMPARE_SET, "a", values=(b"new", b"x"))[1] == b"x"


def test_a_question_that_is_asked_again_is_done_once() -> None:
    table = KeyValueTable()
    assert [_ask(table, 1, Operation.ADD, "a", values=(b"1",)) for _ in range(3)] == [(True, b"1")] * 3
    assert _ask(table, 2, Operation.ADD, "a", values=(b"1",)) == (True, b"2")
    assert table.handle(("rank", 2), KeyRequest("t", 2, Operation.ADD, ["a"], [b"1"])).value == b"3"


@pytest.mark.parametrize("request_", [
    KeyRequest("t", 1, "run", ["a"], [b"1"]),
    KeyRequest("t", 1, Operation.SET, ["a"]),
    KeyRequest("t", 1, Operation.GET, []),
    KeyRequest("t", 1, Operation.ADD, ["a"], [b"one"]),
])  # fmt: skip
def test_what_makes_no_sense_changes_nothing(request_: KeyRequest) -> None:
    table = KeyValueTable()
    with pytest.raises(Malformed):
        table.handle(RANK, request_)
    assert _ask(table, 2, Operation.COUNT) == (True, b"0")


def test_an_earlier_starts_table_is_not_answered() -> None:
    tables, request = KeyValueTables(), KeyRequest("first", 1, Operation.SET, ["a"], [b"1"])
    message = Message(request, "rank", 1, 1)
    with pytest.raises(Malformed, match="table"):
        tables.handle(message, request)
    tables.open("first")
    assert tables.handle(message, request).is_there
    tables.open("second")
    with pytest.raises(Malformed, match="table"):
        tables.handle(message, request)
