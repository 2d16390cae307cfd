"""Runs of earlier versions: their folders are read and reported, and go on as the version that began them would.

`old_runs/` holds two completed ones from before tasks, places and typed records, 30 steps of 2 workers on the digits:
an all-reduce with topk(0.1), and ps(mode=async); and four of later versions that were stopped.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import CheckpointStore
from echelon.config import DataConfig, ModelConfig, load_run_config, to_yaml
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.kept_info import keep_info, read_info
from echelon.models.tuning.plan import UNTUNED
from echelon.records.file import read_records
from echelon.records.kinds import Evaluation, Start, Steps
from echelon.reporting.report.write import write_report
from echelon.run.finetune import tuned_from
from echelon.run.overview import overview_of
from echelon.run.resolve import resolve
from echelon.trainer.start_weights import start_from
from tests.ranks.run_many import run_many

OLD_RUNS = {"allreduce": 0.8552, "ps": 0.8357}
# stopped runs: up to which step they are resumed, and the last losses of the version that began them, resumed likewise
STOPPED = {
    "fsdp": (30, (0.3913427, 0.3770179, 0.4503373, 0.2976083)),
    "local": (33, (0.3271774, 0.4005814, 0.3833684, 0.3725550)),  # local(4, overlap=1), sign
    "diloco": (32, (0.6207519, 0.4189658, 0.7968724, 0.7665378)),  # diloco(5), int8
    "pp": (24, (0.5225178, 0.5282615, 0.5056450, 0.3858913)),
}
TINY = """
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
"""


def unpacked(name: str, folder: Path) -> Path:
    """Return the run folder of that name, unpacked."""
    with tarfile.open(Path(__file__).parent / "old_runs" / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(params=OLD_RUNS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(str(request.param), tmp_path)


@pytest.mark.parametrize("name", STOPPED)
def test_one_that_was_stopped_is_reported_and_listed(name: str, tmp_path: Path) -> None:
    run = unpacked(name, tmp_path)
    write_report(run)
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    assert overview_of(run).state == "stopped"


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", STOPPED)
def test_one_that_was_stopped_goes_on_as_the_version_that_began_it_would(name: str, tmp_path: Path) -> None:
    run, (steps, expected) = unpacked(name, tmp_path), STOPPED[name]
    (tmp_path / "tiny.py").write_text(TINY)
    (resumed,) = run_many(tmp_path, [["resume", str(run), "--max-steps", str(steps), "--trust"]])
    assert resumed.code == 0, resumed
    losses = [loss for window in read_records(run, Steps) for loss in window.losses]
    assert len(losses) == steps and losses[-len(expected) :] == pytest.approx(expected, abs=1e-4)
    (evaluated,) = run_many(tmp_path, [["evaluate", str(run), "--trust"]])
    assert evaluated.code == 0, evaluated


def test_its_record_is_read_as_today_s(run: Path) -> None:
    starts, windows = list(read_records(run, Start)), list(read_records(run, Steps))
    assert [start.world_size for start in starts] == [2] and starts[0].task.primary.name == "top1"
    assert windows[-1].step == 30 and sum(len(window.losses) for window in windows) == 30
    last = list(read_records(run, Evaluation))[-1]
    assert last.metrics["top1"] == pytest.approx(OLD_RUNS[run.name], abs=1e-4)


def test_it_is_reported_and_listed(run: Path) -> None:
    write_report(run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 30
    assert summary["metrics"]["top1"] == pytest.approx(OLD_RUNS[run.name], abs=1e-4)
    page = (run / "report.html").read_text()
    assert "Top-1" in page or "top-1" in page
    assert overview_of(run).state == "completed"


def test_what_cannot_be_written_is_said_in_words(run: Path) -> None:
    (run / "summary.json").unlink(missing_ok=True)
    (run / "summary.json").mkdir()
    with pytest.raises(UserError, match="the report could not be written: Is a directory"):
        echelon.report(run)


def test_it_goes_on_from_its_description_and_its_checkpoint(run: Path) -> None:
    resolved = resolve(load_run_config(run / "config.yaml"))
    assert resolved.sync.name == run.name and resolved.layout_for(2).dp == 2
    found = CheckpointStore(run / "checkpoints", keep=1).newest()
    assert found is not None and found[0] == 30
    weights = {name: value for name, value in found[1]["model"].items() if isinstance(value, torch.Tensor)}
    assert {name: tuple(value.shape) for name, value in weights.items()}["1.weight"] == (8, 64)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_it_is_evaluated_and_trains_on(run: Path) -> None:
    (run.parent / "tiny.py").write_text(TINY)
    best = max(evaluation.metrics["top1"] or 0.0 for evaluation in read_records(run, Evaluation))
    (evaluated,) = run_many(run.parent, [["evaluate", str(run), "--trust"]])
    assert evaluated.code == 0, evaluated
    assert json.loads((run / "evaluation.json").read_text())["metrics"]["top1"] == pytest.approx(best, abs=1e-6)
    (resumed,) = run_many(run.parent, [["resume", str(run), "--max-steps", "34", "--epochs", "9", "--trust"]])
    assert resumed.code == 0, resumed
    last = list(read_records(run, Steps))[-1]
    assert last.step == 34 and json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_a_head_that_is_kept_for_other_classes_is_remarked_on(run: Path) -> None:
    keep_info(run, open_data(DataConfig(source="digits"), 0).info)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    config = ModelConfig(name="mine:net", weights=str(run))
    info = read_info(run)
    assert info is not None
    assert "head is kept" not in str(start_from(model, config, UNTUNED, info))
    letters = replace(info, classes=tuple(f"letter {name}" for name in info.classes))
    loaded = start_from(model, config, UNTUNED, letters)
    assert "its head is kept, and was for as many other classes (0, 1, 2, 3, 4, ...): --head new" in str(loaded)


def test_what_is_tuned_from_it_reads_its_columns(run: Path) -> None:
    config = load_run_config(run / "config.yaml")
    columns = replace(config.data, input="a,b", target="y", columns="b=category")
    (run / "config.yaml").write_text(to_yaml(replace(config, data=columns)))
    taken = tuned_from(run, {"data.source": "other.csv", "data.target": "z"})
    assert (taken["data.input"], taken["data.columns"]) == ("a,b", "b=category")
    assert taken["data.target"] == "z" and tuned_from(run, {})["data.target"] == "y"


def test_how_it_was_tuned_is_read_where_others_start_from_it(run: Path) -> None:
    config = load_run_config(run / "config.yaml")
    for weights, is_run in ((str(run), True), (f"hf:{run}", True), ("pretrained", False), ("hf:no/such-name", False)):
        starts = replace(config, run="", model=replace(config.model, name="timm/resnet18", weights=weights))
        assert (resolve(starts).start_tuning() is not None) == is_run, "nothing is asked of a hub, nor brought"


def test_a_run_that_goes_on_does_not_read_the_one_whose_weights_it_started_from(run: Path) -> None:
    config = load_run_config(run / "config.yaml")
    (run / "config.yaml").write_text("model: {tune: none_such}")
    resolved = resolve(replace(config, run="", model=replace(config.model, weights=str(run))))
    assert not resolved.going_on(0).config.model.weights
    with pytest.raises(UserError, match="none_such"):
        resolved.start_tuning()
