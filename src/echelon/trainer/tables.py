"""Sparse tables of a run: how their rows begin, and what they ask of the rest.

A choice that cannot keep to touched rows is refused in one line. A built-in model's tables begin row by row: a rank has
memory for the rows that it keeps, and for no others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.core.layout import Layout
from echelon.core.shards import Span, cut
from echelon.models import build_model
from echelon.models.base import ModelInput
from echelon.models.tables import check_tables, make_sparse, sparse_tables
from echelon.optim.traits import ON_ROWS, is_sgd
from echelon.parallel.deferred_init import DeferredInit, named_tensors, without_memory
from echelon.parallel.row_values import RowDraw, fill_rows
from echelon.parallel.tables import can_fetch
from echelon.ps.table import RowStart
from echelon.sync.ps import server_settings
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.world import World

DENSE = "build it with sparse=False"
_FLAG = "--sparse-tables"


def check_sparse_setting(run: ResolvedRun, ranks: int) -> None:
    """Refuse what does not go together with `--sparse-tables`, before a model is built.

    Raises:
        UserError: names both settings and the fix.
    """
    if run.config.model.sparse_tables:
        _check_choices(run, ranks, _FLAG, f"leave out {_FLAG}")


def check_sparse_model(model: nn.Module, run: ResolvedRun, ranks: int) -> None:
    """Refuse a model with sparse tables where the run cannot train them; does nothing for one without.

    Raises:
        UserError: names the table, the setting and the fix.
    """
    name = type(model).__name__
    check_tables(model, f"model {name}")
    tables, cut = sparse_tables(model), run.layout.table
    if cut > 1 and not tables:
        raise UserError(
            f"--parallel {run.described.strategy.parallel}: model {name} has no sparse tables that are trained and "
            f"could be cut: add {_FLAG}, or leave out table={cut}"
        )
    if tables:
        asked = run.config.model.sparse_tables
        label = _FLAG if asked else f"model {name}: {next(iter(tables))} makes sparse gradients, which"
        _check_choices(run, ranks, label, f"leave out {_FLAG}" if asked else DENSE)


def _check_choices(run: ResolvedRun, ranks: int, label: str, instead: str) -> None:
    asked, given, layout = run.described.optimizer, run.described.strategy, run.layout_for(ranks)
    if run.optimizer.is_own or asked.name.lower() not in ON_ROWS:
        raise UserError(
            f"{label} needs an optimizer of touched rows, and --optimizer {asked.name} is none: use sparse_adam, "
            f"adagrad or sgd --momentum 0, or {instead}"
        )
    if is_sgd(asked.name) and asked.momentum:
        raise UserError(
            f"{label} with --momentum {asked.momentum:g}: momentum moves rows that no sample touched: add "
            f"--momentum 0, or {instead}"
        )
    if asked.weight_decay:
        raise UserError(
            f"{label} with --weight-decay {asked.weight_decay:g}: decay moves rows that no sample touched: add "
            f"--weight-decay 0, or {instead}"
        )
    for flag, stands in (
        (f"--parallel {given.parallel}", layout.splits or layout.zero1),
        ("--compile", run.config.model.compile),
    ):
        if stands:
            raise UserError(f"{label} with {flag} does not work yet: leave out {flag.split()[0]}, or {instead}")
    if run.sync.uses_servers:
        _check_servers(run, label, instead)


def check_cut(run: ResolvedRun, layout: Layout) -> None:
    """Refuse what does not go together with tables that are cut over replicas.

    Raises:
        UserError: names both settings and the fix.
    """
    given, training = run.described.strategy, run.config.training
    label, instead = f"--parallel {given.parallel}", f"leave out table={layout.table}"
    if not run.sync.sums_in_backward:
        raise UserError(
            f"{label} with --sync {given.sync}: a row is on one replica, whose updates need all gradients: use "
            f"--sync allreduce, or {instead}"
        )
    for flag, stands in (
        (f"--precision {training.precision}", PRECISIONS[training.precision].parameters is not None),
        (f"--tune {run.tuning.text}", not run.tuning.changes_nothing),
    ):
        if stands:
            raise UserError(f"{label} with {flag} does not work yet: leave out {flag.split()[0]}, or {instead}")


def _check_servers(run: ResolvedRun, label: str, instead: str) -> None:
    """Refuse what servers cannot do with rows that come one by one.

    Raises:
        UserError: names both settings and the fix.
    """
    given, training, settings = run.described.strategy, run.config.training, server_settings(run.sync)
    if settings.compensation != "none" or settings.by_staleness or settings.decay_s:
        raise UserError(
            f"{label} with --sync {given.sync}: compensation, by_staleness and decay_s need the whole table that a "
            f"worker had: leave them out, or {instead}"
        )
    for flag, stands in (
        (f"--clip-norm {run.config.optimizer.clip_norm:g}", run.config.optimizer.clip_norm > 0),
        (f"--ema {training.ema:g}", training.ema > 0),
        (f"--precision {training.precision}", PRECISIONS[training.precision].parameters is not None),
    ):
        if stands:
            raise UserError(
                f"{label} with --sync {given.sync} and {flag} does not work yet: "
                f"leave out {flag.split()[0]}, or {instead}"
            )


def table_notes(run: ResolvedRun, model: nn.Module, ranks: int) -> list[str]:
    """Say, in sentences, what of a run's choices does not act on its sparse tables."""
    has_servers = run.sync.uses_servers
    if (ranks == 1 and not has_servers) or not sparse_tables(model):
        return []
    given = run.described.strategy
    notes = []
    if run.compression.encodes and not run.compression.codec.takes_rows:
        notes.append(
            f"--compression {given.compression} acts on all but the sparse tables, whose rows travel as they are "
            "(int8, fp16 and bf16 act on rows)"
        )
    if not has_servers and not run.path.by_backend:
        notes.append(
            f"--collective {given.collective} acts on all but the sparse tables: rows go to each worker at once"
        )
    return notes


