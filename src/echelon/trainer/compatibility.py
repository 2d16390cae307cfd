"""The four choices together: what works, what is refused, and what one choice asks of another."""

from __future__ import annotations

from dataclasses import replace

from echelon.collectives import registry as collectives
from echelon.collectives.reducer import check_combination
from echelon.compression import registry as compression
from echelon.config import OptimizerConfig, RunConfig
from echelon.config.validate import check_world
from echelon.core.axes import Axis
from echelon.core.errors import UserError, naming
from echelon.optim.traits import NESTEROV, is_nesterov, is_sgd
from echelon.sync import check_sync, encodes_gradients, synchronous_steps
from echelon.trainer.layouts import check_layout
from echelon.trainer.server_checks import check_server_run, server_settings, uses_servers


def check_strategies(config: RunConfig, ranks: int) -> None:
    """Refuse specs that no registered strategy takes, and combinations that cannot work.

    Args:
        ranks: of all machines.

    Raises:
        UserError: names the spec, the reason, and the nearest that works.
    """
    strategy = config.strategy
    if uses_servers(config):
        check_server_run(config, ranks)
    check_layout(config, ranks)
    with naming("--sync"):
        check_sync(strategy.sync, strategy.compression)
    with naming("--collective"):
        path = collectives.build(strategy.collective)
    with naming("--compression"):
        codec = compression.build(strategy.compression)
    settled = assign_momentum(config).optimizer
    if uses_servers(config) and server_settings(config).momentum_correction and not _has_momentum(settled):
        raise UserError(
            f"--sync {strategy.sync}: there is no momentum on the servers to correct: use --optimizer sgd with "
            "--momentum and a --compression that leaves it to the optimizer, or leave momentum_correction out"
        )
    _check_replicas(config, ranks)
    if synchronous_steps(strategy.sync) and codec.momentum_inside and _has_momentum(config.optimizer):
        raise UserError(
            f"--sync {strategy.sync} sends gradients through --compression {strategy.compression} at first, and the "
            "optimizer's momentum after decoding, together with error feedback, spoils training: leave out start, or "
            "use int8, topk or powersgd"
        )
    if strategy.compression != "none" and ranks > 1:
        check_combination(codec, path, ranks)
        tiers = None if codec.shaped and codec.linear else path.tiers(0, ranks, 0)
        if tiers is not None and tiers.between is not None and len(tiers.between.members) == 1:
            raise UserError(
                f"--collective {strategy.collective} makes one group of {ranks} workers, and --compression "
                f"{strategy.compression} works between groups: use a smaller group, or --collective backend"
            )
    if codec.direction and config.optimizer.clip_norm:
        raise UserError(
            f"--compression {strategy.compression} gives directions, whose norm says nothing: leave out --clip-norm"
        )
    if not path.by_backend and ranks == 1:
        raise UserError(f"--collective {strategy.collective} needs several workers: leave it out, or use --workers 2")


def _check_replicas(config: RunConfig, ranks: int) -> None:
    """Refuse what acts between replicas where several ranks make one."""
    layout, strategy = check_world(config, ranks), config.strategy
    if layout.dp > 1 or ranks == 1 or uses_servers(config):
        return
    two = replace(layout, sizes={Axis.DP: 2, **{a: size for a, size in layout.sizes.items() if a is not Axis.DP}})
    for flag, value, plain in (
        ("--sync", strategy.sync, "allreduce"),
        ("--compression", strategy.compression, "none"),
        ("--collective", strategy.collective, "backend"),
    ):
        if value != plain:
            raise UserError(
                f"{flag} {value} acts between replicas, and --parallel {strategy.parallel} makes one of {ranks} "
                f"workers: use --parallel {two} with {2 * ranks}, or leave {flag} out"
            )


def _has_momentum(optimizer: OptimizerConfig) -> bool:
    return is_sgd(optimizer.name) and optimizer.momentum > 0


def interplay_notes(config: RunConfig, ranks: int) -> list[str]:
    """Say, in sentences, which settings work otherwise than they would without the run's other choices."""
    return [] if ranks == 1 else [*_momentum_notes(config), *_path_notes(config, ranks)]


def _momentum_notes(config: RunConfig) -> list[str]:
    optimizer, compression_ = config.optimizer, config.strategy.compression
    settled = assign_momentum(config)
    if settled.optimizer.momentum == optimizer.momentum:
        return []
    codec = compression.build(settled.strategy.compression)
    late = "; Nesterov's form (--optimizer sgd) makes up for what error feedback sends late"
    hint = late if codec.biased and not codec.looks_ahead else ""
    return [f"momentum {optimizer.momentum:g} acts in each worker, before --compression {compression_} encodes{hint}"]


def _path_notes(config: RunConfig, ranks: int) -> list[str]:
    strategy = config.strategy
    if uses_servers(config) or collectives.build(strategy.collective).by_backend or check_world(config, ranks).dp != 2:
        return []
    return [f"between 2 replicas all paths are one: --collective {strategy.collective} changes nothing"]


def settle_single_worker(config: RunConfig) -> RunConfig:
    """Return the description for a single worker, which encodes nothing: a momentum in the codec is the optimizer's."""
    optimizer, spec = config.optimizer, config.strategy.compression
    if not encodes_gradients(config.strategy.sync) or not is_sgd(optimizer.name):
        return config
    spec, _ = compression.place_momentum(spec, optimizer.momentum, is_nesterov(optimizer.name))
    codec = compression.build(spec)
    momentum = codec.absorbs_momentum
    if not momentum:
        return config
    decay = optimizer.weight_decay / (1.0 if optimizer.momentum else compression.decay_factor(spec, momentum))
    name = NESTEROV[0] if codec.looks_ahead else "momentum"
    return replace(config, optimizer=replace(optimizer, name=name, momentum=momentum, weight_decay=decay))


def assign_momentum(config: RunConfig) -> RunConfig:
    """Return the description with momentum where the codec wants it: in the worker before encoding, or the optimizer.

    Where it leaves the optimizer, the weight decay that it has multiplied until then becomes larger by as much.

    Raises:
        UserError: compression and optimizer contradict each other.
    """
    optimizer, strategy = config.optimizer, config.strategy
    if not encodes_gradients(strategy.sync):
        return config
    family = is_sgd(optimizer.name)
    asked = optimizer.momentum if family else 0.0
    spec, left = compression.place_momentum(strategy.compression, asked, is_nesterov(optimizer.name))
    if not family or left == asked:
        return replace(config, strategy=replace(strategy, compression=spec))
    decay = optimizer.weight_decay * compression.decay_factor(spec, asked)
    settled = replace(optimizer, momentum=left, weight_decay=decay)
    return replace(config, strategy=replace(strategy, compression=spec), optimizer=settled)
