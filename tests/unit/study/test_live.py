"""The live table, and how far a run is by the end of its record."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

from rich.console import Console

from echelon.reporting.report import load_run, summarise
from echelon.study import from_tries, planned_runs
from echelon.study.folder import RunEnd, run_folder
from echelon.study.live import StudyDisplay, study_table
from echelon.study.progress import Tail
from echelon.study.watch import StudyWatch
from tests.unit.study.fixtures import EPOCHS, Planted, make_study, tell

TRUTHS = {"sync=allreduce": Planted(), "compression=int8": Planted(status="refused", message="no")}


def display(folder: Path, height: int = 40, terminal: bool = True) -> tuple[StudyDisplay, Console]:
    console = Console(file=io.StringIO(), width=120, height=height, force_terminal=terminal, color_system=None)
    return StudyDisplay(folder, console), console


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_record_is_followed_to_its_last_whole_line(tmp_path: Path) -> None:
    run = planned_runs(from_tries({}, ["sync=allreduce"], "1"))[0]
    lines = [json.dumps(line) for line in tell(run, Planted())]
    tail = Tail(tmp_path)
    assert tail.read().done == 0.0
    (tmp_path / "record.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    halfway = tail.read()
    assert halfway.done == 1 / EPOCHS and halfway.value is None and halfway.samples_per_s is not None
    (tmp_path / "record.jsonl").write_text("\n".join(lines) + "\n")
    whole = tail.read()
    assert whole.done == 1.0 and whole.value is not None


def test_the_table_shows_all_runs_and_what_is_left(tmp_path: Path) -> None:
    study = from_tries({}, list(TRUTHS), "2")
    folder = make_study(tmp_path / "s", study, TRUTHS)
    runs = planned_runs(study)
    screen, console = display(folder)
    ends = {
        runs[0].name: RunEnd(runs[0].name, "completed", "", 10.0),
        runs[1].name: RunEnd(runs[1].name, "refused", "no", 2.0),
    }
    screen.began(runs, ends, frozenset(ends))
    screen.started(runs[2], run_folder(folder, runs[2].name))
    console.print(screen.view())
    text = shown(console)
    assert "2 of 4 runs over; about 20 s left" in text
    rows = [line for line in text.splitlines() if line.startswith(("sync=", "compression="))]
    assert [row.split()[2] for row in rows[-4:]] == ["completed", "refused", "running", "waiting"]


def test_a_run_that_was_cut_short_is_said_to_be_repeated(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce", "lr=1"], "1")
    folder = make_study(tmp_path / "s", study, {"sync=allreduce": Planted()})
    second = planned_runs(study)[1]
    half = run_folder(folder, second.name)
    half.mkdir(parents=True)
    here = [{**line, "hosts": [socket.gethostname()]} for line in tell(second, Planted())]
    (half / "record.jsonl").write_text("\n".join(json.dumps(line) for line in here[:3]) + "\n")
    (half / ".lock").touch()  # nobody holds it: its processes are gone
    watch = StudyWatch(folder)
    state = watch.refresh()[1]
    assert (state.status, state.message) == ("cut short", "it will be repeated from its start")
    assert watch.status().status == "stopped" and "echelon compare --run" in watch.status().message
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(study_table(watch.states, 40))
    assert "about 30 s left; 1 cut short, which will be repeated from its start" in shown(console)
    with (half / "record.jsonl").open("a") as file:  # asked to stop, it said so itself: it is repeated all the same
        file.write(json.dumps({"t": here[2]["t"] + 1, "kind": "end", "status": "stopped"}) + "\n")
    assert watch.refresh()[1].status == "cut short"


def test_a_small_terminal_shows_the_rows_around_the_present_one(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce", "lr=1"], "20")
    screen, console = display(make_study(tmp_path / "s", study, {}), height=12)
    screen.began(planned_runs(study), {}, frozenset())
    console.print(screen.view())
    assert "34 runs not shown" in shown(console)


def test_the_rate_of_a_run_that_is_over_is_the_one_of_its_report(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce"], "1")
    folder = make_study(tmp_path / "s", study, {"sync=allreduce": Planted()})
    run = planned_runs(study)[0]
    record = run_folder(folder, run.name) / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "steps"][-1]
    last["seconds"] *= 2  # the last window is no measure of the run
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rate = summarise(load_run(run_folder(folder, run.name))).samples_per_s
    screen, _ = display(folder)
    screen.began([run], {run.name: RunEnd(run.name, "completed", "", 10.0)}, frozenset({run.name}))
    ended = StudyWatch(folder).refresh()[0]
    assert ended.progress.samples_per_s == rate != last["samples"] / last["seconds"]
    cells = [state.progress.samples_per_s for state in screen._states.values()]
    assert cells == [rate]


def test_what_is_left_counts_what_is_spent_around_runs(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce", "lr=1"], "1")
    runs = planned_runs(study)
    screen, console = display(make_study(tmp_path / "s", study, {"sync=allreduce": Planted()}), terminal=False)
    screen.began(runs, {}, frozenset(), " for learning rates; those of the study follow")
    screen.started(runs[0], run_folder(tmp_path / "s", runs[0].name))
    screen.ended(runs[0], RunEnd(runs[0].name, "completed", "", 10.0, 12.0))
    assert "2 runs for learning rates; those of the study follow, one after the other" in shown(console)
    assert "completed in 10 s" in shown(console) and "about 12 s left of these" in shown(console)


def test_without_a_terminal_each_run_is_a_line(tmp_path: Path) -> None:
    study = from_tries({}, list(TRUTHS), "1")
    folder = make_study(tmp_path / "s", study, TRUTHS)
    runs = planned_runs(study)
    screen, console = display(folder, terminal=False)
    with screen:
        screen.began(runs, {}, frozenset())
        screen.started(runs[0], run_folder(folder, runs[0].name))
        screen.ended(runs[0], RunEnd(runs[0].name, "completed", "", 10.0))
        screen.ended(runs[1], RunEnd(runs[1].name, "refused", "unknown compression", 2.0))
    opening, first, second = shown(console).splitlines()
    assert opening.startswith("2 runs, one after the other, in ")
    assert first.startswith("[1/2] sync=allreduce, seed 0: completed in 10 s; accuracy 0.9")
    assert first.endswith("about 10 s left")
    assert second == "[2/2] compression=int8, seed 0: refused in 2 s; unknown compression"
