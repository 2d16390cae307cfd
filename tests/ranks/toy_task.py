"""Regression on two inputs: a task, a model and data of the user's own, in one file that a test puts into a folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.core.figure import Chart, ReportSection, ReportTable
from echelon.core.task import Metric
from echelon.models import Hints
from echelon.tasks.base import EvaluationResult, Task


class SquaredErrors:
    """Sums over samples; each counts once, whichever rank has it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def update(self, outputs: Tensor, targets: dict[str, Tensor]) -> None:
        error = outputs.squeeze(-1).double() - targets["value"].double()
        self.sums += torch.stack([error.square().sum(), error.abs().sum(), torch.tensor(float(len(error)))])

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        if group is not None:
            dist.all_reduce(self.sums, group=group)
        squares, absolute, samples = self.sums.tolist()
        return EvaluationResult({"rmse": (squares / samples) ** 0.5, "mae": absolute / samples})


class Regression(Task):
    name, primary, outputs = "toy_regression", Metric("rmse", "min", "RMSE"), 1
    headlines = (Metric("mae", "min", "MAE"),)

    def loss_sum(self, outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return (outputs.squeeze(-1) - targets["value"]).square().sum()

    def metrics(self, device: torch.device) -> SquaredErrors:
        return SquaredErrors(device)

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        rows = [[name, f"{value:.3f}"] for name, value in result.metrics.items()]
        bars = {"type": "bar", "x": list(result.metrics), "y": list(result.metrics.values())}
        chart = Chart("toy-errors", "The toy's errors as bars", "Lower is better.", "Errors.", [bars])
        return (ReportSection("Toy", [chart], [ReportTable("Errors of the toy", ("error", "value"), rows)]),)


class Weighted(Regression):
    """Regression whose unit is no sample: each sample has a number of them, as a text has tokens."""

    name, unit = "toy_weighted", "pair"

    def loss_sum(self, outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return (targets["count"] * (outputs.squeeze(-1) - targets["value"]).square()).sum()

    def units(self, targets: dict[str, Tensor]) -> int:
        return int(targets["count"].sum())


class TwoInputs(nn.Module):
    structure = Hints(
        chain=(":mix", "hidden.*", "head"),
        glue={":mix": ("left", "right")},
        tensor_plan={"hidden.0": "column", "hidden.2": "row"},
    )

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 16), nn.Linear(5, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def mix(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(self.left(left) + self.right(right))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.hidden(self.mix(left, right)))


class Pairs(Dataset):
    """Items are dicts: two inputs by the names of the model's arguments, and a target of two tensors."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.left = torch.randn(samples, 3, generator=generator)
        self.right = torch.randn(samples, 5, generator=generator)
        self.value = self.left.sum(1) * 0.5 + self.right[:, 0] * self.right[:, 1]
        self.count = torch.randint(1, 9, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, i: int) -> dict[str, object]:
        target = {"value": self.value[i], "count": self.count[i]}
        return {"left": self.left[i], "right": self.right[i], "target": target}


def load() -> tuple[Pairs, Pairs]:
    return Pairs(203, 0), Pairs(61, 1)
