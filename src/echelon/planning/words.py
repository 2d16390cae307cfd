"""A plan in words and rows, for terminal and page alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.core.columns import NONE, Column, bytes_column, seconds_column
from echelon.core.units import format_bytes, format_seconds
from echelon.planning.plan import Change, PlannedMachines, PlanReport, RunEstimate
from echelon.planning.steps import Division, Estimate, shares_of
from echelon.reporting.report.predictions import FEWEST_AGREEMENTS
from echelon.run.way_samples import StudySamples

_WIDE = 1.5
_CENTS = 0.1  # below it two decimals would say little


def columns_of(ways: Sequence[RunEstimate]) -> list[Column]:
    """Return what a table shows of ways; parts where workers are unlike, bubbles of pipelines, costs where priced."""
    step_s, run_s = [way.step.seconds for way in ways], [way.run_s for way in ways]
    columns = [
        Column("way", [_marked(way) for way in ways]),
        seconds_column("a step", [s.value for s in step_s]),
        Column("within", [_off_by(s) for s in step_s]),
        seconds_column("run", [s.value for s in run_s]),
        Column("within", [_off_by(s) for s in run_s]),
        _memory_column(ways),
        Column("within", [_off_by(memory) if (memory := _memory_of(way)) else "" for way in ways]),
        bytes_column("sent a step", [way.step.sent_bytes for way in ways]),
    ]
    if any(way.division for way in ways):
        columns.insert(1, Column("parts", [str(way.division) for way in ways]))
    bubbles = [way.step.bubble for way in ways]
    if any(bubble is not None for bubble in bubbles):
        columns.append(Column("bubble", ["" if bubble is None else f"{bubble:.0%}" for bubble in bubbles]))
    costs = [money(way.money) for way in ways]
    return [*columns, Column("cost", costs, counts=True)] if any(costs) else columns


def target_columns(ways: Sequence[RunEstimate], samples: StudySamples) -> list[Column]:
    """Return what a table shows of ways that a study measured, to its target, the fastest first."""
    measured = [(way, target) for way in ways if (target := way.to_target) and target.seconds and target.epochs]
    targets = sorted(measured, key=lambda each: each[1].seconds.value if each[1].seconds else math.inf)
    seconds = [target.seconds for _, target in targets if target.seconds]
    epochs = [target.epochs for _, target in targets if target.epochs]
    columns = [
        Column("way", [_marked(way) for way, _ in targets]),
        Column("samples", [_share_of(each, samples) for each in epochs], counts=True),
        Column("epochs", [_count_of(each) for each in epochs], counts=True),
        Column("within", [_off_by(each) for each in epochs]),
        seconds_column("time", [each.value for each in seconds]),
        Column("within", [_off_by(each) for each in seconds]),
    ]
    if any(target.reason for _, target in targets):
        columns.append(Column("in the study", [target.reason for _, target in targets]))
    costs = [money(target.money) for _, target in targets]
    return [*columns, Column("cost", costs, counts=True)] if any(costs) else columns


def target_title(samples: StudySamples) -> str:
    """Say what a table to a study's target is about."""
    return f"To {samples.target}, as in the study {samples.study}; samples in those of {samples.first}"


def _share_of(epochs: Estimate, samples: StudySamples) -> str:
    return f"{epochs.value / samples.epochs:.2f}x" if math.isfinite(epochs.value) else NONE


def _count_of(epochs: Estimate) -> str:
    return f"{epochs.value:.2f}" if math.isfinite(epochs.value) else NONE


def _marked(way: RunEstimate) -> str:
    return way.label + ("" if way.candidate.exact else " *")


def _memory_of(way: RunEstimate) -> Estimate | None:
    return way.candidate.memory(way.division)


