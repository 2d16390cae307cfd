"""From a description's text to typed objects, once. Checking names and settings imports no torch; resolving does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.collectives.registry import PATHS
from echelon.compression import registry as codecs
from echelon.config import RunConfig, load_run_config
from echelon.config.schema import ModelConfig
from echelon.config.validate import CheckpointInterval, Nodes, parse_interval, parse_max_time, parse_nodes
from echelon.core.address import Address, parse_voters
from echelon.core.errors import UserError, naming
from echelon.core.hints import parse_tensor_plan
from echelon.core.layout import AUTO, Layout, parse_layout
from echelon.core.link import Link, parse_link
from echelon.core.spec import parse_spec
from echelon.core.tokeniser import RUN_FILE, read_tokeniser
from echelon.core.tuning import TUNINGS, check_packages, packages_of, read_tuning
from echelon.core.units import parse_bytes, parse_seconds
from echelon.launch.places import PlaceChoice, check_place
from echelon.observe.loggers import check_loggers
from echelon.run.notify import check_notify
from echelon.storage.url import check_url, is_url
from echelon.sync.registry import STRATEGIES, uses_servers
from echelon.sync.registry import read as read_sync
from echelon.tasks.registry import TaskChoice, check_task

if TYPE_CHECKING:
    from echelon.data import SourceChoice
    from echelon.launch.places.cluster import NodeRank
    from echelon.models.tuning.plan import TuningPlan
    from echelon.optim.own import OptimizerFactory
    from echelon.sync.settings import SyncSettings
    from echelon.trainer.resolved import ResolvedRun


def check_names(config: RunConfig) -> None:
    """Refuse strategies, tasks and places that do not exist, and settings that strategies do not have, without torch.

    Raises:
        UserError: names the setting, and the nearest that exists.
    """
    strategy = config.strategy
    with naming("--parallel"):
        parse_layout(strategy.parallel)
    with naming("--sync"):
        STRATEGIES.check(parse_spec(strategy.sync))
    with naming("--compression"):
        codecs.check(strategy.compression)
    with naming("--collective"):
        PATHS.check(parse_spec(strategy.collective))
    with naming("--tune"):
        read_tuning(config.model.tune)
        check_packages(config.model.tune)
    _check_path(config.data.source)
    check_task(config.task)
    if not (config.run and (Path(config.run) / RUN_FILE).is_file()):  # a run that goes on has its own
        read_tokeniser(config.data.tokeniser)
    check_place(config.launch.on)
    check_loggers(config.tracking.loggers)
    check_notify(config.tracking.notify)


def _check_path(source: str) -> None:
    """Refuse data that can only be a folder, and is not there; other names are known once torch is."""
    if is_url(source):
        with naming("data"):
            check_url(source)
    if source.startswith(("/", ".", "~")) and not Path(source).expanduser().exists():
        raise UserError(f"data {source}: no such folder")


@dataclass(frozen=True)
class ChosenModules:
    """Modules and packages that hold what a description chooses, which processes may import before they are forked.

    Attributes:
        strategy: of `--sync`.
        path: of `--collective`.
        tuning: packages that `--tune` needs beside torch.
    """

    strategy: str
    path: str
    tuning: tuple[str, ...]


@dataclass(frozen=True)
class LaunchRequest:
    """What a description asks of machines, read once, without importing torch (`launch_request`).

    Attributes:
        config: the plain values.
        layout: as described; sizes may be left open.
        nodes: how many machines take part.
        voters: the machines that may lead, which is where they meet; empty: this one is alone.
        link: the shaped links between workers; None: loopback.
        place: where processes are started.
        uses_servers: parameters are held by servers, as the strategy's file declares.
        modules: that hold what is chosen.
        node_rank: of this machine, where a place gave it one: it runs the processes itself.
    """

    config: RunConfig
    layout: Layout
    nodes: Nodes
    voters: tuple[Address, ...]
    link: Link | None
    place: PlaceChoice
    uses_servers: bool
    modules: ChosenModules
    node_rank: NodeRank | None = None


def launch_request(config: RunConfig, node_rank: NodeRank | None = None) -> LaunchRequest:
    """Read what a description asks of machines; refuse names that do not exist.

    Args:
        node_rank: of this machine, where a place gave it one.

    Raises:
        UserError: names the setting, and the nearest that exists.
    """
    check_names(config)
    launch, strategy = config.launch, config.strategy
    with naming("--link"):
        link = parse_link(launch.link) if launch.link else None
    if is_url(config.checkpoint.mirror):
        with naming("--mirror"):
            check_url(config.checkpoint.mirror)
    place = place_of(config)
    if node_rank is not None and (cluster := place.cluster()) is not None:
        place = replace(place, name="local", stop_s=cluster.stop_s)
    voters, with_servers = parse_voters(launch.rendezvous) if launch.rendezvous else (), has_servers(config)
    if len(voters) > 1 and with_servers:
        raise UserError(
            f"--rendezvous {launch.rendezvous}: a parameter server's scheduler stays on the first machine; name that"
        )
    return LaunchRequest(
        config=config,
        layout=parse_layout(strategy.parallel),
        nodes=nodes_of(config),
        voters=voters,
        link=link,
        place=place,
        uses_servers=with_servers,
        modules=ChosenModules(
            STRATEGIES.module_of(strategy.sync), PATHS.module_of(strategy.collective), packages_of(config.model.tune)
        ),
        node_rank=node_rank,
    )


def nodes_of(config: RunConfig) -> Nodes:
    """Return how many machines take part in a described run."""
    return parse_nodes(config.launch.nodes)


def place_of(config: RunConfig) -> PlaceChoice:
    """Return where a described run's processes are started; the place itself is not looked at."""
    return PlaceChoice(config.launch.on, parse_seconds(config.checkpoint.io_patience))


