"""Predictions of earlier runs beside what later ones took."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.records.events import WayTried
from echelon.records.file import Recorder
from echelon.reporting.report.records import load_run
from echelon.run.residuals import (
    ENOUGH,
    PLANS_FILE,
    PlannedRuns,
    PlannedStep,
    Residual,
    alike_for_plans,
    half_width,
    history_words,
    memory_half_width,
    predicted_before,
    residuals_of,
    write_planned,
)
from tests.unit.reporting.report.fixtures import LiveState, make_run, tell, write_record

SHORT = LiveState(epochs=2, steps_per_epoch=100, jitter=0.0)
STEP_S = 0.11
CONFIG = (
    "data:\n  source: d\nmodel:\n  name: m\nlaunch:\n  workers: 2\nstrategy:\n  sync: {sync}\n  compression: {codec}\n"
)


def run_in(folder: Path, sync: str = "allreduce", codec: str = "none", model: str = "m", t: float = 0.0) -> Path:
    """Make a run of 110 ms a step that was described at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    make_run(folder, SHORT)
    lines = tell(SHORT)
    for line in lines:
        if line["kind"] == "steps":
            line["seconds"] = STEP_S * len(line["losses"])
    write_record(folder, lines)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(sync=sync, codec=codec).replace("name: m\n", f"name: {model}\n"))
    os.utime(config, (t, t))
    return folder


def predicts(folder: Path, settings: dict[str, str], then_s: float) -> None:
    """Have a run predict a way."""
    (folder / "summary.json").write_text(json.dumps({"predictions": [{"settings": settings, "then_s": then_s}]}))


def test_the_newest_earlier_run_that_is_alike_but_for_its_way_is_compared_with(tmp_path: Path) -> None:
    for name, then_s, t in (("old", 0.5, 1.0), ("new", 0.1, 2.0)):
        predicts(run_in(tmp_path / name, t=t), {"strategy.compression": "topk(density=0.01)"}, then_s)
    predicts(run_in(tmp_path / "other", model="another", t=3.0), {"strategy.compression": "topk(density=0.01)"}, 0.2)
    (tmp_path / "no_run").mkdir()
    run = run_in(tmp_path / "mine", codec="topk(0.01)")
    told = predicted_before(run, load_run(run))
    assert told is not None
    assert (told.source, told.predicted_s) == ("new", 0.1) and told.step_s == pytest.approx(STEP_S)
    assert told.message == "a step of topk(density=0.01): new had predicted 100 ms, 110 ms were measured"


@pytest.mark.parametrize("settings", [{"strategy.sync": "local(period=8)"}, {"strategy.compression": "int8"}])
def test_another_way_predicts_nothing(tmp_path: Path, settings: dict[str, str]) -> None:
    predicts(run_in(tmp_path / "before", t=1.0), settings, 0.1)
    run = run_in(tmp_path / "mine", sync="local(8)", codec="int8")
    assert predicted_before(run, load_run(run)) is None


def test_history_is_in_the_order_of_time_and_holds_what_auto_tried(tmp_path: Path) -> None:
    with closing(Recorder(run_in(tmp_path / "a"))) as record:
        record.write(WayTried("tried", "int8", 0.10, 0.12))
        record.write(WayTried("tried", "none", 0.10, None))
    with closing(Recorder(run_in(tmp_path / "b"))) as record:
        record.write(WayTried("tried", "sign", 0.10, 0.05))
    found = residuals_of(tmp_path)
    assert [(r.run, r.way, round(r.off, 2)) for r in found] == [("a", "int8", 0.2), ("b", "sign", -0.5)]
    words = list(history_words(found))
    assert words[0] == "2 predictions: median error 50%, worst 50%, 0 within 15%."
    with pytest.raises(UserError, match="no folder of runs"):
        residuals_of(tmp_path / "missing")


def test_intervals_follow_from_enough_residuals() -> None:
    assert half_width([Residual(0.0, "r", "w", 1.0, 1.3)] * (ENOUGH - 1)) is None
    spread = [Residual(0.0, "r", "w", math.exp(0.01 * i), 1.0) for i in range(20)]
    assert half_width(spread) == pytest.approx(math.expm1(0.18))


def test_a_run_that_a_plan_was_about_is_compared_with_the_newest_before_it(tmp_path: Path) -> None:
    run = run_in(tmp_path / "mine", codec="int8")
    record = load_run(run)
    began = record.last_start.t if record.last_start is not None else 0.0
    workers = record.last_start.world_size if record.last_start is not None else 0
    alike = json.dumps({"data": {"source": "d"}, "model": {"name": "m"}, "launch": {}, "training": {}, "strategy": {}})
    alike = json.dumps(json.loads(alike), sort_keys=True)

    def planned(step_s: float, t: float, workers: int, layout: str = "") -> PlannedRuns:
        settings = {"strategy.parallel": layout or f"dp={workers}", "strategy.compression": "int8"}
        way = PlannedStep("int8", settings, step_s, step_s / 1.2, step_s * 1.2, 5e8)
        return PlannedRuns(t, "before", alike, workers, 0.0, 0.0, [way])

    write_planned(tmp_path, [planned(0.3, began - 9, workers), planned(0.1, began - 5, workers)])
    write_planned(tmp_path, [planned(0.7, began - 4, workers + 1), planned(0.8, began - 3, workers, "fsdp=2")])
    write_planned(tmp_path, [planned(0.9, began + 5, workers)])  # after the run began
    with (tmp_path / PLANS_FILE).open("a") as file:
        file.write('{"t": 1.0, "sour')
    told = predicted_before(run, record)
    assert told is not None and (told.source, told.predicted_s) == ("the plan of before", 0.1)
    assert (told.low_s, told.high_s) == (0.1 / 1.2, 0.1 * 1.2)
    with closing(Recorder(run)) as recorder:
        recorder.write(told)
    (residual,) = residuals_of(tmp_path)
    assert residual.held is True and residual.measured_s == pytest.approx(STEP_S)
    assert "1 of 1 steps that a plan predicted lie within its bounds." in list(history_words([residual]))


def test_a_description_and_the_file_of_its_run_are_alike() -> None:
    config = build(None, {"data.source": "digits"}).config
    other = build(None, {"data.source": "digits", "launch.workers": 8, "strategy.compression": "int8"}).config
    assert alike_for_plans(config) == alike_for_plans(other)
    assert alike_for_plans(config) != alike_for_plans(build(None, {"data.source": "cifar10"}).config)


def test_bounds_of_memory_follow_from_enough_residuals() -> None:
    residuals = [Residual(0.0, "r", "w", 1.0, 1.0, predicted_bytes=1.2, measured_bytes=1.0)] * ENOUGH
    assert memory_half_width(residuals) == pytest.approx(0.2)
    assert memory_half_width([*residuals[1:], Residual(0.0, "r", "w", 1.0, 1.0)]) is None
