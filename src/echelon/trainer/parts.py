"""Model, optimizer and strategy of a rank, whole or split as the layout says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives.row_exchange import RowExchange
from echelon.compression.rungs import Switch
from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.models import build_model, fill_padding, give_logits, hints_for, keep_no_cache
from echelon.models.keras_model import KerasModule, loss_name
from echelon.models.tables import make_sparse, sparse_tables
from echelon.models.trial import call_blank, evaluating, try_out
from echelon.observe.phases import PhaseClock
from echelon.optim.build import EMA, build_optimizer, idle_optimizer
from echelon.optim.kernels import fuse_where_possible
from echelon.parallel.deferred_init import DeferredInit, named_tensors, without_memory
from echelon.parallel.local_shards import LocalShards
from echelon.parallel.precision import cast_parameters
from echelon.parallel.split import SplitModel, SplitOptions, recompute_model, split_model
from echelon.parallel.sync_batchnorm import convert_sync_batchnorm
from echelon.parallel.tables import cut_tables
from echelon.parallel.zero import DividedUpdate
from echelon.sync.averaging.period import PeriodChange
from echelon.sync.base import CutRows, Sync, SyncContext
from echelon.sync.same_start import equalise
from echelon.tasks import nest
from echelon.torch_compat import is_compiled
from echelon.trainer.inputs import model_input
from echelon.trainer.own_trial import check_own_model, check_single_samples, make_whole
from echelon.trainer.precision import PRECISIONS, build_scaler, check_narrow, to_fp8
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.split_sync import SplitSync
from echelon.trainer.start_weights import start_from, starts_rebuilt
from echelon.trainer.state import RunParts
from echelon.trainer.tables import build_by_rows, check_sparse_model
from echelon.trainer.update import Update
from echelon.trainer.work import Work
from echelon.trainer.world import World

_REENTRANT = "CheckpointFunctionBackward"
CUTS_FILE = "stages.json"  # where a pipeline was cut, kept with the run


@dataclass(frozen=True)
class _Built:
    """What the strategy acts on: `local_model` are the tensors of this rank, which `optimizer` updates."""

    run: ResolvedRun
    world: World
    clock: PhaseClock
    local_model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    update: Update
    steps: int
    cut_rows: CutRows | None = None
    switches: list[Switch | PeriodChange] = field(default_factory=list)


def build_parts(run: ResolvedRun, work: Work, world: World, clock: PhaseClock) -> RunParts:
    """Build what a run's state is made of; all ranks call it together.

    Raises:
        UserError: the model cannot be built, or not be split like this.
    """
    config, split, cut_rows = run.config, None, _cut_rows(run, world)
    if _is_split(world):
        split = build_split(run, work, world, world.data_size)
        model = split.module
    else:
        model = build_computing(config, work, world)
        check_complex(model, run, world.size)
        check_sparse_model(model, run, world.size)
        if cut_rows is not None:
            split = _with_cut_tables(model, cut_rows, world)
        elif _is_divided(world):
            split = _divided(model, world)
    tables = sparse_tables(model)
    local_model = split.pieces if split else model
    is_idle = split is not None and _is_split(world) and not split.pieces.trainable()
    if is_idle:
        optimizer = idle_optimizer(config.optimizer, config.data.batch_size)
    else:
        optimizer = build_optimizer(
            local_model,
            config.optimizer,
            config.data.batch_size,
            run.optimizer.factory,
            work.tuned.rates,
            tables,
        )
        if not tables:
            fuse_where_possible(optimizer, local_model)
    if split and split.pieces.divided:
        split.pieces.divided.keep_own(optimizer)
    scaler = build_scaler(config.training.precision, world.device, _overflows_together(world))
    update = Update(local_model, optimizer, scaler, config.optimizer.clip_norm)
    built = _Built(run, world, clock, local_model, optimizer, scaler, update, work.steps, cut_rows)
    cut = split.pieces.cut if split else None
    start_bytes = equalise(local_model, world.replica_group, cut.spans if cut else ())
    ema = EMA(local_model, config.training.ema, work.tuned.frozen) if config.training.ema else None
    if split and _is_split(world):
        sync: Sync = SplitSync(model, split.pieces, lambda: _sync(built, local_model), clock)
    else:
        sync = _sync(
            built,
            compiled(model, run, work),
            has_unused=world.group is not None and bool(unused_parameters(model, work)),
        )
    frozen, since = work.tuned.frozen, work.tuning.epoch
    return RunParts(model, optimizer, scaler, ema, sync, split, start_bytes, frozen, since, built.switches, update)


def compiled(model: nn.Module, run: ResolvedRun, work: Work) -> nn.Module:
    """Return the model compiled, where the run asks for it; else the model itself.

    Batches of images come in two or three sizes, each of which is compiled for itself: that is faster than code for any
    size, in which torch 2.11 also takes the strides of some convolutions' gradients for others.
    """
    config = run.config
    if not config.model.compile:
        return model
    has_few_sizes = work.info.several is None and config.launch.balance == "off"
    return cast(
        nn.Module, torch.compile(model, mode=config.model.compile_mode, dynamic=False if has_few_sizes else None)
    )


def channels_last(config: RunConfig, device: torch.device) -> bool:
    """Whether images lie in memory channel by channel."""
    wanted = config.model.channels_last
    return wanted == "on" or (wanted == "auto" and device.type == "cuda")


def build_computing(config: RunConfig, work: Work, world: World) -> nn.Module:
    """Build the whole model as this rank computes with it: activations computed again, parameters cast, as described.

    Raises:
        UserError: the model cannot be built, or has no blocks to compute again.
    """
    model = build_whole(config, work, world)
    param_dtype = PRECISIONS[config.training.precision].parameters
    recompute_model(model, hints_for(model), config.training.recompute, param_dtype)
    if param_dtype is not None:
        cast_parameters(model, param_dtype)
    return model


def _check_compiled_loss(model: KerasModule, name: str) -> None:
    from echelon.models.keras_compiled import compiled_loss  # imports torchmetrics, which other models may not need

    if compiled_loss(model) is not None:
        raise UserError(
            f"--model {name} was compiled with the loss {loss_name(model.compiled.loss)}, which no task learns: name "
            "it as --loss module:function, or give the model to echelon.train as an object"
        )


def build_whole(config: RunConfig, work: Work, world: World) -> nn.Module:
    """Build the whole model on this rank's device, the same values on every rank."""
    model, data = work.user_model, model_input(work.info, work.task)
    if model is None and work.tuning.changes_nothing:
        model = build_by_rows(config, data, world, work.row_starts)
    if model is None:
        model = build_model(config.model, data)
    if is_compiled(model):
        raise UserError(
            "model: it is wrapped by torch.compile already, and its parameters have other names then: give the module "
            "itself, and compile=True (--compile)"
        )
    if config.model.sparse_tables:
        make_sparse(model, f"model {type(model).__name__}")
    trained = work.start_tuning() if config.model.weights else None
    is_rebuilt = starts_rebuilt(config.model, work.tuning, trained)
    rebuilt = work.tuning.rebuild(model) if is_rebuilt else None
    if (loaded := start_from(model, config.model, trained, work.info)) is not None:
        work.loaded.append(loaded)
    if work.user_model is not None:
        (keep_no_cache if work.task.takes_records else give_logits)(work.user_model)
        fill_padding(work.user_model)
        make_whole(work.user_model, work)
    elif isinstance(model, KerasModule) and not config.optimizer.loss:
        _check_compiled_loss(model, config.model.name)
    shares_norms = config.model.sync_batchnorm and (world.data_group is not None or config.launch.elastic == "on")
    if shares_norms and isinstance(model, KerasModule):
        _check_keras_norms(model)
    if shares_norms and not _is_split(world):
        model = convert_sync_batchnorm(model, world.data_group)
    if any(tensor.device != world.device for tensor in (*model.parameters(), *model.buffers())):
        model = model.to(world.device)  # not else: tensors without data, as in a rehearsal, cannot be moved at all
    if work.user_model is not None or work.task.is_own:
        check_own_model(model, work)
    if not config.model.sync_batchnorm and work.tuning.changes_nothing:  # else some may be frozen
        check_single_samples(model, work)
    if config.training.precision == "fp8":
        model = to_fp8(model, world.device)
    sharded = world.placement is not None and world.placement.layout.fsdp > 1  # rows of parameters must be contiguous
    if channels_last(config, world.device) and not sharded:
        model = model.to(memory_format=torch.channels_last)
    check_narrow(model, data, config.training.precision)
    if not work.tuning.changes_nothing:
        work.tunings.append(work.tuning.apply(model, rebuilt, partial(call_blank, data=data)))
    if work.tuning.rebuilds:
        _check_rebuilt(model, work)
    return model


