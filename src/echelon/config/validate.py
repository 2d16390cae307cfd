"""What contradicts itself is refused before anything starts; what a strategy accepts, the strategy checks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from echelon.config.schema import RunConfig
from echelon.core.address import parse_voters
from echelon.core.errors import UserError, naming
from echelon.core.layout import AUTO, Layout, parse_layout
from echelon.core.spec import parse_chain, parse_spec
from echelon.core.units import bytes_for, parse_seconds, seconds_for

_HERE = "local"  # the place that is this machine


@dataclass(frozen=True)
class Nodes:
    """How many machines take part: fixed, or a range that may change while the run goes."""

    least: int
    most: int

    @property
    def is_range(self) -> bool:
        """Whether machines may come and go."""
        return self.least < self.most


@dataclass(frozen=True)
class CheckpointInterval:
    """Either a number of optimizer steps or a duration in seconds; the other is None."""

    steps: int | None
    seconds: float | None


def parse_nodes(text: str) -> Nodes:
    """Read `2` or `1:4`.

    Raises:
        UserError: the text is neither.
    """
    match = re.fullmatch(r"\s*([1-9]\d*)(?::([1-9]\d*))?\s*", text)
    if not match:
        raise UserError(f"--nodes {text!r}: write a number such as 2, or a range such as 1:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least > most:
        raise UserError(f"--nodes {text!r}: the least number of machines comes first")
    return Nodes(least, most)


def parse_interval(text: str) -> CheckpointInterval:
    """Read `200` (steps) or `5m` (duration).

    Raises:
        UserError: the text is neither, or not positive.
    """
    is_steps = re.fullmatch(r"\s*\d+\s*", text)
    try:
        interval = CheckpointInterval(int(text), None) if is_steps else CheckpointInterval(None, parse_seconds(text))
    except UserError:
        raise UserError(f"--checkpoint-every {text!r}: write a number of steps (200) or a duration (5m)") from None
    if not (interval.steps or interval.seconds):
        raise UserError(f"--checkpoint-every {text}: write a number of steps of at least 1, or a duration such as 5m")
    return interval


def parse_max_time(text: str) -> float:
    """Read `2h`, in seconds; infinity where it is empty.

    Raises:
        UserError: the text is no duration, or too short for a start and an end.
    """
    if not text:
        return math.inf
    seconds = seconds_for("--max-time")(text)
    if seconds < 10:
        raise UserError(f"--max-time {text}: starting and ending take seconds: use at least 10s")
    return seconds


def check_world(config: RunConfig, world_size: int) -> Layout:
    """Return the layout for this number of ranks.

    Raises:
        UserError: the layout is not the world, or the batch is smaller than the ranks that share it.
    """
    layout = parse_layout(config.strategy.parallel).resolve(world_size)
    check_batch(config, layout)
    return layout


def splits_model(config: RunConfig) -> bool:
    """Whether a replica of the described layout is more than one rank; False where it is to be chosen yet."""
    return config.strategy.parallel != AUTO and parse_layout(config.strategy.parallel).splits


def check_batch(config: RunConfig, layout: Layout) -> None:
    """Refuse a batch that is smaller than the ranks that share it.

    Raises:
        UserError: names both numbers.
    """
    sharing = layout.dp * layout.fsdp
    if 0 < config.data.batch_size < sharing:  # 0: it is chosen later
        raise UserError(
            f"--batch-size {config.data.batch_size} is smaller than the {sharing} workers that share it; "
            f"use at least {sharing}, or fewer workers"
        )


def check(config: RunConfig) -> None:
    """Refuse contradictions within a description.

    Raises:
        UserError: names the settings and the fix.
    """
    _check_strategy(config)
    _check_launch(config)
    _check_training(config)


def _check_strategy(config: RunConfig) -> None:
    if config.strategy.parallel != AUTO:
        parse_layout(config.strategy.parallel)
    with naming("--sync"):
        parse_spec(config.strategy.sync)
    with naming("--compression"):
        parse_chain(config.strategy.compression)
    with naming("--collective"):
        parse_spec(config.strategy.collective)


def _check_voters(config: RunConfig, voters: int, nodes: Nodes) -> None:
    """Refuse several machines that may lead where that protects from nothing.

    Raises:
        UserError: says why.
    """
    if voters == 1:
        return
    if voters > nodes.most:
        raise UserError(f"--rendezvous names {voters} machines that may lead, and --nodes {config.launch.nodes} fewer")
    if config.checkpoint.mirror:
        raise UserError("--mirror copies what the first machine has: name one machine in --rendezvous, or leave it out")


def _check_launch(config: RunConfig) -> None:
    nodes = parse_nodes(config.launch.nodes)
    if config.launch.rendezvous:
        _check_voters(config, len(parse_voters(config.launch.rendezvous)), nodes)
    elif nodes.most > 1:
        raise UserError(
            f"--nodes {config.launch.nodes} needs --rendezvous HOST:PORT of the first machine, on each machine"
        )
    if config.launch.trusted_network and not config.launch.rendezvous:
        raise UserError("--trusted-network is for machines that meet: give --nodes and --rendezvous, or leave it out")
    if config.launch.link and nodes.most > 1:
        raise UserError("--link shapes the links between workers of one machine: leave out --nodes")
    here = config.launch.on.partition("(")[0] == _HERE  # another place says by itself how many machines there are
    if here and config.launch.workers and not nodes.is_range and config.strategy.parallel != AUTO:
        check_world(config, config.launch.workers * nodes.most)
    try:
        timeout_s = parse_seconds(config.launch.timeout)
    except UserError as error:
        raise UserError(f"--timeout: {error}") from None
    if timeout_s < 1:
        raise UserError(f"--timeout {config.launch.timeout}: use at least 1s")
    seconds_for("--machine-patience")(config.launch.machine_patience)
    parse_interval(config.checkpoint.every)
    seconds_for("--io-patience")(config.checkpoint.io_patience)


def _check_training(config: RunConfig) -> None:
    optimizer, training = config.optimizer, config.training
    if optimizer.warmup_epochs >= training.epochs and optimizer.warmup_epochs > 0:
        raise UserError(
            f"--warmup-epochs {optimizer.warmup_epochs:g} leaves nothing of --epochs {training.epochs}: "
            "use a shorter warm-up"
        )
    if training.accumulate > config.data.batch_size > 0:
        raise UserError(
            f"--accumulate {training.accumulate} cuts a batch of {config.data.batch_size} into empty micro-batches: "
            f"use at most {config.data.batch_size}"
        )
    if (config.data.mixup or config.data.cutmix) and "skip" in (config.data.on_bad_image, config.data.on_nan):
        raise UserError("--mixup and --cutmix mix pairs of images: use --on-bad-image stop, or leave them out")
    if training.early_stop and not training.eval_every:
        raise UserError("--early-stop counts evaluations, and --eval-every 0 has one at the end: use --eval-every 1")
    if config.model.compile_mode != "default" and not config.model.compile:
        raise UserError(f"--compile-mode {config.model.compile_mode} is a mode of torch.compile: add --compile")
    if config.model.compile_mode == "reduce-overhead" and (training.accumulate != 1 or training.on_oom == "halve"):
        flag = "--accumulate" if training.accumulate != 1 else "--on-oom halve"
        raise UserError(
            f"--compile-mode reduce-overhead with {flag}: of a batch in parts, a replayed graph overwrites what the "
            "part before has left; leave one of them out"
        )
    if config.data.decode == "gpu" and (training.device == "cpu" or config.data.loaders > 0):
        raise UserError(
            "--decode gpu: files are decoded on a GPU, and threads read them: leave out --device cpu and --loaders"
        )
    bytes_for("--data-cache-limit")(config.data.cache_limit)
    if training.max_time:
        parse_max_time(training.max_time)
    if training.precision == "fp8" and training.device == "cpu":
        raise UserError("--precision fp8 needs a GPU with 8-bit matrix units: on a CPU use --precision bf16 or fp32")
