"""What the parts of a pipeline's step cost, fitted to runs that had one.

Phases of all steps tell what its ranks computed, and the recorded timelines what lies between:

    all stages on a micro-batch of b samples:  F(b) = fixed + per_sample b, likewise backward
    between:  from one computation of a rank to the next, where it waited for no other rank   (median)
    message:  from the end of what was waited for to the begin of what waited = fixed + per_sample b   (medians)
    around:   what a measured step has beyond the same step as it is simulated from all that   (mean)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, linear_regression, median

from echelon.core.axes import Axis
from echelon.forecast.simulator import makespan, simulate
from echelon.observe.phases import Phase
from echelon.parallel.pipeline.order import Computation, needed
from echelon.planning.pipelines import StageTimes, pipeline_tasks, places_of
from echelon.records.kinds import PipelineAction, PipelineStep
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing, measure


@dataclass(frozen=True)
class PhaseCost:
    """Seconds of a phase of a step, on one rank."""

    fixed_s: float
    per_sample_s: float

    def seconds(self, samples: float) -> float:
        """Return the seconds for a rank's samples."""
        return self.fixed_s + self.per_sample_s * samples


def fitted_line(points: Sequence[tuple[float, float]]) -> PhaseCost:
    """Fit seconds over samples by least squares, neither part below nothing; through nothing where there is one size.

    >>> fitted_line([(8.0, 3.0), (16.0, 5.0)])
    PhaseCost(fixed_s=1.0, per_sample_s=0.25)
    """
    sizes, seconds = [x for x, _ in points], [y for _, y in points]
    through_nothing = PhaseCost(0.0, sum(x * y for x, y in points) / sum(x * x for x in sizes))
    if len(set(sizes)) == 1:
        return through_nothing
    slope, fixed = linear_regression(sizes, seconds)
    if slope < 0:
        return PhaseCost(fmean(seconds), 0.0)
    return PhaseCost(fixed, slope) if fixed >= 0 else through_nothing


@dataclass(frozen=True)
class PipelineRun:
    """What the record of a pipelined run says.

    Attributes:
        samples: of a micro-batch.
        timing: of its steps.
        steps: its recorded timelines.
    """

    name: str
    ranks: int
    replicas: int
    samples: float
    timing: Timing
    steps: tuple[PipelineStep, ...]

    @property
    def count(self) -> int:
        """Micro-batches."""
        return 1 + max(action.microbatch for action in self.steps[0].actions)

    @property
    def stages(self) -> int:
        """Of the whole model."""
        return 1 + max(action.stage for action in self.steps[0].actions)

    def total_s(self, phase: Phase) -> float:
        """Return the seconds of all stages for one micro-batch."""
        return self.timing.phases.get(phase, 0.0) * self.ranks / self.count

    def shares(self, kinds: Sequence[str]) -> tuple[float, ...]:
        """Return each stage's share of some kinds of computations."""
        seconds = [sum(self._of_stage(stage, kind) for kind in kinds) for stage in range(self.stages)]
        return tuple(each / sum(seconds) for each in seconds)

    def weight_share(self) -> float | None:
        """Return the share of the half of backward that gives gradients of parameters; None: it was not divided."""
        halves = [(self._of_stage(s, "input"), self._of_stage(s, "weight")) for s in range(1, self.stages)]
        whole = sum(i + w for i, w in halves)
        return sum(w for _, w in halves) / whole if whole and any(i for i, _ in halves) else None

    def _of_stage(self, stage: int, kind: str) -> float:
        found = [a.end_s - a.begin_s for step in self.steps for a in step.actions if (a.stage, a.kind) == (stage, kind)]
        return median(found) if found else 0.0

    def waits(self) -> tuple[list[float], list[float]]:
        """Return the seconds before computations that waited for no other rank, and before those that did."""
        alone: list[float] = []
        for_others: list[float] = []
        for step in self.steps:
            _add_waits(step.actions, self.stages - 1, alone, for_others)
        return alone, for_others


def _add_waits(actions: Sequence[PipelineAction], last: int, alone: list[float], for_others: list[float]) -> None:
    ends = {_key(a): (a.end_s, a.rank) for a in actions}
    for rank in {a.rank for a in actions}:
        mine = sorted((a for a in actions if a.rank == rank), key=lambda a: a.begin_s)
        for before, after in pairwise(mine):
            source = needed(Computation(after.stage, after.microbatch, after.kind), last)  # type: ignore[arg-type]
            if source is None and after.kind == "weight" and not after.stage and last:  # all of its backward
                source = Computation(1, after.microbatch, "backward")
            end_s, at = ends.get(source, (0.0, rank)) if source is not None else (0.0, rank)
            if at == rank or end_s <= before.end_s:
                alone.append(after.begin_s - before.end_s)
            else:
                for_others.append(after.begin_s - end_s)


