"""What was predicted of a run's steps before it was made, beside what they took: recorded where it ends.

Runs that stand in one folder predict each other: each records what other ways to communicate would take, and a later
run of one of these, alike in all else, is what that prediction is measured by. Before these come plans: `echelon plan`
leaves what it predicted in the folder of runs (`plans.jsonl`), and a run of a way, workers and link that one was about
is compared with the newest. What `--auto` predicted of its trials is in records already. From all follows how far
predictions were off here, over time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from echelon.config import RunConfig, to_yaml
from echelon.config.yaml_file import plain, read_yaml
from echelon.core.errors import UserError
from echelon.core.files import write_whole
from echelon.core.units import format_seconds
from echelon.records.decode import decode
from echelon.records.events import WayPredicted, WayTried
from echelon.records.file import newest
from echelon.records.segments import RECORD_FILE
from echelon.records.summary import RunSummary, read_summary
from echelon.reporting.report.records import CONFIG_FILE, RunRecord
from echelon.reporting.report.timing import measure
from echelon.run.resolve import canonical, link_of

_WHOLE = "dp=-1"
_WAY = ("sync", "compression")
_DEFAULTS = {"sync": "allreduce", "compression": "none"}
_ALIKE: dict[str, tuple[str, ...]] = {
    "data": (), "model": (), "launch": ("workers", "threads", "nodes", "link"),
    "training": ("epochs", "max_steps", "accumulate", "precision", "device", "recompute"),
    "strategy": ("parallel", "collective"),
}  # fmt: skip
"""Sections of two runs that are alike, and of each the settings (all: none is named)."""
_PLANNED: dict[str, tuple[str, ...]] = {
    "data": (), "model": (), "launch": ("threads",), "training": ("accumulate", "precision", "device", "recompute"),
    "strategy": ("collective",),
}  # fmt: skip
"""The same of a run and a plan, which says its workers, link and ways itself."""
PLANS_FILE = "plans.jsonl"
_NEWEST_BYTES = 1 << 20  # of plans that are looked at
_MOST_LOOKED_AT = 40
ENOUGH = 8
"""Of fewer residuals no interval is made."""
_WITHIN = 0.95


@dataclass(frozen=True)
class Residual:
    """A prediction of a step and its measurement, in seconds; `when` in unix seconds, `run` where it was measured.

    Attributes:
        low_s, high_s: the bounds that were told; 0: none were.
        predicted_bytes, measured_bytes: memory of the fullest rank; 0: not told.
    """

    when: float
    run: str
    way: str
    predicted_s: float
    measured_s: float
    low_s: float = 0.0
    high_s: float = 0.0
    predicted_bytes: float = 0.0
    measured_bytes: float = 0.0

    @property
    def held(self) -> bool | None:
        """Whether the step lies within the bounds; None: none were told."""
        return self.low_s <= self.measured_s <= self.high_s if self.high_s else None

    @property
    def off(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def predicted_before(path: Path, record: RunRecord) -> WayPredicted | None:
    """Return what the newest plan of a run like this one predicted of it; without one, what the newest earlier run
    beside it had predicted, that is alike but for its way.
    """
    start, windows = record.last_start, record.windows
    steps = sum(window.count for window in windows)
    step_s = sum(window.seconds for window in windows) / max(1, steps)  # of all of them, as what is predicted
    if start is None or not step_s:
        return None
    way, alike = _way(record.config), _alike(record.config)
    if (planned := _planned_before(path, record)) is not None:
        return _compared(record, *planned, step_s)
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


def _compared(record: RunRecord, plan: PlannedRuns, told: PlannedStep, step_s: float) -> WayPredicted:
    """Return what a plan predicted of a run beside what was measured; memory where both are known."""
    timing = measure(record)
    memory = max(timing.memory_bytes, default=0.0) if timing is not None else 0.0
    bounds = f"{format_seconds(told.low_s)} to {format_seconds(told.high_s)}"
    predicted = f"a plan had predicted {format_seconds(told.step_s)} ({bounds})"
    message = f"a step of {told.label}: {predicted}, {format_seconds(step_s)} were measured"
    return WayPredicted(
        message, told.label, f"the plan of {plan.source}", step_s, told.step_s, told.low_s, told.high_s,
        memory if told.memory_bytes else 0.0, told.memory_bytes if memory else 0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class PlannedStep:
    """What a plan predicted of a way.

    Attributes:
        settings: layout, sync and codec by dotted name.
        memory_bytes: of the fullest rank's process; 0: not known.
    """

    label: str
    settings: Mapping[str, str]
    step_s: float
    low_s: float
    high_s: float
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class PlannedRuns:
    """What a plan predicted for some machines.

    Attributes:
        t: when, in unix seconds.
        source: what it was planned from.
        alike: what decides on a run's steps beside workers, link and ways.
        rate_bits_per_s, delay_s: of the link; 0: none is described.
    """

    t: float
    source: str
    alike: str
    workers: int
    rate_bits_per_s: float
    delay_s: float
    ways: Sequence[PlannedStep]


def alike_for_plans(config: RunConfig) -> str:
    """Return what a run that a plan is about has in common with it, as `PlannedRuns.alike` is written."""
    return _alike_text(_mapping(yaml.compose(to_yaml(config), yaml.SafeLoader)))


def _alike_text(config: Mapping[str, object]) -> str:
    return json.dumps(_alike(config, _PLANNED), sort_keys=True)


def write_planned(folder: Path, planned: Sequence[PlannedRuns]) -> None:
    """Add plans to those of a folder of runs, which is made.

    Raises:
        UserError: it cannot be written.
    """
    lines = "".join(json.dumps(asdict(each)) + "\n" for each in planned)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / PLANS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_whole(fd, lines.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(f"{folder / PLANS_FILE} cannot be written: {error.strerror}") from None


def _planned_before(path: Path, record: RunRecord) -> tuple[PlannedRuns, PlannedStep] | None:
    """Return the newest plan that a run was made after, and what it predicted of the run's way."""
    start = record.last_start
    if start is None or _section(record.config, "launch").get("nodes", "1") not in ("1", 1):
        return None
    alike, link = _alike_text(record.config), _link(record)
    wanted = {**_way(record.config), "parallel": _layout(record.config, start.world_size)}
    for plan in _plans(path.resolve().parent):
        if plan.t > start.t or plan.workers != start.world_size or plan.alike != alike:
            continue
        if (plan.rate_bits_per_s, plan.delay_s) != link:
            continue
        for told in plan.ways:
            short = {name.removeprefix("strategy."): text for name, text in told.settings.items()}
            of_way = {**_way({"strategy": {**_DEFAULTS, **short}}), "parallel": short.get("parallel", "")}
            if of_way == wanted:
                return plan, told
    return None


