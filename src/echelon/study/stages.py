"""What a study runs beside the comparison by epochs: each candidate's own learning rate first, equal time at last.

What the later stages do depends on what the earlier ones measured. It is chosen once, and written into `study.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

from echelon.config import RunConfig, build
from echelon.core.errors import UserError
from echelon.core.own import HUGGING_FACE
from echelon.core.units import format_seconds, seconds_for
from echelon.run.defaults import with_task_defaults
from echelon.storage.url import is_url
from echelon.study.base import BASELINE_TIME, COMPLETED, Choices, PlannedRun, Settings, Stage, Study
from echelon.study.grid import RunPlace, planned_runs, run_places
from echelon.study.tables import RunRow

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the learning rate that a candidate has, which are tried."""
SHORTER = 4  # times as few epochs as a run of the study has
_SLACK = 0.02  # of an epoch: by so much it may end after the time that is given
_RATE, _EPOCHS, _STEPS = "optimizer.lr", "training.epochs", "training.max_steps"


def all_runs(study: Study) -> list[PlannedRun]:
    """Return the runs of all stages, as far as they are known."""
    return [*rate_runs(study), *planned_runs(study), *time_runs(study)]


def rate_runs(study: Study) -> list[PlannedRun]:
    """Return the short runs that look for learning rates: of the first seed, and of the first terms of a candidate."""
    if not study.tune_lr:
        return []
    plain = replace(study, choices=Choices(), seeds=study.seeds[:1])
    runs = []
    for place in _first_of_each(plain):
        settings = place.settings(plain)
        if _built(settings) is None:
            continue
        for factor in FACTORS:
            tried = {**settings, **_shortened(settings), _RATE: f"{rate_of_settings(settings) * factor:.6g}"}
            name = f"lr-{place.number:02d}-x{factor:g}-s{place.seed}"
            runs.append(PlannedRun(name, place.candidate.label, place.terms.label, place.seed, tried, Stage.RATES))
    return runs


def best_rates(study: Study, rows: Sequence[RunRow]) -> dict[str, str]:
    """Return the learning rate that reached most, of each candidate with a run that converged; earlier choices stay."""
    rates: dict[str, str] = dict(study.choices.rates)
    tried = [r for r in rows if r.stage == Stage.RATES and r.status == COMPLETED and r.final is not None and r.lr]
    has_loss = any(r.eval_loss is not None for r in tried)  # else nothing records one, not even that it was not finite
    for candidate in study.candidates:
        twin = next(c for c in study.candidates if dict(c.settings) == dict(candidate.settings))
        mine = [r for r in tried if r.candidate == twin.label and (not has_loss or _is_finite(r.eval_loss))]
        if mine and candidate.label not in rates:
            best = max(mine, key=lambda r: (r.primary.score(r.final or 0.0), -(r.eval_loss or 0.0)))
            rates[candidate.label] = f"{best.lr:.6g}"
    return rates


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def epochs_in_time(study: Study, rows: Sequence[RunRow]) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Return the equal time under each of the terms, in seconds, and the whole epochs that each candidate ends in it.

    By the mean over the seeds of what its runs took; what was chosen before stays.
    """
    seconds, epochs = dict(study.choices.seconds), {k: dict(v) for k, v in study.choices.epochs.items()}
    for terms in study.terms:
        done = [r for r in rows if (r.stage, r.terms, r.status) == (Stage.EPOCHS, terms.label, COMPLETED) and r.run_s]
        base = [r.run_s or 0.0 for r in done if r.candidate == study.baseline.label]
        given_s = _given_s(study)
        if terms.label not in seconds and not base and given_s is None:
            continue
        limit_s = seconds.setdefault(terms.label, fmean(base) if given_s is None else given_s)
        known = epochs.setdefault(terms.label, {})
        for candidate in study.candidates:
            mine = [r for r in done if r.candidate == candidate.label and r.epochs]
            if mine:
                start_s = fmean(r.pause_start or 0.0 for r in mine)
                epoch_s = fmean(((r.run_s or 0.0) - (r.pause_start or 0.0)) / (r.epochs or 1.0) for r in mine)
                known.setdefault(candidate.label, max(0, math.floor((limit_s - start_s) / epoch_s + _SLACK)))
    return seconds, epochs


def time_runs(study: Study) -> list[PlannedRun]:
    """Return the runs of other numbers of epochs than the study's, that end in equal time."""
    runs = []
    for place in run_places(study):
        settings = place.settings(study)
        epochs = study.choices.epochs.get(place.terms.label, {}).get(place.candidate.label, 0)
        if study.equal_time and epochs and epochs != epochs_of(settings):
            name = f"time-{place.name()}"
            longer = {**settings, _EPOCHS: str(epochs)}
            runs.append(PlannedRun(name, place.candidate.label, place.terms.label, place.seed, longer, Stage.TIME))
    return runs


