"""Every kind of line is read back as it was written; lines of earlier runs and strange ones are survived."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from echelon.records import events, kinds
from echelon.records import file as file_module
from echelon.records.file import KINDS, Recorder, RecordReader, newest, read_records
from echelon.records.kinds import Record
from echelon.records.segments import RECORD_FILE

WRITTEN: list[Record] = [
    kinds.Start(
        world_size=2, hosts=("a", "a"), pids=(1, 2), layout={"dp": 2}, classes=("x",), steps_per_epoch=3, epochs=2,
        environment=kinds.Environment(python="3.12", gpus=("g",), command="echelon train digits"), launched_t=1.0,
    ),
    kinds.Steps(
        step=2, losses=(1.0, 0.5), seconds=0.5, epoch=1, correct=3.0, samples=8, lr=0.1, phase_names=("forward",),
        phases=((0.4,), (0.5,)), wire_bytes=10.0, wire_bytes_by_group={"linear": 10.0}, waits=((0.0, 0.1),) * 2,
        pause_names=("evaluation",), pauses=((0.0,), (1.0,)), gc_s=(0.0, 0.1), memory_bytes=(1.0, 2.0), density=0.5,
    ),
    kinds.Evaluation(2, 1, 0.4, {"top1": 0.9}, 0.1, 100),
    kinds.Checkpoint(2, 0.1, 0.2, 300, "checkpoints/2", "end"),
    kinds.Pause("evaluation", 0.1, 2),
    kinds.PipelineStep(2, (kinds.PipelineAction(0, 0, 1, "forward", 0.0, 0.1),), "1f1b", 2),
    kinds.SlowStep(2, 0.3, 0.1, ("forward",), ((0.3,), None), (0.0, None), ("evaluation",)),
    kinds.EntropyCoding(2, 100.0, 50.0, 1.0),
    kinds.Alternatives({"strategy.compression": "none"}, 0.1, (kinds.Alternative({"a": "b"}, 1, 2.0, 3.0, 0.1, 0.5),)),
    kinds.LinkTraffic("1gbit", (kinds.LinkCounters(1, 2, 3, 4, 5),), {"server0": kinds.LinkCounters(1)}),
    kinds.WorkerJoined("worker0", "a", 3, "0-1"),
    kinds.ProcessStarted("worker0", 3),
    kinds.WorkerWindow(2, {"worker0": 1.0}, 0, {"worker0": {"task": 0.1}}, {"worker0": 5.0}, {"worker0": 6.0}),
    kinds.ServerWindow("server0", 2, 7, 1, dropped={"version": 1}, staleness={"0": 3}, ready=True),
    kinds.End("completed", "", 5.0, 12.0),
    kinds.CommandEnd(5.5),
    kinds.CommandRefused(5.5, "why"),
    kinds.StudyStart(4.5),
    kinds.RunEnd("a-run", "failed", "why", 3.0, 3.5),
    kinds.FlowStepStart("ab12", {"settings": "cd"}, True),
    kinds.FlowStepEnd("ab12", "completed", "", 3.0, {"run": "ef"}),
    events.Event("said", name="settings"),
    *(event("said") for event in events.EVENTS),
]  # fmt: skip


def write(folder: Path, *lines: object) -> Path:
    (folder / RECORD_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_kind_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for record in WRITTEN:
        recorder.write(record)
    recorder.close()
    read = read_records(tmp_path)
    assert [dataclasses.replace(r, t=0.0) for r in read] == [dataclasses.replace(r, t=0.0) for r in WRITTEN]
    assert all(math.isfinite(r.t) for r in read)
    others = {kind for record in WRITTEN for kind in (record.kind,)} ^ {*KINDS, events.Event.kind}
    assert others == {kinds.Resources.kind}  # its unknown numbers are NaN, which equal nothing


def test_names_that_others_read_stay(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for record in WRITTEN[:2]:
        recorder.write(record)
    recorder.close()
    start, steps = (json.loads(line) for line in (tmp_path / RECORD_FILE).read_text().splitlines())
    assert (start["kind"], start["pids"], start["version"]) == ("start", [1, 2], kinds.VERSION)
    assert (steps["kind"], steps["step"], steps["losses"]) == ("steps", 2, [1.0, 0.5]) and steps["t"] > 1e9


def test_resources_are_null_where_unknown_and_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(kinds.Resources.of(3, [[38.5, *[math.nan] * 8], []]))
    recorder.close()
    assert json.loads((tmp_path / RECORD_FILE).read_text())["ranks"][1] == [None] * 9
    (resources,) = read_records(tmp_path, kinds.Resources)
    first, second = resources.by_rank()
    assert first.cpu_percent == 38.5 and math.isnan(first.rss_bytes) and math.isnan(second.cpu_percent)


def test_lines_of_before_newer_fields_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"t": 1.0, "kind": "start", "world_size": 2, "environment": {"command": ["echelon", "train", "a b"]}},
        {"t": 2.0, "kind": "steps", "step": 5, "losses": [1, None], "seconds": 1, "density": None},
        {"t": 3.0, "kind": "event", "name": "restarted", "message": "again"},
        {"t": 4.0, "kind": "event", "name": "of an earlier version", "detail": 3},
        {"t": 5.0, "kind": "of a later version"},
        {"t": 6.0, "kind": "end", "status": "completed", "of a later version": 1},
    )
    start, steps, restarted, event, end = read_records(tmp_path)
    assert isinstance(start, kinds.Start) and start.version == 0 and start.layout is None
    assert start.environment.command == "echelon train 'a b'"
    assert isinstance(steps, kinds.Steps) and steps.losses[0] == 1.0 and math.isnan(steps.losses[1])
    assert isinstance(restarted, events.Restarted) and restarted.message == "again"
    assert isinstance(event, events.Event) and event.name == "of an earlier version"
    assert isinstance(end, kinds.End) and end.status == "completed" and end.seconds is None


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "steps", "t": 1.0},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [], "seconds": 1},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [1], "seconds": math.inf},
        {"kind": "steps", "t": 1.0, "step": 5.5, "losses": [1], "seconds": 1},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [1], "seconds": 1, "phases": [[1]]},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": ["1"], "seconds": 1},
        {"kind": "event", "name": "refused"},
        {"kind": "event", "t": "soon", "name": "refused"},
        {"kind": "event", "t": 1.0},
        {"kind": "end", "t": math.nan},
        {"kind": "evaluation", "t": 1.0, "step": 3, "metrics": 4},
        {"kind": "resources", "t": 1.0, "names": ["cpu_percent"], "ranks": [[1, 2]]},
    ],
)
def test_a_line_that_is_not_what_its_kind_needs_is_counted_and_left_out(tmp_path: Path, line: object) -> None:
    reader = RecordReader(write(tmp_path, line, {"kind": "end", "t": 2.0}))
    assert [type(record) for record in reader.read()[1]] == [kinds.End]
    assert (reader.lines, reader.torn, reader.unreadable) == (2, 0, 1)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "pipeline", "step": 3, "actions": [[0, 0, 0, "forward", 0.0, 1.0], [0, 0], [0, 0, 0, "x", 0.0, None]]},
        {"kind": "alternatives", "now": {}, "rows": [{"settings": "torn"}, 3]},
    ],
)
def test_rows_that_are_not_what_they_should_be_are_counted_and_left_out(tmp_path: Path, line: object) -> None:
    reader = RecordReader(write(tmp_path, {"t": 1.0, **line}))  # type: ignore[dict-item]
    (record,) = reader.read()[1]
    assert (reader.unreadable, reader.unreadable_rows, record.rows_left_out) == (0, 2, 2)


def test_columns_that_do_not_fit_are_left_out_of_a_window(tmp_path: Path) -> None:
    line = {"t": 1.0, "kind": "steps", "step": 5, "losses": [1.0], "seconds": 1, "waits": [[1.0, 2.0]], "gc_s": [1.0]}
    (steps,) = read_records(write(tmp_path, line), kinds.Steps)
    assert steps.waits == () and steps.gc_s == ()


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"t": 1.0, "kind": "event", "name": "refused", "message": "no"},
          {"t": 1.0, "kind": "event", "name": "rank_failed", "message": "why", "rank": 1}, {"kind": "steps"},
          {"t": 2.0, "kind": "end", "status": "failed"})  # fmt: skip
    (failed,) = read_records(tmp_path, events.RankFailed)
    assert failed.rank == 1 and failed.message == "why"
    assert len(read_records(tmp_path, events.Event, kinds.End)) == 3


def test_the_newest_records_are_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(newest(tmp_path, kinds.Steps)) == []
    lines = [{"t": float(i), "kind": "steps", "step": i, "losses": [1.0], "seconds": 1} for i in range(1, 2000)]
    write(tmp_path, {"t": 0.0, "kind": "start"}, *lines, {"t": 9.0, "kind": "event", "name": "rank_failed", "rank": 3})
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write('{"t": 9.5, "kind": "steps", "st')
    monkeypatch.setattr(file_module, "_BLOCK_BYTES", 100)
    assert [window.step for window in newest(tmp_path, kinds.Steps)] == [*range(1999, 0, -1)]
    assert [type(r) for r in newest(tmp_path, events.RankFailed, kinds.Start)] == [events.RankFailed, kinds.Start]
    read: list[bytes] = []
    values = file_module._values
    monkeypatch.setattr(file_module, "_values", lambda line: read.append(line) or values(line))
    assert next(newest(tmp_path, kinds.Steps)).step == 1999 and len(read) == 2  # the torn line, the window


def test_text_that_only_python_reads_is_read(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text('{"t": 1.0, "kind": "end", "message": "\\ud800", "seconds": null}\n')
    (end,) = read_records(tmp_path, kinds.End)
    assert end.message == "\ud800"
