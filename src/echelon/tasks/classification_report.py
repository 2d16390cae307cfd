"""What a report shows of a classification: confusion matrix, ROC curves, and the table of the classes.

It is made of an evaluation's detail, as `ClassificationMetrics` gives it and as `evaluation.json` keeps it. What a
detail of an earlier version lacks is left out. C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.core.figure import Chart, Choice, Json, ReportSection, ReportTable, axis, color, line, pick, safe

_MOST_CLASSES = 30
_NUMBERED_CELLS = 12
_SHORT = 2  # letters of a name that stands upright below its column
_ROC_POINTS = 150
HEAT = ((0.0, "paper"), (0.02, "heat0"), (0.35, "heat1"), (1.0, "heat2"))
"""The colours of a confusion matrix by the share of its row; between two of them the page interpolates."""
ON_HEAT = ((0.37, "on-low"), (0.62, "on-mid"), (1.0, "on-high"))
"""The colour of a number up to each share; where one colour stops being readable, the other begins (by theme)."""


@dataclass(frozen=True)
class RocCurve:
    """One class against the rest: rates at falling thresholds."""

    fpr: Sequence[float]
    tpr: Sequence[float]


@dataclass(frozen=True)
class ClassDetail:
    """What an evaluation says of its classes; what it does not say is empty.

    Attributes:
        confusion: C rows of C counts, row the true class, column the predicted one.
        columns: of the table of classes: precision, recall, f1, roc_auc, support, by class.
        roc: by `macro` and the number of each class.
        labels: names of the classes.
        area: the mean of the areas below the curves.
    """

    confusion: Sequence[Sequence[float]]
    columns: Mapping[str, Sequence[object]]
    roc: Mapping[str, RocCurve]
    labels: Sequence[str]
    notes: Sequence[str]
    area: float | None

    @staticmethod
    def read(detail: Mapping[str, object], names: Sequence[str]) -> ClassDetail:
        """Take what is sound of an evaluation's detail; `names` are of the classes, where it has none."""
        recorded, notes, metrics = detail.get("classes"), detail.get("notes"), _mapping(detail.get("metrics"))
        curves = {name: _curve_of(_mapping(curve)) for name, curve in _mapping(detail.get("roc")).items()}
        columns = _mapping(detail.get("per_class"))
        return ClassDetail(
            _square(detail.get("confusion")),
            {name: column for name, column in columns.items() if isinstance(column, list)},
            {name: curve for name, curve in curves.items() if curve is not None},
            [str(name) for name in (recorded if isinstance(recorded, list | tuple) else names)],
            [str(note) for note in notes] if isinstance(notes, list) else [],
            _number(metrics.get("roc_auc")),
        )

    def value(self, column: str, i: int) -> float | None:
        """Return a number of the table of classes."""
        values = self.columns.get(column, ())
        return _number(values[i]) if i < len(values) else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _square(matrix: object) -> Sequence[Sequence[float]]:
    rows = matrix if isinstance(matrix, list) else []
    return rows if all(isinstance(row, list) and len(row) == len(rows) for row in rows) else []


def _curve_of(curve: Mapping[str, object]) -> RocCurve | None:
    fpr, tpr = curve.get("fpr"), curve.get("tpr")
    if isinstance(fpr, list) and isinstance(tpr, list) and len(fpr) == len(tpr) > 0:
        return RocCurve(fpr, tpr)
    return None


def class_sections(detail: Mapping[str, object], names: Sequence[str] = ()) -> list[ReportSection]:
    """Return the section of the classes, as far as the detail of an evaluation holds it.

    Args:
        detail: with `metrics`, `confusion`, `roc`, `per_class`, `notes`, `classes`.
        names: of the classes, where the detail has none.
    """
    sound = ClassDetail.read(detail, names)
    charts = [chart for chart in (_confusion(sound), _roc(sound)) if chart]
    table = _class_table(sound)
    if not charts and table is None:
        return []
    return [ReportSection("Classes", charts, [table] if table else [], sound.notes)]


def _class_table(detail: ClassDetail) -> ReportTable | None:
    """Return precision, recall, F1, ROC AUC and samples of each class, the lowest F1 first."""
    if not detail.columns or not detail.labels:
        return None
    scores = [detail.value("f1", i) for i in range(len(detail.labels))]
    order = sorted(range(len(scores)), key=lambda i: (scores[i] is None, scores[i] or 0.0))
    rows = []
    for i in order:
        values = [detail.value(key, i) for key in ("precision", "recall", "f1", "roc_auc")]
        samples = detail.value("support", i)
        texts = ["–" if value is None else f"{value:.4f}" for value in values]
        rows.append([detail.labels[i], *texts, "–" if samples is None else str(int(samples))])
    head = ["class", "precision", "recall", "F1", "ROC AUC", "samples"]
    summary = f"Per class, the weakest first ({len(rows)} classes)"
    return ReportTable("Metrics per class, the lowest F1 first", head, rows, summary, meter=head.index("F1"))


def most_confused(matrix: Sequence[Sequence[float]], limit: int) -> list[int]:
    """The classes of the most frequent errors, true and predicted, in class order; all if no more than `limit`."""
    if len(matrix) <= limit:
        return list(range(len(matrix)))
    chosen: set[int] = set()
    for _, i, j in _errors(matrix):
        if len(chosen | {i, j}) > limit:
            break
        chosen |= {i, j}
    return sorted(chosen)