def _memory_column(ways: Sequence[RunEstimate]) -> Column:
    column = bytes_column("memory", [memory.value if (memory := _memory_of(way)) else None for way in ways])
    cells = []
    for way, held in zip(ways, column.cells, strict=True):
        least = "≥ " if way.candidate.unknown else ""
        known = "not known" if _memory_of(way) is None else f"{least}{held}"
        cells.append(known if way.fits else f"too much: {known}")
    return Column(column.head, cells)


def span_of(seconds: Estimate) -> str:
    """Write a duration with how far it may be off."""
    if not math.isfinite(seconds.value) or not seconds.value:
        return "never" if seconds.value else "0 s"
    return f"{format_seconds(seconds.value)} {_off_by(seconds)}"


def _off_by(seconds: Estimate) -> str:
    """Write how far a duration may be off, in ratio; or by which factor."""
    if not math.isfinite(seconds.value) or not seconds.value:
        return ""
    off = seconds.high / seconds.value
    if math.isinf(off):
        return "not known"
    return f"×/÷ {off:.1f}" if off > _WIDE else f"± {off - 1:.0%}"


def money(cost: Estimate | None) -> str:
    """Write a cost, which is off as the time is; nothing where no price was said."""
    if cost is None or math.isnan(cost.value):
        return ""
    digits = 4 if 0 < cost.value < _CENTS else 2
    return f"{cost.value:,.{digits}f}" if cost.value else "free"


def _for_money(cost: Estimate | None) -> str:
    return f", for {money(cost)}" if cost is not None and cost.value else ", free" if cost is not None else ""


def opening(plan: PlanReport) -> list[str]:
    """Say what the plan follows from."""
    known, length = plan.known, plan.length
    calibrated = f"{known.workers} workers, batches of {known.batch}" if known.precise else "nothing measured"
    return [
        f"Planned from {plan.source} ({calibrated}): {length.epochs} epochs of {length.train_size:,} samples in "
        f"batches of {length.batch}, {length.steps:,} steps.",
        *known.notes,
        *_study_words(plan.samples),
    ]


def _study_words(samples: StudySamples | None) -> list[str]:
    """Say what the study tells, and what not."""
    if samples is None:
        return [
            "No study of this model and data that reached its target is at hand, so time to an accuracy is not "
            "predicted: `echelon compare` measures the samples that ways take."
        ]
    bounds = f" ({samples.low:.2f} to {samples.high:.2f})" if samples.low is not None and samples.high else ""
    return [
        f"The study {samples.study} tells how many samples a way takes to {samples.target}: {samples.first} took "
        f"{samples.epochs:.2f} epochs{bounds} with {samples.workers} workers and batches of {samples.batch}.",
        *samples.notes,
    ]


def answer_words(answer: PlannedMachines) -> list[str]:
    """Say which way is best on some machines, and what would change that."""
    best, exact = answer.best, answer.best_exact
    if not best:
        least = min((p for p in answer.predictions if p.candidate.memory_bytes), key=_memory, default=None)
        need = f": the least is {format_bytes(_memory(least))} with {least.label}" if least else ""
        return [f"Nothing fits the memory of a worker{need}. More workers for fsdp, or a smaller --batch-size, help."]
    words = [f"Fastest: {best[0].label}, {span_of(best[0].run_s)}{_for_money(best[0].money)}."]
    if not best[0].candidate.exact and best[0].to_target is None:
        words[0] += " What accuracy it costs is not predicted: `echelon compare` measures it."
        if exact is not None:
            words.append(f"Of those that train like one process: {exact.label}, {span_of(exact.run_s)}.")
    words += [*_target_words(answer), *_division_words(answer)]
    if len(best) > 1:
        words.append("Then: " + "; ".join(f"{p.label}, {span_of(p.run_s)}" for p in best[1:]) + ".")
    if answer.too_short:
        named = "; ".join(p.label for p in answer.too_short)
        words.append(f"Faster, but not for so short a run: {named} would agree fewer than {FEWEST_AGREEMENTS} times.")
    if best[0].step.communicate_s > 0.1 * best[0].step.seconds.value:
        share = best[0].step.communicate_s / best[0].step.seconds.value
        words.append(f"Communication that nothing hides is {share:.0%} of its step.")
    return words + [_change_words(change) for change in answer.changes]


