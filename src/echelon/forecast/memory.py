"""What a layout needs of memory on each rank, before anything starts: predicted from model, batch and optimizer.

Every kind of rank is rehearsed (see `rehearsal`); what replicas add to it, and optimizer state that they divide, is
reckoned from its sizes. `try_out` finds in this process, before there are workers, what they would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from echelon.core.axes import Axis
from echelon.core.layout import Layout
from echelon.data import LoaderConfig
from echelon.data.base import DataInfo
from echelon.data.recipe import make_rows
from echelon.data.weights import read_weights
from echelon.forecast.rehearsal import Peaks, Role, rehearse
from echelon.models import build_model, hints_for
from echelon.parallel.deferred_init import without_memory
from echelon.parallel.pipeline.batches import has_batchnorm
from echelon.parallel.pipeline.plan import StagePlan, plan_stages
from echelon.parallel.pipeline.settings import PipelineSettings, microbatch_count
from echelon.parallel.tensor import plan_tensor
from echelon.parallel.zero import divide
from echelon.sync.state_bytes import Piece, StateBytes
from echelon.tasks.nest import Nest
from echelon.torch_compat import NEEDS_VALUES
from echelon.trainer.assemble import check_enough, check_mixing
from echelon.trainer.compatibility import keeps_copies, survivors_go_on, survivors_save
from echelon.trainer.inputs import any_inputs, model_input
from echelon.trainer.precision import to_fp8
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.server_parts import worker_momentum
from echelon.trainer.start_weights import start_from, starts_rebuilt
from echelon.trainer.tables import begin_by_row
from echelon.trainer.unused import unread_notes
from echelon.trainer.world import choose_device

_SAMPLES = 2  # of the forward pass by which a pipeline is cut


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one rank of each part of a pipeline (all other ranks of a stage have as much).

    Attributes:
        averages: the moving average of the weights.
        activations: most at any time of what forward keeps for backward, of blocks that are whole while they compute,
            and of temporaries.
        sync: what the strategy and its codec keep between steps.
        checkpoint: most of the copy that a rank writes as its part of a checkpoint, while steps go on.
        copies: of what a neighbour alone has, beyond the peak: they are left out where memory is short.
        peak: most at any time of all of them: the last activations have gone when the last gradient comes.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    averages: int
    activations: int
    sync: int
    checkpoint: int
    copies: int
    peak: int


@dataclass(frozen=True)
class Forecast:
    """The stages of the pipeline (none without), the memory of a rank of each, or why it cannot be told.

    `leader`: bytes of the whole model that the first rank of a split worker of a parameter server has beside that;
    `notes`: what a user has to know of the layout, in sentences.
    """

    stages: tuple[StagePlan, ...]
    memory: tuple[Memory, ...]
    unknown: str = ""
    leader: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsed:
    """What was found of a layout's ranks, whatever the strategy and the codec: `unknown` says why nothing was."""

    stages: tuple[StagePlan, ...]
    notes: tuple[str, ...]
    peaks: tuple[Peaks, ...]
    unknown: str = ""


