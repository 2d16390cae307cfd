"""A record that grows, tears, begins anew: what is known of a run at each moment."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
from math import isnan
from pathlib import Path

import pytest

from echelon.records.file import Recorder, RecordReader, read_records
from echelon.records.going import is_held
from echelon.records.kinds import Resources, Start, Steps
from echelon.reporting.live.snapshot import QUIET_S, look, to_json
from echelon.reporting.live.state import Curve, LiveRun
from echelon.reporting.live.terminal import plain_text
from tests.unit.reporting.live.runs import USED, append, make_live_run, resources, start, steps


def watched(folder: Path) -> LiveRun:
    run = LiveRun(folder)
    run.refresh()
    return run


def test_a_growing_record_is_read_once_and_to_its_last_whole_line(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path)
    assert reader.read() == (False, [])
    append(tmp_path, start(), '{"kind": "st')
    assert [type(r) for r in reader.read()[1]] == [Start]
    append(tmp_path, 'eps", "t": 2.0, "step": 1, "losses": [1.5], "seconds": 0.1}\n', '{"torn\n', "[1]\n", "\n")
    assert reader.read() == (False, [Steps(1, (1.5,), 0.1, t=2.0)])
    assert reader.torn == 2
    assert reader.read() == (False, [])


def test_another_record_in_its_place_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    append(run, start(), steps(50, 101.0))
    live = watched(run)
    assert live.state.step == 50
    (run / "record.jsonl").unlink()  # its file number may be used again at once
    append(run, start(t=101.5), *(steps(5, 102.0 + i) for i in range(9)))
    assert live.refresh() and live.state.step == 5 and len(live.state.loss_curve.points()) == 9
    (run / "record.jsonl").unlink()
    assert live.refresh() and not live.state.start


def test_a_long_curve_stays_short_and_keeps_its_mean() -> None:
    curve = Curve(limit=100)
    for x in range(1, 10_001):
        curve.add(x, [float(x), 1.0])
    points = curve.points()
    assert 50 <= len(points) <= 101 and points[-1][0] == 10_000
    assert sum(y for _, y, _ in points) / len(points) == pytest.approx(5000, rel=0.02)
    assert [x for x, *_ in points] == sorted(x for x, *_ in points)
    curve.forget_after(500)
    assert curve.points()[-1][0] <= 500
    curve.add(501, [1.0])  # fewer ranks than before
    assert curve.points() == [[501, 1.0]]


def test_a_run_that_goes_is_summed_up_over_its_last_seconds(tmp_path: Path) -> None:
    append(tmp_path, start(), *(steps(5 * i, 100.0 + i, loss=1.0 / i) for i in range(1, 17)))
    append(tmp_path, {"t": 116.5, "kind": "evaluation", "step": 80, "metrics": {"top1": 0.9}})
    s = look(watched(tmp_path), now=117.0)
    assert (s.status, s.over, s.epoch, s.epochs, s.step, s.total_steps) == ("running", False, 8, 10, 80, 100)
    assert s.samples_per_s == pytest.approx(320) and s.wire_bytes_per_step == 1000 and s.step_s == pytest.approx(0.1)
    assert s.eta_s == pytest.approx(20 * 1.0 / 5)  # a second for each five steps
    assert s.communication == pytest.approx(0.3) and s.ranks[1].phases["communicate"] == pytest.approx(0.4)
    assert s.train_score == pytest.approx(0.5) and s.value == 0.9
    assert [r.host for r in s.ranks] == ["a", "a"] and [r.memory_bytes for r in s.ranks] == [1e8, 2e8]


def test_warm_up_and_earlier_epochs_are_not_what_training_is_now(tmp_path: Path) -> None:
    append(tmp_path, start(), {**steps(5, 104.0, loss=9.0), "seconds": 4.0}, steps(15, 105.0, loss=2.0))
    s = look(watched(tmp_path), now=105.5)
    assert s.loss == 2.0 and s.step_s == pytest.approx(0.1)


def evaluation(step: int, top1: float) -> dict[str, object]:
    return {"t": 102.0, "kind": "evaluation", "step": step, "metrics": {"top1": top1}}


def test_what_a_restart_undoes_is_forgotten(tmp_path: Path) -> None:
    append(tmp_path, start(), steps(10, 101.0), steps(20, 102.0, loss=9.0))
    append(tmp_path, {"t": 103.0, "kind": "event", "name": "worker_died", "message": "rank 1 died"})
    append(tmp_path, evaluation(10, 0.5), evaluation(20, 0.9))
    append(tmp_path, start(10, 104.0), steps(15, 105.0))
    s = look(watched(tmp_path), now=106.0)
    assert s.step == 15 and s.attempts == 2 and s.loss == 1.0 and (s.value, s.best) == (0.5, 0.5)
    assert [x for x, _ in to_json(watched(tmp_path), s)["curves"]["loss"]] == [10, 15]
    assert [(e.name, e.bad) for e in s.events] == [("start", False), ("worker_died", True), ("start", False)]


def test_strange_records_are_counted_and_left_out(tmp_path: Path) -> None:
    append(tmp_path, start(), {"t": 1, "kind": "steps"}, {"t": "x", "kind": "steps"}, {"kind": "event"})
    append(tmp_path, {"t": 2.0, "kind": "resources", "names": ["cpu_percent"], "ranks": [[1, 2]]}, "{]\n")
    append(tmp_path, {"t": 3.0, "kind": "evaluation", "metrics": None}, steps(5, 101.0))
    append(tmp_path, {"t": 102.0, "kind": "something new"}, {**steps(10, 103.0), "losses": [None, float("nan")]})
    s = look(watched(tmp_path), now=104.0)
    assert s.torn == 6 and s.step == 10
    assert "NaN" not in json.dumps(to_json(watched(tmp_path), s), allow_nan=False)


def test_max_steps_end_a_run_before_its_epochs_do(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training:\n  max_steps: 40\n")
    append(tmp_path, start(), steps(20, 101.0))
    assert look(watched(tmp_path), now=102.0).done == 0.5


def test_how_a_run_stands(tmp_path: Path) -> None:
    def status(now: float) -> tuple[str, bool]:
        s = look(watched(tmp_path), now)
        return s.status, s.over

    host = socket.gethostname()
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps({"launched_t": 99.0}))
    assert status(100.0) == ("starting", False)
    append(tmp_path, start(hosts=[host, host]), steps(10, 101.0))
    assert status(102.0) == ("running", False)
    assert status(160.0) == ("quiet", False)  # started by torchrun: nobody holds it
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert is_held(tmp_path) and status(160.0) == ("quiet", False)
    assert is_held(tmp_path) is False
    assert status(101.5 + QUIET_S) == ("gone", True)
    launch.write_text(json.dumps({"launched_t": 99.0, "ended": True}))
    assert status(102.0) == ("ended", True)
    append(tmp_path, {"t": 102.0, "kind": "end", "status": "stopped"})
    assert status(103.0) == ("stopped", True)
    launch.write_text(json.dumps({"launched_t": 104.0}))
    assert status(105.0) == ("starting", False)  # resumed


def test_a_run_that_another_machine_starts_is_not_gone(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    for by, status in (("node17:42", "starting"), (f"{socket.gethostname()}:42", "gone")):
        (tmp_path / "launch.json").write_text(json.dumps({"launched_t": 99.0, "by": by}))
        assert look(watched(tmp_path), 100.0 + QUIET_S).status == status


def test_names_that_are_no_utf8_are_shown_as_well_as_they_can_be(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    append(tmp_path, start(), {"t": 101.0, "kind": "event", "name": "bad_image", "message": name})
    run = watched(tmp_path)
    assert json.dumps(to_json(run, look(run, 102.0)), ensure_ascii=False).encode().count(b"caf?.jpg") == 1
    assert plain_text(name) == "caf?.jpg"


def test_a_run_whose_launcher_and_ranks_were_killed_is_gone_at_once(tmp_path: Path) -> None:
    def status(now: float) -> tuple[str, bool]:
        s = look(watched(tmp_path), now)
        return s.status, s.over

    host, launch = socket.gethostname(), tmp_path / "launch.json"
    launch.write_text(json.dumps({"launched_t": 99.0}))
    (tmp_path / ".lock").touch()
    dead = [subprocess.Popen(["true"]) for _ in range(2)]
    for process in dead:
        process.wait(60)
    pids = [process.pid for process in dead]
    append(tmp_path, start(hosts=[host, host], pids=[pids[0], os.getpid()]), steps(10, 101.0))
    assert status(102.0) == ("running", False)  # one rank lives
    append(tmp_path, start(step=10, t=103.0, hosts=[host, host], pids=pids), steps(20, 104.0))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(105.0) == ("running", False)  # its launcher will start them again
    assert status(105.0) == ("gone", True)
    launch.write_text(json.dumps({"launched_t": 106.0}))
    assert status(107.0) == ("starting", False)  # resumed


def test_resources_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    record = Recorder(tmp_path)
    record.write(Resources.of(3, [USED, []]))
    record.close()
    ranks = read_records(tmp_path, Resources)[0].by_rank()
    assert ranks[0].cpu_percent == 38.5 and ranks[0].gpu_percent != ranks[0].gpu_percent
    assert ranks[1].rss_bytes != ranks[1].rss_bytes
    torn = {"kind": "resources", "t": 1.0, "names": ["cpu_percent", "of tomorrow"], "ranks": [[1.0, 2.0]]}
    append(tmp_path, torn, {"kind": "resources"})
    _, newer = read_records(tmp_path, Resources)
    assert newer.by_rank()[0].cpu_percent == 1.0


def test_a_rank_that_sampled_nothing_new_keeps_what_it_had(tmp_path: Path) -> None:
    append(tmp_path, start(), resources(101.0, 1, USED, USED))
    append(tmp_path, resources(103.0, 2, [99.0, *USED[1:]], []))
    s = look(watched(tmp_path), now=104.0)
    assert [r.resources.cpu_percent for r in s.ranks] == [99.0, 38.5]
    assert isnan(s.ranks[0].resources.gpu_percent)


def test_a_whole_recorded_run(tmp_path: Path) -> None:
    s = look(watched(make_live_run(tmp_path / "run")))
    assert s.status == "completed" and s.over and s.done == 1.0 and s.torn == 0 and s.value is not None
