"""What is asked of a plan: what it is answered from, models that are hard to build, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.config import RunConfig, build
from echelon.config.machines import read_at
from echelon.core.errors import UserError
from echelon.forecast.memory import forecast
from echelon.planning import trial
from echelon.planning.auto import choose
from echelon.planning.layouts import DescribedModel
from echelon.planning.page import as_json, write_page
from echelon.planning.request import PlanRequest, plan, rate, request_of
from echelon.planning.trial import calibrate_by_runs
from echelon.records.kinds import Alternatives, Start
from echelon.reporting.report.predictions import newest_alternatives
from echelon.reporting.report.records import RunRecord
from echelon.run.resolve import resolve

HERE = "tests.unit.planning.test_request"


def described(**settings: object) -> RunConfig:
    words = {"data.source": "digits", "model.name": "mlp", "training.device": "cpu", "launch.workers": 2}
    return build(None, {**words, **settings}).config


class NeedsValues(nn.Module):
    """Reads numbers from a tensor while it is built, as models with stochastic depth do."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layer = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.layer(images.flatten(1))


class Lazy(nn.Module):
    """Has a layer whose shape the first batch tells."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.layer(images.flatten(1))


class UsesNumpy(NeedsValues):
    """Looks at an array of its input."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(images) * float(images.detach().cpu().numpy().mean() > -9)


@pytest.mark.parametrize("model", [NeedsValues, Lazy])
def test_models_are_planned_that_cannot_be_built_without_values(model: type[nn.Module]) -> None:
    found = DescribedModel.of(described(**{"model.name": f"{HERE}:{model.__name__}"}))
    assert sum(p.numel() for p in found.model.parameters()) == 650
    assert found.memory({"strategy.parallel": "dp=2"}, 2, 128) > 2 * 4 * 650


def test_memory_of_a_model_that_uses_numpy_is_not_known() -> None:
    run = resolve(described(**{"model.name": f"{HERE}:UsesNumpy", "strategy.parallel": "dp=2"}))
    assert "numpy" in forecast(run, run.source.open().info, 2).unknown


def test_only_what_is_trained_is_sent_and_updated() -> None:
    (machines,) = read_at("workers=8, tflops=1, link=1gbit")
    whole, head = (rate(DescribedModel.of(described(**{"model.tune": tune})), machines) for tune in ("all", "head"))
    assert whole.ways[0].wire_bytes == 4 * whole.parameters
    assert head.ways[0].wire_bytes < whole.ways[0].wire_bytes / 10
    assert head.phases["update"].fixed_s < whole.phases["update"].fixed_s / 10


def test_machines_of_several_rates_are_drawn_each_by_its_own(tmp_path: Path) -> None:
    machines = (*read_at("workers=8, tflops=0.001"), *read_at("workers=8, tflops=1"))
    report = plan(PlanRequest(described(), machines))
    slow, fast = (answer.known.phases["forward"].seconds(8) for answer in report.answers)
    assert slow == pytest.approx(1000 * fast)
    assert str(as_json(report)["source"]).count("TFLOP/s") == 2
    write_page(report, tmp_path / "plan.html")
    assert "0.001 TFLOP/s" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("settings", "tolerance", "said"),
    [
        ({}, float("nan"), "--tolerance nan: give the points of accuracy"),
    ],
)
def test_what_auto_cannot_choose_beside_is_refused(settings: dict[str, int], tolerance: float, said: str) -> None:
    resolved = build(None, {"data.source": "digits", "launch.workers": 2, **settings})
    with pytest.raises(UserError, match=said):
        choose(resolved, tolerance, frozenset({"strategy.compression"}))


def test_one_worker_keeps_the_defaults_and_has_no_plan() -> None:
    resolved = build(None, {"data.source": "digits", "launch.workers": 1, "training.device": "cpu"})
    found = choose(resolved, 0.3, frozenset())
    assert not found.settings and "one worker has nobody to agree with" in found.words[0]
    with pytest.raises(UserError, match="give --workers 2"):
        calibrate_by_runs(resolved.config)


def test_trials_are_of_this_machine_and_divide_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def record(config: RunConfig, what: str) -> RunRecord:
        tried.append(config.data.batch_size)
        return RunRecord("run", [Start(t=0.0, world_size=2)])

    monkeypatch.setattr(trial, "try_out", record)
    for batch in (16, 64):
        with pytest.raises(UserError, match="no steps to plan from"):
            calibrate_by_runs(described(**{"data.batch_size": batch, "training.accumulate": 16}))
    assert tried == [16, 64, 32]


def test_a_folder_with_a_description_of_its_own_is_data(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("title: pictures of mine\n")
    resolved = build(None, {"data.source": str(tmp_path), "task": "supervised"})
    assert request_of(resolved, (), trust=True).run is None


def test_other_ways_are_told_as_long_as_the_ranks_are_as_many() -> None:
    begun, told = Start(t=1.0, world_size=4), Alternatives({}, 0.0, [], t=2.0)
    for later, known in (((), True), ((begun,), True), ((Start(t=3.0, world_size=2),), False)):
        found = newest_alternatives(RunRecord("run", [begun, told, *later]))
        assert (found is told) == known == (found is not None)
