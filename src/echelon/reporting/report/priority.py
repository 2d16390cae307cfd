"""Whether gradients in the order of the forward pass could bring, or have brought, anything: from a run's own timings.

Ranks sum them in that order, or workers push them to servers and pull values in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.records.kinds import WorkerWindow
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing

READY, PRIORITY = "ready", "priority"
LEAST_GAIN = 1.03
"""Below it, what is gained is less than turns of one run differ by."""


def could_gain(record: RunRecord, timing: Timing | None) -> float:
    """Return by which factor steps could be faster at most, were gradients in that order; 1: not at all.

    What is exposed could be hidden behind the forward pass, as far as that is long enough.
    """
    if _order(record) != READY or timing is None or timing.step_s <= 0:
        return 1.0
    hidden_s = min(_exposed_s(record, timing), timing.phases.get(Phase.FORWARD, 0.0))
    return timing.step_s / (timing.step_s - min(hidden_s, 0.99 * timing.step_s))


def priority_notes(record: RunRecord, timing: Timing | None) -> list[str]:
    """Say where that order would bring nothing, and what it has brought where it was used."""
    order = _order(record)
    if timing is None or timing.step_s <= 0 or (timing.communication is None and not record.has_servers):
        return []
    exposed = f"{format_seconds(_exposed_s(record, timing))} of a step of {format_seconds(timing.step_s)}"
    forward_s = timing.phases.get(Phase.FORWARD, 0.0)
    if order == READY and could_gain(record, timing) < LEAST_GAIN:
        where, what = ("--sync ps(...)", "waits for servers") if record.has_servers else (
            "--collective", "communication that nothing hides"
        )  # fmt: skip
        return [
            f"order=priority in {where} would bring nothing: {exposed} are {what}, and "
            f"the forward pass, which could hide them, takes {format_seconds(forward_s)}."
        ]
    if order != PRIORITY:
        return []
    return [_of_servers(record, timing, exposed) if record.has_servers else _of_sums(timing, exposed)]


def _of_sums(timing: Timing, exposed: str) -> str:
    """Say what it has brought to sums of gradients."""
    communication, step_s = timing.communication, timing.step_s
    assert communication is not None
    # Sums in the order of backward are hidden between its first gradients and its last ones alone.
    more_s = max(0.0, communication.hidden_s - communication.spread_s)
    if (step_s + more_s) / step_s < LEAST_GAIN:
        return (
            f"order=priority has brought nothing: of {format_seconds(communication.total_s)} of communication in a "
            f"step, {format_seconds(communication.hidden_s)} were hidden, and backward by itself could have hidden "
            f"{format_seconds(communication.spread_s)}; {exposed} are still waited for."
        )
    return (
        f"order=priority has hidden {format_seconds(more_s)} of communication behind the forward pass in each step, "
        f"beyond what backward could have hidden: steps are up to {(step_s + more_s) / step_s:.2f}x as fast; {exposed} "
        "are still waited for."
    )


def _of_servers(record: RunRecord, timing: Timing, exposed: str) -> str:
    """Say what it has brought to pushes and pulls: no more than forward computed while values still came."""
    hidden_s, step_s = _overlapped_s(record.of(WorkerWindow)), timing.step_s
    while_came = f"while its last values still came, the forward pass computed for {format_seconds(hidden_s)} in a step"
    if (step_s + hidden_s) / step_s < LEAST_GAIN:
        return f"order=priority has brought nothing: {while_came}; {exposed} are still waits for servers."
    return (
        f"order=priority: {while_came}, so steps are up to {(step_s + hidden_s) / step_s:.2f}x as fast; {exposed} are "
        "still waits for servers."
    )


def _overlapped_s(windows: Sequence[WorkerWindow]) -> float:
    """Return for how long, per step of the run, workers computed forward passes while values came, on average.

    A worker that began anew counts from zero again.
    """
    total_s, steps = 0.0, 0
    for before, after in pairwise(windows):
        if after.step <= before.step or not after.clocks:
            continue
        grown = (after.overlapped_s.get(w, 0.0) - before.overlapped_s.get(w, 0.0) for w in after.clocks)
        total_s += sum(max(0.0, seconds) for seconds in grown) / len(after.clocks)
        steps += after.step - before.step
    return total_s / steps if steps else 0.0


def _exposed_s(record: RunRecord, timing: Timing) -> float:
    """Return the seconds of a step that nothing hides: of communication, or of waiting for servers.

    Of what all wait for together, the waits for slower ranks are left out.
    """
    if timing.communication is not None and record.waits_for_all:
        return timing.communication.exposed_s
    return timing.phases.get(Phase.COMMUNICATE, 0.0) if record.has_servers else 0.0


def _order(record: RunRecord) -> str:
    return record.last_start.order if record.last_start else ""