def has_servers(config: RunConfig) -> bool:
    """Whether servers hold the parameters of a described run, as its strategy's file says; imports no torch.

    Raises:
        UserError: an unknown strategy.
    """
    with naming("--sync"):
        return uses_servers(config.strategy.sync)


def sync_of(config: RunConfig) -> SyncSettings:
    """Return how replicas of a described run agree; imports torch.

    Raises:
        UserError: an unknown strategy or setting, or an impossible value.
    """
    with naming("--sync"):
        return read_sync(config.strategy.sync)


def left_open(config: RunConfig) -> frozenset[str]:
    """Return which of layout, sync and codec a description leaves to be chosen: those that say `auto`."""
    strategy = config.strategy
    texts = {"parallel": strategy.parallel, "sync": strategy.sync, "compression": strategy.compression}
    return frozenset(f"strategy.{name}" for name, text in texts.items() if text == AUTO)


def rate_of(link: str) -> float:
    """Return the bits per second of a link as a run's description has it."""
    return parse_link(link).rate_bits_per_s


def link_of(link: str) -> Link | None:
    """Return a link as a run's description has it; None: loopback."""
    return parse_link(link) if link else None


def canonical(setting: str, spec: str) -> str:
    """Write a spec so that equal ones are written alike: `topk(0.01)` as `topk(density=0.01)`; imports no torch.

    Args:
        setting: `strategy.sync`, `strategy.compression`, `strategy.collective` or `model.tune`.

    Raises:
        UserError: the spec cannot be read.
    """
    registries = {"strategy.sync": STRATEGIES, "strategy.compression": codecs.CODECS, "strategy.collective": PATHS}
    registries["model.tune"] = TUNINGS
    return registries[setting].canonical(spec)


def checkpoint_interval(config: RunConfig) -> CheckpointInterval:
    """Return how often a run saves.

    Raises:
        UserError: it cannot be read.
    """
    return parse_interval(config.checkpoint.every)


def agreements(sync: str, steps: int) -> int:
    """Return how often replicas agree on a parameter in a run of so many steps.

    Raises:
        UserError: the spec cannot be read.
    """
    return read_sync(sync).messages(steps)


