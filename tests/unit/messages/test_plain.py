"""Contents of messages go round through plain values; whatever does not fit is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest

from echelon.coordinator import messages as coordination
from echelon.coordinator.messages import (
    MovedBytes,
    ServerBeat,
    ServerEntry,
    SetupDone,
    TaskDone,
    TaskReport,
    TrainTask,
)
from echelon.launch import machines, meeting
from echelon.launch.rounds import Go, Ready, Round
from echelon.messages.framing import Content
from echelon.messages.plain import Malformed, from_plain, to_plain
from echelon.ps import messages as keys

DONE = TaskDone(7, False, TaskReport(math.inf, None, 8, 0.1, [0.5], 9, resources=[math.nan]), MovedBytes(1, 2, 3))
BEAT = ServerBeat(0, 2**60, "a", True, False, False, 3, 0, 1, 0.5, {"0": 3}, dropped={"fields": 2})
CONTENTS = [
    DONE, TrainTask(1, 1, 0, 1), BEAT,
    SetupDone(2, "f", 3, 0, [4, 6], about={"model": "cnn", "gpus": ["a"]}),
    coordination.Members([ServerEntry("a", 1, True, "", False)], ["worker0"], 5),
    machines.StateReport(meeting.Arrival("a", 2, {"--lr": "0.1"}), 3, Ready(1, "rank 0 died")),
    machines.StateOrder(1, 3, Go(Round(2, {"WORLD_SIZE": "4"}, 2))),
    keys.ReplicatedPush(1, "w", keys.PushGradient(0, 1, 2, 3, 4, 5, 6, 7, 8, 0.5, True), 1.0),
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda c: type(c).__name__)
def test_round_trip(content: Content) -> None:
    for plain in (msgpack.unpackb(msgpack.packb(to_plain(content))), json.loads(json.dumps(to_plain(content)))):
        assert repr(from_plain(type(content), plain)) == repr(content)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("task",), -1, "range"),
        (("task",), 2**63, "range"),
        (("task",), True, "type"),
        (("late",), 1, "type"),
        (("report",), [], "fields"),
        (("report", "lr"), math.nan, "range"),
        (("report", "loss"), 10**400, "range"),
        (("report", "phases"), {}, "type"),
        (("report", "phases"), ["x"], "type"),
        (("report", "entropy_coded"), {1: 1.0}, "type"),
        (("report", "more"), 1, "fields"),
        (("moved", "sent"), math.inf, "type"),
    ],
)
def test_what_does_not_fit_is_refused(path: tuple[str, ...], value: object, reason: str) -> None:
    plain: Any = to_plain(DONE)
    place = plain
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(Malformed) as caught:
        from_plain(TaskDone, plain)
    assert caught.value.reason == reason


def test_words_are_words() -> None:
    with pytest.raises(Malformed, match="type"):
        from_plain(coordination.JoinWorker, {"fingerprint": "model", "affinity": {}})


@pytest.mark.parametrize("state", [{}, {"Ready": {}, "Left": {}}, {"Go": {}}, {1: {}}, [], "Ready", {"Ready": None}])
def test_a_field_is_one_of_its_contents(state: object) -> None:
    report = {"arrival": {"machine": "a", "workers": 1, "settings": {}}, "number": 1, "state": state}
    with pytest.raises(Malformed):
        from_plain(machines.StateReport, report)


def test_trees_have_words_as_keys_and_an_end() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"x": deep}
    for tree in (deep, {"x": [{1: 2}]}, {b"x": 1}):
        with pytest.raises(Malformed, match="type"):
            from_plain(SetupDone, {**to_plain(SetupDone(2, "f", 3, 0, [])), "about": tree})


def test_each_content_has_a_number_of_its_own() -> None:
    contents = [
        value for module in (coordination, keys, meeting, machines) for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Content) and value is not Content
    ]  # fmt: skip
    assert len({content.kind for content in set(contents)}) == len(set(contents))
