"""What is asked of a plan: what it is answered from, models that are hard to build, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.config import RunConfig, build
from echelon.config.machines import read_at
from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.forecast.memory import forecast
from echelon.planning import trial
from echelon.planning.auto import choose
from echelon.planning.layouts import DescribedModel, Pipelining, pipeline_way, tried_pipelines
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


def test_a_pipeline_that_fails_is_told_and_the_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int, int]] = []

    def record(config: RunConfig, what: str) -> RunRecord:
        tried.append((config.strategy.parallel, config.launch.workers, config.launch.threads))
        if what.endswith("=2"):
            raise UserError(f"a trial with {what} ended with code 1")
        return RunRecord("run", [Start(t=0.0, world_size=4)])

    monkeypatch.setattr(trial, "try_out", record)
    config = described(**{"launch.workers": 4, "launch.threads": 3})
    records, notes = trial.run_pipelines(config, ("pp=2,microbatches=2", "pp=2,microbatches=8"))
    assert tried == [("pp=2,microbatches=2", 2, 3), ("pp=2,microbatches=8", 2, 3)]
    assert len(records) == 1 and notes == [
        "pp=2,microbatches=2 was tried, and is not counted: a trial with pp=2,microbatches=2 ended with code 1."
    ]


def test_pipelines_are_tried_where_one_is_planned_and_the_model_can_be_cut() -> None:
    digits, even = DescribedModel.of(described(**{"model.name": "mlp"})), read_at("workers=4")
    assert tried_pipelines(even, digits, 64) == ("pp=2,microbatches=2", "pp=2,microbatches=8")
    assert tried_pipelines(even, digits, 6) == ("pp=2,microbatches=2",)
    assert tried_pipelines(even, digits, 7) == tried_pipelines(read_at("workers=3"), digits, 64) == ()


class Tied(nn.Module):
    """Its last layer has the weights of its first."""

    structure = Hints(blocks=("layers.*",), chain=("first", "layers.*", "last"))

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), nn.Linear(64, 64)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.last.weight = self.first[1].weight

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.last(self.layers(self.first(images)))
        return found


def test_no_pipeline_is_planned_whose_stages_would_share_weights() -> None:
    tied = DescribedModel.of(described(**{"model.name": f"{HERE}:Tied"}))
    with pytest.raises(UserError, match="tied"):
        pipeline_way(tied, Pipelining(2, 1, 2), 64)
    assert tried_pipelines(read_at("workers=4"), tied, 64) == ()


class Uneven(nn.Module):
    """Two blocks, of which the second has most of the work."""

    structure = Hints(blocks=("few", "many"), chain=("few", "many"))

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.few = nn.Sequential(nn.Flatten(), nn.Linear(64, 512))
        self.many = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)], nn.Linear(512, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.many(self.few(images))
        return found


def test_stages_that_can_be_cut_in_one_way_only_are_timed_too() -> None:
    model = DescribedModel.of(described(**{"model.name": f"{HERE}:Uneven"}))
    way = pipeline_way(model, Pipelining(2, 1, 2), 256)
    assert way.shares[1] > 0.7 and way.passed_bytes == (4.0 * 512,)


def test_a_folder_with_a_description_of_its_own_is_data(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("title: pictures of mine\n")
    resolved = build(None, {"data.source": str(tmp_path), "task": "supervised"})
    assert request_of(resolved, (), trust=True).run is None


def test_other_ways_are_told_as_long_as_the_ranks_are_as_many() -> None:
    begun, told = Start(t=1.0, world_size=4), Alternatives({}, 0.0, [], t=2.0)
    for later, known in (((), True), ((begun,), True), ((Start(t=3.0, world_size=2),), False)):
        found = newest_alternatives(RunRecord("run", [begun, told, *later]))
        assert (found is told) == known == (found is not None)
