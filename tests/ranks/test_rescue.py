"""Split replicas when a process is killed: no step is lost, and the result is that of a run that nobody disturbed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.trainer.saving import state_of
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs
from tests.ranks.split_faults import FAULTS, STRUCK

pytestmark = pytest.mark.timeout(600)

Fault = tuple[str, str, int]
EPOCHS, STEPS = 2, 24
MODEL = "tests.ranks.split_faults:FaultyViT"
SETTINGS = ("--model", MODEL, "--batch-size", "128", "--epochs", str(EPOCHS), "--workers", "4", "--balance", "off")
LAYOUTS = ("dp=2,tp=2", "dp=2,pp=2", "dp=2,fsdp=2")
CASES: dict[str, Sequence[Fault]] = {
    "before a step": [("rank1", "step", 6)],
    "in backward": [("rank3", "backward", 6)],
    "with its sums": [("rank2", "sums", 7)],
    "after all have their sums": [("rank1", "after flag", 7)],
    "after its update": [("rank0", "after update", 7)],
    "in an evaluation": [("rank2", "evaluation", 1)],
    "while a checkpoint is taken": [("rank1", "checkpoint", 1)],
    "two of different pieces at once": [("rank0", "sums", 5), ("rank3", "sums", 5)],
    "another while they save": [("rank1", "sums", 8), ("rank2", "rescue", 1)],
    "the one that leads, as they save": [("rank1", "sums", 8), ("rank0", "rescued part", 1)],
    "one after the other": [("rank1", "sums", 4), ("rank2", "after update", 3)],
}
LONG = {("dp=2,tp=2", "after its update"), ("dp=2,fsdp=2", "with its sums"), ("dp=2,pp=2", "in an evaluation")}


def train(runs: Runs, layout: str, faults: Sequence[Fault], *settings: str, folder: str = "run") -> Run:
    """Start a run with faults."""
    struck = runs.root / f"struck-{folder}"
    struck.mkdir()
    environment = {FAULTS: json.dumps(faults), STRUCK: str(struck), "PYTHONPATH": python_path()}
    arguments = ("--threads", "1", "--device", "cpu", "--parallel", layout, *SETTINGS, *settings)
    return runs.start("train", "digits", *arguments, folder=folder, environment=environment)


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Return what was trained, and the optimizer's moments."""
    state: Any = state_of(run.folder, "newest")
    moments = {f"{n}/{k}": v for n, each in state["optimizer"]["state"].items() for k, v in each.items()}
    return {**state["model"], **moments}


def check_recorded(run: Run) -> None:
    """Check that each step is recorded once."""
    steps = [step for r in run.records("steps") for step in range(r["step"] - len(r["losses"]) + 1, r["step"] + 1)]
    assert steps == list(range(1, STEPS + 1)), run.text()[-3000:]


def _marks(layout: str, case: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long if (layout, case) in LONG else pytest.mark.slow]


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(layout, case, marks=_marks(layout, case)) for layout in LAYOUTS for case in CASES],
)
def test_no_step_is_lost_whoever_dies_where(layout: str, case: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        whole = train(runs, layout, [], folder="whole")
        assert whole.end() == 0, whole.text()[-3000:]
        run = train(runs, layout, CASES[case])
        assert run.end() == 0, run.text()[-3000:]
        assert run.events("worker_died") and [r for r in run.records("checkpoint") if r["reason"] == "rescue"]
        assert all(event["lost_steps"] <= 1 for event in run.events("resumed")), run.text()[-3000:]
        check_recorded(run)
        undisturbed = weights(whole)
        for name, tensor in weights(run).items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(undisturbed[name])), name
