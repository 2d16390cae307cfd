"""What layers draw depends on the seed, the step and the part of the batch, whoever has it after a death."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from echelon.trainer.saving import state_of
from tests.ranks.dropping_parts import KILLED, STEPS
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
KILLED_AT = 9


def train(runs: Runs, name: str, killed: str, *settings: str) -> Run:
    environment = {KILLED: json.dumps([killed, KILLED_AT]), "PYTHONPATH": python_path()}
    program = (sys.executable, "-m", "tests.ranks.dropping_parts", str(runs.root / name), "2", *settings)
    run = runs.start(folder=name, program=program, environment=environment)
    assert run.end() == 0, run.text()[-3000:]
    return run


def alone_until(run: Run) -> int:
    """Return the last step that the survivor made alone."""
    later = [start["start_step"] for start in run.records("start")[2:]]
    return int(min(later, default=STEPS))


def test_survivors_draw_the_same_whoever_is_killed_at_a_step(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        first, again, other = (
            train(runs, name, member) for name, member in (("a", "rank1.0"), ("b", "rank1.0"), ("c", "rank0.0"))
        )
        for run in (first, again, other):
            assert run.events("worker_died") and not run.events("resumed")
        losses = first.losses()
        for run in (again, other):
            last = min(alone_until(first), alone_until(run))
            assert last > KILLED_AT, "the survivor has made no step alone"
            for step in range(KILLED_AT, last + 1):  # those before may be recorded of the survivor's samples
                assert run.losses()[step] == pytest.approx(losses[step], rel=1e-6), step


def test_a_run_draws_by_part_as_its_checkpoint_says(tmp_path: Path) -> None:
    """One that began without survivors who go on has ranks' own generators, as those of earlier versions."""
    with Runs(tmp_path) as runs:
        for elastic, by_part in (("on", True), ("off", False)):
            train(runs, elastic, "", f"elastic={elastic}")
            assert state_of(tmp_path / elastic, "newest")["cursor"]["draws_by_part"] is by_part
            environment = {"PYTHONPATH": python_path()}
            more = ["--max-steps", str(STEPS + 4), "--elastic", "off" if elastic == "on" else "on"]
            program = (sys.executable, "-c", RESUME, str(tmp_path / elastic), *more)
            assert runs.start(program=program, environment=environment).end() == 0
            assert state_of(tmp_path / elastic, "newest")["cursor"]["draws_by_part"] is by_part


RESUME = """
import sys
import echelon
from tests.ranks.dropping_parts import Dropping
changes = {"training.max_steps": int(sys.argv[3]), "launch.elastic": sys.argv[5]}
echelon.resume(sys.argv[1], changes, model=Dropping(), data="digits")
"""
