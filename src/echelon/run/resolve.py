"""From a description's text to typed objects, once. Checking names and settings imports no torch; resolving does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.collectives.registry import PATHS
from echelon.compression import registry as codecs
from echelon.config import RunConfig
from echelon.config.validate import Nodes, parse_interval, parse_nodes
from echelon.core.address import Address, parse_rendezvous
from echelon.core.errors import UserError, naming
from echelon.core.hints import parse_tensor_plan
from echelon.core.layout import Layout, parse_layout
from echelon.core.link import Link, parse_link
from echelon.core.spec import parse_spec
from echelon.core.units import parse_bytes, parse_seconds
from echelon.launch.places import check_place
from echelon.sync.registry import STRATEGIES
from echelon.tasks.registry import check_task

if TYPE_CHECKING:
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
    check_task(config.task)
    check_place(config.launch.on)


def layout_of(config: RunConfig) -> Layout:
    """Return the layout as described; sizes may be left open."""
    return parse_layout(config.strategy.parallel)


def nodes_of(config: RunConfig) -> Nodes:
    """Return how many machines take part."""
    return parse_nodes(config.launch.nodes)


def rendezvous_of(config: RunConfig) -> Address | None:
    """Return where the machines of a run meet; None: this one is alone.

    Raises:
        UserError: the text is not an address.
    """
    return parse_rendezvous(config.launch.rendezvous) if config.launch.rendezvous else None


def link_of(config: RunConfig) -> Link | None:
    """Return the shaped links between workers; None: loopback.

    Raises:
        UserError: the text is not a link.
    """
    if not config.launch.link:
        return None
    with naming("--link"):
        return parse_link(config.launch.link)


def rate_of(link: str) -> float:
    """Return the bits per second of a link as a run's description has it."""
    return parse_link(link).rate_bits_per_s


def canonical(setting: str, spec: str) -> str:
    """Write a spec so that equal ones are written alike: `topk(0.01)` as `topk(density=0.01)`; imports no torch.

    Args:
        setting: `strategy.sync`, `strategy.compression` or `strategy.collective`.

    Raises:
        UserError: the spec cannot be read.
    """
    registries = {"strategy.sync": STRATEGIES, "strategy.compression": codecs.CODECS, "strategy.collective": PATHS}
    return registries[setting].canonical(spec)


def uses_servers(config: RunConfig) -> bool:
    """Whether a run's parameters are held by servers, as its strategy's file declares; imports no torch."""
    return STRATEGIES.declaration(parse_spec(config.strategy.sync).name).constants.get("uses_servers") == "True"


def _log_limit(config: RunConfig) -> int:
    with naming("--log-limit"):
        limit = parse_bytes(config.launch.log_limit)
        if limit < 10_000:
            raise UserError(f"{config.launch.log_limit} leaves nothing to read: at least 10kb")
        return int(limit)


def resolve(config: RunConfig) -> ResolvedRun:
    """Return a description as typed objects.

    Raises:
        UserError: a text cannot be read, or codec and optimizer contradict each other; names the setting and the fix.
    """
    from echelon.sync import registry as strategies
    from echelon.trainer.layouts import read_cuts, read_tensor_plan
    from echelon.trainer.resolved import ResolvedRun

    check_names(config)
    strategy = config.strategy
    with naming("--sync"):
        sync = strategies.read(strategy.sync).with_ema(config.training.ema)
    with naming("--compression"):
        compression = codecs.read(strategy.compression)
    with naming("--collective"):
        path = PATHS.build(strategy.collective)
    run = ResolvedRun(
        config=config,
        described=config,
        layout=layout_of(config),
        sync=sync,
        compression=compression,
        path=path,
        tensor_plan=parse_tensor_plan(read_tensor_plan(strategy.tensor_plan)),
        cuts=read_cuts(strategy.cuts),
        nodes=nodes_of(config),
        timeout_s=parse_seconds(config.launch.timeout),
        log_limit=_log_limit(config),
        checkpoint_every=parse_interval(config.checkpoint.every),
        io_patience_s=parse_seconds(config.checkpoint.io_patience),
    )
    return run.compressed_by(compression)
