"""A plan from a run's record: every way with its interval, a page, and words that refuse what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import echelon
from echelon.config import load_run_config
from echelon.records.events import WayTried
from echelon.records.file import newest
from tests.ranks.links import NEEDS_LINKS
from tests.ranks.runs import Runs

AT = ("--at", "workers=8, link=100mbit, memory=1GB, price=2", "--at", "workers=4")


@pytest.mark.slow
def test_a_run_is_planned_on_other_machines(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        trained = runs.train("digits", "--workers", "2", "--max-steps", "60", "--epochs", "10", folder="run")
        assert trained.end() == 0, trained.errors()
        planned = runs.start("plan", trained.folder, *AT)
        assert planned.end() == 0, planned.errors()
        assert "Fastest: " in planned.text() and (tmp_path / "plan.html").stat().st_size > 10_000
        told = runs.start("plan", trained.folder, *AT, "--json")
        assert told.end() == 0, told.errors()
        plan = json.loads(told.text())
        slow, near = plan["machines"]
        ways = {way["way"]: way for way in slow["ways"]}
        assert {"none", "int8", "sign", "local(period=8)", "fsdp=8", "dp=4,pp=2,microbatches=8"} <= set(ways)
        assert all(way["step_low_s"] < way["step_s"] < way["step_high_s"] for way in ways.values())
        assert all(way["memory_bytes"] and not way["memory_unknown"] and way["cost"] > 0 for way in ways.values())
        assert ways["int8"]["step_s"] < ways["none"]["step_s"]  # the link is slow
        assert ways["none"]["bubble"] is None and 0 < ways["dp=4,pp=2,microbatches=8"]["bubble"] < 1
        assert {way["cost"] for way in near["ways"]} == {None}
        assert all(way["memory_low_bytes"] < way["memory_bytes"] < way["memory_high_bytes"] for way in ways.values())
        for words, said in (
            (("--at", "workers=4, processors=-1"), "processors must not be below 0"),
            (("--at", "workers=4, processors=half"), "processors"),
            (("--at", "workers=256"), "cannot be divided by 256 workers"),
            ((), "--at is missing"),
            (("--at", "workers=4", "--model", "mlp"), "model.name belongs to the run"),
            (("--at", "workers=4", "--page", "no/where.html"), "--page no/where.html: no is no folder that you may"),
            (("--at", "workers=4", "--batch-size", "auto"), "--batch-size auto is chosen for this machine's memory"),
        ):
            refused = runs.start("plan", trained.folder, *words)
            assert refused.end() == 2 and said in refused.errors(), refused.errors()


@pytest.mark.long
def test_a_run_of_objects_from_python_is_planned_from_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = TensorDataset(torch.randn(640, 8), torch.randint(0, 2, (640,)))
    run = echelon.train(nn.Linear(8, 2), (samples, samples), tmp_path / "run", task="image-classification", workers=2,
                        threads=1, device="cpu", epochs=4, optimizer=torch.optim.Adagrad).folder  # fmt: skip
    planned = echelon.plan(run, at=AT[1::2])
    slow, near = planned.answers
    assert {"none", "int8", "sign"} <= {way.label for way in near.predictions}
    assert all(way.candidate.memory_bytes is None and way.fits for way in slow.predictions)
    (note,) = [note for note in planned.known.notes if "given from Python" in note]
    assert note.startswith("Model and data were given from Python: they cannot be built again here")
    with Runs(tmp_path) as runs:
        told = runs.start("plan", run, *AT, "--trust")
        assert told.end() == 0 and "Fastest: " in told.text() and "memory is not predicted" in told.text()


@pytest.mark.slow
@pytest.mark.parametrize("link", [pytest.param("10mbit", marks=NEEDS_LINKS)])
def test_auto_takes_what_is_faster_on_this_link(tmp_path: Path, link: str) -> None:
    with Runs(tmp_path) as runs:
        words = ("--workers", "2", "--link", link, "--epochs", "60", "--max-steps", "20", "--tolerance", "0")
        refused = runs.train("digits", "--auto", "--sync", "local(8)", folder="refused")
        assert refused.end() == 2 and "--auto chooses strategy.sync" in refused.errors(), refused.errors()
        beside = runs.train("digits", "--auto", "--compression", "auto", folder="beside")
        assert beside.end() == 2 and "leave out --compression auto, or --auto" in beside.errors(), beside.errors()
        run = runs.train("digits", "--auto", *words, folder="run")
        assert run.end() == 0, run.errors()
        strategy = load_run_config(tmp_path / "run" / "config.yaml").strategy
        assert strategy.compression in ("int8", "bf16") and strategy.sync == "allreduce", run.text()
        assert strategy.collective == "backend", "codecs, and two workers, have one path"
        tried = {trial.way: trial for trial in newest(tmp_path / "run", WayTried)}
        assert tried["none"].predicted_s is None and tried[strategy.compression].predicted_s
        assert tried[strategy.compression].step_s < tried["none"].step_s
        short = next(line for line in run.text().splitlines() if "20 steps are too few for " in line)  # in any order
        assert "x as fast a step" in run.text() and "local(period=8)" in short, run.text()


@pytest.mark.slow
def test_auto_leaves_the_path_to_be_measured_where_there_are_several(tmp_path: Path) -> None:
    words = ("--workers", "3", "--batch-size", "48", "--epochs", "1", "--max-steps", "20", "--tolerance", "0")
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--model", "mlp", "--auto", *words, folder="run")
        assert run.end() == 0, run.errors()
        strategy = load_run_config(tmp_path / "run" / "config.yaml").strategy
        assert strategy.collective == ("auto" if strategy.compression == "none" else "backend"), run.text()