def _check_keras_norms(model: KerasModule) -> None:
    """Refuse statistics of the whole batch in layers of Keras, which measure what they are given.

    Raises:
        UserError: names the first layer.
    """
    if model.measuring:
        raise UserError(
            f"--sync-batchnorm: {model.measuring[0]} of Keras takes statistics of each worker's part: leave it out, or "
            "use keras.layers.GroupNormalization, which depends on no batch"
        )


def _check_rebuilt(model: nn.Module, work: Work) -> None:
    """Refuse modules of a caller's own that the rest of the model cannot be called with.

    Raises:
        UserError: says what its forward raised.
    """
    label = f"--tune {work.tuning.text}: {type(model).__name__}"
    try:
        try_out(model, label, model_input(work.info, work.task))
    except UserError:
        raise
    except Exception as error:  # the caller's code may raise any
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"{label} cannot be called with what takes its place: {type(error).__name__}: {said}"
        ) from error


def check_complex(model: nn.Module, run: ResolvedRun, ranks: int) -> None:
    """Refuse complex tensors where what travels is real: codecs, averages of parameters, servers.

    Raises:
        UserError: names the tensor, the choice and what works.
    """
    given = run.described.strategy
    averages = not run.sync.sums_in_backward
    parameter = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    buffer = next((name for name, b in model.named_buffers() if b.is_complex()), None)
    if parameter is not None and averages and (ranks > 1 or run.sync.uses_servers):
        choice = f"--sync {given.sync}"
    elif parameter is not None and ranks > 1 and run.compression.encodes:
        choice = f"--compression {given.compression}"
    elif buffer is not None and run.sync.uses_servers:
        choice = f"--sync {given.sync}"
    else:
        return
    raise UserError(
        f"{choice} with {type(model).__name__}: {parameter or buffer} is complex, and only real numbers travel so: use "
        "--sync allreduce without --compression, or hold its real and imaginary parts (torch.view_as_real)"
    )


