"""A run as typed objects: what every room below `run` gets instead of a description's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.collectives.base import Path as CollectivePath
from echelon.compression import Compression
from echelon.config import RunConfig
from echelon.config.validate import CheckpointInterval, Nodes, check_batch
from echelon.core.hints import Style
from echelon.core.layout import Layout
from echelon.core.link import Link
from echelon.data import SourceChoice
from echelon.models.tuning.plan import UNTUNED, StartTuning, TuningPlan, of_no_run
from echelon.optim.choice import OptimizerChoice
from echelon.optim.traits import NESTEROV, is_nesterov, is_sgd
from echelon.sync.settings import SyncSettings
from echelon.tasks.registry import TaskChoice

if TYPE_CHECKING:  # the engine knows no place: `run` builds it
    from echelon.launch.places import PlaceChoice


@dataclass(frozen=True)
class ResolvedRun:
    """One run, its text read once (`echelon.run.resolve`).

    Attributes:
        config: the plain values as they are used: `optimizer.momentum` is what the codec leaves to the optimizer.
        described: the description as the user wrote it, for words about it.
        layout: as described; sizes may be left open (see `layout_for`).
        sync: how replicas agree; of a parameter server with the moving average that `--ema` asks for.
        compression: what travels, with the momentum that the codec applies.
        path: along which it travels.
        tensor_plan: patterns of module names to styles, over the model's own hints.
        cuts: the blocks that stages but the first begin with; empty: balanced.
        optimizer: what updates parameters: timm's, or the user's own.
        task: what is learnt, fitted where the data is open.
        source: the data.
        nodes: how many machines take part.
        link: the shaped links between workers; None: loopback.
        place: where processes are started.
        timeout_s: how long any rank waits for another.
        machine_patience_s: how long machines wait for one that was lost.
        log_limit: bytes of a process's log before it is shortened.
        checkpoint_every: between checkpoints.
        io_patience_s: how long training goes on while the run's folder cannot be written.
        max_time_s: in which a command is to end; infinity: no limit.
        tuning: what is trained of the model.
        start_tuning: returns what was trained of the model of the run whose weights `--weights` names; None: of none.
    """

    config: RunConfig
    described: RunConfig
    layout: Layout
    sync: SyncSettings
    compression: Compression
    path: CollectivePath
    tensor_plan: Mapping[str, Style]
    cuts: tuple[str, ...]
    optimizer: OptimizerChoice
    task: TaskChoice
    source: SourceChoice
    nodes: Nodes
    link: Link | None
    place: PlaceChoice
    timeout_s: float
    machine_patience_s: float
    log_limit: int
    checkpoint_every: CheckpointInterval
    io_patience_s: float
    max_time_s: float
    tuning: TuningPlan = UNTUNED
    start_tuning: StartTuning = of_no_run

    def layout_for(self, ranks: int) -> Layout:
        """Return the layout with every size known, for this number of ranks.

        Raises:
            UserError: the layout is not the world, or the batch is smaller than the ranks that share it.
        """
        layout = self.layout.resolve(ranks)
        check_batch(self.config, layout)
        return layout

    def batch_parts(self, layout: Layout) -> int:
        """Return how many ranks' parts a global batch is cut into."""
        return self.sync.batch_parts(layout.dp) * layout.fsdp

    def compressed_by(self, compression: Compression) -> ResolvedRun:
        """Return the run with another codec, and momentum where this one wants it.

        That is in the worker before encoding, or the optimizer. Where it leaves the optimizer, the weight decay that it
        has multiplied until then becomes larger by as much.

        Raises:
            UserError: compression and optimizer contradict each other.
        """
        optimizer = self.described.optimizer
        if not self.sync.encodes_gradients:
            return replace(self, compression=compression)
        asked = optimizer.momentum if is_sgd(optimizer.name) else 0.0
        settled, left = compression.with_momentum(asked, is_nesterov(optimizer.name))
        if is_sgd(optimizer.name) and left != asked:
            decay = optimizer.weight_decay * settled.decay_factor(asked)
            optimizer = replace(optimizer, momentum=left, weight_decay=decay)
        return replace(self, compression=settled, config=replace(self.config, optimizer=optimizer))

    def going_on(self, epoch: int) -> ResolvedRun:
        """Return the run as a checkpoint of an epoch, counted from 0, has it: all weights are in there."""
        config = replace(self.config, model=replace(self.config.model, weights=""))
        return replace(self, config=config, tuning=self.tuning.at(epoch))

    def for_single_worker(self) -> ResolvedRun:
        """Return the run of a single worker, which encodes nothing: a momentum in the codec is the optimizer's."""
        asked, momentum = self.described.optimizer, self.compression.codec.absorbs_momentum
        if not momentum or not self.sync.encodes_gradients or not is_sgd(asked.name):
            return replace(self, config=replace(self.config, optimizer=asked))
        decay = asked.weight_decay / (1.0 if asked.momentum else self.compression.decay_factor(momentum))
        name = NESTEROV[0] if self.compression.codec.looks_ahead else "momentum"
        optimizer = replace(asked, name=name, momentum=momentum, weight_decay=decay)
        return replace(self, config=replace(self.config, optimizer=optimizer))
