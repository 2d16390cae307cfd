"""A plan in words and rows, for terminal and page alike."""

from __future__ import annotations

import math

from echelon.core.units import format_bytes, format_seconds
from echelon.planning.plan import Change, PlannedMachines, PlanReport, RunEstimate
from echelon.planning.steps import Estimate

HEAD = ("way", "a step", "run", "memory", "sent a step", "cost")
_WIDE = 1.5


def row_of(prediction: RunEstimate) -> list[str]:
    """Return the cells of a way, in the order of `HEAD`."""
    memory = prediction.candidate.memory_bytes
    held = "not known" if memory is None else ("≥ " if prediction.candidate.unknown else "") + format_bytes(memory)
    held += "" if prediction.fits else " (too much)"
    return [
        prediction.label + ("" if prediction.candidate.exact else " *"),
        span_of(prediction.step.seconds),
        span_of(prediction.run_s),
        held,
        format_bytes(prediction.step.sent_bytes),
        money(prediction.money),
    ]


def span_of(seconds: Estimate) -> str:
    """Write a duration with how far it may be off, in ratio; or by which factor."""
    if not math.isfinite(seconds.value) or not seconds.value:
        return "never" if seconds.value else "0 s"
    off = seconds.high / seconds.value
    return f"{format_seconds(seconds.value)} " + (f"×/÷ {off:.1f}" if off > _WIDE else f"± {off - 1:.0%}")


def money(cost: Estimate) -> str:
    """Write a cost, which is off as the time is; nothing where no price was said."""
    return f"{cost.value:,.2f}" if cost.value else ""


def opening(plan: PlanReport) -> list[str]:
    """Say what the plan follows from."""
    known, length = plan.known, plan.length
    calibrated = f"{known.workers} workers, batches of {known.batch}" if known.precise else "nothing measured"
    return [
        f"Planned from {known.source} ({calibrated}): {length.epochs} epochs of {length.train_size:,} samples in "
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
    if best[0].step.communicate_s > 0.1 * best[0].step.seconds.value:
        share = best[0].step.communicate_s / best[0].step.seconds.value
        words.append(f"Communication that nothing hides is {share:.0%} of its step.")
    return words + [_change_words(change) for change in answer.changes]


def _memory(prediction: RunEstimate) -> int:
    return prediction.candidate.memory_bytes or 0


def _change_words(change: Change) -> str:
    now, then = change.before, change.best
    gain = now.run_s.value / then.run_s.value if then.run_s.value else 1.0
    stays = f"{then.label} stays best" if change.same else f"{then.label} becomes best"
    cost = f", for {then.money.value:,.2f}" if then.money.value else ""
    return f"With {change.what}, {stays}: {format_seconds(then.run_s.value)}, {gain:.2f}x as fast{cost}."
