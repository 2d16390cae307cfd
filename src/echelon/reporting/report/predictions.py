"""What another way to communicate would gain, computed from the record: never promised, and checked by studies.

A step now takes s = c + e, where e is exposed communication and c the rest. Communication takes t = e + hidden in all,
of which the network has n, and the run's own codec t - n. At the run's end every way's coding k' and network time n'
were measured (`alternatives`): a run that encodes has n of them, the rest of t being its coding as it was in training;
of one that does not, all of t is the network's, and n' of others grow as its own did. With h = hidden / t

    c' = c - h min(t - n, k)                                           coding that was hidden had backward's processor
    n' = n (measured n' / measured n)
    e' = max(n' - spread, tail n')                                     behind a backward that takes spread
    s' = c' + k' + e'                                                  in each step
    s' = c' + f (k' + max(0, n' - o c'))                               in a share f of the steps, behind o of them

where the tail is the share that comes last, which nothing hides. Where the period follows the link, f is such that
messages take the share of the time that they are to take. Coding is taken as not hidden: it needs the processor
that backward computes on. Records of before links were measured have n = latency r + (t - k - latency r) from which n'
follows by bytes and rounds r. What the rest c takes is taken to stay as it is. A whole run of S seconds, from its
first step to its end, with N steps becomes S - N (s - s'): its pauses stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from echelon.observe.phases import Phase
from echelon.records.kinds import Alternative, Alternatives, Start
from echelon.reporting.report.communication import Communication
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing, own_work
from echelon.reporting.report.whole_run import WholeRun

FEWEST_AGREEMENTS = 20
"""Of a run with fewer, what periods cost in accuracy was not measured."""
SAYS_SO = 1.05
"""Gains below are not worth saying."""
_MOST_NAMED = 5
UNEVEN = 0.25
"""Share of its own work that a rank may wait for others whose work is as much, because steps differ."""


@dataclass(frozen=True)
class WayPrediction:
    """What changing some settings would do to a step, and to the whole run.

    Attributes:
        label: the settings as one writes them: `bf16`, `local(period=8), int8`.
        settings: by dotted name.
        now_s, then_s: seconds per step.
        wire_bytes: that each rank would send per step, the mean; `now_bytes`: as it was.
        run_now_s, run_then_s: seconds of the whole run, from its first step to its end; 0: not known.
        is_long_enough: the run; see the function of that name.
    """

    label: str
    settings: Mapping[str, str]
    now_s: float
    then_s: float
    wire_bytes: float
    now_bytes: float = 0.0
    run_now_s: float = 0.0
    run_then_s: float = 0.0
    is_long_enough: bool = True

    @property
    def gain(self) -> float:
        """How many times as fast steps would be."""
        return self.now_s / self.then_s

    @property
    def saves(self) -> float:
        """The share of a step that would be saved; negative: lost."""
        return 1 - self.then_s / self.now_s

    @property
    def run_saves(self) -> float:
        """The share of the whole run that would be saved, its pauses counted."""
        return 1 - self.run_then_s / self.run_now_s if self.run_now_s else 0.0


def predict(record: RunRecord, timing: Timing | None, whole_run: WholeRun | None) -> list[WayPrediction]:
    """Predict a step, and the run, with each alternative that was recorded, the fastest first; none: nothing was."""
    recorded = newest_alternatives(record)
    communication = networks_part(timing)
    if timing is None or communication is None or recorded is None or not timing.step_s:
        return []
    ways, latency_s = [way for way in recorded.rows if _is_sound(way)], recorded.latency_s
    now = next((w for w in ways if w.settings == recorded.now), None)
    if now is None or now.wire_bytes <= 0:
        return []
    predictions = []
    for way in ways:
        then_s, often = _then(timing.step_s, communication, latency_s, (now, way))
        label = ", ".join(way.settings.values())
        if way is not now and then_s > 0:
            sent = way.wire_bytes * often, now.wire_bytes * now.often
            run_s = _runs(record, whole_run, timing.step_s - then_s)
            enough = is_long_enough(sum(window.count for window in record.windows), way)
            predictions.append(WayPrediction(label, way.settings, timing.step_s, then_s, *sent, *run_s, enough))
    return sorted(predictions, key=lambda p: p.then_s)


def is_long_enough(steps: int, way: Alternative) -> bool:
    """Whether a run of so many steps has the agreements and messages with which a way's accuracy was measured."""
    if way.follows:  # the longest that it chooses leaves a run as many agreements
        return way.period > 1 and way.fewest_messages <= FEWEST_AGREEMENTS
    return steps >= way.period * max(way.fewest_messages, FEWEST_AGREEMENTS if way.period > 1 else 0)