def rehearse_layout(run: ResolvedRun, info: DataInfo, ranks: int, model: nn.Module | None = None) -> Rehearsed:
    """Rehearse a rank of each part of a pipeline.

    Args:
        model: the caller's, in place of the described one; it may be on the meta device.

    Raises:
        UserError: the model cannot be built, or not be split as described.
    """
    config, layout = run.config, run.layout_for(ranks)
    pulls_rows = model is None and _servers_make_rows(run)
    model = model or _build(run, info, layout)
    example = any_inputs(info, _SAMPLES, next(model.parameters()).dtype)
    samples = max(1, config.data.batch_size // run.batch_parts(layout))
    stages, notes = _stages(run, layout, model, example, samples // config.training.accumulate)
    cuts = tuple(stage.steps[0].name for stage in stages[1:])
    alone = replace(layout, sizes={**layout.sizes, Axis.DP: 1}, zero1=False, table=1)
    try:
        peaks = tuple(
            rehearse(run, info, model, Role(alone, rank, cuts, pulls_rows), samples) for rank in range(layout.pp)
        )
    except (*NEEDS_VALUES, RuntimeError) as error:  # such as that of `.numpy()`, which has no type of its own
        return Rehearsed(stages, notes, (), f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
    return Rehearsed(stages, notes, peaks)


def forecast(
    run: ResolvedRun, info: DataInfo, ranks: int, model: nn.Module | None = None, rehearsed: Rehearsed | None = None
) -> Forecast:
    """Predict the memory of each rank.

    Args:
        model: the caller's, in place of the described one; it may be on the meta device.
        rehearsed: what was found of the same layout and batch.

    Raises:
        UserError: the model cannot be built, or not be split as described.
    """
    layout, servers = run.layout_for(ranks), run.sync.uses_servers
    if servers and layout.splits:
        model = model or _build(run, info, layout)
        leader = _leader_bytes(run, model, layout.dp)
    else:
        leader = 0
    found = rehearsed or rehearse_layout(run, info, ranks, model)
    memory = tuple(_memory(run, layout, of_rank) for of_rank in found.peaks)
    return Forecast(found.stages, memory, found.unknown, leader, found.notes)


def _build(run: ResolvedRun, info: DataInfo, layout: Layout) -> nn.Module:
    """Build the model; where ranks have parts of it, without memory, as they do: it may be larger than a process's."""
    described = run.config.model
    data = model_input(info, run.task.fitted(info))
    in_parts = layout.splits or layout.table > 1 or _servers_make_rows(run)
    if not in_parts or ":" in described.name:
        return build_model(described, data)
    with without_memory():
        return build_model(described, data)


def _servers_make_rows(run: ResolvedRun) -> bool:
    """Whether servers have the rows of tables, and a worker those of its batch."""
    return run.sync.uses_servers and begin_by_row(run.config)


def _leader_bytes(run: ResolvedRun, model: nn.Module, workers: int) -> int:
    """Return the bytes of a whole model, its gradients, and what a worker of a parameter server keeps of it."""
    tensors = (*model.parameters(), *model.buffers())
    trainable = [p for p in model.parameters() if p.requires_grad]
    kept = _kept(run, [(tuple(p.shape), p.dtype) for p in trainable], 0, workers)
    return sum(t.nbytes for t in tensors) + kept.between + kept.agreeing


def _kept(
    run: ResolvedRun, shapes: Iterable[tuple[tuple[int, ...], torch.dtype]], optimizer: int, ranks: int
) -> StateBytes:
    parameters = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    kept = run.sync.state_bytes(run.compression, Piece(parameters, optimizer, ranks))
    if run.sync.uses_servers and worker_momentum(run, ranks) is not None:
        kept = replace(kept, between=kept.between + sum(p.nbytes for p in parameters))
    return kept


def _memory(run: ResolvedRun, layout: Layout, peaks: Peaks) -> Memory:
    """Add what replicas have beyond a single one: what their strategy keeps, and where they reduce gradients (DDP) a
    place for these all of the time.
    """
    gradients, optimizer = sum(peaks.gradients), peaks.optimizer
    working = peaks.without_gradients - peaks.held - peaks.optimizer
    peak = peaks.peak
    if layout.zero1:
        optimizer, sent = _divided(peaks, layout.dp)
        before = peaks.without_gradients - peaks.optimizer + optimizer + gradients
        peak = max(before, peaks.held + gradients + optimizer + sent)
    elif layout.dp > 1 and run.sync.sums_in_backward:
        peak = (peaks.peak if layout.splits else peaks.without_gradients) + gradients
    ours = not (run.sync.uses_servers and layout.splits)  # there, the leader has it
    kept = _kept(run, peaks.shapes, optimizer, layout.dp) if ours else StateBytes()
    saved = peaks.held + optimizer + kept.saved
    plain = not (layout.splits or run.sync.sums_in_backward)
    if plain and survivors_go_on(run, layout.dp):  # a round begins with a copy, to return to
        begun = optimizer if kept.between > kept.saved else 0  # while a mean travels, of the next one too
        kept = replace(kept, between=kept.between + peaks.held + optimizer + kept.saved + begun)
    return Memory(
        parameters=peaks.parameters,
        gradients=gradients,
        optimizer=optimizer,
        buffers=peaks.buffers,
        averages=peaks.held - peaks.parameters - peaks.buffers,
        activations=max(0, working),
        sync=kept.between,
        checkpoint=saved,
        copies=_copied(run, layout, peaks, optimizer),
        peak=max(peak, peaks.held + optimizer + kept.agreeing) + kept.between,
    )


def _copied(run: ResolvedRun, layout: Layout, peaks: Peaks, optimizer: int) -> int:
    """Return the most that a rank keeps of its neighbour's, with the gradients that come for it in each step."""
    if not (keeps_copies(layout) and survivors_save(run, layout.dp * layout.model_size)):
        return 0
    return optimizer if layout.zero1 else peaks.held - peaks.buffers + optimizer + 2 * sum(peaks.gradients)


def _divided(peaks: Peaks, replicas: int) -> tuple[int, int]:
    """Return the most that a replica has of the optimizer's state, and of parameters that it sends, when divided."""
    owners = divide(peaks.gradients, replicas)
    shares = [
        sum(s for s, o in zip(peaks.gradients, owners, strict=True) if o == replica) for replica in range(replicas)
    ]
    total = max(1, sum(peaks.gradients))
    return round(peaks.optimizer * max(shares) / total), max(shares)


def _stages(
    run: ResolvedRun, layout: Layout, model: nn.Module, example: Nest, samples: int
) -> tuple[tuple[StagePlan, ...], tuple[str, ...]]:
    if layout.pp == 1:
        return (), ()
    from echelon.parallel.pipeline.pipeline import batchnorm_notes

    hints = hints_for(model)
    styles = plan_tensor(model, layout.tp, hints, run.tensor_plan, layout.sequence).styles if layout.tp > 1 else {}
    settings = PipelineSettings(layout.schedule, layout.microbatches, run.cuts, samples, styles=styles)
    stages = plan_stages(model, hints, settings, layout.pp, example)
    count = microbatch_count(settings, layout.pp, len(stages))
    return stages, batchnorm_notes(has_batchnorm([model]), count)


@dataclass(frozen=True)
class Findings:
    """What was found out about a run that can start; `notes` are sentences about its data."""

    info: DataInfo
    forecast: Forecast
    notes: tuple[str, ...] = ()


def try_out(run: ResolvedRun, workers: int, ranks: int) -> Findings:
    """Open the data, find the devices, and rehearse the model, as workers will.

    Args:
        workers: of this machine.
        ranks: of all machines.

    Raises:
        UserError: a worker would refuse this.
    """
    config = run.config
    devices = [choose_device(config.training.device, local_rank, workers) for local_rank in range(workers)]
    layout = run.layout_for(ranks)
    source = run.source.open()
    check_enough(source.info, layout.dp * layout.fsdp)
    settings = LoaderConfig.of(config.data, config.training.seed, devices[0])
    rows = make_rows(source.train, source.info, settings, training=True)
    read_weights(config.data.sample_weights, source.info, rows.targets)
    make_rows(source.evaluation, source.info, settings, training=False)
    check_mixing(config, run.task.fitted(source.info))
    _try_model(run, source.info, devices[0])
    notes = (*source.notes, *unread_notes(config.data, source))
    return Findings(source.info, forecast(run, source.info, ranks), notes)


def _try_model(run: ResolvedRun, info: DataInfo, device: torch.device) -> None:
    """Build what the rehearsal leaves out: weights from a file, and 8-bit layers."""
    config = run.config
    in_8_bits = config.training.precision == "fp8"
    if not (config.model.weights or in_8_bits):
        return
    model = build_model(config.model, model_input(info, run.task.fitted(info)))
    trained = run.start_tuning()
    if starts_rebuilt(config.model, run.tuning, trained):
        run.tuning.rebuild(model)
    start_from(model, config.model, trained)
    if in_8_bits:
        to_fp8(model, device)
