"""A task of the user's own, one file in a package of theirs: it does everything that the built-in ones do.

Regression on two inputs, whose targets are two tensors and whose unit is, in one form, no sample.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.core.errors import UserError
from echelon.core.task import TaskDefaults
from echelon.data import from_datasets
from echelon.data.base import Shard
from echelon.data.order import local_part
from echelon.observe.phases import HostClock
from echelon.records.file import read_records
from echelon.records.kinds import Evaluation, Start
from echelon.run.resolve import resolve
from echelon.study.base import COMPLETED
from echelon.study.tables import read_tables
from echelon.tasks import nest
from echelon.tasks.base import Batch, TaskSettings
from echelon.tasks.registry import TASKS, build_task, check_task
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from tests.ranks import toy_task
from tests.ranks.layouts import Trial, assemble, held, make_world
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, Run, Runs
from tests.ranks.spawn import Rank, run_ranks

SIZES = (8, 7, 3, 8, 1)
PLAIN = {"optimizer.name": "momentum", "optimizer.momentum": 0.0, "optimizer.lr": 0.02}
IN_FLOAT64 = {  # layouts of two ranks, and what the strategy must be for the same function
    "dp=2": "allreduce",
    "dp=2 ": "local(1)",
    "fsdp=2": "allreduce",
    "tp=2": "allreduce",
    "pp=2,microbatches=2": "allreduce",
    "pp=2,schedule=1f1b": "allreduce",
}


def learn(rank: Rank | None, layouts: Sequence[tuple[str, str]], accumulate: int = 1) -> list[Any]:
    """Train on the same global batches in each layout; returns losses and what this rank holds at the end, of each."""
    return [_learn(rank, parallel.strip(), sync, accumulate) for parallel, sync in layouts]


def _learn(rank: Rank | None, parallel: str, sync: str, accumulate: int) -> tuple[list[float], Any]:
    settings = {**PLAIN, "strategy.sync": sync, "training.accumulate": accumulate}
    config = Trial("toy", parallel, settings, SIZES).config()
    world = make_world(config, rank)
    seed_everything(0)
    source = from_datasets(*toy_task.load())
    task = toy_task.Weighted().fitted(source.info, TaskSettings())
    inputs, targets = nest.stack([source.train[i] for i in range(40)])
    inputs, targets = nest.map_leaves(lambda leaf: leaf.double(), (inputs, targets))
    clock = HostClock()
    work = Work(source.info, task, toy_task.TwoInputs().double(), nest.take(inputs, slice(2)))
    parts = build_parts(resolve(config), work, world, clock)
    step_settings = StepSettings(world.device, None, accumulate, 0.0, False, world.data_group)
    step = Step(task, step_settings, clock, parts.scaler, parts.split)
    losses = []
    for number, size in enumerate(SIZES):
        rows = np.arange(number * 8, number * 8 + size)
        own = torch.from_numpy(local_part(rows, Shard(world.data_rank, world.data_size)))
        batch = Batch(nest.take(inputs, own), nest.take(targets, own), size, number)
        result = step.forward_backward(batch, parts.sync)
        loss = result.loss.double() * world.counts
        if world.group is not None:
            dist.all_reduce(loss)
        parts.sync.step()
        losses.append(float(loss))
    parts.sync.close()
    return losses, held(parts)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_layout_divides_by_the_units_of_the_global_batch(accumulate: int) -> None:
    """Uneven parts of uneven units: the sum of losses is divided by all of them, and averages weigh by them."""
    layouts = list(IN_FLOAT64.items())
    ranks = run_ranks(learn, 2, layouts, accumulate)
    ((expected, whole),) = learn(None, [("dp=1", "allreduce")])
    parameters = assemble([whole])
    for i, layout in enumerate(layouts):
        losses = ranks[0][i][0]
        assert np.allclose(losses, expected, rtol=0, atol=1e-9), layout
        pieces = assemble([rank[i][1] for rank in ranks])
        assert all(np.abs(pieces[n] - parameters[n]).max() < 1e-9 for n in parameters), layout


def test_tasks_are_known_by_their_files() -> None:
    assert "image_classification" in TASKS.names()
    for name in TASKS.names():
        assert build_task(name.replace("_", "-")).facts().spec == name
    with pytest.raises(UserError, match="did you mean image-classification"):
        check_task("image-clasification")


def test_a_float_target_is_no_class() -> None:
    info = from_datasets(*toy_task.load()).info
    with pytest.raises(UserError, match="name another --task"):
        build_task("image-classification").fitted(info, TaskSettings())


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(toy_task.__file__, package / "regression.py")
    with Runs(tmp_path) as started:
        yield started


TOY = ("--model", "toys.regression:TwoInputs", "--task", "toys.regression:Regression", *SMALL, "--loaders", "0",
       "--batch-size", "32", "--lr", "0.02")  # fmt: skip


def train(runs: Runs, folder: str, *settings: str) -> Run:
    """Train the toy task and wait for its end."""
    environment = {"PYTHONPATH": f"{runs.root}:{Path.cwd()}"}
    run = runs.start("train", "toys.regression:load", *TOY, *settings, folder=folder, environment=environment)
    assert run.end() == 0, run.text()
    return run


def rmse(run: Path) -> float:
    """Return the last RMSE that was recorded."""
    value = list(read_records(run, Evaluation))[-1].metrics["rmse"]
    assert value is not None
    return value


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_trains_resumes_evaluates_and_reports(runs: Runs) -> None:
    run = ["train", "toys.regression:load", *TOY, "--epochs", "3", "--workers", "2"]
    trained, *others, evaluated = run_many(
        runs.root,
        [
            [*run, "--run", "whole"],
            [*run, "--max-steps", "10", "--run", "half"],
            ["resume", "half", "--max-steps", "0"],
            ["evaluate", "whole"],
        ],
    )
    assert [result.code for result in (trained, *others, evaluated)] == [0] * 4, (trained, others, evaluated)
    whole, half = runs.root / "whole", runs.root / "half"
    assert rmse(half) == rmse(whole), "a resumed run goes on otherwise"
    assert "RMSE" in evaluated.out + evaluated.err, evaluated
    (start,) = read_records(whole, Start)
    assert (start.task.spec, start.task.primary.direction) == ("toys.regression:Regression", "min")
    best = min(e.metrics["rmse"] for e in read_records(whole, Evaluation))
    numbers = json.loads((whole / "summary.json").read_text())
    assert numbers["metrics"]["rmse"] == pytest.approx(rmse(whole)) and "top1" not in numbers["metrics"]
    assert json.loads((whole / "evaluation.json").read_text())["metrics"]["rmse"] == best
    page = (whole / "report.html").read_text()
    assert "RMSE" in page and "Errors of the toy" in page and 'id="toy-errors"' in page and "top-1" not in page
    said = trained.out + trained.err
    assert "No evaluation was recorded" not in said and "RMSE" in said


LAYOUTS = {
    "dp=2": ("--parallel", "dp=2"),
    "fsdp=2": ("--parallel", "fsdp=2"),
    "tp=2": ("--parallel", "tp=2"),
    "pp=2": ("--parallel", "pp=2,microbatches=2"),
    "local(8)": ("--sync", "local(8)"),
    "ps": ("--sync", "ps(mode=async)"),
    "ps sync": ("--sync", "ps(mode=sync)"),
}


SEEN_BY_CI = ("fsdp=2", "ps", "ps sync")  # the others above in float64, and replicas in the long test before this one


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.long if each in SEEN_BY_CI else pytest.mark.slow) for each in LAYOUTS],
)
def test_it_trains_and_resumes_in_every_layout(runs: Runs, layout: str) -> None:
    task = ("--task", "toys.regression:Weighted") if layout == "ps sync" else ()
    alone = train(runs, "alone", "--epochs", "2", "--workers", "1", *task)
    run = train(runs, "run", "--epochs", "2", "--max-steps", "9", "--workers", "2", *LAYOUTS[layout], *task)
    environment = {"PYTHONPATH": f"{runs.root}:{Path.cwd()}"}
    again = runs.start("resume", str(run.folder), "--max-steps", "0", environment=environment)
    assert again.end() == 0, again.text()
    assert run.summary()["metrics"]["rmse"] == pytest.approx(rmse(run.folder))
    tolerance = 0.02 if layout.startswith(("local", "ps")) else 1e-4
    assert math.isclose(rmse(run.folder), rmse(alone.folder), abs_tol=tolerance)
    evaluated = runs.start("evaluate", str(run.folder), environment=environment)
    assert evaluated.end() == 0 and "RMSE" in evaluated.text(), evaluated.text()
    page = (run.folder / "report.html").read_text()
    assert "Errors of the toy" in page and 'id="toy-errors"' in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layouts_and_strategies_are_compared_by_it(runs: Runs) -> None:
    environment = {"PYTHONPATH": f"{runs.root}:{Path.cwd()}"}
    ways = [f"{flag.removeprefix('--')}={way.partition(',')[0]}" for flag, way in LAYOUTS.values()]
    tries = [word for way in ways for word in ("--try", way)]
    arguments = ("toys.regression:load", *TOY[:-2], *tries, "--seeds", "1", "--epochs", "2", "--workers", "2")
    run = runs.start("compare", *arguments, "--run", str(runs.root / "ways"), folder="ways", environment=environment)
    assert run.end(800) == 0, run.text()
    rows, _ = read_tables(runs.root / "ways")
    assert len(rows) == len(LAYOUTS) and all(row.status == COMPLETED for row in rows), rows
    assert all(row.metric == "rmse" and math.isfinite(row.metrics["rmse"] or math.nan) for row in rows), rows
    page = (runs.root / "ways" / "report.html").read_text()
    assert all(layout[1].partition(",")[0] in page for layout in LAYOUTS.values()) and "RMSE" in page


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_is_compared_by_its_primary_metric(runs: Runs) -> None:
    environment = {"PYTHONPATH": f"{runs.root}:{Path.cwd()}"}
    study = runs.root / "study"
    tries = ("--try", "lr=0.02", "--try", "lr=0.0001", "--seeds", "1", "--epochs", "3", "--workers", "1")
    arguments = ("toys.regression:load", *TOY[:-2], *tries, "--run", str(study))
    run = runs.start("compare", *arguments, folder="study", environment=environment)
    assert run.end() == 0, run.text()
    page = re.sub(
        r"<script[^>]*>(?:(?!</script>).){500000,}</script>", "", (study / "report.html").read_text(), flags=re.S
    )
    assert "RMSE" in page and "accuracy" not in page  # beside what the library of charts says


@pytest.mark.parametrize("name", TASKS.names())
def test_defaults_are_known_without_importing_a_task(name: str) -> None:
    declared = TASKS.declaration(name).constants["defaults"]
    assert (declared == "TaskDefaults()") == (build_task(name).defaults == TaskDefaults()), "annotate it: ClassVar[...]"
