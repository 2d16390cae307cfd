"""Charts of learning: loss, the primary metric, learning rate over the steps that survived restarts."""

from __future__ import annotations

import math
from statistics import median

from echelon.core.figure import Chart, axis, color, dots, line, pick, thin
from echelon.core.rate_search import curve_of
from echelon.core.ticks import count_axis
from echelon.core.units import format_metric, sentence_case
from echelon.records.kinds import Steps
from echelon.reporting.report.records import RunRecord

_RAW_POINTS = 1500
_SMOOTH_POINTS = 120
_FEW_POINTS = 30  # of which one sees that straight lines join them


def learning_charts(record: RunRecord) -> list[Chart]:
    """Loss, the primary metric and learning rate, as far as the record holds them."""
    windows = record.kept_windows()
    if record.searched:
        return [_search(windows)]
    return [c for c in (_loss(record, windows), _primary(record, windows), _lr(windows)) if c]


def _loss(record: RunRecord, windows: list[Steps]) -> Chart | None:
    known = [(s, y, n) for w in windows for s, y, n in w.loss_points() if math.isfinite(y)]
    if not known:
        return None
    x, y, steps = [float(s) for s, _, _ in known], [v for _, v, _ in known], sum(n for _, _, n in known)
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
    said = f"Training loss from {y[0]:.3g} to {y[-1]:.3g} over {steps} steps"
    said += f"; evaluation loss at the end {held[-1].loss:.3g}." if held else "."
    layout = {"xaxis": count_axis("step", x[-1]), "yaxis": axis("loss", rangemode="tozero")}
    caption = "Thin: each step. Thick: mean of neighbouring steps." if smoothed else "Training loss of each step."
    return Chart("loss", "Loss", caption, said, traces, layout)


def _primary(record: RunRecord, windows: list[Steps]) -> Chart | None:
    """The primary metric of the task, and the share of training samples that it counts where it counts any."""
    task = record.task
    primary, label = task.primary, task.score_label
    train = _scores(windows) if label else []
    held = [(e, v) for e in record.kept_evaluations() if (v := e.metrics.get(primary.name)) is not None]
    traces = []
    if train:
        x, y = thin([s for s, _ in train], [a for _, a in train], _SMOOTH_POINTS)
        traces.append(line(f"training {label}", x, y, "train"))
    said = f"Training {label} ends at {train[-1][1]:.3f}. " if train else ""
    if held:
        steps, is_loss = [e.step for e, _ in held], primary.name == "loss"
        if not is_loss:  # whose evaluations are beside the training's
            traces.append(dots(f"evaluation {primary.title}", steps, [v for _, v in held], "eval", symbol="diamond"))
        for metric in task.curves:
            values = [e.metrics.get(metric.name) for e, _ in held]
            if any(v is not None and (v < 1 or not metric.percent) for v in values):
                traces.append(dots(f"evaluation {metric.title}", steps, values, "muted", dash="dot"))
        said += f"Evaluation {primary.title} ends at {format_metric(held[-1][1])}."
    if not traces:
        return None
    noun = primary.noun or primary.title
    ticks = {"tickformat": ".0%"} if primary.percent else {}
    last = max([s for s, _ in train] + [e.step for e, _ in held])
    layout = {
        "xaxis": count_axis("step", last),
        "yaxis": axis("share correct" if primary.percent else primary.title, **ticks),
    }
    caption = "Training is measured while the weights change and with augmentation, evaluation after."
    chart_id, title = primary.noun or primary.name, sentence_case(noun)
    if primary.name == "loss":
        chart_id, title = "score", sentence_case(f"training {label}" if label else "other metrics")
    return Chart(chart_id, title, caption if train else "", said.strip(), traces, layout)


def _scores(windows: list[Steps]) -> list[tuple[float, float]]:
    """Return steps, and the share counted since the one before: windows of few samples (an epoch's rest) with others.

    A share of few samples is mostly chance.
    """
    scored = [w for w in windows if w.correct is not None and w.samples]
    enough = median(w.samples for w in scored) / 2 if scored else 0.0
    groups: list[tuple[float, float, int]] = []  # last step, score, samples
    for w in scored:
        score, samples = w.correct or 0.0, w.samples
        if groups and (groups[-1][2] < enough or samples < enough):
            _, score_before, samples_before = groups.pop()
            score, samples = score + score_before, samples + samples_before
        groups.append((float(w.step), score, samples))
    return [(step, score / samples) for step, score, samples in groups]


def _lr(windows: list[Steps]) -> Chart | None:
    known = pick([(float(w.step), w.lr) for w in windows if w.lr is not None], _RAW_POINTS)
    if not known:
        return None
    rates = [r for _, r in known]
    first, last = known[0][0], known[-1][0]
    said = f"Learning rate from {rates[0]:.3g} at step {first:.0f} to {rates[-1]:.3g} at step {last:.0f}"
    said += f", at most {max(rates):.3g}." if max(rates) > max(rates[0], rates[-1]) else "."
    few = len(known) <= _FEW_POINTS
    said += " A point is where it was recorded, at the end of a window of steps." if few else ""
    draw = dots if few else line
    layout = {"xaxis": count_axis("step", known[-1][0]), "yaxis": axis("learning rate", rangemode="tozero")}
    traces = [draw("lr", [s for s, _ in known], rates, "train")]
    return Chart("lr", "Learning rate", said, said, traces, layout, 220, wide=True)


def _search(windows: list[Steps]) -> Chart:
    """The losses of a search over the learning rate, in place of those over steps."""
    curve = curve_of({step: loss for window in windows for step, loss, _ in window.loss_points()})
    traces = [
        line("each step", curve.rates, curve.losses, "faint", width=1, hoverinfo="skip"),
        line("mean of neighbours", curve.rates, curve.smooth, "train"),
    ]
    said = "The loss fell at no learning rate."
    if curve.steepest is not None and curve.tenth is not None:
        rates = [curve.steepest, curve.tenth]
        heights = [curve.smooth[min(range(len(curve.rates)), key=lambda i: abs(curve.rates[i] - r))] for r in rates]
        marker = {"color": color("eval"), "size": 9, "symbol": "diamond"}
        traces.append(line("suggested", rates, heights, "eval", mode="markers", marker=marker))
        said = (
            f"The loss falls most steeply at {curve.steepest:.2g}; a tenth of where it is lowest is {curve.tenth:.2g}."
        )
    top = 1.2 * max(curve.smooth[: len(curve.smooth) // 2 + 1], default=1.0)
    layout = {
        "xaxis": axis("learning rate", type="log", exponentformat="power", dtick=1),
        "yaxis": axis("loss", range=[0, top]),
    }
    caption = "Each step has a higher learning rate than the one before (the range test of Smith 2017)."
    return Chart("lr_find", "Loss by learning rate", caption, said, traces, layout, wide=True)