def longest_period(sync: str, steps: int) -> int:
    """Return the longest period that a strategy may choose in a run of so many steps; 0: it chooses none.

    Raises:
        UserError: the spec cannot be read.
    """
    return read_sync(sync).longest_period(steps)


def source_of(config: RunConfig, folder: Path | None) -> SourceChoice:
    """Return the data of a described run, not yet opened; imports torch.

    Args:
        folder: of the run, which keeps the tokeniser; None: it has none yet.

    Raises:
        UserError: a setting of how samples are made cannot be read.
    """
    from echelon.data import SourceChoice
    from echelon.data.preparation import read_preparation

    preparation = read_preparation(config.data, folder)
    return SourceChoice(config.data, config.training.seed, preparation, config.task, folder)


def tuning_of(model: ModelConfig) -> TuningPlan:
    """Return what is trained of a described run's model; imports torch.

    Raises:
        UserError: a kind does not exist, or a setting is impossible.
    """
    from echelon.models.tuning.plan import tuning_plan

    with naming("--tune"):
        return tuning_plan(model.tune, model.frozen_norm)


def _start_tuning(model: ModelConfig) -> TuningPlan | None:
    """Return what was trained of the model of the run whose folder `--weights` names; None: it names none.

    Raises:
        UserError: that run's description cannot be read.
    """
    from echelon.models.pretrained import folder_of_weights
    from echelon.models.tuning.plan import tuning_plan
    from echelon.trainer.folder import CONFIG_FILE, has_weights

    folder = folder_of_weights(model.weights) if model.weights else None
    if folder is None or not has_weights(folder):
        return None
    other = load_run_config(folder / CONFIG_FILE).model
    with naming(f"--weights {model.weights}"):
        return tuning_plan(other.tune, other.frozen_norm)


def _log_limit(config: RunConfig) -> int:
    with naming("--log-limit"):
        limit = parse_bytes(config.launch.log_limit)
        if limit < 10_000:
            raise UserError(f"{config.launch.log_limit} leaves nothing to read: at least 10kb")
        return int(limit)


def resolve(config: RunConfig, optimizer: OptimizerFactory | None = None) -> ResolvedRun:
    """Return a description as typed objects.

    Args:
        optimizer: the caller's own, which the description names.

    Raises:
        UserError: a text cannot be read, or codec and optimizer contradict each other; names the setting and the fix.
    """
    from echelon.optim.choice import OptimizerChoice
    from echelon.optim.own import read_optimizer
    from echelon.trainer.layouts import read_cuts, read_tensor_plan
    from echelon.trainer.resolved import ResolvedRun

    request, strategy = launch_request(config), config.strategy
    if config.data.batch_size == 0:
        raise UserError(
            "--batch-size auto is chosen where Echelon starts the ranks, on one machine: give a number here"
        )
    sync = sync_of(config).with_ema(config.training.ema)
    with naming("--compression"):
        compression = codecs.read(strategy.compression)
    with naming("--collective"):
        path = PATHS.build(strategy.collective)
    call = read_optimizer(config.optimizer.name) if optimizer is None else None
    run = ResolvedRun(
        config=config,
        described=config,
        layout=request.layout,
        sync=sync,
        compression=compression,
        path=path,
        tensor_plan=parse_tensor_plan(read_tensor_plan(strategy.tensor_plan)),
        cuts=read_cuts(strategy.cuts),
        optimizer=OptimizerChoice(config.optimizer.name, optimizer, call),
        task=TaskChoice.of(config),
        source=source_of(config, Path(config.run) if config.run else None),
        nodes=request.nodes,
        link=request.link,
        place=request.place,
        timeout_s=parse_seconds(config.launch.timeout),
        machine_patience_s=parse_seconds(config.launch.machine_patience),
        log_limit=_log_limit(config),
        checkpoint_every=checkpoint_interval(config),
        io_patience_s=parse_seconds(config.checkpoint.io_patience),
        max_time_s=parse_max_time(config.training.max_time),
        tuning=tuning_of(config.model),
        start_tuning=partial(_start_tuning, config.model),
    )
    return run.compressed_by(compression)