def build_split(run: ResolvedRun, work: Work, world: World, batch_parts: int) -> SplitModel:
    """Build this rank's pieces of the model; all ranks call it together.

    Args:
        batch_parts: that a batch is cut into.

    Raises:
        UserError: the model cannot be built, or not be split like this.
    """
    deferred = _build_deferred(run, work, world)
    model = deferred[0] if deferred else build_whole(run.config, work, world)
    check_sparse_model(model, run, world.size)
    return _split(run, model, world, work, deferred[1] if deferred else None, batch_parts)


def _build_deferred(run: ResolvedRun, work: Work, world: World) -> tuple[nn.Module, DeferredInit] | None:
    """Build the model without memory where it is to be split as its family says: each rank then makes its pieces alone.

    None where values are needed before: they are the caller's or a file's, tied (memory would be given twice), partly
    frozen, or a plan or a chain that nobody declared is tried on them.
    """
    layout, config = world.placement.layout if world.placement is not None else None, run.config
    if (
        layout is None
        or not layout.splits
        or work.user_model is not None
        or config.model.weights
        or not work.tuning.changes_nothing
        or ":" in config.model.name
    ):
        return None
    if run.tensor_plan or config.training.precision == "fp8":
        return None
    state = torch.get_rng_state()
    with without_memory() as recording:
        model = build_model(config.model, model_input(work.info, work.task))
    hints = hints_for(model)
    tied = len(list(model.parameters())) < len(dict(model.named_parameters(remove_duplicate=False)))
    found = layout.pp > 1 and (hints is None or hints.chain is None)
    if tied or hints is None or found or (layout.tp > 1 and not hints.tensor_plan):
        torch.set_rng_state(state)
        return None
    return model, DeferredInit(recording, named_tensors(model), world.device)


def _is_split(world: World) -> bool:
    return world.placement is not None and world.placement.layout.splits


def _is_divided(world: World) -> bool:
    return world.placement is not None and world.placement.layout.zero1 and world.placement.replica_group is not None


def _cuts_tables(world: World) -> bool:
    return world.placement is not None and world.placement.table_group is not None


def _overflows_together(world: World) -> dist.ProcessGroup | None:
    """Return the ranks that step on parts of one update: a replica's, or all that divide the optimizer or tables."""
    if world.placement is None:
        return None
    divides = _is_divided(world) or _cuts_tables(world)
    return world.placement.replica_group if divides else world.placement.model_group


def _divided(model: nn.Module, world: World) -> SplitModel:
    assert world.placement is not None and world.placement.replica_group is not None
    pieces = LocalShards([model], world.placement)
    pieces.divided = DividedUpdate(pieces.trainable(), world.placement.replica_group)
    return SplitModel(model, pieces)


def _cut_rows(run: ResolvedRun, world: World) -> CutRows | None:
    """Build what moves rows of tables that are cut over replicas; None: none is."""
    placement, codec = world.placement, run.compression.codec
    if placement is None or placement.table_group is None:
        return None
    exchange = RowExchange(placement.table_group, codec if codec.takes_rows else None, run.config.training.seed)
    return CutRows(exchange, placement.same_rows_group)


