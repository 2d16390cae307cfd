"""Whether sums in the order of the forward pass could bring, or have brought, anything: from a run's own timings."""

from __future__ import annotations

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing

READY, PRIORITY = "ready", "priority"
LEAST_GAIN = 1.03
"""Below it, what is gained is less than turns of one run differ by."""


def could_gain(record: RunRecord, timing: Timing | None) -> float:
    """Return by which factor steps could be faster at most, were sums in the order of the forward pass; 1: not at all.

    What is exposed could be hidden behind the forward pass, as far as that is long enough.
    """
    if _order(record) != READY or timing is None or timing.communication is None or timing.step_s <= 0:
        return 1.0
    hidden_s = min(timing.communication.exposed_s, timing.phases.get(Phase.FORWARD, 0.0))
    return timing.step_s / (timing.step_s - min(hidden_s, 0.99 * timing.step_s))


def priority_notes(record: RunRecord, timing: Timing | None) -> list[str]:
    """Say where that order would bring nothing, and what it has brought where it was used."""
    order = _order(record)
    if timing is None or timing.communication is None or timing.step_s <= 0:
        return []
    communication, step_s = timing.communication, timing.step_s
    exposed = f"{format_seconds(communication.exposed_s)} of a step of {format_seconds(step_s)}"
    forward_s = timing.phases.get(Phase.FORWARD, 0.0)
    if order == READY and could_gain(record, timing) < LEAST_GAIN:
        return [
            f"order=priority in --collective would bring nothing: {exposed} are communication that nothing hides, and "
            f"the forward pass, which could hide them, takes {format_seconds(forward_s)}."
        ]
    if order != PRIORITY:
        return []
    # Sums in the order of backward are hidden between its first gradients and its last ones alone.
    more_s = max(0.0, communication.hidden_s - communication.spread_s)
    if (step_s + more_s) / step_s < LEAST_GAIN:
        return [
            f"order=priority has brought nothing: of {format_seconds(communication.total_s)} of communication in a "
            f"step, {format_seconds(communication.hidden_s)} were hidden, and backward by itself could have hidden "
            f"{format_seconds(communication.spread_s)}; {exposed} are still waited for."
        ]
    return [
        f"order=priority has hidden {format_seconds(more_s)} of communication behind the forward pass in each step, "
        f"beyond what backward could have hidden: steps are up to {(step_s + more_s) / step_s:.2f}x as fast; {exposed} "
        "are still waited for."
    ]


def _order(record: RunRecord) -> str:
    return record.last_start.order if record.last_start else ""
