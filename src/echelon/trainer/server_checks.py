"""What a run with a parameter server cannot do, refused before it starts."""

from __future__ import annotations

from dataclasses import replace

from echelon.config import RunConfig
from echelon.config.validate import check_world, parse_nodes
from echelon.core.errors import UserError, naming
from echelon.core.spec import bind, parse_spec
from echelon.sync.ps import ServerSettings

NAME = "ps"


def uses_servers(config: RunConfig) -> bool:
    """Whether the run has a parameter server, and workers that train on leases."""
    return parse_spec(config.strategy.sync).name == NAME


def server_settings(config: RunConfig) -> ServerSettings:
    """Return the settings of `ps(...)`.

    Raises:
        UserError: an unknown or impossible setting.
    """
    with naming("--sync"):
        settings = bind(parse_spec(config.strategy.sync), ServerSettings)
    if settings.ema:
        raise UserError(f"--sync {config.strategy.sync}: the average is asked for by --ema {settings.ema:g}")
    return replace(settings, ema=config.training.ema)


def batch_parts(config: RunConfig, workers: int, fsdp: int) -> int:
    """Return how many parts a batch is cut into: a lease is a share of it where gradients are summed, else all of it.

    Args:
        fsdp: ranks of a worker that divide its samples.
    """
    return (workers if server_settings(config).aggregates else 1) * fsdp


def check_server_run(config: RunConfig, ranks: int) -> None:
    """Refuse what does not go together with a parameter server.

    Args:
        ranks: processes of all machines' workers; where the model is split, a worker is several.

    Raises:
        UserError: names both settings and what works.
    """
    size = _replica_size(config, ranks)
    sync = f"--sync {config.strategy.sync}"
    settings = server_settings(config)
    if config.training.precision == "fp16":
        raise UserError(f"{sync} has no gradient scaler on its servers: use --precision bf16 or fp32")
    if config.model.sync_batchnorm:
        raise UserError(f"{sync} has no group for --sync-batchnorm: leave it out, or use --sync allreduce")
    if config.optimizer.clip_norm and settings.aggregates:
        raise UserError(f"{sync}: no server sees the norm of the whole gradient: leave out --clip-norm, or mode=async")
    if parse_spec(config.strategy.collective).name != "backend":
        raise UserError(f"{sync} has no collectives: leave out --collective")
    nodes = parse_nodes(config.launch.nodes)
    workers = ranks * nodes.least // nodes.most // size
    if settings.backup >= workers:
        raise UserError(f"{sync}: with {workers} workers at most {workers - 1} are backups")


def _replica_size(config: RunConfig, ranks: int) -> int:
    """Return the ranks of a worker.

    Raises:
        UserError: the layout is not the world, or a worker would lie on several machines.
    """
    size, machines = check_world(config, ranks).model_size, parse_nodes(config.launch.nodes).most
    if ranks // machines % size:
        raise UserError(
            f"--sync {config.strategy.sync} with --parallel {config.strategy.parallel}: a replica is {size} ranks of "
            f"one machine, and {ranks // machines} workers on each are no whole number of replicas; "
            f"use --workers {size * max(1, ranks // machines // size)}, or smaller replicas"
        )
    return size
