"""The contract between the training loop and a strategy by which replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives.base import Path
from echelon.collectives.row_exchange import RowExchange
from echelon.collectives.times import ReduceTimes
from echelon.compression import Compression
from echelon.compression.rungs import Switch
from echelon.core.state_tree import StateTree, StateView
from echelon.observe.phases import PhaseClock
from echelon.sync.averaging.period import PeriodChange

AGREED_FROM = ("buffers", "ema", "model", "sync")
"""Entries of a rank's own state from which it can be told what the replicas agree on."""


class StepAbandoned(RuntimeError):
    """A step's batch is not needed any more: the run ended while a replica waited in the middle of it."""


@dataclass(frozen=True)
class CutRows:
    """Rows of tables that are cut over replicas: their gradients are summed where they lie.

    Attributes:
        exchange: brings gradients to the ranks that have the rows, inside of backward.
        group: the ranks that have the same rows, among whom they are to be summed yet; None: no other rank has them.
    """

    exchange: RowExchange
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class SyncContext:
    """What a strategy acts on.

    Attributes:
        model: the module that this rank holds, on its device.
        update: applies the gradients to the parameters (clipping, optimizer, scaler) and clears them.
        optimizer: whose moments may be averaged; `update` steps it.
        group: the ranks that hold the same piece of the model in other replicas; None for a single process.
        compression: what travels between the replicas.
        path: along which it travels.
        seed: of the codec's draws, the same on every rank.
        clock: told when a strategy communicates outside of backward.
        loss_scale: by what gradients are multiplied until the update (half precision).
        averages_gradients: losses are means over each replica's own samples, as in a loop of somebody else's: gradients
            are averaged over the replicas instead of summed.
        ddp: what somebody else has wrapped the model in.
        has_unused: whether some parameters get no gradient from a step, which then keep none.
        noted: hears what is changed as the run goes: by an adaptive codec, or of a period.
        steps: of the run, by which what begins and ends it is settled; 0: not known, as in somebody else's loop.
        survives: the replicas go on when some of them die.
        cut_rows: sparse tables are cut by rows over the replicas: between whom these travel; None: all have all rows.
    """

    model: nn.Module
    update: Callable[[], None]
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup | None
    device: torch.device
    compression: Compression
    path: Path
    seed: int
    clock: PhaseClock
    loss_scale: Callable[[], float] = lambda: 1.0
    averages_gradients: bool = False
    ddp: DistributedDataParallel | None = None
    has_unused: bool = False
    steps: int = 0
    noted: Callable[[Switch | PeriodChange], None] = lambda change: None
    survives: bool = False
    cut_rows: CutRows | None = None


