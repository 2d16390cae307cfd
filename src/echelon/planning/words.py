"""A plan in words and rows, for terminal and page alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.core.columns import Column, bytes_column, seconds_column
from echelon.core.units import format_bytes, format_seconds
from echelon.planning.plan import Change, PlannedMachines, PlanReport, RunEstimate
from echelon.planning.steps import Estimate
from echelon.reporting.report.predictions import FEWEST_AGREEMENTS

_WIDE = 1.5


def columns_of(ways: Sequence[RunEstimate]) -> list[Column]:
    """Return what a table shows of ways; bubbles where one is a pipeline, costs where a price was said."""
    step_s, run_s = [way.step.seconds for way in ways], [way.run_s for way in ways]
    columns = [
        Column("way", [way.label + ("" if way.candidate.exact else " *") for way in ways]),
        seconds_column("a step", [s.value for s in step_s]),
        Column("a step within", [_off_by(s) for s in step_s]),
        seconds_column("run", [s.value for s in run_s]),
        Column("run within", [_off_by(s) for s in run_s]),
        _memory_column(ways),
        bytes_column("sent a step", [way.step.sent_bytes for way in ways]),
    ]
    bubbles = [way.step.bubble for way in ways]
    if any(bubble is not None for bubble in bubbles):
        columns.append(Column("bubble", ["" if bubble is None else f"{bubble:.0%}" for bubble in bubbles]))
    costs = [money(way.money) for way in ways]
    return [*columns, Column("cost", costs)] if any(costs) else columns


def _memory_column(ways: Sequence[RunEstimate]) -> Column:
    column = bytes_column("memory", [way.candidate.memory_bytes for way in ways])
    cells = []
    for way, held in zip(ways, column.cells, strict=True):
        least = "≥ " if way.candidate.unknown else ""
        known = "not known" if way.candidate.memory_bytes is None else f"{least}{held}"
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
    return f"×/÷ {off:.1f}" if off > _WIDE else f"± {off - 1:.0%}"


def money(cost: Estimate) -> str:
    """Write a cost, which is off as the time is; nothing where no price was said."""
    return f"{cost.value:,.2f}" if cost.value else ""


def opening(plan: PlanReport) -> list[str]:
    """Say what the plan follows from."""
    known, length = plan.known, plan.length
    calibrated = f"{known.workers} workers, batches of {known.batch}" if known.precise else "nothing measured"
    return [
        f"Planned from {plan.source} ({calibrated}): {length.epochs} epochs of {length.train_size:,} samples in "
        f"batches of {length.batch}, {length.steps:,} steps.",
        *known.notes,
    ]


def answer_words(answer: PlannedMachines) -> list[str]:
    """Say which way is best on some machines, and what would change that."""
    best, exact = answer.best, answer.best_exact
    if not best:
        least = min((p for p in answer.predictions if p.candidate.memory_bytes), key=_memory, default=None)
        need = f": the least is {format_bytes(_memory(least))} with {least.label}" if least else ""
        return [f"Nothing fits the memory of a worker{need}. More workers for fsdp, or a smaller --batch-size, help."]
    cost = f", for {money(best[0].money)}" if best[0].money.value else ""
    words = [f"Fastest: {best[0].label}, {span_of(best[0].run_s)}{cost}."]
    if not best[0].candidate.exact:
        words[0] += " What accuracy it costs is not predicted: `echelon compare` measures it."
        if exact is not None:
            words.append(f"Of those that train like one process: {exact.label}, {span_of(exact.run_s)}.")
    if len(best) > 1:
        words.append("Then: " + "; ".join(f"{p.label}, {span_of(p.run_s)}" for p in best[1:]) + ".")
    if answer.too_short:
        named = "; ".join(p.label for p in answer.too_short)
        words.append(f"Faster, but not for so short a run: {named} would agree fewer than {FEWEST_AGREEMENTS} times.")
    if best[0].step.communicate_s > 0.1 * best[0].step.seconds.value:
        share = best[0].step.communicate_s / best[0].step.seconds.value
        words.append(f"Communication that nothing hides is {share:.0%} of its step.")
    return words + [_change_words(change) for change in answer.changes]


def choice_words(plan: PlanReport) -> list[str]:
    """Say which of several machines are worth it: the fastest, and where prices are known the cheapest, and those that
    another beats in both.
    """
    bests = [(answer.machines.name, answer.best[0]) for answer in plan.answers if answer.best]
    if len(bests) < 2:
        return []
    fastest, fast = min(bests, key=lambda named: named[1].run_s.value)
    words = [f"Fastest of these machines: {fastest}: {format_seconds(fast.run_s.value)} with {fast.label}"]
    if any(not best.money.value for _, best in bests):
        return [words[0] + ". Give each a price=... to know which is worth its money."]
    words[0] += f", for {money(fast.money)}."
    cheapest, cheap = min(bests, key=lambda named: named[1].money.value)
    if cheap is fast:
        return [words[0] + " It is the cheapest, too: no other is worth its price."]
    takes = f"{cheap.run_s.value / fast.run_s.value:.2f}x as long ({format_seconds(cheap.run_s.value)})"
    words.append(f"Cheapest: {cheapest}: {money(cheap.money)}, {takes}.")
    beaten = [name for name, best in bests if any(_is_beaten(best, other) for _, other in bests)]
    if beaten:
        words.append(f"Not worth renting, for another is faster and cheaper: {'; '.join(beaten)}.")
    return words


def _is_beaten(best: RunEstimate, other: RunEstimate) -> bool:
    return other.run_s.value < best.run_s.value and other.money.value < best.money.value


def _memory(prediction: RunEstimate) -> int:
    return prediction.candidate.memory_bytes or 0


def _change_words(change: Change) -> str:
    now, then = change.before, change.best
    is_told = 0 < then.run_s.value < math.inf and now.run_s.value < math.inf
    gain = f", {now.run_s.value / then.run_s.value:.2f}x as fast" if is_told else ""
    stays = f"{then.label} stays best" if change.same else f"{then.label} becomes best"
    cost = f", for {then.money.value:,.2f}" if then.money.value else ""
    return f"With {change.what}, {stays}: {format_seconds(then.run_s.value)}{gain}{cost}."
