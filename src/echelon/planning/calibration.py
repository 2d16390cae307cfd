"""What is known of a model's steps, from the records of runs that took some: compute, links, codecs, pauses.

Of one record, what a rank computes is taken to grow with its samples (the update aside); two records with other batch
sizes tell what does not:

    c(s) = fixed + per_sample s                                      seconds of a phase for s samples of a rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev

from echelon.core.errors import UserError
from echelon.core.link import Link
from echelon.observe.phases import Phase
from echelon.planning.pipeline_costs import PhaseCost, PipelineCosts, fit_pipelines
from echelon.records.kinds import Alternative, Checkpoint, Evaluation
from echelon.reporting.report.predictions import network_seconds, networks_part, newest_alternatives
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing, measure
from echelon.run.resolve import link_of

RESIDUAL = 0.15
"""Relative error of predictions for what was calibrated: half of the 95% interval (benchmarks/RESULTS.md)."""
COMPUTE = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.OTHER)
_FIXED = (Phase.UPDATE, Phase.OTHER)
_LINKS_OWN = 1.25  # headers, acknowledgements, pauses: a sum over a shaped link takes 1.05 to 1.2 of its bytes' time


@dataclass(frozen=True)
class MeasuredMemory:
    """The most bytes that the fullest rank of a run had: its process, or torch's allocator on a GPU.

    Attributes:
        settings: that decide it, by dotted name.
        workers, batch: of the run.
        before_bytes: of these, what it had before it had a model.
    """

    settings: Mapping[str, str]
    workers: int
    batch: int
    n_bytes: float
    before_bytes: float = 0.0

    @property
    def samples(self) -> float:
        """Of a rank, in a step."""
        return self.batch / self.workers


@dataclass(frozen=True)
class Calibration:
    """What predictions follow from.

    Attributes:
        source: the runs, in words.
        workers: of the measured runs.
        batch: samples of a global batch there.
        samples: of a rank, for which compute was measured: least and most.
        phases: by name.
        spread: share of backward behind which communication can hide.
        jitter_s: standard deviation of a rank's work in a step.
        hop_s: seconds of a message between two ranks beside its bytes.
        byte_s: seconds of a byte that the processors spend, whatever the link.
        ways: what other ways to communicate cost with `workers`.
        parameters: of the model.
        train_size, epochs: of the run.
        evaluation_s, checkpoint_s, start_s: of one each, with `workers`; of the command until the first step.
        evaluations: of the run.
        link: that was measured; None: within one machine.
        residual: relative half width of the interval of what was calibrated.
        precise: whether it was measured; a device's rate stands for it otherwise.
        on_cpu: whether it was on processors, whose messages gloo carries.
        notes: what a reader has to know, in sentences.
        memory: of the runs.
        pipelines: what their parts cost; None: none was measured.
    """

    source: str
    workers: int
    batch: int
    samples: tuple[float, float]
    phases: Mapping[str, PhaseCost]
    spread: float
    jitter_s: float
    hop_s: float
    byte_s: float
    ways: tuple[Alternative, ...]
    parameters: int
    train_size: int
    epochs: int
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    start_s: float = 0.0
    residual: float = RESIDUAL
    link: Link | None = None
    precise: bool = True
    on_cpu: bool = False
    notes: tuple[str, ...] = ()
    memory: tuple[MeasuredMemory, ...] = ()
    pipelines: PipelineCosts | None = None

    def compute(self, samples: float, speed: float) -> dict[str, float]:
        """Return the seconds of each phase for a rank's samples, on a worker of some speed."""
        return {name: cost.seconds(samples) / speed for name, cost in self.phases.items()}


