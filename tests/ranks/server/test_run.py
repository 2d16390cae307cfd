"""Whole runs of `echelon train --sync ps(...)` with a fault: they finish, well, and count every batch once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks._chaos_trial import Setting, Trainer, run_trial, trainer

from echelon.records.events import ServerSettled
from echelon.reporting.report.records import load_run
from echelon.reporting.report.timing import measure

STRIKES = [
    ("server0", Setting(mode="sync", epochs=12)),
    ("worker1", Setting(epochs=15)),
    ("server0", Setting(epochs=15)),
    ("server1", Setting(epochs=15, replicas=1)),
    ("standby0", Setting(epochs=15, replicas=1)),
    ("scheduler", Setting(epochs=15)),
    ("worker0", Setting(mode="sync", epochs=12)),
    ("server1", Setting(mode="sync", epochs=12, replicas=1)),
    ("scheduler", Setting(mode="sync", epochs=12)),
]

BY_PRIORITY = Setting(mode="sync", epochs=12, order="priority")
"""Whose workers are a step ahead of what is complete when a role dies."""


@pytest.fixture(scope="module")
def own() -> Iterator[Trainer]:
    with trainer() as process:
        yield process


def check(own: Trainer, strike: tuple[str, Setting], folder: Path, seed: int) -> None:
    victim, setting = strike
    trial = run_trial(own, setting, seed, victim, folder)
    assert trial.victim == victim
    assert trial.kept, trial
    assert trial.counted_once
    assert trial.lost == 0


@pytest.mark.slow
def test_a_server_dies_in_synchronous_mode(own: Trainer, tmp_path: Path) -> None:
    check(own, STRIKES[0], tmp_path, 3)
    assert [event.lost for event in load_run(tmp_path / "run").of(ServerSettled)] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("strike", STRIKES[1:], ids=lambda s: f"{s[0]}-{s[1].mode}-{s[1].replicas}")
def test_any_role_dies(own: Trainer, tmp_path: Path, strike: tuple[str, Setting], seed: int) -> None:
    check(own, strike, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server0", "worker0", "worker1", "scheduler"])
def test_any_role_dies_while_workers_are_ahead(own: Trainer, tmp_path: Path, victim: str) -> None:
    check(own, (victim, BY_PRIORITY), tmp_path, 3)


@pytest.mark.slow
def test_a_server_with_a_standby_dies_while_workers_are_ahead(own: Trainer, tmp_path: Path) -> None:
    check(own, ("server1", replace(BY_PRIORITY, replicas=1)), tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_phases_are_the_wall_time(own: Trainer, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "run"
    own.begin({
        "data": "digits", "run": str(path), "sync": f"ps(mode={mode}, servers=2)", "workers": 2, "threads": 1,
        "epochs": 25, "eval_every": 10, "batch_size": 64, "lr": 0.05,
    })  # fmt: skip
    assert own.ended(90)
    timing = measure(load_run(path))
    assert timing is not None and abs(sum(timing.phases.values()) / timing.step_s - 1) < 0.02
    page = (path / "report.html").read_text()
    assert 'id="waiting"' in page and 'id="serverload"' in page
    assert ('id="staleness"' in page) == (mode == "async")
    assert json.loads((path / "summary.json").read_text())["status"] == "completed"
