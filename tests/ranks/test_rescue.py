"""Split replicas when a process is killed: no step is lost, and the result is that of a run that nobody disturbed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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
WIDE = "tests.ranks.split_faults:WideViT"
SETTINGS = ("--batch-size", "128", "--epochs", str(EPOCHS), "--balance", "off")
REPLICAS = ("dp=2,tp=2", "dp=2,pp=2", "dp=2,fsdp=2")
"""Layouts of which each piece is in two replicas: those of ranks 0 and 2, and of ranks 1 and 3."""
COPIES = ("fsdp=4", "dp=4,zero1")
"""Layouts in which each rank keeps a copy of what the next one alone has."""
CASES: dict[str, Sequence[Fault]] = {
    "before a step": [("rank1", "step", 6)],
    "in backward": [("rank3", "backward", 6)],
    "with its sums": [("rank2", "sums", 7)],
    "after all have their sums": [("rank1", "after flag", 7)],
    "after its update": [("rank0", "after update", 7)],
    "in an evaluation": [("rank2", "evaluation", 1)],
    "while a checkpoint is taken": [("rank1", "checkpoint", 1)],
    "one after the other": [("rank1", "sums", 4), ("rank2", "after update", 3)],
    "another while they save": [("rank1", "sums", 8), ("rank2", "rescue", 1)],
    "two at once": [("rank0", "sums", 5), ("rank3", "sums", 5)],
    "the one that leads, as they save": [("rank1", "sums", 8), ("rank0", "rescued part", 1)],
}
CASES_OF_COPIES: dict[str, Sequence[Fault]] = {
    **CASES,
    "another while they save": [("rank1", "sums", 8), ("rank3", "rescue", 1)],
    "two at once": [("rank0", "sums", 5), ("rank2", "sums", 5)],
    "the one that leads, as they save": [("rank2", "sums", 8), ("rank0", "rescued part", 1)],
}
CASES_OF_LAYOUTS: dict[str, dict[str, Sequence[Fault]]] = {
    "dp=2,fsdp=2": {**CASES, "in a sum": [("rank2", "reduce scatter", 20)]},
    "fsdp=4": {
        **CASES_OF_COPIES,
        "in a sum": [("rank2", "reduce scatter", 20)],
        "before it gives its gradients for a copy": [("rank1", "copy", 7)],
        "with the gradients of its neighbour": [("rank2", "copied", 7)],
    },
    "dp=4,zero1": {
        **CASES_OF_COPIES,
        "before any of them shares": [("rank1", "share", 25)],
        "between the parts that are shared": [("rank1", "share", 27)],
        "the one that leads, once all is shared": [("rank0", "shared", 7)],
    },
}
LONG = {
    ("dp=2,tp=2", "after its update"), ("dp=2,pp=2", "in an evaluation"), ("dp=2,fsdp=2", "two at once"),
    ("fsdp=4", "with its sums"), ("dp=4,zero1", "between the parts that are shared"),
}  # fmt: skip


def train(
    runs: Runs,
    layout: str,
    faults: Sequence[Fault],
    *settings: str,
    folder: str = "run",
    prefix: Sequence[str] = (),
    model: str = MODEL,
) -> Run:
    """Start a run with faults; `prefix`: of the command."""
    struck = runs.root / f"struck-{folder}"
    struck.mkdir(exist_ok=True)
    environment = {FAULTS: json.dumps(faults), STRUCK: str(struck), "PYTHONPATH": python_path()}
    workers = () if "--workers" in settings else ("--workers", "4")
    arguments = (
        "--threads",
        "1",
        "--device",
        "cpu",
        "--parallel",
        layout,
        "--model",
        model,
        *SETTINGS,
        *workers,
        *settings,
    )
    environment["ECHELON_RUN_SECRET"] = "5a" * 32
    return runs.start("train", "digits", *arguments, folder=folder, environment=environment, prefix=prefix)


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Return what was trained, and the optimizer's moments."""
    state: Any = state_of(run.folder, "newest")
    moments = {f"{n}/{k}": v for n, each in state["optimizer"]["state"].items() for k, v in each.items()}
    return {**state["model"], **moments}


def check_recorded(run: Run) -> None:
    """Check that each step is recorded once."""
    steps = [step for r in run.records("steps") for step in range(r["step"] - len(r["losses"]) + 1, r["step"] + 1)]
    assert steps == list(range(1, STEPS + 1)), run.text()[-3000:]


