"""Numbers, one or several per sample: squared error, judged by RMSE, MAE and R2 in the data's own units.

Targets of a table are standardised: the model gives (y - mean) / std, and metrics convert this back. Targets from
Python are used as they are. Shapes: B samples, T targets.

Helps: Prices, temperatures, ages: targets that are numbers.
Needs: for a table, a `--target` of numbers, or several joined by commas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.columns import Column, measure_column, rows_of
from echelon.core.errors import UserError
from echelon.core.figure import Chart, ReportSection, ReportTable, axis, color, line
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    OF_TEXTS,
    DataFacts,
    Encoding,
    EvaluationResult,
    InputFacts,
    Metrics,
    Prediction,
    Task,
    TaskSettings,
    are_tokens,
)
from echelon.tasks.gathering import RowMetrics
from echelon.tasks.nest import Nest, TensorSpec

RMSE = Metric("rmse", "min", "RMSE", noun="error")
_POINTS = 1000
_BARS = 41


class Units:
    """From the units in which targets are learnt to those of the data, and back: `(B, T)`."""

    def __init__(self, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        """Take mean and standard deviation of each target; none: they are learnt as they come."""
        self._mean, self._std = torch.tensor(mean), torch.tensor(std)

    def learnt(self, targets: Tensor) -> Tensor:
        """Return targets `(B, T)` as they are learnt."""
        return (targets - self._mean.to(targets)) / self._std.to(targets) if len(self._mean) else targets

    def given(self, outputs: Tensor) -> Tensor:
        """Return outputs `(B, T)` in the data's units."""
        return outputs * self._std.to(outputs) + self._mean.to(outputs) if len(self._mean) else outputs


