"""Predictions of earlier runs beside what later ones took."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.records.events import WayTried
from echelon.records.file import Recorder
from echelon.reporting.report.records import load_run
from echelon.run.residuals import ENOUGH, Residual, half_width, history_words, predicted_before, residuals_of
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