def newest_alternatives(record: RunRecord) -> Alternatives | None:
    """Return what other ways cost as many ranks, with as large batches, as the run had last; None: not measured."""
    recorded, lines = record.of(Alternatives), [x for x in record.records if isinstance(x, Alternatives | Start)]
    if not recorded:
        return None
    place = next(i for i in reversed(range(len(lines))) if lines[i] is recorded[-1])
    starts = [line for line in lines[max(0, place - 1) :] if isinstance(line, Start)]
    return recorded[-1] if len({(start.world_size, start.batch_size) for start in starts}) < 2 else None


def networks_part(timing: Timing | None) -> Communication | None:
    """Return communication, with what else ranks wait because the link serves one of them first.

    Over a slow link the same sum ends earlier on one rank than on others, which is then early for the next: it waits
    for them, but not for their work; and who is done has an update that waits while gloo still sends. Waits beyond what
    work differs by between ranks and from step to step are such.
    """
    communication = timing.communication if timing is not None else None
    if timing is None or communication is None:
        return None
    updates = [phases.get(Phase.UPDATE, 0.0) for phases in timing.by_rank]
    late_updates_s = fmean(updates) - timing.least_update_s
    work = [own_work(phases) - own + timing.least_update_s for phases, own in zip(timing.by_rank, updates, strict=True)]
    explained_s = max(work) - fmean(work) + UNEVEN * fmean(work)
    late_s = max(0.0, communication.waited_s + late_updates_s - explained_s)
    waited_s = max(0.0, communication.waited_s - late_s)
    return replace(communication, exposed_s=communication.exposed_s + late_s, waited_s=waited_s)


def pick_ways(predictions: Sequence[WayPrediction]) -> list[WayPrediction]:
    """Return what a sentence names: the mildest two and the strongest three, of one setting where there are such.

    No compression is among them where it saves time: it is what a codec that does not pay is left out for.
    """
    single = [p for p in predictions if len(p.settings) == 1] or predictions
    by_saving = sorted(single, key=lambda p: p.saves)
    if len(by_saving) <= _MOST_NAMED:
        return by_saving
    named = by_saving[:2] + by_saving[-3:]
    plain = [p for p in by_saving if p.label == "none" and p not in named]
    return sorted([*plain, *named[len(plain) :]], key=lambda p: p.saves)


def _runs(record: RunRecord, whole_run: WholeRun | None, saved_s: float) -> tuple[float, float]:
    """Return the seconds of the run as it was, and if each of its steps had been shorter by `saved_s`."""
    if whole_run is None:
        return 0.0, 0.0
    steps = sum(window.count for window in record.windows)
    paused_s = whole_run.seconds - whole_run.steps_s
    return whole_run.seconds, paused_s + max(0.0, whole_run.steps_s - steps * saved_s)


def _then(
    step_s: float, communication: Communication, latency_s: float, ways: tuple[Alternative, Alternative]
) -> tuple[float, float]:
    """Return the mean seconds of a step with the second way, and in which share of steps it is sent."""
    now, then = ways
    own_network_s, network_s = network_seconds(communication, latency_s, ways)
    hidden = communication.hidden_s / communication.total_s if communication.total_s else 0.0
    own_coding_s = min(communication.total_s - own_network_s, now.coding_s)
    rest_s = max(0.0, step_s - communication.exposed_s - hidden * own_coding_s)
    if then.period > 1:
        message_s = then.coding_s + max(0.0, network_s - then.overlap * rest_s)
        often = then.often_beside(rest_s, message_s)
        return rest_s + often * message_s, often
    return rest_s + then.coding_s + max(network_s - communication.spread_s, then.tail * network_s), 1.0


def network_seconds(
    communication: Communication, latency_s: float, ways: tuple[Alternative, Alternative]
) -> tuple[float, float]:
    """Return the seconds of the network in a step as it was, and at each of the other way's times."""
    now, then = ways
    total_s = communication.total_s
    if now.network_s and then.network_s:
        own_s = min(total_s, now.network_s) if now.coding_s else total_s
        return own_s, own_s * then.network_s / now.network_s
    rounds_s = latency_s * now.rounds
    moving_s = max(0.0, total_s - now.coding_s - rounds_s)
    own_s = min(total_s, rounds_s + moving_s)
    return own_s, latency_s * then.rounds + moving_s * then.wire_bytes / now.wire_bytes


def _is_sound(way: Alternative) -> bool:
    return 0 <= way.overlap < way.period and bool(way.settings) and _least(way) >= 0


def _least(way: Alternative) -> float:
    return min(way.wire_bytes, way.coding_s, way.rounds, way.network_s, way.share)
