"""The end of a run's command: its time is recorded, and its report written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.stop import StopFlag
from echelon.launch.fork_server import end_import_server
from echelon.launch.places.base import STOP_S
from echelon.observe.environment import is_own_command
from echelon.observe.profile import merge_traces
from echelon.records.events import Event
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import CommandEnd, End, Record
from echelon.run.machine import say

_LEAVE_S = 1.0  # of what a stop may take: to let go of what the run held


def close_run(path: Path, record: Recorder, stop: StopFlag, stop_s: float = STOP_S) -> None:
    """Record when the command ended, and write the report: what all its processes did is known only now.

    A disk that takes no report is waited for, but not beyond what a stop may take, nor after another signal.
    """
    if is_own_command():
        end_import_server()  # now, beside what follows: as this process ends it would be waited for
    signals, leave_s = stop.count, min(_LEAVE_S, 0.1 * stop_s)

    def cut() -> str:
        """Return why the disk is not waited for."""
        if stop.count > signals or stop.left_s(stop_s) < leave_s:
            return f"asked to stop, it waits no longer; `echelon report {path}` writes it"
        return ""

    record.patience.cut, record.patience.trains = cut, False
    try:
        _write_end(path, record)
    except UserError as error:
        if not cut():
            raise
        say(str(error))


def _write_end(path: Path, record: Recorder) -> None:
    """Record the command's end and write the report.

    What takes long of it comes before the clock is read, so that the command ends when its record says.
    """
    from echelon.reporting.report import compile_templates, load_run, write_report
    from echelon.run.residuals import predicted_before

    if traced := merge_traces(path):
        record.write(Event(traced, name="profile"))
    record.flush()
    compile_templates()
    known = record.patience.insist("report", lambda: load_run(path))
    told = predicted_before(path, known) if known.of(End) else None
    lines: list[Record] = [*([told] if told else []), CommandEnd(read_launch(path).seconds_since())]
    for line in lines:
        record.write(line)
    record.flush()
    known = replace(known, records=[*known.records, *(replace(line, t=time.time()) for line in lines)])
    record.patience.insist("report", lambda: write_report(path, known=known))