def _key(action: PipelineAction) -> Computation:
    return Computation(action.stage, action.microbatch, "backward" if action.kind == "input" else action.kind)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PipelineCosts:
    """Parts of a pipeline's step, fitted to runs; see the head of this file.

    Attributes:
        source: the runs, in words; empty: no pipeline was measured, and these follow from whole replicas.
        forward, backward: of all stages together, by samples of a micro-batch.
        message: of a cut, likewise; its bytes are in `per_sample_s`.
        data, update: of a rank, by samples of a replica.
        ranks: of a replica, of the measured runs: an update is of one share of so many.
        shares: of forward and of backward by stage, for numbers of stages that were measured.
        weight_share: of backward; None: no run divided it.
        samples: of micro-batches of the runs, the least and the most.
    """

    source: str
    forward: PhaseCost
    backward: PhaseCost
    between_s: float
    message: PhaseCost
    data: PhaseCost
    update_s: float
    around_s: float
    ranks: int
    shares: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]
    weight_share: float | None = None
    samples: tuple[float, float] = (0.0, 0.0)

    def times(self, shares: tuple[tuple[float, ...], tuple[float, ...]], samples: float, count: int) -> StageTimes:
        """Return the seconds of a step's parts.

        Args:
            shares: of forward and of backward, by stage.
            samples: of a micro-batch; `count`: micro-batches.
        """
        forward_s, backward_s = self.forward.seconds(samples), self.backward.seconds(samples)
        return StageTimes(
            tuple(forward_s * share for share in shares[0]),
            tuple(backward_s * share for share in shares[1]),
            0.5 if self.weight_share is None else self.weight_share,
            self.between_s,
            (self.message.per_sample_s * samples,) * (len(shares[0]) - 1),
            self.message.fixed_s,
            self.data.seconds(samples * count),
            self.update_s,
        )


def pipeline_run(record: RunRecord) -> PipelineRun | None:
    """Return what a record says of its pipeline; None: it is none, is a hybrid of one, or recorded no timeline."""
    start, timing, steps = record.last_start, measure(record), record.of(PipelineStep)
    steps = [step for step in steps if step.actions and not step.rows_left_out]
    if start is None or timing is None or not steps or set(start.inner_axes) != {Axis.PP}:
        return None
    accumulate = record.setting("training", "accumulate") or 1
    if accumulate != 1:
        return None
    ranks = (start.layout or {}).get(Axis.PP, 1)
    replicas = start.world_size // ranks
    run = PipelineRun(record.name, ranks, replicas, 0.0, timing, tuple(steps))
    return replace(run, samples=(start.batch_size or 1) / replicas / run.count)


def fit_pipelines(records: Sequence[RunRecord]) -> PipelineCosts | None:
    """Fit a pipeline's parts to runs of one model; None: none of them is a pipeline with a recorded timeline."""
    runs = [run for record in records if (run := pipeline_run(record)) is not None]
    return fit_runs(runs) if runs else None


def fit_runs(runs: Sequence[PipelineRun]) -> PipelineCosts:
    """Fit a pipeline's parts to at least one run."""
    waits = [run.waits() for run in runs]
    between = [each for alone, _ in waits for each in alone]
    messages = [(run.samples, median(others)) for run, (_, others) in zip(runs, waits, strict=True) if others]
    divided = [share for run in runs if (share := run.weight_share()) is not None]
    kinds = ("backward", "input", "weight")
    costs = PipelineCosts(
        source=" and ".join(run.name for run in runs),
        forward=fitted_line([(run.samples, run.total_s(Phase.FORWARD)) for run in runs]),
        backward=fitted_line([(run.samples, run.total_s(Phase.BACKWARD)) for run in runs]),
        between_s=median(between) if between else 0.0,
        message=fitted_line(messages) if messages else PhaseCost(0.0, 0.0),
        data=fitted_line([(run.samples * run.count, run.timing.phases.get(Phase.DATA, 0.0)) for run in runs]),
        update_s=median(
            max(rank.get(Phase.UPDATE, 0.0) + rank.get(Phase.OTHER, 0.0) for rank in run.timing.by_rank) for run in runs
        ),
        around_s=0.0,
        ranks=runs[0].ranks,
        shares={run.stages: (run.shares(["forward"]), run.shares(kinds)) for run in runs},
        weight_share=median(divided) if divided else None,
        samples=(min(run.samples for run in runs), max(run.samples for run in runs)),
    )
    around = [run.timing.step_s - _simulated_s(run, costs) for run in runs if run.replicas == 1]
    return replace(costs, around_s=max(0.0, fmean(around)) if around else 0.0)


def _simulated_s(run: PipelineRun, costs: PipelineCosts) -> float:
    times = costs.times(costs.shares[run.stages], run.samples, run.count)
    tasks = pipeline_tasks(run.steps[0].schedule, run.count, run.ranks, times)
    return makespan(simulate(tasks, places_of(0, run.ranks)))
