"""What a run with a parameter server cannot do, refused before it starts."""

from __future__ import annotations

from dataclasses import replace

from echelon.config import RunConfig
from echelon.config.validate import parse_nodes
from echelon.core.errors import UserError, naming
from echelon.core.spec import bind, parse_spec
from echelon.sync.server.settings import Settings

NAME = "ps"


def is_leased(config: RunConfig) -> bool:
    """Whether the run has a parameter server, and workers that train on leases."""
    return parse_spec(config.strategy.sync).name == NAME


def settings_of(config: RunConfig) -> Settings:
    """Return the settings of `ps(...)`.

    Raises:
        UserError: an unknown or impossible setting.
    """
    with naming("--sync"):
        settings = bind(parse_spec(config.strategy.sync), Settings)
    if settings.ema:
        raise UserError(f"--sync {config.strategy.sync}: the average is asked for by --ema {settings.ema:g}")
    return replace(settings, ema=config.training.ema)


def check_leased(config: RunConfig, ranks: int) -> None:
    """Refuse what does not go together with a parameter server.

    Args:
        ranks: workers of all machines.

    Raises:
        UserError: names both settings and what works.
    """
    sync = f"--sync {config.strategy.sync}"
    settings = settings_of(config)
    if config.training.precision == "fp16":
        raise UserError(f"{sync} has no gradient scaler on its servers: use --precision bf16 or fp32")
    if config.model.sync_batchnorm:
        raise UserError(f"{sync} has no group for --sync-batchnorm: leave it out, or use --sync allreduce")
    if config.optimizer.clip_norm and settings.aggregates:
        raise UserError(f"{sync}: no server sees the norm of the whole gradient: leave out --clip-norm, or mode=async")
    if parse_spec(config.strategy.collective).name != "auto":
        raise UserError(f"{sync} has no collectives: leave out --collective")
    nodes = parse_nodes(config.launch.nodes)
    workers = ranks * nodes.least // nodes.most
    if settings.backup >= workers:
        raise UserError(f"{sync}: with {workers} workers at most {workers - 1} are backups")