class StepSync(Protocol):
    """What forward and backward of a step ask of a strategy."""

    @property
    def module(self) -> nn.Module:
        """What the forward pass goes through."""

    @property
    def needs_warmup_backward(self) -> bool:
        """Whether a backward pass of zeros must come before the first step, for sums to be in the same order later."""

    def begin_step(self, units: int, global_units: int) -> int:
        """Hear what the coming step trains on; return by what the sum of this rank's losses is to be divided.

        Where gradients are summed over replicas that is the size of the global batch, in units of the loss (samples,
        tokens); where each replica steps by itself, its own number of units: its gradient is then a mean, and the
        learning rate means what it means to one process with a batch of that size.

        Args:
            units: of this rank's replica; may be 0.
            global_units: of all replicas.
        """

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch; only the last one of a step may communicate."""

    def silent(self) -> AbstractContextManager[object]:
        """Surround the backward pass of a batch that is left out: nothing of it leaves this replica.

        The graph is freed, and libraries that count forward and backward passes (DDP, FSDP) stay in step.
        """

    @property
    def steps_together(self) -> bool:
        """Whether all ranks make one update of a global batch; else each replica makes its own of its part."""

    def communication_began(self) -> Any:
        """Return the moment (as the phase clock marks it) from which backward only waited for others; None: never."""


class Sync(StepSync, Protocol):
    """One strategy: the loop calls `begin_step`, forward and backward through `module`, then `step`."""

    @property
    def has_replica_state(self) -> bool:
        """Whether parameters and optimizer state are each replica's own, so that a checkpoint keeps all of them."""

    def step(self) -> None:
        """Agree on what is to be agreed on, then update the parameters."""

    def leave_out(self) -> None:
        """Do without this step's gradients, in place of `step`; its last backward pass was `silent`.

        Ranks that make one update together make none; a replica that steps alone counts as one that had no samples.
        """

    def agreed(self, averages: bool = False) -> AbstractContextManager[object]:
        """Give the model, inside the block, what the replicas would agree on now: to evaluate or to save it.

        All ranks enter it together. Each gets its own values back afterwards, so that training goes on as if nobody
        had looked.

        Args:
            averages: the model holds moving averages of the weights at present: their mean over the replicas is meant.
        """

    def steps_to_agreement(self, averages: bool = False) -> int | None:
        """Return after how many more steps `agreed` will need nothing from other replicas; all ranks say the same.

        0: it needs nothing now. None: there is no such moment.
        """

    def agreed_of(self, replicas: Sequence[StateView], averages: bool = False) -> StateTree:
        """Return what `agreed` gives the model, by name, from what all replicas saved of themselves instead.

        Args:
            replicas: of each rank the entries of its own state that `AGREED_FROM` names.
            averages: as for `agreed`.
        """

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way that `state_dict` would wait for; all ranks say the same."""

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes that this rank has sent since the start, by group (of `GROUPS` in `collectives.wire`)."""

    def reduce_times(self) -> ReduceTimes | None:
        """Return how long communication during backward took so far; None: there is none, or it cannot be told."""

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did on this rank since the start; empty without it.

        See `compression.transforms.huffman.entropy_coded`.
        """

    def density(self) -> float | None:
        """Return the share of the encoded elements that this rank sent last; None without a sparse codec."""

    def state_dict(self) -> StateTree:
        """Return this rank's own state: plain values, and the tensors that it goes on with (not copied)."""

    def alike(self, state: StateView) -> list[Tensor]:
        """Return those tensors of what `state_dict` just returned that all replicas have, bit for bit."""

    def load_state_dict(self, state: StateTree) -> None:
        """Take back what `state_dict` gave on this rank."""

    def load_resharded(self, states: Sequence[StateView]) -> None:
        """Take over what another number of ranks had, in their order; what it sums to over all ranks is kept."""

    def close(self) -> None:
        """End threads and connections; called when training has ended well."""


class Agreement(Enum):
    """What replicas have in common after the last step; all of them say the same.

    - `REACHED`: no replica has trained anything that the others have no part in: from here all can go on.
    - `BEGUN`: what they have trained until now is taken, and travels; each goes on by itself.
    - `LANDED`: what was taken some steps ago has arrived: from there all can go on (see `Overlapped`).
    - `NONE`: none of this.
    """

    REACHED = auto()
    BEGUN = auto()
    LANDED = auto()
    NONE = auto()


@runtime_checkable
class Regroupable(Sync, Protocol):
    """A strategy that goes on in another group, with other replicas, when some of them are gone or have come."""

    @property
    def agreement(self) -> Agreement:
        """What replicas have in common after the last step."""

    def leave(self) -> Callable[[dist.ProcessGroup | None, Path], Sync]:
        """Let go of the group; returns what builds the strategy for another one (None: this rank is alone) and a path.

        What this rank remembers goes along, once `settle_step` has said of which moment.
        """

    def settle_step(self, made: bool) -> None:
        """Hear, between two groups, whether the step that was begun last counts: if not, it is forgotten."""

    def shared_memory(self) -> StateTree:
        """Return, between two groups, what is remembered alike on all ranks."""

    def take_shared_memory(self, state: StateView) -> None:
        """Take over, between two groups, what `shared_memory` returned on a rank that is further."""


@runtime_checkable
class Replayable(Protocol):
    """A strategy that may decide by what it measures."""

    @property
    def decides(self) -> bool:
        """Whether it does; all ranks say the same."""

    def replay(self, decided: Mapping[int, int]) -> None:
        """Decide as before after these steps of the run, which are trained again; measure from the last one on."""


@runtime_checkable
class Rescuable(Protocol):
    """A strategy whose survivors can save what they had trained with a replica that is gone."""

    def break_off(self, made: bool) -> None:
        """Send nothing any more; unless the step that was begun last was `made`, it is forgotten."""

    def common_state(self) -> StateTree:
        """Return what of `state_dict` all replicas have alike."""

    def load_common_state(self, state: StateView) -> None:
        """Take over what `common_state` returned in another replica; all else begins anew."""


@runtime_checkable
class Overlapped(Regroupable, Protocol):
    """One whose agreements travel behind the computation."""

    def landed(self) -> AbstractContextManager[StateTree]:
        """Give the model, inside the block, what has landed after the last step, and this strategy's state with it.

        Both are of the moment at which it was taken: what was trained since then is not in them. The model gets its own
        values back afterwards. The state's tensors are live.
        """