def _plans(folder: Path) -> Iterator[PlannedRuns]:
    """Yield the plans of a folder of runs, the newest first; lines that cannot be read are left out."""
    try:
        with (folder / PLANS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _NEWEST_BYTES))
            lines = file.read().splitlines()
    except OSError:  # nothing was planned here
        return
    for line in reversed(lines):
        try:
            yield decode(PlannedRuns, json.loads(line))
        except (KeyError, TypeError, ValueError):  # cut off, or of another version
            continue


def _link(record: RunRecord) -> tuple[float, float]:
    described = record.setting("launch", "link")
    link = link_of(described) if isinstance(described, str) else None
    return (link.rate_bits_per_s, link.delay_s) if link is not None else (0.0, 0.0)


def _layout(config: Mapping[str, object], ranks: int) -> str:
    """Return a run's layout as plans write it: whole replicas are as many as there are ranks."""
    layout = str(_section(config, "strategy").get("parallel", _WHOLE))
    return f"dp={ranks}" if layout == _WHOLE else layout


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
            if not isinstance(event, WayPredicted | WayTried) or not event.predicted_s or event.step_s <= 0:
                continue
            residual = Residual(event.t, run.name, event.way, event.predicted_s, event.step_s)
            if isinstance(event, WayPredicted):
                residual = replace(
                    residual, low_s=event.low_s, high_s=event.high_s,
                    predicted_bytes=event.predicted_memory_bytes, measured_bytes=event.memory_bytes,
                )  # fmt: skip
            found.append(residual)
    return sorted(found, key=lambda residual: residual.when)


def _has_record(folder: Path) -> bool:
    """Whether a folder holds a record; one that this user may not enter holds none."""
    try:
        return (folder / RECORD_FILE).exists()
    except OSError:
        return False


def half_width(residuals: Sequence[Residual]) -> float | None:
    """Return the relative half width that 95% of the residuals of steps kept; None: they are too few."""
    return _half_width([r.predicted_s / r.measured_s for r in residuals])


def memory_half_width(residuals: Sequence[Residual]) -> float | None:
    """Return the same of residuals of memory."""
    return _half_width([r.predicted_bytes / r.measured_bytes for r in residuals if r.measured_bytes])


def _half_width(predicted_over_measured: Sequence[float]) -> float | None:
    if len(predicted_over_measured) < ENOUGH:
        return None
    ratios = sorted(abs(math.log(ratio)) for ratio in predicted_over_measured)
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
        return _mapping(read_yaml(folder / CONFIG_FILE))
    except UserError:  # another's run is being removed, or is no run of ours
        return None


def _mapping(node: yaml.Node | None) -> Mapping[str, object]:
    read = plain(node, CONFIG_FILE) if node is not None else {}
    if not isinstance(read, dict):
        raise UserError(f"{CONFIG_FILE} holds no description of a run")
    return read


def _is_alike(folder: Path, alike: dict[str, dict[str, object]], way: dict[str, str]) -> bool:
    config = _config(folder)
    return config is not None and _alike(config) == alike and _way(config) != way


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _alike(
    config: Mapping[str, object], settings: Mapping[str, tuple[str, ...]] = _ALIKE
) -> dict[str, dict[str, object]]:
    return {
        name: {key: value for key, value in _section(config, name).items() if not keys or key in keys}
        for name, keys in settings.items()
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
        yield (
            "No run here was predicted by a plan, by another run, or by --auto: runs that `echelon plan` described, or "
            "that differ from an earlier one in --sync or --compression, are."
        )
        return
    sizes = sorted(abs(r.off) for r in residuals)
    yield (
        f"{len(residuals)} prediction{'s' * (len(residuals) != 1)}: median error {sizes[len(sizes) // 2]:.0%}, worst "
        f"{sizes[-1]:.0%}, {sum(size <= 0.15 for size in sizes)} within 15%."
    )
    if told := [r.held for r in residuals if r.held is not None]:
        yield f"{sum(told)} of {len(told)} steps that a plan predicted lie within its bounds."
    if memory := sorted(abs(r.predicted_bytes / r.measured_bytes - 1) for r in residuals if r.measured_bytes):
        yield f"Memory, of {len(memory)}: median error {memory[len(memory) // 2]:.0%}, worst {memory[-1]:.0%}."
    width = half_width(residuals)
    if width is None:
        yield f"Intervals of plans from these runs follow from {ENOUGH} or more."
    else:
        yield f"Plans from these runs take intervals of a factor {1 + width:.2f} from them."
