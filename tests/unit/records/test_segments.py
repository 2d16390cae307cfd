"""A record that is sealed, thinned and merged: nothing is lost, nothing comes twice, whoever reads it and when."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from echelon.records.compact import compact
from echelon.records.file import Detail, Recorder, RecordReader, newest, read_records
from echelon.records.kinds import Checkpoint, Record, Resources, SlowStep, Start, Steps
from echelon.records.merged import MergedSteps, _loss_means
from echelon.records.segments import FAN, RECORD_FILE, Segment, all_segments, level_for, segments_of
from echelon.reporting.live.state import LiveRun

SEGMENT_BYTES = 20_000
PHASES = ("forward", "communicate")


def window(number: int) -> Steps:
    """Window after window of five steps of two ranks."""
    return Steps(
        step=5 * number, losses=[1.0 / number + i for i in range(5)], seconds=1.0 + number % 3, samples=10,
        phase_names=PHASES, phases=[[0.5, 0.25], [0.25, 0.5]], wire_bytes=100.0, memory_bytes=[1.0 * number, 5.0],
        waits=[[0.1] * 5, [0.2] * 5], pause_names=("recording",), pauses=[[0.1], [0.2]],
    )  # fmt: skip


def record_windows(recorder: Recorder, first: int, last: int) -> None:
    for number in range(first, last + 1):
        recorder.write(window(number))
        recorder.write(Resources.of(5 * number, [[float(number)] * 9, [1.0] * 9]))
        if number % 10 == 0:
            recorder.write(Checkpoint(5 * number))


def sealed(folder: Path, windows: int) -> Recorder:
    """Return a recorder whose run recorded so many windows, sealed now and then and not merged."""
    recorder = Recorder(folder, SEGMENT_BYTES)
    recorder._compaction = None  # it seals, and the test merges
    recorder.write(Start(world_size=2, pids=(1, 2), hosts=("a", "a"), launched_t=1.0))
    record_windows(recorder, 1, windows)
    return recorder


def covered(folder: Path) -> list[int]:
    """Return the steps of a record in order; each window must begin where the one before ended."""
    reached = [0]
    for steps in read_records(folder, Steps):
        assert steps.step - steps.count == reached[-1]
        reached.append(steps.step)
    return reached


def test_a_short_record_is_one_file(tmp_path: Path) -> None:
    sealed(tmp_path, 5).close()
    assert [entry.name for entry in tmp_path.iterdir()] == [RECORD_FILE]


def test_sealed_files_are_read_as_one_record(tmp_path: Path) -> None:
    sealed(tmp_path, 200).close()
    assert len(segments_of(tmp_path)) >= 5
    assert covered(tmp_path)[-1] == 1000
    assert len(read_records(tmp_path, Start)) == 1, "the start that each new file repeats is no attempt"
    head = json.loads((tmp_path / RECORD_FILE).read_text().splitlines()[0])
    assert (head["kind"], head["pids"]) == ("start", [1, 2]), "who reads this file alone knows the processes"
    assert [w.step for w in newest(tmp_path, Steps)] == [*range(1000, 0, -5)]


def test_merged_windows_keep_sums_and_extremes(tmp_path: Path) -> None:
    sealed(tmp_path, 200).close()
    raw = read_records(tmp_path)
    compact(tmp_path, os.getppid())
    segments = segments_of(tmp_path)
    assert [s.level for s in segments[:-1]] == sorted((s.level for s in segments[:-1]), reverse=True)
    assert segments[-1].level == 0, "the newest stays for those who follow the record"
    assert covered(tmp_path)[-1] == 1000
    windows, before = read_records(tmp_path, Steps), [r for r in raw if isinstance(r, Steps)]
    assert windows[0] == before[0], "an attempt's first window stays alone"
    assert FAN <= max(w.windows for w in windows if isinstance(w, MergedSteps)) <= segments[0].windows
    for total in ("seconds", "samples", "wire_bytes", "hidden_s"):
        assert sum(getattr(w, total) for w in windows) == pytest.approx(sum(getattr(w, total) for w in before))
    losses = sum(w.mean_loss * w.count for w in windows), sum(sum(w.losses) for w in before)
    assert losses[0] == pytest.approx(losses[1])
    assert max(w.memory_bytes[0] for w in windows) == 200
    assert sorted(t for w in windows for t in w.step_times()) == pytest.approx(
        sorted(t for w in before for t in w.step_times()), rel=0.01
    )
    assert [c.step for c in read_records(tmp_path, Checkpoint)] == [*range(50, 1001, 50)]
    assert {type(r) for r in read_records(tmp_path)} == {type(r) for r in raw} | {MergedSteps}


def test_levels_grow_with_the_logarithm_of_the_record(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 1)
    for part in range(20):
        record_windows(recorder, 1 + 100 * part + 1, 1 + 100 * (part + 1))
        compact(tmp_path, os.getppid())
    recorder.close()
    segments = segments_of(tmp_path)
    assert segments[0].level >= 2 and len(segments) <= FAN * (segments[0].level + 1)
    assert covered(tmp_path)[-1] == 5 * 2001
    assert all_segments(tmp_path) == segments


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_losses_of_few_steps_all_stay(count: int) -> None:
    windows = [Steps(step=i + 1, losses=[float(i)], seconds=1.0) for i in range(count)]
    means = _loss_means(windows, count)
    assert all(map(math.isfinite, means)) and means == [float(i) for i in range(count)]


def test_what_was_merged_and_not_yet_removed_is_read_once(tmp_path: Path) -> None:
    sealed(tmp_path, 200).close()
    before = {s.name: (tmp_path / s.name).read_bytes() for s in segments_of(tmp_path)}
    compact(tmp_path, os.getppid())
    merged = segments_of(tmp_path)
    for name, content in before.items():  # as if the process had been killed before it removed them
        (tmp_path / name).write_bytes(content)
    assert segments_of(tmp_path) == merged
    assert covered(tmp_path)[-1] == 1000
    compact(tmp_path, os.getppid())
    assert all_segments(tmp_path) == merged


def test_a_process_that_died_while_it_sealed_leaves_the_record_whole(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 20)
    (tmp_path / RECORD_FILE).rename(tmp_path / Segment(1, 1, 0).name)  # and no new file was begun
    assert covered(tmp_path)[-1] == 100
    record_windows(recorder, 21, 25)
    recorder.close()
    assert covered(tmp_path)[-1] == 125 and (tmp_path / RECORD_FILE).exists()


def test_another_writer_goes_on_in_the_new_file(tmp_path: Path) -> None:
    launcher, rank = Recorder(tmp_path), sealed(tmp_path, 1)
    for number in range(2, 200):
        record_windows(rank, number, number)
        launcher.write(Checkpoint(number, reason="launcher"))
    rank.close()
    launcher.close()
    assert len(segments_of(tmp_path)) > 2
    told = [c.step for c in read_records(tmp_path, Checkpoint) if c.reason == "launcher"]
    assert told == [*range(2, 200)] and covered(tmp_path)[-1] == 5 * 199


def test_a_thread_records_while_another_seals(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 1)

    def save() -> None:
        for number in range(2000):
            recorder.write(Checkpoint(number, reason="thread"))

    thread = threading.Thread(target=save)
    thread.start()
    record_windows(recorder, 2, 400)
    thread.join()
    recorder.close()
    assert len(segments_of(tmp_path)) > 5 and covered(tmp_path)[-1] == 2000
    assert [c.step for c in read_records(tmp_path, Checkpoint) if c.reason == "thread"] == [*range(2000)]


@pytest.mark.parametrize("merges", [False, True])
def test_who_follows_a_record_sees_each_line_once(tmp_path: Path, merges: bool) -> None:
    recorder, reader = sealed(tmp_path, 1), RecordReader(tmp_path)
    seen: list[Record] = reader.read()[1]
    for number in range(2, 200):
        record_windows(recorder, number, number)
        if number % 7 == 0:
            replaced, records = reader.read()
            assert not replaced
            seen += records
            if merges:
                compact(tmp_path, os.getppid())
    recorder.close()
    seen += reader.read()[1]
    assert [r.step for r in seen if isinstance(r, Steps)] == [*range(5, 1000, 5)]
    assert sum(isinstance(r, Start) for r in seen) == 1


def test_who_slept_while_a_record_was_merged_reads_it_anew(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 10)
    live = LiveRun(tmp_path)
    live.refresh()
    record_windows(recorder, 11, 300)
    recorder.close()
    compact(tmp_path, os.getppid())
    assert live.refresh() and live.state.step == 1500 and live.state.attempts == 1
    assert live.state.loss_curve.points()[0][0] == 5


@pytest.mark.parametrize("detail", list(Detail))
def test_a_record_that_grew_in_one_file_is_read(
    tmp_path: Path, detail: Detail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.records.file.SEGMENT_BYTES", 10_000)
    recorder = Recorder(tmp_path, 1 << 30)
    recorder.write(Start(world_size=2))
    record_windows(recorder, 1, 1000)
    recorder.close()
    records = RecordReader(tmp_path, detail=detail).read(to_end=True)[1]
    windows = [r for r in records if isinstance(r, Steps)]
    assert windows[-1].step == 5000 and sum(isinstance(r, Checkpoint) for r in records) == 100
    assert sum(w.count for w in windows) == 5000 or detail is Detail.SAMPLED
    assert (len(windows) == 1000) == (detail is Detail.ALL)


def test_a_slow_step_knows_who_was_waited_for_when_its_window_is_gone(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 3)
    recorder.write(SlowStep(13, 3.0, 0.1))
    record_windows(recorder, 4, 100)
    recorder.close()
    compact(tmp_path, os.getppid())
    (slow,) = read_records(tmp_path, SlowStep)
    assert slow.waited_for == 0


@pytest.mark.parametrize(("n_bytes", "level"), [(0, 1), (9 << 20, 1), (1 << 30, 3), (2_000_000_000, 3)])
def test_a_large_file_is_thinned_more(n_bytes: int, level: int) -> None:
    assert level_for(n_bytes) == level


def test_windows_are_not_merged_over_a_step_that_a_restart_went_back_to(tmp_path: Path) -> None:
    recorder = sealed(tmp_path, 52)
    recorder.write(Start(world_size=2, start_step=5 * 41))
    record_windows(recorder, 42, 150)
    recorder.close()
    compact(tmp_path, os.getppid())
    steps: list[Any] = read_records(tmp_path, Start, Steps)
    restart = [i for i, r in enumerate(steps) if isinstance(r, Start)][1]
    reached = [w.step for w in steps[1:restart]]
    assert 5 * 41 in reached and reached[-1] == 5 * 52
    assert steps[restart + 1].windows == 1
