"""What a page says of sums in the order of the forward pass, from a run's own timings."""

from __future__ import annotations

import pytest

from echelon.observe.phases import PHASE_NAMES
from echelon.records.kinds import Record, Start, Steps, WorkerWindow
from echelon.reporting.report.priority import could_gain, priority_notes
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import measure


def _record(order: str, forward_s: float, waits_s: float, busy_s: float) -> RunRecord:
    """Two ranks, ten steps: backward takes 0.2 s, all between its first bucket and its last."""
    of_step = {"forward": forward_s, "backward": 0.2, "communicate": waits_s}
    row = [10 * of_step.get(name, 0.0) for name in PHASE_NAMES]
    seconds = sum(row)
    window = Steps(
        10, (1.0,) * 10, seconds, phase_names=PHASE_NAMES, phases=(row, row), waits=((waits_s,) * 10,) * 2,
        comm_busy_s=(10 * busy_s,) * 2, comm_spread_s=(2.0, 2.0), t=seconds,
    )  # fmt: skip
    return RunRecord("run", [Start(t=0.0, world_size=2, order=order), window])


@pytest.mark.parametrize(
    ("record", "gain", "sentence"),
    [
        (_record("ready", 0.1, 0.1, 0.3), 4 / 3, ""),
        (_record("ready", 0.1, 0.3, 0.5), 1.2, ""),
        (_record("ready", 0.1, 0.001, 0.2), 1.003, "would bring nothing: 1 ms of a step"),
        (_record("ready", 0.001, 0.3, 0.5), 1.002, "the forward pass, which could hide them, takes 1 ms"),
        (_record("priority", 0.1, 0.0, 0.3), 1.0, "steps are up to 1.33x as fast"),
        (_record("priority", 0.1, 0.1, 0.3), 1.0, "has brought nothing: of 300 ms"),
        (_record("", 0.1, 0.1, 0.3), 1.0, ""),
    ],
)
def test_what_it_could_bring_or_has_brought_is_told(record: RunRecord, gain: float, sentence: str) -> None:
    timing = measure(record)
    assert could_gain(record, timing) == pytest.approx(gain, rel=2e-3)
    notes = priority_notes(record, timing)
    assert len(notes) == bool(sentence) and sentence in "".join(notes)


def test_nothing_is_told_where_no_step_was_timed() -> None:
    record = RunRecord("run", [Start(t=0.0, order="ready")])
    assert could_gain(record, None) == 1.0 and priority_notes(record, None) == []


def _served(order: str, forward_s: float, waits_s: float, overlapped_s: float = 0.0) -> RunRecord:
    """Two asynchronous workers, ten steps in each of two windows."""
    of_step = {"forward": forward_s, "backward": 0.2, "communicate": waits_s}
    row = [10 * of_step.get(name, 0.0) for name in PHASE_NAMES]
    seconds = sum(row)
    lines: list[Record] = [Start(t=0.0, world_size=2, order=order, served=True)]
    for number in (1, 2):
        clocks = {"worker0": 10.0 * number, "worker1": 11.0 * number}
        counted = {worker: 10 * number * overlapped_s for worker in clocks if overlapped_s}
        lines += [
            Steps(10 * number, (1.0,) * 10, seconds, phase_names=PHASE_NAMES, phases=(row, row), t=number * seconds),
            WorkerWindow(10 * number, clocks, overlapped_s=counted, t=number * seconds),
        ]
    return RunRecord("run", lines)


@pytest.mark.parametrize(
    ("record", "gain", "sentence"),
    [
        (_served("ready", 0.1, 0.1), 4 / 3, ""),
        (
            _served("ready", 0.1, 0.001),
            1.003,
            "in --sync ps(...) would bring nothing: 1 ms of a step of 301 ms are waits",
        ),
        (_served("ready", 0.001, 0.3), 1.002, "the forward pass, which could hide them, takes 1 ms"),
        (_served("priority", 0.1, 0.1, 0.08), 1.0, "computed for 80 ms in a step, so steps are up to 1.20x as fast"),
        (_served("priority", 0.1, 0.1, 0.001), 1.0, "has brought nothing: while its last values still came"),
        (_served("priority", 0.1, 0.1), 1.0, "100 ms of a step of 400 ms are still waits for servers"),
        (_served("", 0.1, 0.1), 1.0, ""),
    ],
)
def test_what_it_could_bring_or_has_brought_to_servers_is_told(record: RunRecord, gain: float, sentence: str) -> None:
    timing = measure(record)
    assert could_gain(record, timing) == pytest.approx(gain, rel=2e-3)
    notes = priority_notes(record, timing)
    assert len(notes) == bool(sentence) and sentence in "".join(notes)