class Regression(Task):
    """Outputs `(B, T)` and targets `(B, T)`, or `(B,)` each for one target; the loss is the mean over the targets."""

    name = "regression"
    primary = RMSE
    headlines = (Metric("mae", "min", "MAE"), Metric("r2", "max", "R2"))
    encoding = Encoding.NUMBERS
    table_model: ClassVar[str] = "table_mlp"
    text_model: ClassVar[str] = "text_classifier"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 1e-2, epochs=30)

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ("target",)
        self._units = Units()

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no numbers `(T,)`, or class weights or label smoothing are asked for.
        """
        task = super().fitted(data, settings)
        specs = nest.leaves(data.targets)
        if len(specs) != 1 or not self._takes_targets(data, specs[0]):
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task regression needs numbers, "
                "float32 of shape () or (T,)"
            )
        count = specs[0].shape[0] if specs[0].shape else 1
        task._names = data.target_names or tuple(f"target {i}" for i in range(count))
        task._units = Units(data.target_mean, data.target_std)
        return task

    def _takes_targets(self, data: DataFacts, spec: TensorSpec) -> bool:
        """Whether targets of this form can be learnt."""
        return len(spec.shape) < 2 and not spec.ragged and spec.dtype.startswith("float")

    @property
    def outputs(self) -> int:
        """One number a target."""
        return len(self._names)

    def loss_sum(self, outputs: Tensor, targets: Nest) -> Tensor:
        """Return the sum over samples of the squared error, its mean over the targets; `(B, T)`, or `(B,)`."""
        wide, wanted = self._rows(outputs), self._rows(targets)
        return (wide - self._units.learnt(wanted.to(wide))).square().mean(-1).sum()

    def learnt(self, targets: Tensor) -> Tensor:
        """Return targets `(B, T)` or `(B,)` in the units in which they are learnt."""
        return self._units.learnt(self._rows(targets)).reshape(targets.shape)

    def given(self, outputs: Tensor) -> Tensor:
        """Return outputs `(B, T)` or `(B,)` in the data's units."""
        return self._units.given(self._rows(outputs)).reshape(outputs.shape)

    def _rows(self, values: Tensor) -> Tensor:
        return values.reshape(len(values), len(self._names))

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of RMSE, MAE and R2."""
        return RegressionMetrics(self._names, self._units, device)

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the target, from outputs `(B, T)` or `(B,)`, in the data's units; of several, each by its name."""
        rows = self._units.given(self._rows(outputs).double()).tolist()
        if len(self._names) == 1:
            return [Prediction(value) for (value,) in rows]
        return [Prediction(dict(zip(self._names, row, strict=True))) for row in rows]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return predictions over the truth, residuals, and of several targets a table."""
        return regression_sections(result)

    def auto_model(self, data: InputFacts) -> str:
        """Return the one for texts, or for other columns of a table; others as by the size of images."""
        columns = all(len(spec.shape) < 2 for spec in nest.leaves(data.inputs))
        if data.task != self.name or not columns:
            return ""
        return self.text_model if are_tokens(data.inputs) else self.table_model

    def defaults_for(self, data: DataConfig, inputs: InputFacts | None = None) -> TaskDefaults:
        """Return those of texts where the inputs are, else those of other columns."""
        return OF_TEXTS if inputs is not None and are_tokens(inputs.inputs) else self.defaults


TASK = Regression


class RegressionMetrics(RowMetrics):
    """RMSE, MAE and R2, in float64: in float32, numbers of about 1e9 are rounded to multiples of 64."""

    def __init__(self, names: Sequence[str], units: Units, device: torch.device) -> None:
        super().__init__(len(names), device, torch.float64)
        self._names, self._units = list(names), units

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: outputs and targets (B, T), or (B,); B may be 0."""
        shape = (len(targets), len(self._names))
        self.add(self._units.given(outputs.reshape(shape).double()), targets.reshape(shape))

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics over all targets, and the detail of each, with points for drawing."""
        outputs, targets = self.all(group)
        metrics, by_target = regression_scores(outputs, targets)
        chosen = torch.linspace(0, max(0, len(outputs) - 1), min(_POINTS, len(outputs))).long()
        detail = {
            "names": self._names,
            "by_target": by_target,
            "true": targets[chosen].T.tolist(),
            "predicted": outputs[chosen].T.tolist(),
            "residuals": [_histogram(column) for column in (outputs - targets).T] if len(outputs) else [],
        }
        return EvaluationResult(metrics, detail)


def regression_scores(
    outputs: Tensor, targets: Tensor
) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    """Return RMSE, MAE and R2 over all targets, and of each; `(n, T)` each.

    R2 is the mean over targets; it is undefined where a target never varies.
    """
    from torchmetrics.functional import mean_absolute_error, mean_squared_error

    names, (n, count) = ("rmse", "mae", "r2"), outputs.shape
    if not n:
        return dict.fromkeys(names), {name: [None] * count for name in names}
    columns = [(outputs[:, i].contiguous(), targets[:, i].contiguous()) for i in range(count)]
    varies = [n > 1 and bool((true != true[0]).any()) for _, true in columns]
    by_target: dict[str, list[float | None]] = {
        "rmse": [float(mean_squared_error(*column, squared=False)) for column in columns],
        "mae": [float(mean_absolute_error(*column)) for column in columns],
        "r2": [_r2(*column) if ok else None for column, ok in zip(columns, varies, strict=True)],
    }
    r2 = [value for value in by_target["r2"] if value is not None]
    metrics: dict[str, float | None] = {
        "rmse": float(mean_squared_error(outputs, targets, squared=False)),
        "mae": float(mean_absolute_error(outputs, targets)),
        "r2": sum(r2) / len(r2) if r2 else None,
    }
    return metrics, by_target


def _r2(outputs: Tensor, targets: Tensor) -> float:
    """Return R2 of targets `(n,)` that vary, whatever their unit: for torchmetrics, squares below 1e-4 are 0."""
    from torchmetrics.functional import r2_score

    mean, std = targets.double().mean(), targets.double().std()
    return float(r2_score((outputs.double() - mean) / std, (targets.double() - mean) / std))


def _histogram(values: Tensor) -> dict[str, list[float]]:
    """Return the middles of bars, and how many values each has."""
    finite = values[values.isfinite()]
    if not len(finite):
        return {"middle": [], "count": []}
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return {"middle": [low], "count": [float(len(finite))]}
    counts = torch.histc(finite, _BARS, low, high)
    width = (high - low) / _BARS
    return {"middle": [low + (i + 0.5) * width for i in range(_BARS)], "count": counts.tolist()}


def regression_sections(result: EvaluationResult) -> list[ReportSection]:
    """Return charts of an evaluation's detail, as the metrics of a regression give it."""
    detail = result.detail
    names, by_target = detail["names"], detail["by_target"]
    charts = []
    for i, name in enumerate(names[: len(detail["residuals"])]):
        of = "" if len(names) == 1 else f" of {name}"
        charts += [
            _predicted_over_true(f"predicted{i}", of, detail["true"][i], detail["predicted"][i]),
            _residuals(f"residuals{i}", of, detail["residuals"][i]),
        ]
    measured = [
        measure_column(title, by_target[key]) for title, key in (("RMSE", "rmse"), ("MAE", "mae"), ("R2", "r2"))
    ]
    columns = [Column("target", names), *measured]
    head = [column.head for column in columns]
    tables = [ReportTable("Metrics per target", head, rows_of(columns))] if len(names) > 1 else []
    return [ReportSection("Predictions", charts, tables)] if charts else []


def _predicted_over_true(id: str, of: str, true: Sequence[float], predicted: Sequence[float]) -> Chart:
    low, high = min(true), max(true)
    points = line("samples", true, predicted, "eval", mode="markers", marker={"color": color("eval"), "size": 4})
    exact = line("exact", [low, high], [low, high], "rule", dash="dot", width=1, hoverinfo="skip")
    layout = {"xaxis": axis("true"), "yaxis": axis("predicted"), "showlegend": False, "hovermode": "closest"}
    caption = f"{len(true)} samples; on the line, prediction and truth are the same."
    return Chart(id, f"Predicted over true{of}", caption, f"Predicted over true{of}.", [exact, points], layout, 360)


def _residuals(id: str, of: str, bars: dict[str, list[float]]) -> Chart:
    trace = {"type": "bar", "x": bars["middle"], "y": bars["count"], "marker": {"color": color("eval")}}
    layout = {"xaxis": axis("predicted - true"), "yaxis": axis("samples"), "showlegend": False, "bargap": 0.05}
    return Chart(id, f"Residuals{of}", "How far predictions are off.", f"Residuals{of}.", [trace], layout, 360)
