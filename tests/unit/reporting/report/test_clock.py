"""The clock of a run: from its command to its end, of each command that took it up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.core.units import format_seconds
from echelon.reporting.report import Summary, closing_words, write_report
from tests.unit.reporting.report.fixtures import T0, LiveState, make_run, tell, write_record

STORY = LiveState(epochs=2, steps_per_epoch=100, jitter=0.0)
Line = dict[str, Any]


def report(folder: Path, lines: list[Line]) -> tuple[Summary, str]:
    make_run(folder, STORY)
    write_record(folder, lines)
    summary = write_report(folder)
    return summary, "\n".join(closing_words(summary))


def resumed_at(lines: list[Line], seconds: float, step: int) -> list[Line]:
    """Return the lines as another command tells them, so many seconds later and from a step on."""
    later: list[Line] = [{**line, "t": line["t"] + seconds} for line in lines if line.get("step", step + 1) > step]
    later[0] |= {"launched_t": T0 + seconds, "start_step": step, "start_epoch": 0}
    return later


@pytest.mark.parametrize("between", [(), ("profile", "way_predicted")], ids=["at once", "after events"])
def test_a_run_lasts_until_its_command_ends(tmp_path: Path, between: tuple[str, ...]) -> None:
    lines = tell(STORY)
    end = lines[-1]
    for name in between:
        lines.append({"t": end["t"] + 1.5, "kind": "event", "name": name, "message": "told where the command ends"})
    summary, words = report(
        tmp_path, [*lines, {"t": end["t"] + 1.6, "kind": "command_end", "seconds": end["seconds"] + 1.7}]
    )
    assert summary.wall_s == summary.seconds == pytest.approx(end["seconds"] + 1.7)
    assert summary.waterfall is not None and summary.waterfall.wall_s == summary.wall_s
    assert summary.waterfall.missing < 0.02 and "accounts for" not in words


def test_a_run_that_never_started_took_the_time_of_its_command(tmp_path: Path) -> None:
    died = {"t": T0 + 6.0, "kind": "event", "name": "worker_died", "message": "rank 0 died", "rank": 0}
    end = {"t": T0 + 6.1, "kind": "end", "status": "failed", "message": "it died"}
    summary, words = report(tmp_path, [died, end, {"t": T0 + 6.5, "kind": "command_end", "seconds": 6.5}])
    assert summary.wall_s == 6.5
    assert "Failed after 0 steps and 6.5 s" in words and "At 6 s: rank 0 died" in words


def test_a_killed_run_that_was_resumed_counts_both_commands_once(tmp_path: Path) -> None:
    whole = tell(STORY)
    killed = [line for line in whole if line.get("step", 0) <= 150 and line["kind"] != "end"]
    lines = [*killed, *resumed_at(whole, 1000.0, 100)]
    summary, words = report(tmp_path, lines)
    first_s = killed[-1]["t"] - T0
    assert summary.wall_s == pytest.approx(first_s + whole[-1]["seconds"], abs=0.01)
    assert summary.commands == 2 and summary.last_command_s == pytest.approx(whole[-1]["seconds"], abs=0.01)
    assert f" over 2 commands ({format_seconds(summary.last_command_s)} the last)" in words
    start = next(line for line in whole if line["kind"] == "start")
    assert summary.startup_s == pytest.approx(2 * (start["t"] - T0))
    assert summary.waterfall is not None
    gap_s = (
        sum(w["seconds"] for w in whole if w["kind"] == "steps" and w["step"] <= 100) + 1.3
    )  # left out of the second
    assert summary.waterfall.parts["preparing"][0] == pytest.approx(gap_s, abs=0.3)
    assert summary.waterfall.parts["not accounted for"][0] == pytest.approx(0, abs=0.3)
    assert "count twice" not in words


@pytest.mark.parametrize("killed", [False, True])
def test_a_resume_that_was_refused_takes_none_of_the_run(tmp_path: Path, killed: bool) -> None:
    lines = tell(STORY)
    if killed:
        lines = [line for line in lines if line["kind"] != "end"]
    ended, refused_t = max(line["t"] for line in lines), T0 + 5000.0
    refusal = {"t": refused_t - 0.1, "kind": "event", "name": "refused", "message": "other data"}
    refused = {"t": refused_t, "kind": "command_refused", "seconds": 4.0, "message": "other data"}
    summary, words = report(tmp_path, [*lines, refusal, refused])
    assert summary.commands == 1 and summary.wall_s == pytest.approx(ended - T0, abs=0.5)
    assert summary.status == ("unfinished" if killed else "completed") and "efused" not in words
    later = resumed_at(tell(STORY), 9000.0, 100)
    summary, _ = report(tmp_path, [*lines, refusal, refused, *later])
    assert summary.commands == 2
    assert summary.wall_s == pytest.approx(ended - T0 + later[-1]["t"] - T0 - 9000.0, abs=0.5)


def test_a_restart_by_the_same_command_is_no_command_of_its_own(tmp_path: Path) -> None:
    lines = tell(LiveState(epochs=4, death_at=150, jitter=0.0))
    for line in lines:
        if line["kind"] == "start":
            line["launched_t"] = T0
    summary, _ = report(tmp_path, lines)
    assert summary.wall_s == pytest.approx(lines[-1]["t"] - T0, abs=0.01)
    assert summary.waterfall is not None and summary.waterfall.parts["restart"][0] > 2


def test_ranks_that_end_and_start_again_for_a_machine_that_joins_are_of_one_command(tmp_path: Path) -> None:
    whole = tell(STORY)
    whole[0]["launched_t"] = T0
    later = resumed_at(whole, whole[-1]["t"] - T0 + 3.0, 100)
    later[0]["launched_t"] = T0
    later[-1]["seconds"] = later[-1]["t"] - T0
    summary, words = report(tmp_path, [*whole, *later])
    assert summary.wall_s == pytest.approx(later[-1]["t"] - T0, abs=0.01) and summary.commands == 1
    assert "count twice" not in words