@cache
def undisturbed_weights(layout: str, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return what a run without faults trains."""
    with TemporaryDirectory() as folder, Runs(Path(folder)) as runs:
        run = train(runs, layout, [], *settings)
        assert run.end() == 0, run.text()[-3000:]
        return weights(run)


def check_undisturbed(run: Run, layout: str, *settings: str) -> None:
    """Check that a run that has lost workers lost no step, and has trained what one without faults trains."""
    assert run.end() == 0, run.text()[-3000:]
    undisturbed = undisturbed_weights(layout, settings)
    assert run.events("worker_died") and [r for r in run.records("checkpoint") if r["reason"] == "rescue"]
    assert all(event["lost_steps"] == 0 for event in run.events("resumed")), run.text()[-3000:]
    check_recorded(run)
    for name, tensor in weights(run).items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(undisturbed[name])), name


def _cases() -> Iterator[Any]:
    for layout in (*REPLICAS, *COPIES):
        for case, faults in CASES_OF_LAYOUTS.get(layout, CASES).items():
            mark = pytest.mark.long if (layout, case) in LONG else pytest.mark.slow
            yield pytest.param(layout, faults, marks=mark, id=f"{layout}, {case}")


@pytest.mark.parametrize(("layout", "faults"), _cases())
def test_no_step_is_lost_whoever_dies_where(layout: str, faults: Sequence[Fault], tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        check_undisturbed(train(runs, layout, faults), layout)


TOPK, POWER = "topk(0.05, warmup_steps=0, finish_steps=0)", "powersgd(2, warmup_steps=0, finish_steps=0)"
CODED: Sequence[tuple[str, str, str]] = (
    ("dp=2,tp=2", TOPK, "backward"),
    ("dp=2,tp=2", POWER, "after flag"),
    ("dp=2,pp=2", TOPK, "after update"),
    ("dp=2,fsdp=2", POWER, "sums"),
    ("dp=2,fsdp=2", "adaptive(error=0.3)", "sums"),
    ("dp=4,zero1", TOPK, "after update"),
    ("dp=4,zero1", POWER, "sums"),
    ("dp=4,zero1", "int8", "backward"),
)


@pytest.mark.parametrize(
    ("layout", "codec", "point"),
    [pytest.param(*case, marks=pytest.mark.slow if i else pytest.mark.long) for i, case in enumerate(CODED)],
)
def test_codecs_between_split_replicas_go_on_from_the_same_step(
    layout: str, codec: str, point: str, tmp_path: Path
) -> None:
    """What the dead rank's codec had not sent is lost; what all codecs have alike is not, or they would not meet."""
    with Runs(tmp_path) as runs:
        run = train(runs, layout, [("rank1", point, 7)], "--compression", codec, model=WIDE)
        assert run.end() == 0, run.text()[-3000:]
        assert [r for r in run.records("checkpoint") if r["reason"] == "rescue"], run.text()[-3000:]
        assert all(event["lost_steps"] == 0 for event in run.events("resumed")), run.text()[-3000:]
        check_recorded(run)
        assert "does nothing" not in run.text()
        undisturbed = train(runs, layout, [], "--compression", codec, folder="undisturbed", model=WIDE)
        assert undisturbed.end() == 0
        loss, expected = run.losses()[STEPS], undisturbed.losses()[STEPS]
        assert abs(loss - expected) < 0.3 * expected


ADAM = ("--optimizer", "adamw", "--lr", "0.002", "--ema", "0.9", "--clip-norm", "0.5", "--workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "dp=2,zero1"])
@pytest.mark.parametrize("point", ["sums", "after flag", "after update", "step"])
def test_a_copy_has_moments_averages_and_clipped_gradients(layout: str, point: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = train(runs, layout, [("rank0", point, 7), ("rank1", point, 5)], *ADAM)
        check_undisturbed(run, layout, *ADAM)


@pytest.mark.slow
def test_who_has_a_piece_alone_leads_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Ranks 1 and 3 have the same piece of two replicas."""
    with Runs(tmp_path) as runs:
        faults = [("rank1", "sums", 18), ("rank3", "sums", 18)]
        run = train(runs, "dp=2,tp=2", faults, "--checkpoint-every", "12")
        assert run.end() == 0, run.text()[-3000:]
        assert not [r for r in run.records("checkpoint") if r["reason"] == "rescue"]
        assert [event["step"] for event in run.events("resumed")] == [12], run.text()[-3000:]


@pytest.mark.long
def test_who_is_stopped_is_ended_and_no_step_is_lost(tmp_path: Path) -> None:
    """Rank 1 is stopped (SIGSTOP) in a step: the others have not lost it, and would wait for --timeout."""
    settings = ("--timeout", "100s")
    with Runs(tmp_path) as runs:
        run = train(runs, "dp=2,tp=2", [("rank1", "step, stopped", 9)], *settings)
        check_undisturbed(run, "dp=2,tp=2", *settings)
        death = run.events("worker_died")[0]
        before = max(r["t"] for r in run.records("steps") if r["t"] < death["t"])
        assert "has been stopped (SIGSTOP) for" in death["message"] and death["t"] - before < 30.0, death
