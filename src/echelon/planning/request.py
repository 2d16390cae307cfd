"""A plan from what was asked: a run's record, short runs that calibrate it, or a device's rate.

By a rate, operations of forward are counted on tensors without memory (`torch.utils.flop_counter`); backward has twice
as many. A device reaches a share of its rate, links cost their latency and bytes, and encoding is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from echelon.config import Resolved, RunConfig, build
from echelon.config.build import DEFAULT
from echelon.config.machines import FLAG, Machines
from echelon.core.errors import UserError
from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.planning.calibration import RESIDUAL, Calibration, calibrate
from echelon.planning.layouts import MEMORY_RESIDUAL, DescribedModel, tried_pipelines
from echelon.planning.pipeline_costs import PhaseCost
from echelon.planning.plan import Length, PlanReport, make_plan, with_targets
from echelon.planning.steps import Replicated
from echelon.records.file import newest
from echelon.records.kinds import Alternative, Start
from echelon.records.segments import RECORD_FILE
from echelon.reporting.report.predictions import newest_alternatives
from echelon.reporting.report.records import CONFIG_FILE, RunRecord, load_run
from echelon.reporting.report.timing import measure
from echelon.run.defaults import with_task_defaults
from echelon.run.residuals import (
    PlannedRuns,
    PlannedStep,
    Residual,
    alike_for_plans,
    half_width,
    memory_half_width,
    residuals_of,
    write_planned,
)
from echelon.run.resolve import resolve
from echelon.run.trust import check_trust
from echelon.run.way_samples import StudySamples
from echelon.tasks import nest
from echelon.torch_compat import NEEDS_VALUES
from echelon.trainer.folder import has_checkpoint
from echelon.trainer.inputs import any_inputs

REACHED = 0.4
"""Share of a device's rate that training reaches: 0.3 to 0.5 is usual (Chowdhery et al. 2022, arXiv:2204.02311)."""
RUNS_FOLDER = "runs"
_SAMPLES = 2
_HOP_S = 2e-5
_BYTE_S = 1e-11
_BUCKET_BYTES = 25e6
_UPDATE_PASSES = 5  # over parameters: read weight, gradient and momentum, write two
_MEMORY_BYTES_PER_S = 1e12
_OF_RUNS = ("data.batch_size", "training.epochs")
_BUILT = ("model", "data", "task")  # what memory and other layouts follow from


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    Attributes:
        config: the run as described.
        machines: that it is to run on.
        run: the folder of a run to plan from; None: calibrate.
        batch, epochs: in place of the described ones; 0: as described.
        samples: that ways take to the target of a study; None: there is none.
        objects: those of model, data and task that the run was given from Python, and that no name leads to.
    """

    config: RunConfig
    machines: tuple[Machines, ...]
    run: Path | None = None
    batch: int = 0
    epochs: int = 0
    objects: tuple[str, ...] = ()
    samples: StudySamples | None = None


def request_of(resolved: Resolved, machines: tuple[Machines, ...], trust: bool) -> PlanRequest:
    """Return what is asked by a description whose data may be the folder of a run.

    Raises:
        UserError: it names code that is not trusted, or changes what a run cannot be planned with.
    """
    source = resolved.config.data.source
    if not _is_run(Path(source)):
        check_trust(resolved, trust)
        if resolved.config.training.accumulate == 0:
            raise UserError("--accumulate auto is chosen for this machine's memory: give --accumulate N to plan with")
        return PlanRequest(with_task_defaults(resolved).config, machines)
    given = {name for name, origin in resolved.origins.items() if origin != DEFAULT}
    if more := sorted(given - {"data.source", *_OF_RUNS}):
        raise UserError(
            f"{more[0]} belongs to the run {source}: of a run, only --batch-size and --epochs may be others"
        )
    if _OF_RUNS[0] in given and resolved.config.data.batch_size == 0:
        raise UserError("--batch-size auto is chosen for this machine's memory: give --batch-size N to plan with")
    of_run = build(Path(source) / CONFIG_FILE, {})
    check_trust(of_run, trust)
    batch, epochs = resolved.config.data.batch_size, resolved.config.training.epochs
    changed = (batch if _OF_RUNS[0] in given else 0), (epochs if _OF_RUNS[1] in given else 0)
    begun = next(newest(Path(source), Start), None)
    objects = tuple(name for name in _BUILT if begun is not None and name in begun.objects)
    return PlanRequest(replace(of_run.config, run=""), machines, Path(source), *changed, objects)


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's: data may have a file of that name, too."""
    others = (folder / RECORD_FILE).is_file() or has_checkpoint(folder)
    return others and (folder / CONFIG_FILE).is_file()