def expected_max(ranks: int) -> float:
    """Return the mean of the largest of so many standard normal numbers (Blom 1958).

    >>> round(expected_max(2), 2), round(expected_max(1000), 1)
    (0.59, 3.2)
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def calibrate(
    records: Sequence[RunRecord], residual: float = RESIDUAL, pipelined: Sequence[RunRecord] = ()
) -> Calibration:
    """Fit what predictions need to the records of one or two runs, with the same workers.

    Args:
        pipelined: runs of the same model as one pipeline, with timelines.
        residual: relative half width of intervals of what is calibrated, as earlier predictions were off.

    Raises:
        UserError: a record has no steps of several workers, or does not say what other ways would cost.
    """
    measured = [(record, _timing(record)) for record in records]
    record, timing = measured[0]
    start, recorded, communication = record.last_start, newest_alternatives(record), networks_part(timing)
    if start is None or communication is None or recorded is None:
        raise UserError(
            f"{record.name} does not say what other ways to communicate cost: plan from a run that ended, of "
            "--sync allreduce with at least 2 workers that each have the whole model"
        )
    ways = {tuple(way.settings.items()): way for way in recorded.rows if way.settings}
    now = next((way for way in ways.values() if way.settings == recorded.now), None)
    if now is None or now.wire_bytes <= 0 or start.world_size < 2:
        raise UserError(f"{record.name} does not say what its own way to communicate costs: train it again")
    ranks, batch = start.world_size, start.batch_size or 1
    latency_s = recorded.latency_s
    network_s = network_seconds(communication, latency_s, (now, now))[0]
    moving_s = max(0.0, network_s - latency_s * now.rounds)
    backward_s = timing.phases.get(Phase.BACKWARD, 0.0)
    return Calibration(
        source=" and ".join(r.name for r in records),
        workers=ranks,
        batch=batch,
        samples=_samples(records),
        phases=_phases(measured),
        spread=min(1.0, communication.spread_s / backward_s) if backward_s else 0.0,
        jitter_s=communication.waited_s / expected_max(ranks),
        hop_s=latency_s / (2 * (ranks - 1)),
        byte_s=max(0.0, moving_s / now.wire_bytes - _shaped_s(record)),
        ways=tuple(ways.values()),
        parameters=start.parameters or 0,
        train_size=start.train_size or 0,
        epochs=start.epochs,
        evaluation_s=_median([e.seconds for e in record.of(Evaluation)]),
        checkpoint_s=_median([c.blocked_s for c in record.of(Checkpoint)]),
        start_s=max(0.0, start.t - start.launched_t) if start.launched_t else 0.0,
        residual=math.hypot(residual, _noise(record)),
        link=_link(record),
        on_cpu=start.device.startswith("cpu"),
        memory=tuple(found for record in records if (found := measured_memory(record)) is not None),
        pipelines=fit_pipelines(pipelined),
    )


def _timing(record: RunRecord) -> Timing:
    timing = measure(record)
    if timing is None or not timing.phases:
        raise UserError(f"{record.name} has no steps to plan from: train for a few hundred")
    return timing


def measured_memory(record: RunRecord) -> MeasuredMemory | None:
    """Return what a run's fullest rank took; None: it was not recorded."""
    start, timing = record.last_start, measure(record)
    most = timing.memory_bytes if timing is not None else ()
    if start is None or not most:
        return None
    before = start.resident_bytes if len(start.resident_bytes) == len(most) else [0] * len(most)
    named = {name: record.setting("strategy", name) for name in ("sync", "compression")}
    settings = {f"strategy.{name}": text for name, text in named.items() if isinstance(text, str)}
    settings["strategy.parallel"] = f"dp={start.world_size}"
    return MeasuredMemory(settings, start.world_size, start.batch_size or 1, *max(zip(most, before, strict=True)))


def _samples(records: Sequence[RunRecord]) -> tuple[float, float]:
    starts = [start for record in records if (start := record.last_start) is not None]
    per_rank = [(start.batch_size or 1) / start.world_size for start in starts]
    return min(per_rank), max(per_rank)


def _phases(measured: Sequence[tuple[RunRecord, Timing]]) -> dict[str, PhaseCost]:
    """Fit each phase: a line through two batch sizes, else a line through nothing and one."""
    points = []
    for record, timing in measured:
        start = record.last_start
        assert start is not None
        points.append(((start.batch_size or 1) / start.world_size, timing.phases))
    fitted = {}
    (samples, first), (others, second) = points[0], points[-1]
    for phase in COMPUTE:
        seconds = first.get(phase, 0.0)
        if others != samples:
            slope = max(0.0, (seconds - second.get(phase, 0.0)) / (samples - others))
            slope = min(slope, seconds / samples)
        else:
            slope = 0.0 if phase in _FIXED else seconds / samples
        fitted[phase.value] = PhaseCost(seconds - slope * samples, slope)
    return fitted


def _link(record: RunRecord) -> Link | None:
    described = record.setting("launch", "link")
    return link_of(described) if isinstance(described, str) else None


def _shaped_s(record: RunRecord) -> float:
    """Return the seconds that a byte takes on the link that the run was given, with what it may take beside."""
    link = _link(record)
    return _LINKS_OWN * 8 / link.rate_bits_per_s if link else 0.0


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _noise(record: RunRecord) -> float:
    """Return the relative standard error of the mean step, from how windows differ, twice."""
    steps = [seconds for window in record.windows[1:] for seconds in window.step_times()]
    if len(steps) < 3:
        return RESIDUAL
    middle = median(steps)
    kept = [s for s in steps if s < 3 * middle]
    return 2 * stdev(kept) / middle / math.sqrt(len(kept)) if len(kept) > 2 else RESIDUAL
