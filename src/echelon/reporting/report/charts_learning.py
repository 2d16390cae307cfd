"""Charts of learning: loss, accuracy, learning rate over the steps that survived restarts."""

from __future__ import annotations

import math

from echelon.records.kinds import Steps
from echelon.reporting.report.figure import Chart, axis, dots, line, pick, thin
from echelon.reporting.report.records import RunRecord

_RAW_POINTS = 1500
_SMOOTH_POINTS = 120


def learning_charts(record: RunRecord) -> list[Chart]:
    """Loss, accuracy and learning rate, as far as the record holds them."""
    windows = record.kept_windows()
    return [c for c in (_loss(record, windows), _accuracy(record, windows), _lr(windows)) if c]


def _loss(record: RunRecord, windows: list[Steps]) -> Chart | None:
    steps = [w.step - w.count + 1 + i for w in windows for i in range(w.count)]
    losses = [loss for w in windows for loss in w.losses]
    known = [(s, y) for s, y in zip(steps, losses, strict=True) if math.isfinite(y)]
    if not known:
        return None
    x, y = [float(s) for s, _ in known], [v for _, v in known]
    raw_x, raw_y = thin(x, y, _RAW_POINTS)
    traces = [line("each step", raw_x, raw_y, "faint", width=1, hoverinfo="skip")]
    smoothed = len(x) > 2 * _SMOOTH_POINTS
    if smoothed:
        smooth_x, smooth_y = thin(x, y, _SMOOTH_POINTS)
        traces.append(line("training", smooth_x, smooth_y, "train"))
    else:
        traces = [line("training", raw_x, raw_y, "train", width=1.5)]
    held = [e for e in record.kept_evaluations() if e.loss is not None]
    if held:
        traces.append(dots("evaluation", [e.step for e in held], [e.loss for e in held], "eval", symbol="diamond"))
    said = f"Training loss from {y[0]:.3g} to {y[-1]:.3g} over {len(x)} steps"
    said += f"; evaluation loss at the end {held[-1].loss:.3g}." if held else "."
    layout = {"xaxis": axis("step"), "yaxis": axis("loss", rangemode="tozero")}
    caption = "Thin: each step. Thick: mean of neighbouring steps." if smoothed else "Training loss of each step."
    return Chart("loss", "Loss", caption, said, traces, layout)


def _accuracy(record: RunRecord, windows: list[Steps]) -> Chart | None:
    train = [(float(w.step), w.correct / w.samples) for w in windows if w.correct is not None and w.samples]
    held = [e for e in record.kept_evaluations() if "top1" in e.metrics]
    traces = []
    if train:
        x, y = thin([s for s, _ in train], [a for _, a in train], _SMOOTH_POINTS)
        traces.append(line("training top-1", x, y, "train"))
    said = f"Training top-1 ends at {train[-1][1]:.3f}. " if train else ""
    if held:
        steps = [e.step for e in held]
        traces.append(dots("evaluation top-1", steps, [e.metrics["top1"] for e in held], "eval", symbol="diamond"))
        top5 = [e.metrics.get("top5") for e in held]
        if any(v is not None and v < 1 for v in top5):
            traces.append(dots("evaluation top-5", steps, top5, "muted", dash="dot"))
        said += f"Evaluation top-1 ends at {held[-1].metrics['top1']:.4f}."
    if not traces:
        return None
    layout = {"xaxis": axis("step"), "yaxis": axis("share correct", tickformat=".0%")}
    caption = "Training is measured while the weights change and with augmentation, evaluation after."
    return Chart("accuracy", "Accuracy", caption, said.strip(), traces, layout)


def _lr(windows: list[Steps]) -> Chart | None:
    known = pick([(float(w.step), w.lr) for w in windows if w.lr is not None], _RAW_POINTS)
    if not known:
        return None
    rates = [r for _, r in known]
    said = f"Learning rate from {rates[0]:.3g} to {rates[-1]:.3g}, at most {max(rates):.3g}."
    layout = {"xaxis": axis("step"), "yaxis": axis("learning rate", rangemode="tozero")}
    traces = [line("lr", [s for s, _ in known], rates, "train")]
    return Chart("lr", "Learning rate", said, said, traces, layout, 220, wide=True)
