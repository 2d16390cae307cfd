"""`echelon resume --from-scratch`: what it is refused for leaves the checkpoints where they are."""

import os
from contextlib import closing
from pathlib import Path

import pytest

import echelon
from echelon.config import build, to_yaml
from echelon.core.errors import UserError
from echelon.records.events import StartedOver
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Start
from echelon.run.elsewhere import submitted_again
from echelon.run.overview import cluster_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    return tmp_path


def _described(run: Path, *objects: str, **settings: str) -> None:
    config = build(None, {"data.source": "digits", "model.name": "mlp"} | settings).config
    (run / "config.yaml").write_text(to_yaml(config))
    with closing(Recorder(run)) as record:
        record.write(Start(objects=objects))


def _is_aside(run: Path) -> bool:
    started_over = bool(list(read_records(run, StartedOver)))
    assert started_over == (run / "checkpoints-before-1").exists() == (not (run / "checkpoints").exists())
    return started_over


def test_a_run_of_objects_that_are_not_given_stays(run: Path) -> None:
    _described(run, "model")
    with pytest.raises(UserError, match=r"model of .* was given from Python as an object: give it again"):
        echelon.resume(run, from_scratch=True)
    assert not _is_aside(run)


def test_a_run_whose_workers_do_not_fit_its_layout_stays(run: Path) -> None:
    _described(run)
    with pytest.raises(UserError, match="dp=3"):
        echelon.resume(run, from_scratch=True, workers=2, parallel="dp=3")
    assert not _is_aside(run)


def test_a_place_that_refuses_a_run_leaves_it_and_one_that_takes_it_starts_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _described(run, **{"launch.on": "slurm"})
    cluster, config = cluster_of(run), build(run / "config.yaml", {}).config
    assert cluster is not None
    with pytest.raises(UserError, match="objects of your own cannot be sent"):
        submitted_again(run, config, cluster, has_objects=True, from_scratch=True)
    assert not _is_aside(run)
    (run / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (run / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{run}:{os.defpath}")
    assert submitted_again(run, config, cluster, from_scratch=True).job == "12"
    assert _is_aside(run)
