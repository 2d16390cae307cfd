"""`--auto`: the fastest way to train on the workers and links at hand, within their memory and a tolerance of accuracy.

A short run as by default says what every other way would take (`planning.steps`); the two best of those that may be
taken are run as well, and only what was measured to be faster than the default is chosen. Where whole replicas do not
fit, layouts that do are run instead, those that send least first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.config import Resolved, RunConfig
from echelon.config.machines import Machines
from echelon.core.errors import UserError
from echelon.core.spec import spec_of
from echelon.core.units import format_bytes, format_seconds
from echelon.optim.traits import normalises
from echelon.planning.calibration import Calibration, calibrate
from echelon.planning.layout_memory import WHOLE, FittingLayouts, LayoutMemory, fitting_layouts
from echelon.planning.layouts import DescribedModel
from echelon.planning.plan import Length, RunEstimate, make_plan
from echelon.planning.steps import Replicated
from echelon.planning.trial import DEFAULTS, try_out, workers_of
from echelon.records.events import WayTried
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import measure
from echelon.reporting.report.whole_run import whole_run_of
from echelon.run.resolve import canonical, left_open, link_of, nodes_of, place_of, resolve, sync_of
from echelon.sync.averaging.plan import SHORT_STEPS
from echelon.trainer.compatibility import check_strategies
from echelon.trainer.world import choose_device

POINTS = {
    "none": 0.0, "bf16": 0.0, "int8": 0.0, "diloco(period=20), int8": 0.3, "local(period=8), sign": 0.3,
    "local(period=8, overlap=2), sign": 0.3, "topk(density=0.01)": 0.5, "powersgd(rank=2)": 0.7,
}  # fmt: skip
"""Points of accuracy that ways cost, rounded up, where they were measured over a few seeds; others are not taken."""
POINTS_WHEN_SHORT = {
    "none": 0.0, "bf16": 0.0, "int8": 0.0, "local(period=4), sign": 0.3, "local(period=8), sign": 0.6,
    "local(period=8, overlap=2), sign": 0.7,
}  # fmt: skip
"""The same in runs of fewer steps than `SHORT_STEPS`: what replicas miss at the start is never made up for."""
POINTS_WHEN_NORMALISED = {"none": 0.0, "bf16": 0.0, "int8": 0.0, "diloco(period=8)": 0.0, "diloco(period=8), int8": 0.0}
"""The same with an optimizer that divides gradients by their size: `local` lost 2 points of a classifier of texts."""
WORTH = 1.1
"""A way is tried that is predicted to be so many times as fast as the default."""
FASTER = 1.05
"""And taken when it was measured to be so many times as fast."""
TRIED = 2
MOST_DIVIDED = 3
"""Layouts that are run where whole replicas do not fit."""
_SETTINGS = ("strategy.parallel", "strategy.sync", "strategy.compression")
_PARALLEL, *_SPECS = _SETTINGS
_COLLECTIVE, _PATH = "strategy.collective", "auto"
_FEWEST_WITH_PATHS = 3
"""Replicas between which paths differ: two have one way to each other."""


@dataclass(frozen=True)
class AutoChoice:
    """What was chosen, by dotted name, and why, in sentences; and what was tried for it, as the run's record has it."""

    settings: Mapping[str, str]
    words: Sequence[str]
    trials: Sequence[WayTried] = ()


def settled(config: RunConfig, chosen: Mapping[str, str] | None = None) -> RunConfig:
    """Return a description with what was chosen, and defaults in place of `auto` that is left."""
    words = {_short(name): DEFAULTS[_short(name)] for name in left_open(config)}
    words |= {_short(name): text for name, text in (chosen or {}).items()}
    return replace(config, strategy=replace(config.strategy, **words))


