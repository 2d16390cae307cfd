"""A loss and metrics of a user's own give the numbers of the built-in ones, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.runs import SMALL, Runs

pytestmark = pytest.mark.timeout(400)

TRAIN = ("train", "digits", "--model", "mlp", "--batch-size", "250", "--epochs", "1", "--lr", "0.05", *SMALL)
OWN = ("--loss", "CrossEntropyLoss", "--metrics", "F1Score(average=macro)", "--primary-metric", "f1_score")


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with Runs(tmp_path_factory.mktemp("built-in")) as runs:
        run = runs.start(*TRAIN, "--workers", "1", folder="run")
        assert run.end() == 0, run.text()
        return run.losses()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--parallel", "pp=2"), marks=pytest.mark.long),
        pytest.param(("--sync", "ps(mode=sync)"), marks=pytest.mark.long),
        pytest.param(("--parallel", "dp=2"), marks=pytest.mark.slow),
    ],
)
def test_a_mean_is_divided_and_metrics_are_added_up_in_every_layout(
    tmp_path: Path, one_worker: dict[int, float], layout: tuple[str, ...]
) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(*TRAIN, "--workers", "2", *layout, *OWN, folder="run")
        assert run.end() == 0, run.text()
    assert run.losses() == pytest.approx(one_worker, rel=1e-3)
    metrics = run.records("evaluation")[-1]["metrics"]
    assert metrics["f1_score"] == pytest.approx(metrics["macro_f1"], abs=1e-6) and metrics["f1_score"] > 0.3
    assert run.summary()["metrics"]["f1_score"] == metrics["f1_score"]


@pytest.mark.long
def test_a_loss_that_layouts_would_change_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(outputs, targets):\n    return outputs.std()\n")
    with Runs(tmp_path) as runs:
        run = runs.start(*TRAIN, "--workers", "2", "--loss", "mine:loss", folder="run")
        assert run.end() == 2, run.text()
    assert "no sum and no mean over samples" in run.text() and "Traceback" not in run.text()