def _errors(matrix: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    pairs = [(count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count]
    return sorted(pairs, key=lambda p: (-p[0], p[1], p[2]))


def _confusion(detail: ClassDetail) -> Chart | None:
    matrix = detail.confusion
    if not matrix:
        return None
    names = detail.labels or [str(i) for i in range(len(matrix))]
    shown = most_confused(matrix, _MOST_CLASSES) or list(range(_MOST_CLASSES))
    totals = [sum(matrix[i]) for i in shown]
    counts = [[matrix[i][j] for j in shown] for i in shown]
    shares = [[c / total if total else 0.0 for c in row] for row, total in zip(counts, totals, strict=True)]
    short = [safe(names[i], 16) if i < len(names) else str(i) for i in shown]
    ticks = {"tickvals": list(range(len(shown))), "ticktext": short, "showgrid": False, "automargin": True}
    trace: Json = {
        "type": "heatmap",
        "z": shares,
        "text": counts,
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[share, color(token)] for share, token in HEAT],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "%{text} samples, %{z:.1%} of the class<extra></extra>",
    }
    few = len(shown) <= _NUMBERED_CELLS
    layout = {
        "showlegend": False,
        "xaxis": {
            **axis("predicted"),
            **ticks,
            "tickangle": (0 if max(map(len, short)) <= _SHORT else -45) if few else -90,
            "tickfont": {"size": 12 if few else 9},
        },
        "yaxis": {**axis("true"), **ticks, "autorange": "reversed", "tickfont": {"size": 12 if few else 9}},
        "hovermode": "closest",
    }
    part = f"The {len(shown)} most confused of {len(matrix)} classes. " if len(shown) < len(matrix) else ""
    errors = error_words(matrix, names)
    caption = f"{part}Rows are true classes, the colour is the share of the row. {errors}"
    label = f"Confusion matrix. {errors}"
    height = 290 + max(12 * len(shown), 150)
    traces = [trace, _numbers(counts, shares)] if few else [trace]
    return Chart("confusion", "Confusion matrix", caption, label, traces, layout, height)


def _numbers(counts: list[list[float]], shares: list[list[float]]) -> Json:
    """The counts, each in a colour that is read on its cell: a heatmap writes grey on its middle colours."""
    cells = [(i, j) for i, row in enumerate(counts) for j in range(len(row))]
    return {
        "type": "scatter", "mode": "text", "hoverinfo": "skip", "cliponaxis": False,
        "x": [j for _, j in cells], "y": [i for i, _ in cells], "text": [f"{counts[i][j]:g}" for i, j in cells],
        "textfont": {"color": [color(on_heat(shares[i][j])) for i, j in cells], "size": 12},
    }  # fmt: skip


def on_heat(share: float) -> str:
    """Return the colour token of a number on a cell.

    >>> on_heat(0.0), on_heat(0.97)
    ('on-low', 'on-high')
    """
    return next((token for limit, token in ON_HEAT if share <= limit), ON_HEAT[-1][1])


def error_words(matrix: Sequence[Sequence[float]], names: Sequence[str], limit: int = 5) -> str:
    """Name the errors that were made more than once, the most frequent first, as `true as predicted (count)`."""
    label = [names[i] if i < len(names) else str(i) for i in range(len(matrix))]
    errors = _errors(matrix)
    often = [f"{label[i]} as {label[j]} ({count:g})" for count, i, j in errors[:limit] if count > 1]
    if often:
        return f"Most frequent errors: {', '.join(often)}."
    return "No two errors are alike." if len(errors) > 1 else f"{'One error' if errors else 'No error'}."


def _roc(detail: ClassDetail) -> Chart | None:
    curves, names = detail.roc, detail.labels
    if not curves:
        return None
    classes = sorted((k for k in curves if k.isdigit()), key=int)
    if len(classes) > _MOST_CLASSES:
        classes = sorted(
            sorted(classes, key=lambda k: _order(detail.value("roc_auc", int(k))))[:_MOST_CLASSES], key=int
        )
    traces = [line("chance", [0, 1], [0, 1], "rule", dash="dot", width=1, hoverinfo="skip", showlegend=False)]
    traces += [_curve("macro mean", curves["macro"], "train", 3.0)] if "macro" in curves else []
    base, choices = list(range(len(traces))), []
    for key in classes:
        index = int(key)
        name = names[index] if index < len(names) else key
        auc = detail.value("roc_auc", index)
        choices.append(Choice(f"{name}" + (f" (AUC {auc:.4f})" if auc is not None else ""), [*base, len(traces)]))
        traces.append(_curve(name, curves[key], "eval", 2.0))
        traces[-1]["visible"] = False
    every = [Choice("macro mean alone", base), Choice("all classes shown", list(range(len(traces))))] if choices else []
    layout = {
        "xaxis": axis("false positive rate", range=[0, 1]),
        "yaxis": axis("true positive rate", range=[0, 1.005]),
        "showlegend": False,
        "hovermode": "closest",
    }
    total = sum(k.isdigit() for k in curves)
    caption = "One class against the rest."
    if total > len(classes):
        caption += f" Of {total} classes, the {len(classes)} with the lowest area can be chosen."
    label = "ROC curves." if detail.area is None else f"ROC curves; macro area {detail.area:.4f}."
    return Chart("roc", "ROC", caption, label, traces, layout, 410, choices=(*every, *choices))


def _order(auc: float | None) -> float:
    return 2.0 if auc is None else auc


def _curve(name: str, curve: RocCurve, token: str, width: float) -> Json:
    points = pick(list(zip(curve.fpr, curve.tpr, strict=True)), _ROC_POINTS)
    template = f"{safe(name)}: %{{y:.3f}} at %{{x:.3f}}<extra></extra>"
    x, y = [p[0] for p in points], [p[1] for p in points]
    return line(name, x, y, token, width=width, hovertemplate=template)