def begin_by_row(config: RunConfig) -> bool:
    """Whether tables may begin row by row: those of a built-in model, whose values are no file's."""
    named = config.model
    return named.sparse_tables and not named.weights and "/" not in named.name and ":" not in named.name


def build_by_rows(
    config: RunConfig, data: ModelInput, world: World, starts: dict[str, RowStart] | None = None
) -> nn.Module | None:
    """Build a model with sparse tables whose rows begin with values of their own (see `parallel.row_values`).

    Where the layout cuts tables, this rank's rows are all that the weights of these have. What else is random is drawn
    as ever. None, and nothing drawn, where tables cannot be made so: the values are a file's, the model is no built-in
    one, or it draws a table otherwise than element by element alike.

    Args:
        starts: is told how rows begin, where servers make them: the weights of tables then have none. None: they have
            this rank's.
    """
    named = config.model
    if not begin_by_row(config):
        return None
    generators = torch.get_rng_state()
    with without_memory() as recording:
        model = build_model(named, data)
    make_sparse(model, f"model {type(model).__name__}")
    weights = sparse_tables(model)
    draws = {name: RowDraw.of(recording, weight) for name, weight in weights.items()}
    tied = len(list(model.parameters())) < len(dict(model.named_parameters(remove_duplicate=False)))
    modules = dict(model.named_modules())
    elsewhere = starts is None or all(can_fetch(modules[name.rpartition(".")[0]]) for name in weights)
    if tied or None in draws.values() or not elsewhere:
        torch.set_rng_state(generators)
        return None
    others = {name: tensor for name, tensor in named_tensors(model).items() if name not in weights}
    deferred = DeferredInit(recording, others, world.device)
    spans = {name: (0, 0) if starts is not None else _own_span(len(w), world) for name, w in weights.items()}
    for name, weight in weights.items():
        start, stop = spans[name]
        rows = weight.new_empty((stop - start, weight.shape[1]))
        modules[name.rpartition(".")[0]].weight = nn.Parameter(rows)
    deferred.give_memory([model])
    made = named_tensors(model)

    def keep(name: str, value: Tensor) -> None:
        """Give a tensor its values."""
        made[name].detach().copy_(value)

    deferred.fill(keep, weights.values())
    for name, draw in draws.items():
        assert draw is not None
        fill_rows(made[name].detach(), spans[name][0], draw, config.training.seed, name)
        if starts is not None:
            starts[name] = RowStart(draw, config.training.seed, name)
    return model


def whole_table_notes(run: ResolvedRun, model: nn.Module, starts: Mapping[str, RowStart]) -> list[str]:
    """Say in one line that servers are given whole tables, where they cannot make the rows; else nothing."""
    if starts or not sparse_tables(model):
        return []
    return [
        f"--sync {run.described.strategy.sync}: each worker has memory for whole tables, and the first one sends them "
        "to the servers; rows that servers make when they are first asked for are those of built-in models with "
        "--sparse-tables, without --weights and --tune"
    ]


def _own_span(rows: int, world: World) -> Span:
    """Return the rows of a table that this rank keeps."""
    group: dist.ProcessGroup | None = world.placement.table_group if world.placement is not None else None
    return (0, rows) if group is None else cut((0, rows), group.size())[group.rank()]