def choose(resolved: Resolved, tolerance: float, free: frozenset[str]) -> AutoChoice:
    """Choose layout, sync and codec for a run on this machine.

    Args:
        resolved: the description, without `auto`.
        tolerance: points of accuracy that a way may cost, as measured elsewhere.
        free: what is to be chosen, by dotted name; the rest stays as described. Empty: all three of a run that has
            been given none (`--auto`).

    Raises:
        UserError: a choice is already made by hand, several machines take part, nothing fits, or a trial failed.
    """
    config = resolved.config
    _check(resolved, free, tolerance)
    if workers_of(config) < 2:
        return AutoChoice({}, ["--auto: one worker has nobody to agree with: the defaults stay."])
    asked = _Asked(free, {name: canonical(name, _value(config, name)) for name in _SPECS if free and name not in free})
    if not asked.layout:
        return _by_calibration(config, tolerance, asked)
    flag = "--parallel auto" if free else "--auto"
    fitting = fitting_layouts(config, flag)
    if WHOLE not in fitting.layouts:
        return _divided(config, fitting, flag)
    words = [*fitting.words]
    alone = free == {_PARALLEL}
    beside = [text for name, text in asked.given.items() if alone and text != DEFAULTS[_short(name)]]
    if beside:
        words.append(f"{flag}: whole replicas; what others take beside {', '.join(beside)} is not predicted.")
    if beside or (alone and fitting.layouts == (WHOLE,)):
        return AutoChoice({_PARALLEL: WHOLE}, words)
    found = _by_calibration(config, tolerance, replace(asked, layouts=fitting.layouts))
    found = replace(found, words=[*words, *found.words])
    return found if free else _with_path(resolved, found)


def _with_path(resolved: Resolved, choice: AutoChoice) -> AutoChoice:
    """Return what was chosen with `--collective auto`, where paths can differ and none is given by hand.

    Which path is fastest is measured once more, where the run starts, vector by vector: it depends on their sizes.
    """
    if resolved.origins[_COLLECTIVE] != "default":
        return choice
    strategy = replace(resolved.config.strategy, **{_short(name): text for name, text in choice.settings.items()})
    config = replace(resolved.config, strategy=replace(strategy, collective=_PATH))
    run = resolve(config)
    workers = workers_of(config)
    on_gpu = choose_device(config.training.device, 0, workers).type == "cuda"
    if on_gpu or run.compression.encodes or run.layout_for(workers).dp < _FEWEST_WITH_PATHS:
        return choice
    try:
        check_strategies(run, workers)
    except UserError:  # what was chosen, or given, has no other path
        return choice
    word = "--auto: --collective auto: each vector takes the path that is fastest when the run starts."
    return AutoChoice({**choice.settings, _COLLECTIVE: _PATH}, [*choice.words, word], choice.trials)


@dataclass(frozen=True)
class _Asked:
    """What is to be chosen (nothing: all), what sync and codec were given, and the layouts that may be taken."""

    free: frozenset[str]
    given: Mapping[str, str]
    layouts: tuple[str, ...] = (WHOLE,)

    @property
    def layout(self) -> bool:
        """Whether the layout is to be chosen."""
        return not self.free or _PARALLEL in self.free

    def allows(self, prediction: RunEstimate) -> bool:
        """Whether a way may be taken, whatever it costs."""
        return _settings(prediction)[_PARALLEL] in self.layouts and _is(prediction, self.given)


def _by_calibration(config: RunConfig, tolerance: float, asked: _Asked) -> AutoChoice:
    """Choose by a short run of whole replicas, and of what that says may be faster."""
    base = replace(config, strategy=replace(config.strategy, **DEFAULTS))
    record = try_out(base, "the default")
    known = calibrate([record])
    machines = _here(config, known)
    length = Length.of(base, known)
    described = DescribedModel.of(base) if len(asked.layouts) > 1 else None
    predictions = make_plan(known, length, [machines], described).answers[0].predictions
    default = next(p for p in predictions if p.candidate.is_default)
    if asked.given and not _is(default, asked.given):
        default = _given({**_plain(asked.free - {_PARALLEL}), **asked.given}, predictions)
        record = try_out(_steady(_with(base, default)), default.label)
    fitting = [p for p in predictions if asked.allows(p)]
    found = _measured(base, fitting, default, (record, tolerance, length.steps))
    chosen = {name: text for name, text in found.settings.items() if name in asked.free or not asked.free}
    return replace(found, settings=chosen)


def _divided(config: RunConfig, fitting: FittingLayouts, flag: str) -> AutoChoice:
    """Choose among layouts that divide the model: what is measured to be fastest of those that send least."""
    tried = fitting.layouts[:MOST_DIVIDED] if len(fitting.layouts) > 1 else ()
    seconds: dict[str, float] = {}
    failed: list[str] = []
    for layout in tried:
        try:
            seconds[layout] = _step_s(try_out(_laid_out(config, layout), layout))
        except UserError as error:
            if len(failed) + 1 == len(tried):  # none of them trains
                raise
            failed.append(f"{flag}: {layout} is not taken: {error}.")
    best = min(seconds, key=lambda layout: seconds[layout], default=fitting.layouts[0])
    words = [*failed, *(f"{flag}: {layout} takes {format_seconds(taken)} a step." for layout, taken in seconds.items())]
    if len(fitting.layouts) > MOST_DIVIDED:
        words.append(f"{flag}: {', '.join(fitting.layouts[MOST_DIVIDED:])} would fit, too, and was not run.")
    words.append(f"{flag}: {best}: whole replicas do not fit.")
    trials = [_tried(layout, taken) for layout, taken in seconds.items()]
    return AutoChoice({_PARALLEL: best}, [*fitting.words, *words], trials)


