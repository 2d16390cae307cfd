"""What was predicted of a run's steps before it was made, beside what they took: recorded where it ends.

Runs that stand in one folder predict each other: each records what other ways to communicate would take, and a later
run of one of these, alike in all else, is what that prediction is measured by. What `--auto` predicted of its trials
is in records already. From both follows how far predictions were off here, over time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config.yaml_file import plain, read_yaml
from echelon.core.errors import UserError
from echelon.core.units import format_seconds
from echelon.records.events import WayPredicted, WayTried
from echelon.records.file import newest
from echelon.records.segments import RECORD_FILE
from echelon.records.summary import RunSummary, read_summary
from echelon.reporting.report.records import CONFIG_FILE, RunRecord
from echelon.run.resolve import canonical

_WAY = ("sync", "compression")
_DEFAULTS = {"sync": "allreduce", "compression": "none"}
_ALIKE: dict[str, tuple[str, ...]] = {
    "data": (), "model": (), "launch": ("workers", "threads", "nodes", "link"),
    "training": ("epochs", "max_steps", "accumulate", "precision", "device", "recompute"),
    "strategy": ("parallel", "collective"),
}  # fmt: skip
"""Sections of two runs that are alike, and of each the settings (all: none is named)."""
_MOST_LOOKED_AT = 40
ENOUGH = 8
"""Of fewer residuals no interval is made."""
_WITHIN = 0.95


@dataclass(frozen=True)
class Residual:
    """A prediction of a step and its measurement, in seconds; `when` in unix seconds, `run` where it was measured."""

    when: float
    run: str
    way: str
    predicted_s: float
    measured_s: float

    @property
    def off(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def predicted_before(path: Path, record: RunRecord) -> WayPredicted | None:
    """Return what the newest earlier run beside this one, alike but for its way, had predicted of this one's step."""
    start, windows = record.last_start, record.windows
    steps = sum(window.count for window in windows)
    step_s = sum(window.seconds for window in windows) / max(1, steps)  # of all of them, as what is predicted
    if start is None or not step_s:
        return None
    way, alike = _way(record.config), _alike(record.config)
    for folder in _earlier(path, start.t):
        rows = ((_way({"strategy": {**_DEFAULTS, **settings}}), seconds) for settings, seconds in _predictions(folder))
        predicted_s = next((seconds for predicted, seconds in rows if predicted == way), None)
        if predicted_s is None or not _is_alike(folder, alike, way):
            continue
        label = ", ".join(value for name, value in way.items() if value != _DEFAULTS[name]) or "none"
        told = f"a step of {label}: {folder.name} had predicted {format_seconds(predicted_s)}"
        message = f"{told}, {format_seconds(step_s)} were measured"
        return WayPredicted(message, label, folder.name, step_s, predicted_s)
    return None


def residuals_of(folder: Path) -> list[Residual]:
    """Return all predictions that runs in a folder were measured by, the oldest first.

    Raises:
        UserError: it is no folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of runs")
    found = []
    for run in (each for each in folder.iterdir() if _has_record(each)):
        for event in newest(run, WayPredicted, WayTried):
            if isinstance(event, WayPredicted | WayTried) and event.predicted_s and event.step_s > 0:
                found.append(Residual(event.t, run.name, event.way, event.predicted_s, event.step_s))
    return sorted(found, key=lambda residual: residual.when)


def _has_record(folder: Path) -> bool:
    """Whether a folder holds a record; one that this user may not enter holds none."""
    try:
        return (folder / RECORD_FILE).exists()
    except OSError:
        return False


def half_width(residuals: Sequence[Residual]) -> float | None:
    """Return the relative half width that 95% of the residuals kept; None: they are too few."""
    if len(residuals) < ENOUGH:
        return None
    ratios = sorted(abs(math.log(r.predicted_s / r.measured_s)) for r in residuals)
    return math.expm1(ratios[min(len(ratios) - 1, math.ceil(_WITHIN * len(ratios)) - 1)])


def _earlier(path: Path, began: float) -> list[Path]:
    """Return the runs beside this one that were described before it began, the newest first."""
    try:
        others = [each / CONFIG_FILE for each in path.resolve().parent.iterdir() if each.name != path.resolve().name]
        times = {file.parent: file.stat().st_mtime for file in others if file.is_file()}
    except OSError:  # a folder that cannot be listed, or from which a run went away meanwhile: nothing is known
        return []
    before = [folder for folder, t in times.items() if t < began]
    return sorted(before, key=lambda folder: -times[folder])[:_MOST_LOOKED_AT]


def _config(folder: Path) -> Mapping[str, object] | None:
    try:
        node = read_yaml(folder / CONFIG_FILE)
        read = plain(node, CONFIG_FILE) if node is not None else None
    except UserError:  # another's run is being removed, or is no run of ours
        return None
    return read if isinstance(read, dict) else None


def _is_alike(folder: Path, alike: dict[str, dict[str, object]], way: dict[str, str]) -> bool:
    config = _config(folder)
    return config is not None and _alike(config) == alike and _way(config) != way


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _alike(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
    return {
        name: {key: value for key, value in _section(config, name).items() if not keys or key in keys}
        for name, keys in _ALIKE.items()
    }


def _way(config: Mapping[str, object]) -> dict[str, str]:
    return {name: _canonical(name, str(_section(config, "strategy").get(name, _DEFAULTS[name]))) for name in _WAY}


def _canonical(name: str, spec: str) -> str:
    try:
        return canonical(f"strategy.{name}", spec)
    except UserError:  # of another version: it compares as it was written
        return spec


def _predictions(folder: Path) -> Iterator[tuple[dict[str, str], float]]:
    """Yield what a run predicted, from its summary: settings by short name, and seconds of a step."""
    try:
        summary = RunSummary.of(read_summary(folder))
    except UserError:  # it was cut off, or is no summary of ours
        return
    for row in summary.predictions:
        if row.then_s > 0:
            yield {name.removeprefix("strategy."): text for name, text in row.settings.items()}, row.then_s


def history_words(residuals: Sequence[Residual]) -> Iterable[str]:
    """Say how far predictions were off, and what intervals follow."""
    if not residuals:
        yield "No run here was predicted by another, or by --auto: runs that differ in --sync or --compression are."
        return
    sizes = sorted(abs(r.off) for r in residuals)
    yield (
        f"{len(residuals)} prediction{'s' * (len(residuals) != 1)}: median error {sizes[len(sizes) // 2]:.0%}, worst "
        f"{sizes[-1]:.0%}, {sum(size <= 0.15 for size in sizes)} within 15%."
    )
    width = half_width(residuals)
    if width is None:
        yield f"Intervals of plans from these runs follow from {ENOUGH} or more."
    else:
        yield f"Plans from these runs take intervals of a factor {1 + width:.2f} from them."
