"""What sparse tables ask of the rest of a run: refused in one line where a choice cannot keep to touched rows."""

from __future__ import annotations

from torch import nn

from echelon.core.errors import UserError
from echelon.core.layout import Layout
from echelon.models.tables import check_tables, sparse_tables
from echelon.optim.traits import ON_ROWS, is_sgd
from echelon.sync.ps import server_settings
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun

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
    if settings.aggregates:
        raise UserError(
            f"{label} with --sync {given.sync}: servers update rows as they come, and sum none up over workers: use "
            f"--sync ps(mode=async) or --sync allreduce, or {instead}"
        )
    if settings.compensation != "none" or settings.by_staleness or settings.decay_s:
        raise UserError(
            f"{label} with --sync {given.sync}: compensation, by_staleness and decay_s need the whole table that a "
            f"worker had: leave them out, or {instead}"
        )
    for flag, stands in (
        (f"--compression {given.compression}", run.compression.encodes),
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
    if ranks == 1 or run.sync.uses_servers or not sparse_tables(model):
        return []
    given = run.described.strategy
    if not run.sync.sums_in_backward:
        return [f"--sync {given.sync} sends sparse tables whole, whatever rows were touched"]
    notes = []
    if run.compression.encodes and not run.compression.codec.takes_rows:
        notes.append(
            f"--compression {given.compression} acts on all but the sparse tables, whose rows travel as they are "
            "(int8, fp16 and bf16 act on rows)"
        )
    if not run.path.by_backend:
        notes.append(
            f"--collective {given.collective} acts on all but the sparse tables: rows go to each worker at once"
        )
    return notes
