"""Settings that do nothing in a run: each that its user changed and nothing reads is told, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from echelon.config import DataConfig, OptimizerConfig
from echelon.config.build import flag_of
from echelon.data.base import Source
from echelon.optim.traits import is_sgd
from echelon.storage.url import is_url
from echelon.trainer.resolved import ResolvedRun


def unused_notes(run: ResolvedRun) -> list[str]:
    """Return a sentence for each changed setting that only acts beside another, which is as it was."""
    config = run.described
    training, optimizer, model, data = config.training, config.optimizer, config.model, config.data
    is_copied = bool(config.checkpoint.mirror) or is_url(config.run)
    return [
        *_told(optimizer, _of_optimizer(run)),
        *_told(training, {"early_stop_delta": "" if training.early_stop else "without --early-stop"}),
        *_told(
            model,
            {
                "head": "" if model.weights else "without --weights",
                "frozen_norm": "with --tune all, which freezes nothing" if run.tuning.changes_nothing else "",
            },
        ),
        *_told(run.described.launch, {"rendezvous": "" if run.nodes.most > 1 else "without --nodes"}),
        *_told(data, {"cache_limit": "" if is_url(data.source) else "for data that is no URL's"}),
        *_told(
            config.checkpoint,
            {"codec": "" if is_copied else "without a run at a URL, or --mirror"},
        ),
    ]


def _of_optimizer(run: ResolvedRun) -> dict[str, str]:
    optimizer = run.described.optimizer
    reasons = {"step_epochs": "" if optimizer.schedule == "step" else f"with --schedule {optimizer.schedule}"}
    if run.optimizer.user_traits is not None:
        return {**reasons, "momentum": "beside an optimizer's own class, which has its own"}
    if not is_sgd(optimizer.name) and optimizer.momentum != OptimizerConfig().momentum:
        from timm.optim import get_optimizer_info

        takes_one = get_optimizer_info(optimizer.name.lower()).has_momentum
        return {**reasons, "momentum": "" if takes_one else f"with --optimizer {optimizer.name}"}
    return reasons


def unread_notes(config: DataConfig, source: Source) -> list[str]:
    """Return a sentence for each changed setting of some kinds of data alone that this data does not read."""
    info = source.info
    images, sounds = info.shape is None and info.several is None, info.rate > 0
    draws = info.task == "recommendation" and not config.target  # it ranks the items that a user has not taken
    read = {
        **{name: name in source.reads for name in ("input", "target", "split", "context", "follow_links")},
        "columns": "columns" in source.reads and bool(info.columns),
        "tokeniser": info.tokeniser is not None,
        "features": sounds,
        "time": draws,
        "negatives": draws,
        "decode": images,
        "normalise": bool(info.mean),
        "on_bad_image": images or sounds,
    }
    return list(_told(config, {name: f"for data {info.name}" for name, reads in read.items() if not reads}))


def _told(settings: object, reasons: dict[str, str]) -> Iterator[str]:
    """Yield sentences for settings of a part that are not as by default and have a reason for doing nothing."""
    for item in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, item.name)
        if reasons.get(item.name) and value != item.default:
            shown = "" if value is True else f" {value}"
            yield f"{flag_of(item.name, item)}{shown} does nothing {reasons[item.name]}"
