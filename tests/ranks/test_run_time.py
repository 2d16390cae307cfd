"""Where a real run's wall time goes: the law that its parts are the whole, and what its end says of other ways."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from echelon.records.kinds import Evaluation, SlowStep, Start, WorkerJoined
from echelon.reporting.report import load_run, summarise
from echelon.reporting.report.waterfall import TOLERANCE
from tests.ranks.run_many import python_path
from tests.ranks.runs import SMALL, Runs
from tests.ranks.slow_parts import SAVE_S, STALL_S

WAYS = {"bf16", "int8", "sign", "topk(density=0.01)", "powersgd(rank=2)"}
WAYS |= {"local(period=8)", "local(period=8, overlap=2)", "diloco(period=20)"}


@pytest.mark.long
def test_phases_and_pauses_of_each_rank_are_the_wall_time(tmp_path: Path) -> None:
    options = ["--model", "mlp", "--epochs", "6", "--workers", "2", "--checkpoint-every", "20", *SMALL]
    with Runs(tmp_path) as runs:
        began = time.monotonic()
        run = runs.start("train", "digits", *options, folder="timed")
        assert run.end() == 0, run.text()
        took_s = time.monotonic() - began
        record = load_run(run.folder)
        said = run.text()
    summary = summarise(record)
    assert 0 <= took_s - summary.wall_s <= 0.2 + 0.1 * took_s, "the run's clock is its command's, on a busy machine too"
    assert summary.wall_s == run.summary()["wall_s"] == run.summary()["seconds"]
    waterfall = summary.waterfall
    assert waterfall is not None and waterfall.ranks == 2
    assert waterfall.missing <= TOLERANCE, waterfall
    training = sum(sum(s) for name, s in waterfall.parts.items() if name not in ("start", "end", "not accounted for"))
    lost = sum(abs(s) for s in waterfall.parts["not accounted for"])
    assert lost <= 0.1 * training, "the law must not hold by the start's length alone"
    assert all(s > 0 for s in waterfall.parts["evaluation"])
    communication = summary.communication
    assert communication is not None and communication.by_step and communication.timed
    assert sum(communication.critical) == pytest.approx(1)
    labels = {p.label for p in summary.predictions}
    assert labels >= WAYS and "local(period=8, overlap=2), sign" in labels
    assert "diloco(period=20), sign" not in labels, "what is refused is no alternative"
    stored = json.loads((run.folder / "summary.json").read_text())
    assert stored["predictions"][0]["gain"] > 0
    assert "completed; report:" in said


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.long), pytest.param("sync", marks=pytest.mark.slow)]
)
def test_a_run_with_servers_tells_of_its_workers_what_other_runs_tell_of_ranks(tmp_path: Path, mode: str) -> None:
    """Evaluations are no step's time; the start names every worker; a step that took long is told with its cause."""
    options = ["--sync", f"ps(mode={mode})", "--epochs", "6", "--eval-every", "2", "--workers", "2", *SMALL]
    options += ["--model", "tests.ranks.slow_parts:stalled"]
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", *options, folder="run", environment={"PYTHONPATH": python_path()})
        assert run.end() == 0, run.text()
        record = load_run(run.folder)
    (start,), joined = record.of(Start), record.of(WorkerJoined)
    assert list(start.pids) == [w.pid for w in sorted(joined, key=lambda w: w.name)]
    assert list(start.hosts) == [socket.gethostname()] * 2 and all(start.affinity)
    waterfall = summarise(record).waterfall
    assert waterfall is not None
    assert min(waterfall.parts["not accounted for"]) >= -TOLERANCE * waterfall.wall_s, "something counts twice"
    evaluated = sum(e.seconds for e in record.of(Evaluation))
    assert sum(waterfall.parts["evaluation"]) >= 0.9 * evaluated
    slow = max(record.of(SlowStep), key=lambda step: step.seconds)
    assert slow.seconds >= STALL_S and slow.median_s < STALL_S / 3
    phases = next(row for row in slow.phases if row is not None)
    assert dict(zip(slow.phase_names, phases, strict=True))["forward"] >= STALL_S


@pytest.mark.long
def test_waiting_for_the_rank_that_saves_is_its_checkpoints_pause(tmp_path: Path) -> None:
    options = ["--epochs", "3", "--eval-every", "0", "--workers", "2", "--checkpoint-every", "4", *SMALL]
    options += ["--model", "tests.ranks.slow_parts:slow_to_save"]
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", *options, folder="slow", environment={"PYTHONPATH": python_path()})
        assert run.end() == 0, run.text()
        record = load_run(run.folder)
    told = [dict(zip(w.pause_names, zip(*w.pauses, strict=True), strict=True))["checkpoint"] for w in record.windows]
    waited = [[w.phases[r][w.phase_names.index("communicate")] for r in range(2)] for w in record.windows]
    saved = sum(all(s >= SAVE_S for s in pauses) for pauses in told)
    assert saved >= 7, told  # of 9: the last one is after the last window
    assert all(abs(first - second) < SAVE_S / 2 for first, second in told), told
    assert sum(rank[1] - rank[0] for rank in waited) < SAVE_S * saved / 4, waited
    waterfall = summarise(record).waterfall
    assert waterfall is not None and waterfall.missing <= TOLERANCE, waterfall
