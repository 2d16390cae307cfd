"""What a layout asks of the rest of a description: refused before anything starts where it cannot be."""

from __future__ import annotations

from torch import nn

from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.layout import Layout
from echelon.core.own import TRANSFORMERS
from echelon.models import hints_for, is_chain_by_name
from echelon.optim.traits import Reach
from echelon.parallel.pipeline.settings import schedule_kind
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.tables import check_cut


def check_layout(run: ResolvedRun, ranks: int) -> None:
    """Refuse what a layout cannot be combined with.

    Raises:
        UserError: names the settings, the reason, and what works.
    """
    layout, strategy = run.layout_for(ranks), run.described.strategy
    for flag, value, axis in (("--tensor-plan", strategy.tensor_plan, Axis.TP), ("--cuts", strategy.cuts, Axis.PP)):
        if value and layout.size(axis) == 1:
            raise UserError(f"{flag} {value}: it belongs to --parallel {axis}=N with N above 1")
    if layout.splits:
        _check_split(run, layout)
    if layout.zero1:
        _check_zero(run)
    if layout.table > 1:
        check_cut(run, layout)
    if layout.pp > 1:
        schedule_kind(layout.schedule)
        _check_named_chain(run)


def check_own_chain(run: ResolvedRun, ranks: int, model: nn.Module) -> None:
    """Refuse a pipeline of a caller's module whose forward pass is not known to be a chain.

    Raises:
        UserError: says why, what makes it one, and what works.
    """
    if run.layout_for(ranks).pp > 1:
        from echelon.parallel.pipeline.find_chain import (
            find_chain,  # it imports DTensor, which only pipelines need here
        )

        find_chain(model, hints_for(model))


def _check_named_chain(run: ResolvedRun) -> None:
    """Refuse a pipeline of a model whose name tells that it is no chain; of others the ranks say, who build them."""
    from echelon.parallel.pipeline.find_chain import no_chain

    name, features = run.config.model.name, run.config.data.features
    hears = name.startswith(TRANSFORMERS) and features == name  # no family for sounds declares a chain
    if hears or is_chain_by_name(name) is False:
        raise no_chain(f"--model {name}")


def _check_split(run: ResolvedRun, layout: Layout) -> None:
    config, flag = run.config, f"--parallel {run.described.strategy.parallel}"
    optimizer, reach = config.optimizer.name, run.optimizer.reach
    if (layout.fsdp > 1 or layout.tp > 1) and reach > Reach.ELEMENT and not run.sync.uses_servers:
        raise UserError(
            f"{flag} with --optimizer {optimizer}: it needs whole tensors (norms or products of them), and each rank "
            "has rows of them; use adamw, sgd, momentum, lion or another that works element by element, or "
            f"dp=N{run.optimizer.hint}"
        )
    if reach is Reach.MODEL:
        raise UserError(
            f"{flag} with --optimizer {optimizer}: it needs the norm over all of the model; use adamw, or dp=N"
            f"{run.optimizer.hint}"
        )
    if config.training.precision == "fp8" and (layout.tp > 1 or layout.pp > 1):
        raise UserError(f"{flag} with --precision fp8: 8-bit layers are whole: use dp=N or fsdp=N, or --precision bf16")
    if config.model.sync_batchnorm and layout.pp > 1 and layout.microbatches != 1:
        raise UserError(
            f"{flag} with --sync-batchnorm: each micro-batch has statistics of its own: add microbatches=1 to "
            "--parallel, or leave --sync-batchnorm out"
        )
    if config.model.compile:
        raise UserError(f"{flag} with --compile: a split model is not compiled; leave --compile out, or use dp=N")


def _check_zero(run: ResolvedRun) -> None:
    flag = f"--parallel {run.described.strategy.parallel}"
    if not run.sync.sums_in_backward:
        raise UserError(
            f"{flag} with --sync {run.described.strategy.sync}: zero1 divides one common update among the replicas; "
            "use --sync allreduce, or leave zero1 out"
        )
    optimizer, traits = f"--optimizer {run.config.optimizer.name}", run.optimizer.user_traits
    if run.optimizer.reach is Reach.MODEL:
        raise UserError(
            f"{flag} with {optimizer}: it needs the norm over all of the model; use adamw{run.optimizer.hint}"
        )
    if traits is not None and traits.eager:
        raise UserError(
            f"{flag} with {optimizer}: it makes its state before the first step, of parameters that are others' to "
            "update: make it in step(), or leave zero1 out"
        )


def read_tensor_plan(text: str) -> dict[str, str]:
    """Read `blocks.*.fc1=column,blocks.*.fc2=row`: patterns of module names to styles.

    Raises:
        UserError: a part without a pattern or a style.
    """
    plan: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        pattern, equals, style = (each.strip() for each in part.partition("="))
        if not equals or not pattern or not style:
            raise UserError(f"--tensor-plan {text!r}: write PATTERN=STYLE,PATTERN=STYLE, such as *.fc1=column")
        plan[pattern] = style
    return plan


def read_cuts(text: str) -> tuple[str, ...]:
    """Read `blocks.4,blocks.8`: the blocks that stages but the first begin with.

    Raises:
        UserError: an empty name.
    """
    cuts = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if not all(cuts):
        raise UserError(f"--cuts {text!r}: write names of blocks, such as blocks.4,blocks.8")
    return cuts