def _laid_out(config: RunConfig, layout: str) -> RunConfig:
    return replace(config, strategy=replace(config.strategy, parallel=layout))


def _short(name: str) -> str:
    return name.removeprefix("strategy.")


def _plain(free: frozenset[str]) -> dict[str, str]:
    return {name: DEFAULTS[_short(name)] for name in free}


def _is(prediction: RunEstimate, settings: Mapping[str, str]) -> bool:
    """Whether a prediction is of a way with these settings."""
    return all(canonical(name, _settings(prediction)[name]) == text for name, text in settings.items())


def _value(config: RunConfig, name: str) -> str:
    text: str = getattr(config.strategy, _short(name))
    return text


def _given(settings: Mapping[str, str], predictions: Sequence[RunEstimate]) -> RunEstimate:
    """Return the prediction of what was given by hand.

    Raises:
        UserError: what others would cost beside it is not known.
    """
    found = [p for p in predictions if _is(p, settings)]
    if not found:
        known = sorted({_settings(p)["strategy.sync"] for p in predictions})
        said = ", ".join(f"--{name.removeprefix('strategy.')} {text}" for name, text in settings.items())
        raise UserError(
            f"what goes well with {said} is not known: auto compares codecs with --sync {' or '.join(known)}, and "
            "ways to agree with --compression none, int8 or sign; or leave both to --auto"
        )
    return found[0]


def _check(resolved: Resolved, free: frozenset[str], tolerance: float) -> None:
    given = [name for name in _SETTINGS if resolved.origins[name] != "default"]
    if resolved.config.training.accumulate == 0 and (not free or _PARALLEL in free):
        raise UserError("--accumulate auto cuts batches until one layout fits: give --parallel, or --accumulate N")
    if given and not free:
        raise UserError(f"--auto chooses {', '.join(given)}: leave it out, or leave out --auto")
    what = ", ".join(f"--{name.removeprefix('strategy.')} auto" for name in _SETTINGS if name in free) or "--auto"
    if math.isnan(tolerance):
        raise UserError("--tolerance nan: give the points of accuracy that a choice may cost, such as 0.3")
    if resolved.config.data.batch_size == 0:
        raise UserError(f"{what} tries ways with one batch: give --batch-size N instead of auto")
    if nodes_of(resolved.config).most > 1 or place_of(resolved.config).cluster() is not None:
        raise UserError(f"{what} tries ways on this machine: of several, `echelon plan RUN --at ...` says what to take")
    layout = _value(resolved.config, "strategy.parallel")
    if free and _PARALLEL not in free and layout != DEFAULTS["parallel"]:
        raise UserError(
            f"{what} compares ways between whole replicas: leave out --parallel {layout}, or choose by hand"
        )


def _here(config: RunConfig, known: Calibration) -> Machines:
    """Return the workers of the calibration; with shaped links each is on a machine of its own."""
    link = link_of(config.launch.link)
    return Machines("here", known.workers, known.workers if link is None else 1, link)