def _with_cut_tables(model: nn.Module, rows: CutRows, world: World) -> SplitModel:
    assert world.placement is not None and world.placement.table_group is not None
    cut = cut_tables(model, sparse_tables(model), world.placement.table_group, rows.exchange)
    return SplitModel(model, LocalShards([model], world.placement, cut=cut))


def _split(
    run: ResolvedRun, model: nn.Module, world: World, work: Work, deferred: DeferredInit | None, batch_parts: int
) -> SplitModel:
    assert world.placement is not None
    config, layout = run.config, world.placement.layout
    if isinstance(model, KerasModule) and (layout.tp > 1 or layout.pp > 1):
        raise UserError(
            f"--parallel {config.strategy.parallel}: a model of Keras computes as one whole, whose layers torch does "
            "not see: use dp=N, fsdp=N or --sync ps"
        )
    options = SplitOptions(
        tensor_plan=run.tensor_plan,
        cuts=run.cuts,
        recompute=config.training.recompute,
        example=work.inputs(torch.empty(0, dtype=_real_dtype(model), device=world.device)),
        deferred=deferred,
        statistics=world.data_group if config.model.sync_batchnorm else None,
        still=work.tuned.still,
        samples=config.data.batch_size // batch_parts // config.training.accumulate,
        autocast=PRECISIONS[config.training.precision].autocast,
        parameters=PRECISIONS[config.training.precision].parameters,
        loss=work.task.loss_sum,
        score=work.task.training_score,
    )
    return split_model(model, world.placement, hints_for(model), options)


def _real_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the first real parameter: what inputs are made in. Complex ones say nothing of inputs."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def unused_parameters(model: nn.Module, work: Work) -> list[str]:
    """Return the names of trainable parameters that outputs do not depend on, in evaluation mode, where a graph tells.

    Such as a layer that forward leaves out, or a head that only training uses.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named or is_compiled(model):
        return []
    with evaluating(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        outputs = nest.call(model, work.inputs(named[0][1].new_empty(0, dtype=_real_dtype(model))))
    ends = [leaf.grad_fn for leaf in nest.leaves(outputs) if isinstance(leaf, Tensor)]
    waiting = [node for node in ends if node is not None]
    seen, reached = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == _REENTRANT:  # what it hides is known in backward alone
            return []
        reached.add(id(getattr(node, "variable", None)))
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return [name for name, parameter in named if id(parameter) not in reached]


def _sync(built: _Built, model: nn.Module, has_unused: bool = False) -> Sync:
    run, world = built.run, built.world
    context = SyncContext(
        model=model,
        update=built.update,
        optimizer=built.optimizer,
        group=world.replica_group,
        device=world.device,
        compression=run.compression,
        path=run.path,
        seed=run.config.training.seed,
        clock=built.clock,
        loss_scale=built.scaler.get_scale,
        has_unused=has_unused,
        steps=built.steps,
        noted=built.switches.append,
        survives=run.config.launch.elastic == "on",
        cut_rows=built.cut_rows,
    )
    return run.sync.build(context)


def with_kept_cuts(run: ResolvedRun, world: World, folder: Path) -> ResolvedRun:
    """Return the run with the cuts that the run had before in a pipeline of this size and schedule.

    Balanced by measured time, cuts could fall elsewhere at a restart, and what each rank saved of its own (BatchNorm
    statistics, error feedback) belongs to its stages.

    All ranks call it before the pipeline is built, which is before any rank keeps new ones.
    """
    file = folder / CUTS_FILE
    if run.cuts or world.placement is None or world.placement.layout.pp == 1 or not file.exists():
        return run
    kept = json.loads(file.read_text())
    if kept["pipeline"] != _pipeline_of(world):
        return run
    return replace(run, cuts=tuple(kept["cuts"]))


def keep_cuts(run_parts: RunParts, world: World, folder: Path) -> None:
    """Write down where the pipeline was cut; does nothing without one."""
    pipeline = run_parts.split.pipeline if run_parts.split else None
    if pipeline is not None and world.leads:
        cuts = [stage.steps[0].name for stage in pipeline.plan[1:]]
        write_atomic(folder / CUTS_FILE, json.dumps({"pipeline": _pipeline_of(world), "cuts": cuts}))


def _pipeline_of(world: World) -> str:
    assert world.placement is not None
    return f"pp={world.placement.layout.pp},schedule={world.placement.layout.schedule}"
