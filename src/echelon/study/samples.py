"""The samples that each candidate of a study took to its target, for plans of the same model and data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from echelon.config import RunConfig, build
from echelon.core.errors import UserError
from echelon.reporting.report.records import CONFIG_FILE
from echelon.run.way_samples import WAY, StudySamples, WaySamples, way_of
from echelon.study.base import COMPLETED, Candidate, Study, Terms
from echelon.study.collect import collect, main_rows
from echelon.study.compare import metric_of
from echelon.study.file import STUDY_FILE, is_study, load_study
from echelon.study.folder import RUNS_FOLDER
from echelon.study.intervals import Interval, coverage_of, mean_interval, ratio_interval, reached_at
from echelon.study.metric import PrimaryMetric
from echelon.study.tables import PointRow, RunRow

_ALIKE = ("data.source", "data.target", "model.name", "model.tune", "task")
_SAME_SAMPLES = (*WAY, "strategy.parallel", "strategy.collective", "launch.balance")
_NOTED = ("data.batch_size", "training.epochs", "optimizer.name", "optimizer.lr", "optimizer.schedule")
_MOST_LOOKED_AT = 100
_ENOUGH_SEEDS = 6  # from which intervals hold about what they say


def samples_to_target(path: Path, config: RunConfig) -> StudySamples:
    """Return what a study measured of a run's model and data.

    Args:
        path: of the study's folder.
        config: of the planned run.

    Raises:
        UserError: the folder holds no study, one of another model or other data, or one whose first candidate has not
            reached the target.
    """
    if not is_study(path):
        raise UserError(f"{path} holds no study: give the folder that `echelon compare --run FOLDER` wrote")
    study = load_study(path / STUDY_FILE)
    terms = [each for each in study.terms if not _differences(study, each, config)]
    if not terms:
        differing = ", ".join(_differences(study, study.terms[0], config))
        raise UserError(f"{path} is a study of something else: {differing}")
    runs, points = collect(path, study)
    labels = {each.label for each in terms}
    rows = [row for row in main_rows(runs) if row.terms in labels and row.status == COMPLETED]
    spent = _spent(rows, points)
    base = {key: n for key, n in spent.items() if key[0] == study.baseline.label}
    reached = [n for n in base.values() if n is not None]
    if not reached or len(reached) < len(base):
        raise UserError(f"{path}: its first candidate, {study.baseline.label}, has not reached the target in each seed")
    described = _described(study, study.baseline, terms[0])
    epochs = _by_seed({key[1:]: n for key, n in base.items() if n is not None}, _epochs_of(rows, points))
    interval = mean_interval(epochs)
    ways = [way for each in study.candidates if (way := _way(study, each, spent)) is not None]
    metric = metric_of(rows)
    return StudySamples(
        study=path.resolve().name,
        target=_target(metric, rows),
        first=study.baseline.label,
        epochs=interval.value, low=interval.low, high=interval.high,
        workers=next((row.workers for row in rows if row.workers), 1),
        batch=described.data.batch_size,
        ways=ways,
        notes=list(_notes(study, described, config, interval)),
    )  # fmt: skip


def samples_for(study: str, source: str, config: RunConfig) -> StudySamples | None:
    """Return what a study measured of a run's model and data; None: none is given, and none is found.

    Args:
        study: its folder; empty: the newest that is found beside the run, or in `runs`.
        source: the run's folder, or the data.

    Raises:
        UserError: what is given is no such study.
    """
    if study:
        return samples_to_target(Path(study), config)
    return _newest(_folders_near(source), config)


def _newest(near: Sequence[Path], config: RunConfig) -> StudySamples | None:
    """Return what the newest fitting study in some folders measured; those that nothing can be learnt from do not."""
    files = {file.resolve() for folder in near for file in _study_files(folder)}
    for file in sorted(files, key=lambda each: -each.stat().st_mtime)[:_MOST_LOOKED_AT]:
        try:
            return samples_to_target(file.parent, config)
        except UserError:  # of another model, or not done
            continue
    return None


def _folders_near(source: str) -> list[Path]:
    folder = Path(source)
    if not folder.is_dir() or not (folder / CONFIG_FILE).is_file():
        return [Path("runs")]
    beside = folder.resolve().parent
    return [beside, *([beside.parent] if beside.name == RUNS_FOLDER else [])]


def _study_files(folder: Path) -> Iterator[Path]:
    try:
        yield from (file for file in (folder / STUDY_FILE, *folder.glob(f"*/{STUDY_FILE}")) if file.is_file())
    except OSError:  # a folder that this user may not list holds no study for them
        return


def _described(study: Study, candidate: Candidate, terms: Terms) -> RunConfig:
    return build(None, {**study.base, **terms.settings, **candidate.settings}).config


def _differences(study: Study, terms: Terms, config: RunConfig) -> list[str]:
    """Say in which settings that decide on what is learnt a study's runs differ from a planned one."""
    described = _described(study, study.baseline, terms)
    found = []
    for name in _ALIKE:
        theirs, ours = _value(described, name), _value(config, name)
        if theirs != ours:
            found.append(f"its {name} is {theirs}, not {ours}")
    return found