def plan(request: PlanRequest) -> PlanReport:
    """Return the plan.

    Raises:
        UserError: nothing can be planned from what is there.
    """
    made = with_targets(_planned(request), request.samples)
    return replace(made, residuals=tuple(_residuals(request)))


def remember(request: PlanRequest, made: PlanReport) -> Path:
    """Leave in the folder of runs what was predicted, for runs that are made later to be compared with; returns it.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = _runs_folder(request)
    config = replace(request.config, data=replace(request.config.data, batch_size=made.length.batch))
    alike = alike_for_plans(config)
    now, planned = time.time(), []
    for answer in made.answers:
        machines = answer.machines
        if machines.groups:  # a run on one machine has none
            continue
        link = machines.link if machines.count > 1 else None
        ways = [
            PlannedStep(
                p.label, p.candidate.settings, p.step.seconds.value, p.step.seconds.low, p.step.seconds.high,
                0.0 if p.candidate.unknown or not answer.known.memory else p.candidate.memory_bytes or 0.0,
            )
            for p in answer.predictions
            if math.isfinite(p.step.seconds.value)
        ]  # fmt: skip
        rate, delay_s = (link.rate_bits_per_s, link.delay_s) if link is not None else (0.0, 0.0)
        planned.append(PlannedRuns(now, made.source, alike, machines.workers, rate, delay_s, ways))
    write_planned(folder, planned)
    return folder


def _runs_folder(request: PlanRequest) -> Path:
    return request.run.resolve().parent if request.run is not None else Path(RUNS_FOLDER)


def _residuals(request: PlanRequest) -> list[Residual]:
    """Return what earlier predictions in the folder of runs were off by."""
    folder = _runs_folder(request)
    return residuals_of(folder) if folder.is_dir() else []


def _planned(request: PlanRequest) -> PlanReport:
    batch = request.batch or request.config.data.batch_size
    config = replace(request.config, data=replace(request.config.data, batch_size=batch))
    described = None if request.objects else DescribedModel.of(config)
    rated = [machines for machines in request.machines if machines.tflops]
    if rated and described is None:
        raise UserError(f"{FLAG} {rated[0].name}: tflops needs a model that can be built here: say speed=... instead")
    if rated and described is not None and len(rated) == len(request.machines):
        return _rated(request, config, described, batch)
    if rated:
        raise UserError(
            f"{FLAG} {rated[0].name}: tflops stands for a measurement, which the other machines are planned from: give "
            "all of them tflops, or this one speed=..."
        )
    known = _calibrated(request, described, batch)
    if described is not None:
        described.learn(known.memory)
        told = memory_half_width(_residuals(request))
        described.residual = MEMORY_RESIDUAL if told is None else told
    if request.objects:
        known = replace(known, notes=(*known.notes, _unbuilt_words(request.objects)))
    length = Length.of(config, known, batch, request.epochs)
    return make_plan(known, length, request.machines, described)


def _unbuilt_words(objects: Sequence[str]) -> str:
    """Say what is not planned of a run of objects, and what would plan it."""
    were, they = ("were", "they") if len(objects) > 1 else ("was", "it")
    return (
        f"{' and '.join(objects).capitalize()} {were} given from Python: {they} cannot be built again here, so memory "
        "is not predicted, nor layouts other than whole replicas. A run that names them (module:function, a folder) "
        "has those too."
    )


def _calibrated(request: PlanRequest, described: DescribedModel | None, batch: int) -> Calibration:
    if request.run is not None:
        told = half_width(_residuals(request))
        record = load_run(request.run)
        return _checked(calibrate([record], RESIDUAL if told is None else told), record)
    from echelon.planning.trial import calibrate_by_runs

    accumulates = request.config.training.accumulate > 1  # several pipelined batches a step, which no plan has
    piped = () if described is None or accumulates else tried_pipelines(request.machines, described, batch)
    return calibrate_by_runs(request.config, piped)


def _checked(known: Calibration, record: RunRecord) -> Calibration:
    """Return a calibration whose intervals hold what it predicts of its own run, with a sentence about that."""
    timing, recorded = measure(record), newest_alternatives(record)
    own = [way for way in known.ways if recorded is not None and way.settings == recorded.now]
    if timing is None or not own:
        return known
    here = Machines("here", known.workers, known.workers if known.link is None else 1, known.link)
    predicted_s = Replicated(own[0]).step(known, here, known.batch).seconds.value
    off = abs(math.log(predicted_s / timing.step_s))
    told = f"{format_seconds(predicted_s)} a step; it took {format_seconds(timing.step_s)}"
    note = f"Of the run itself, the same arithmetic predicts {told}: intervals hold that error, too."
    return replace(known, residual=math.hypot(known.residual, math.expm1(off)), notes=(*known.notes, note))


def _rated(request: PlanRequest, config: RunConfig, described: DescribedModel, batch: int) -> PlanReport:
    plans = []
    for machines in request.machines:
        known = rate(described, machines)
        plans.append(make_plan(known, Length.of(config, known, batch, request.epochs), [machines], described))
    return PlanReport(plans[0].known, plans[0].length, tuple(answer for each in plans for answer in each.answers))


def rate(described: DescribedModel, machines: Machines) -> Calibration:
    """Return a calibration from a device's rate.

    Raises:
        UserError: the rate is not said.
    """
    if not machines.tflops:
        raise UserError(f"--at {machines.name}: say what a worker computes, such as tflops=400, or plan from a run")
    parameters = sum(p.numel() for p in described.model.parameters())
    notes = ["Nothing was measured: the device's rate is yours, encoding is not counted, intervals are wide."]
    try:
        flops = 3 * forward_flops(described)
    except (*NEEDS_VALUES, RuntimeError):  # values matter to it: the rule of Kaplan et al. 2020 (arXiv:2001.08361)
        flops = 6 * parameters * _tokens(described)
        notes.append("Operations of this model cannot be counted without values: 6 a parameter and token are taken.")
    per_sample_s = flops / (machines.tflops * 1e12 * REACHED)
    gradient = _gradient_bytes(described, 4.0 * parameters)
    update_s = gradient * _UPDATE_PASSES / _MEMORY_BYTES_PER_S
    rounds = max(1.0, gradient / _BUCKET_BYTES)
    tail = min(1.0, _BUCKET_BYTES / gradient)
    phases = {phase.value: PhaseCost(0.0, 0.0) for phase in Phase}
    phases[Phase.FORWARD] = PhaseCost(0.0, per_sample_s / 3)
    phases[Phase.BACKWARD] = PhaseCost(0.0, 2 * per_sample_s / 3)
    phases[Phase.UPDATE] = PhaseCost(update_s, 0.0)
    batch = described.config.data.batch_size
    return Calibration(
        source=f"{flops / 1e9:.3g} GFLOP a sample, at {REACHED:.0%} of {machines.tflops:g} TFLOP/s",
        workers=2, batch=batch, samples=(batch / machines.workers, batch / machines.workers),
        phases=phases, spread=0.9, jitter_s=0.02 * per_sample_s * batch / machines.workers,
        hop_s=_HOP_S, byte_s=_BYTE_S,
        ways=(
            Alternative({"strategy.compression": "none"}, 1, gradient, rounds, 0.0, tail),
            Alternative({"strategy.compression": "bf16"}, 1, gradient / 2, rounds, 0.0, tail),
            Alternative({"strategy.sync": "local(period=8)"}, 8, gradient, rounds, 0.0, 1.0),
            Alternative({"strategy.sync": "diloco(period=20)"}, 20, gradient, rounds, 0.0, 1.0),
        ),
        parameters=parameters, train_size=described.info.train_size, epochs=described.config.training.epochs,
        precise=False,
        notes=tuple(notes),
    )  # fmt: skip


def _gradient_bytes(described: DescribedModel, of_all: float) -> float:
    """Return the bytes of gradients: of what is trained, where the run trains a part of the model."""
    if resolve(described.config).tuning.changes_nothing:
        return of_all
    batch = described.config.data.batch_size
    try:
        peaks = described.rehearsed({"strategy.parallel": "dp=-1"}, 1, batch).peaks
    except UserError:  # values matter to the model
        return of_all
    return float(sum(peaks[0].gradients))


def forward_flops(described: DescribedModel) -> float:
    """Return the floating-point operations of a sample's forward pass."""
    model = described.model
    example = any_inputs(described.info, _SAMPLES, next(model.parameters()).dtype)
    device = next(model.parameters()).device
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        nest.call(model, nest.to_device(example, device))
    return float(counter.get_total_flops()) / _SAMPLES


def _tokens(described: DescribedModel) -> int:
    """Return how many positions a sample has: tokens of a text, one of anything else."""
    spec = described.info.several
    leaves = nest.leaves(any_inputs(described.info, 1)) if spec is not None else []
    return max((leaf.shape[1] for leaf in leaves if leaf.ndim == 2 and not leaf.is_floating_point()), default=1)
