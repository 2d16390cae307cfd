"""A pipeline computes what one process does: losses and parameters of several steps, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from echelon.models import hints_for
from echelon.models.base import ModelInput
from echelon.models.builtin.mlp import build as build_mlp
from echelon.models.builtin.resnet20 import build as build_resnet20
from echelon.models.builtin.small_gpt import SmallGPT, TextSize
from echelon.models.builtin.small_vit import Size, SmallViT
from echelon.parallel.pipeline import Judge, Pipeline, PipelineSettings
from echelon.parallel.pipeline.settings import SCHEDULES
from tests.ranks.spawn import Rank, run_ranks

IMAGES = ModelInput(10, 1, 8)
SIZES = (8, 8, 5, 3)  # the last two do not divide, the last has fewer samples than there are micro-batches
TOLERANCE = 1e-9


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum cross-entropies over samples, and over tokens where there are several."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def deep_mlp() -> nn.Module:
    """Eight linear layers, for schedules with many stages."""
    layers = [each for _ in range(7) for each in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build_mlp(IMAGES),
    "deep_mlp": deep_mlp,
    "vit": lambda: SmallViT(IMAGES, Size(depth=4, width=16, heads=2, hidden=16)),
    "gpt": lambda: SmallGPT(TextSize(vocabulary=16, context=8, tied=False), Size(4, 16, 2, 16)),
    "resnet20": lambda: build_resnet20(IMAGES),
}


@dataclass(frozen=True)
class Case:
    """One run: a model through a schedule."""

    model: str
    schedule: str
    microbatches: int = 4
    accumulate: int = 1
    cuts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = SIZES


def make(case: Case) -> nn.Module:
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return MODELS[case.model]().double()


def batch(case: Case, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step."""
    random = torch.Generator().manual_seed(step)
    if case.model == "gpt":
        ids = torch.randint(0, 16, (size, 9), generator=random)
        return ids[:, :-1], ids[:, 1:]
    targets = torch.randint(0, 10, (size,), generator=random)
    return torch.randn(size, 1, 8, 8, dtype=torch.float64, generator=random), targets


def train(case: Case, model: nn.Module, add_gradients: Callable[[Tensor, Tensor, int], Any]) -> list[tuple[float, int]]:
    """Take a step for each batch; returns each one's loss and correct predictions."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step, size in enumerate(case.sizes):
        inputs, targets = batch(case, step, size)
        loss, correct = 0.0, 0
        parts = zip(inputs.tensor_split(case.accumulate), targets.tensor_split(case.accumulate), strict=True)
        for part, wanted in parts:
            result = add_gradients(part, wanted, size)
            loss, correct = loss + float(result[0]), correct + int(result[1])
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, correct))
    return found


def correct_of(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).sum()


def one_process(case: Case) -> tuple[list[tuple[float, int]], dict[str, Tensor], Tensor]:
    """Return losses, the final state and logits of one process."""
    model = make(case)

    def add_gradients(inputs: Tensor, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        logits = model(inputs)
        loss = loss_of(logits, targets) / size
        loss.backward()
        return loss.detach(), (logits.argmax(-1) == targets).sum()

    losses = train(case, model, add_gradients)
    with torch.no_grad():
        return losses, dict(model.state_dict()), model.eval()(batch(case, 99, 7)[0])


def in_a_pipeline(rank: Rank, cases: list[Case]) -> list[tuple[list[tuple[float, int]], dict[str, Tensor], Tensor]]:
    """Return the same of a pipeline over all ranks; the state is that of this rank's stages."""
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("pp",))
    return [run_case(case, mesh) for case in cases]


def run_case(case: Case, mesh: Any) -> tuple[list[tuple[float, int]], dict[str, Tensor], Tensor]:
    """Train one case."""
    model = make(case)
    settings = PipelineSettings(case.schedule, case.microbatches, case.cuts)
    pipeline = Pipeline(model, hints_for(model), mesh, settings, Judge(loss_of, correct_of), batch(case, 0, 2)[0])
    told: list[str | None] = []
    with pipeline.telling(told.append):
        losses = train(case, pipeline, pipeline.forward_backward)
    assert None in told and "forward" in told and len(set(told)) > 2, f"{case}: computations were {set(told)}"
    state = {name: tensor for stage in pipeline.stage_modules for name, tensor in stage.state_dict().items()}
    pipeline.eval()
    assert len(pipeline.timelines) == 2 or len(case.sizes) * case.accumulate < 4
    return losses, state, pipeline.evaluate(batch(case, 99, 7)[0])


def check(case: Case, ranks: list[tuple[list[tuple[float, int]], dict[str, Tensor], Tensor]]) -> None:
    """Compare the ranks of a pipeline with one process."""
    losses, state, logits = one_process(case)
    for found, _, outputs in ranks:
        assert [c for _, c in found] == [c for _, c in losses], case
        assert torch.tensor(found)[:, 0].sub(torch.tensor(losses)[:, 0]).abs().max() < TOLERANCE, case
        assert (outputs - logits).abs().max() < TOLERANCE, case
    names = [name for _, part, _ in ranks for name in part]
    assert sorted(names) == sorted(state), case
    for _, part, _ in ranks:
        for name, tensor in part.items():
            assert (tensor - state[name]).abs().max() < TOLERANCE, (case, name)


ALL = [Case("deep_mlp", schedule) for schedule in SCHEDULES]
TWO_RANKS = [
    *ALL,
    Case("vit", "1f1b", microbatches=3, accumulate=2),
    Case("vit", "zero_bubble", cuts=("blocks.1", "blocks.2", ":classify")),
    Case("mlp", "gpipe", microbatches=1),
    Case("gpt", "interleaved", microbatches=2, accumulate=2),
    Case("resnet20", "1f1b", microbatches=1, sizes=(6, 5)),
    Case("resnet20", "zero_bubble", microbatches=1, cuts=("blocks.2", "blocks.5", ":classify"), sizes=(6, 5)),
]


def test_a_pipeline_of_two_computes_what_one_process_does() -> None:
    """Every schedule, every kind of chain, uneven and tiny batches, accumulation."""
    results = run_ranks(in_a_pipeline, 2, TWO_RANKS)
    for number, case in enumerate(TWO_RANKS):
        check(case, [rank[number] for rank in results])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_schedule_on_every_chain(world_size: int) -> None:
    """All schedules and chains that have the stages for it, with and without accumulation, more micro-batches."""
    cases = []
    for model in ("deep_mlp", "vit", "gpt", "resnet20"):
        for schedule, kind in SCHEDULES.items():
            if world_size * kind.stages_per_rank <= {"vit": 6, "gpt": 6}.get(model, 8):
                batchnorm = model == "resnet20" and schedule != "dualpipev"
                case = Case(model, schedule, 1 if batchnorm else 8, sizes=(9, 16, 3))
                cases += [case, replace(case, accumulate=2, sizes=(17, 8))] if model != "resnet20" else [case]
    cases = [case for case in cases if (case.model, case.schedule) != ("resnet20", "dualpipev")]
    results = run_ranks(in_a_pipeline, world_size, cases, timeout_s=300)
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results])