def _value(config: RunConfig, name: str) -> str:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    text = str(value)
    return str(Path(text).resolve()) if name == "data.source" and Path(text).exists() else text


def _spent(rows: Sequence[RunRow], points: Sequence[PointRow]) -> dict[tuple[str, str, int], float | None]:
    """Return the samples to the target by candidate, terms and seed; None: it was not reached."""
    by_run: dict[str, list[PointRow]] = {}
    for point in points:
        by_run.setdefault(point.run, []).append(point)
    spent = {}
    for row in rows:
        if row.target is None:
            continue
        score, seen = row.primary.score, [p for p in by_run.get(row.run, []) if p.value is not None]
        scores = [score(p.value) for p in seen if p.value is not None]
        key = row.candidate, row.terms, row.seed
        spent[key] = reached_at([p.samples for p in seen], scores, score(row.target))
    return spent


def _epochs_of(rows: Sequence[RunRow], points: Sequence[PointRow]) -> float:
    """Return the samples of an epoch: of the last evaluations, over the epochs that the runs had."""
    last = {point.run: point.samples for point in points}
    per_epoch = [last[row.run] / row.epochs for row in rows if row.epochs and last.get(row.run)]
    return fmean(per_epoch) if per_epoch else 1.0


def _by_seed(spent: Mapping[tuple[str, int], float], unit: float) -> list[float]:
    """Return the mean of each seed over the terms, in units of so many."""
    seeds = sorted({seed for _, seed in spent})
    return [fmean(n for (_, of), n in spent.items() if of == seed) / unit for seed in seeds]


def _way(study: Study, candidate: Candidate, spent: Mapping[tuple[str, str, int], float | None]) -> WaySamples | None:
    """Return the samples of a candidate in those of the first; None: it changes other things too, or did not run.

    Terms of one seed are no measurements of their own: their logarithms are averaged.
    """
    keys = [key for key in spent if key[0] == candidate.label]
    if not keys or _changes_more(study, candidate):
        return None
    settings = way_of({**study.base, **candidate.settings})
    pairs = {key[1:]: (spent[study.baseline.label, *key[1:]], spent[key]) for key in keys
             if (study.baseline.label, *key[1:]) in spent}  # fmt: skip
    both = {place: (base, own) for place, (base, own) in pairs.items() if base and own}
    reached = {seed for _, seed in pairs} - {seed for (_, seed), (_, own) in pairs.items() if own is None}
    seeds = sorted({seed for _, seed in both})
    if not seeds:
        return WaySamples(candidate.label, settings, math.inf, None, None, 0, len({seed for _, seed in pairs}))
    means = [_geometric([pair for (_, of), pair in both.items() if of == seed]) for seed in seeds]
    ratio = ratio_interval(means, [1.0] * len(means))
    if candidate is study.baseline:
        ratio = Interval(1.0, 1.0, 1.0)
    all_seeds = len({seed for _, seed in pairs})
    return WaySamples(candidate.label, settings, ratio.value, ratio.low, ratio.high, len(reached), all_seeds)


def _changes_more(study: Study, candidate: Candidate) -> bool:
    """Whether a candidate differs from the first in more than how ranks share and agree."""
    first, its = {**study.base, **study.baseline.settings}, {**study.base, **candidate.settings}
    return bool({name for name in {*first, *its} if first.get(name) != its.get(name)} - set(_SAME_SAMPLES))


def _geometric(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    known = [(base, own) for base, own in pairs if base and own]
    return ratio_interval([own for _, own in known], [base for base, _ in known]).value


def _target(metric: PrimaryMetric, rows: Sequence[RunRow]) -> str:
    targets = sorted({row.target for row in rows if row.target is not None})
    values = (
        metric.text(targets[0]) if len(targets) == 1 else f"{metric.text(targets[0])} to {metric.text(targets[-1])}"
    )
    return f"{metric.label} {values}"


def _notes(study: Study, described: RunConfig, config: RunConfig, epochs: Interval) -> Iterator[str]:
    """Say what of the study's runs is not as planned."""
    differing = [name for name in _NOTED if _value(described, name) != _value(config, name)]
    if differing:
        told = ", ".join(
            f"{name.rpartition('.')[2]} {_value(described, name)} there, {_value(config, name)} here"
            for name in differing
        )
        yield f"The study's runs differ from this one: {told}. What it says of samples may not hold here."
    if epochs.low is None:
        yield "The study has too few seeds for intervals of samples: bounds of time to the target are not known."
    elif (seeds := len(study.seeds)) < _ENOUGH_SEEDS:
        yield (
            f"Its intervals are bootstrapped over {seeds} seeds: over so few they hold the truth in about "
            f"{coverage_of(seeds):.0%} of studies, not in 95%."
        )
    if left_out := [each.label for each in study.candidates if _changes_more(study, each)]:
        yield f"Left out of the study, for they change more than the way: {', '.join(left_out)}."