def rate_words(study: Study, apart: Sequence[RunRow]) -> list[str]:
    """Say which learning rate each candidate took of those tried, and what finding it cost, apart from the rest."""
    tried = [r for r in apart if r.stage == Stage.RATES]
    if not tried:
        return []
    clauses = []
    for label, rate in study.choices.rates.items():
        mine = sorted(r.lr for r in tried if r.candidate == label and r.lr)
        edge = (
            " (the end of what was tried: further may be better)" if mine and float(rate) in (mine[0], mine[-1]) else ""
        )
        clauses.append(f"{label} {float(rate):g}{edge}")
    cost = format_seconds(sum(r.whole_s or 0.0 for r in tried))
    factors = ", ".join(f"{factor:g}" for factor in FACTORS)
    chosen = f"Each candidate has the learning rate that was best for it: {'; '.join(clauses)}. " if clauses else ""
    return [
        f"{chosen}Tried were {factors} times its own, with seed {tried[0].seed} and a {SHORTER}th of the epochs: "
        f"{len(tried)} runs in {cost}, which the other times do not hold."
    ]


def check_stages(study: Study) -> None:
    """Refuse what the stages cannot do.

    Raises:
        UserError: a time that is none, or steps where epochs are stretched.
    """
    if not study.equal_time:
        return
    try:
        _given_s(study)
    except UserError as error:
        raise UserError(f"{error}; or {BASELINE_TIME}, for what the baseline takes") from None
    configs = [_built(run.settings) for run in planned_runs(study)]
    if any(config.training.max_steps for config in configs if config is not None):
        raise UserError(
            "--equal-time gives candidates the epochs that end in the time: give --epochs instead of --max-steps"
        )


def epochs_of(settings: Settings) -> int:
    """Return the epochs of a run: as given, or as its task suggests."""
    config = _built(settings) if settings.get(_EPOCHS) else None
    return (config or _described(settings)).training.epochs


def rate_of_settings(settings: Settings) -> float:
    """Return the learning rate of a run: as given, or as its task, or the weights that it starts from, suggest."""
    config = _built(settings) if settings.get(_RATE) else None
    return (config or _described(settings)).optimizer.lr


def _built(settings: Settings) -> RunConfig | None:
    """Return a run's description without what its task suggests; None: the run is refused, alone, when it begins."""
    return _built_once(tuple(sorted(settings.items())))


@cache
def _built_once(settings: tuple[tuple[str, str], ...]) -> RunConfig | None:
    try:
        return build(None, dict(settings)).config
    except UserError:
        return None


def _described(settings: Settings) -> RunConfig:
    return _with_defaults(tuple(sorted(settings.items())))


@cache
def _with_defaults(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    """Return a run's description as its command makes it, once: the defaults of some tasks are found in the data.

    Who looks at a study imports no code that it names, and fetches no data: general defaults stand there.
    """
    described = build(None, dict(settings))
    task, source = described.config.task, described.config.data.source
    if ":" in task:
        return described.config
    try:
        return with_task_defaults(described, opens_data=not (is_url(source) or source.startswith(HUGGING_FACE))).config
    except UserError:  # what is wrong with the data, its runs say
        return described.config


def _given_s(study: Study) -> float | None:
    """Return the equal time that was given; None: it is what the baseline takes."""
    return None if study.equal_time == BASELINE_TIME else seconds_for("--equal-time")(study.equal_time)


def _first_of_each(study: Study) -> Iterator[RunPlace]:
    """Yield each candidate once; of those with the same settings the first."""
    seen: list[Mapping[str, str]] = []
    for place in run_places(study):
        if dict(place.candidate.settings) not in seen:
            seen.append(dict(place.candidate.settings))
            yield place


def _shortened(settings: Settings) -> dict[str, str]:
    config = _built(settings)
    steps = config.training.max_steps if config is not None else 0
    fewer = {_STEPS: str(max(1, steps // SHORTER))} if steps else {}
    return {_EPOCHS: str(max(1, round(epochs_of(settings) / SHORTER))), **fewer, "training.eval_every": "0"}