def _measured(
    base: RunConfig, predictions: Sequence[RunEstimate], default: RunEstimate, given: tuple[RunRecord, float, int]
) -> AutoChoice:
    """Run what is predicted to be best of what may be taken, and choose by what was measured."""
    record, tolerance, steps = given
    default_s = _step_s(record)
    ahead = [p for p in predictions if p.step.seconds.value * WORTH < default.step.seconds.value]
    long_enough = [p for p in ahead if p.is_long_enough]
    points = points_of(base, steps)
    allowed = [p for p in long_enough if p.candidate.exact or points.get(p.label, math.inf) <= tolerance]
    rejected = [p for p in long_enough if p not in allowed]
    words = [f"--auto: {_named(default)} takes {format_seconds(default_s)} a step."]
    best, best_s, trials = default, default_s, [_tried(default.label, default_s)]
    for prediction in sorted(allowed, key=lambda p: p.step.seconds.value)[:TRIED]:
        described = _with(base, prediction)
        if needs := _too_large(described):
            words.append(f"--auto: {prediction.label} was not tried: {needs}.")
            continue
        try:
            seconds = _step_s(try_out(_steady(described), prediction.label))
        except UserError as error:  # the default has trained
            words.append(f"--auto: {prediction.label} is not taken: {error}.")
            continue
        told = format_seconds(prediction.step.seconds.value)
        words.append(f"--auto: {prediction.label} takes {format_seconds(seconds)}, predicted were {told}.")
        trials.append(_tried(prediction.label, seconds, prediction.step.seconds.value))
        if seconds < best_s and seconds * FASTER < default_s:
            best, best_s = prediction, seconds
    if len(long_enough) < len(ahead):
        short = "; ".join(p.label for p in ahead if p not in long_enough)
        words.append(f"--auto: {steps} steps are too few for {short}.")
    if rejected:
        costs = "; ".join(f"{p.label} ({_in_words(points.get(p.label))})" for p in rejected[:4])
        words.append(f"--auto: beyond --tolerance {tolerance:g}: {costs}.")
    if best is default:
        words.append(f"--auto: nothing that may be taken is faster than {_named(default)}.")
    elif best.candidate.exact:
        words.append(f"--auto: {best.label}, {default_s / best_s:.2f}x as fast a step; it trains like one process.")
    else:
        known = f"costs up to {_in_words(points.get(best.label))} where that was measured"
        cost = known if best.label in points else "costs what was not measured"
        words.append(
            f"--auto: {best.label}, {default_s / best_s:.2f}x as fast a step; it {cost}; `echelon compare` measures it "
            "on yours."
        )
    return AutoChoice(_settings(best), words, trials)


def points_of(config: RunConfig, steps: int) -> Mapping[str, float]:
    """Return the points of accuracy that ways cost in a run of so many steps, where that was measured."""
    if normalises(config.optimizer.name):
        return POINTS_WHEN_NORMALISED
    return POINTS if steps >= SHORT_STEPS else POINTS_WHEN_SHORT


def _steady(config: RunConfig) -> RunConfig:
    """Return a description that agrees as often from the start as it would later: a trial is all start."""
    settings = sync_of(config)
    steady = settings.steady()
    if steady == settings:
        return config
    return replace(config, strategy=replace(config.strategy, sync=str(spec_of(settings.name, steady))))


def _too_large(config: RunConfig) -> str:
    """Say what a way needs of memory and what there is, where it is forecast not to fit; else nothing."""
    try:
        memory = LayoutMemory(config, "--auto")
        need = memory.need_of(config.strategy.parallel)
    except UserError:  # what is free is not known
        return ""
    if need.needed_bytes is None or memory.fits(need):
        return ""
    return f"a worker is forecast to need {format_bytes(need.needed_bytes)} of {format_bytes(memory.free_bytes)}"


def _tried(way: str, seconds: float, predicted_s: float | None = None) -> WayTried:
    told = f", predicted were {format_seconds(predicted_s)}" if predicted_s is not None else ""
    return WayTried(f"before the run, {way} took {format_seconds(seconds)} a step{told}", way, seconds, predicted_s)


def _named(prediction: RunEstimate) -> str:
    return "the default (allreduce, none)" if prediction.candidate.is_default else prediction.label


def _in_words(points: float | None) -> str:
    return "not measured" if points is None else f"{points:g} points"


def _settings(prediction: RunEstimate) -> dict[str, str]:
    """Return a way's layout, sync and codec by dotted name; whole replicas are as many as there are workers."""
    whole = isinstance(prediction.candidate.way, Replicated)
    layout = {_PARALLEL: WHOLE} if whole else {}
    defaults = {name: DEFAULTS[_short(name)] for name in _SPECS}
    return {**defaults, **prediction.candidate.settings, **layout}


def _with(base: RunConfig, prediction: RunEstimate) -> RunConfig:
    named = {_short(name): text for name, text in _settings(prediction).items()}
    return replace(base, strategy=replace(base.strategy, **named))


def _step_s(record: RunRecord) -> float:
    """Return the seconds of a step, from the first to the last of them."""
    timing, whole = measure(record), whole_run_of(record)
    if timing is None or whole is None:
        raise UserError("--auto: a trial took no step: choose by hand")
    return timing.step_s