def _target_words(answer: PlannedMachines) -> list[str]:
    """Say what is fastest to the study's target, and what the study does not know."""
    if all(p.to_target is None for p in answer.predictions):
        return []
    best = answer.best_to_target
    if best is None or best.to_target is None or best.to_target.seconds is None:
        return ["No way here reaches the target in the study: time to it is not known."]
    found = best.to_target
    words = [f"Fastest to the target: {best.label}, {span_of(best.to_target.seconds)}{_for_money(found.money)}."]
    unknown = [p.label for p in answer.predictions if p.to_target is not None and p.to_target.seconds is None]
    if unknown:
        words.append(f"Not in the study, so that time to the target is not known: {'; '.join(unknown)}.")
    return words


def _division_words(answer: PlannedMachines) -> list[str]:
    """Say how workers of unlike speeds share a batch in the best way."""
    best = answer.best[0]
    if best.division is Division.EQUAL:
        return ["Workers are of unlike speeds: with equal parts of a batch its steps wait for the slowest."]
    if best.division is Division.ALIKE:
        return []
    shares = shares_of(answer.known, answer.machines, best.batch)
    parts = "; ".join(
        f"{samples:.1f} samples a worker of {group.name}"
        for samples, group in zip(shares, answer.machines.groups, strict=True)
    )
    slower = [p.label for p in answer.best if p.division is Division.EQUAL]
    rest = f" Equal parts, at the pace of the slowest: {'; '.join(slower)}." if slower else ""
    return [f"Parts of a batch go by speed (--balance auto): {parts}.{rest}"]


def choice_words(plan: PlanReport) -> list[str]:
    """Say which of several machines are worth it: the fastest, and where prices are known the cheapest, and those that
    another beats in both.
    """
    bests = [(answer.machines.name, answer.best[0]) for answer in plan.answers if answer.best]
    if len(bests) < 2:
        return []
    fastest, fast = min(bests, key=lambda named: named[1].run_s.value)
    words = [f"Fastest of these machines: {fastest}: {format_seconds(fast.run_s.value)} with {fast.label}"]
    priced = [(name, best, best.money.value) for name, best in bests if best.money is not None]
    if len(priced) < len(bests):
        return [words[0] + ". Give each a price=... to know which is worth its money."]
    words[0] += f"{_for_money(fast.money)}."
    cheapest, cheap, _ = min(priced, key=lambda named: named[2])
    if cheap is fast:
        return [words[0] + " It is the cheapest, too: no other is worth its price."]
    takes = f"{cheap.run_s.value / fast.run_s.value:.2f}x as long ({format_seconds(cheap.run_s.value)})"
    words.append(f"Cheapest: {cheapest}: {money(cheap.money)}, {takes}.")
    beaten = [name for name, best in bests if any(_is_beaten(best, other) for _, other in bests)]
    if beaten:
        words.append(f"Not worth renting, for another is faster and cheaper: {'; '.join(beaten)}.")
    return words


def _is_beaten(best: RunEstimate, other: RunEstimate) -> bool:
    if other.money is None or best.money is None:
        return False
    return other.run_s.value < best.run_s.value and other.money.value < best.money.value


def _memory(prediction: RunEstimate) -> int:
    return prediction.candidate.memory_bytes or 0


def _change_words(change: Change) -> str:
    now, then = change.before, change.best
    is_told = 0 < then.run_s.value < math.inf and now.run_s.value < math.inf
    gain = f", {now.run_s.value / then.run_s.value:.2f}x as fast" if is_told else ""
    stays = f"{then.label} stays best" if change.same else f"{then.label} becomes best"
    return f"With {change.what}, {stays}: {format_seconds(then.run_s.value)}{gain}{_for_money(then.money)}."
