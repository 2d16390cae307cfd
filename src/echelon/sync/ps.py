"""Parameter server: workers push gradients to servers that hold the parameters, and pull what changed.

Helps: Workers of different speeds, and machines that come and go: nobody waits for the slowest (async, ssp, backup).
Costs: processes, memory and network for the servers. With async and ssp, gradients are stale, which costs accuracy.
Needs: processes that Echelon starts itself (not torchrun).

mode=sync waits for the gradients of all workers (or all but `backup`: Chen et al. 2016, arXiv:1604.00981). mode=async
applies each gradient as it arrives (Downpour; Dean et al. 2012). mode=ssp is async, but no worker may run far ahead of
the slowest (stale synchronous; Ho et al. 2013).
"""

# The declaration, which imports no torch; servers and the workers' side are in `ps/`.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from echelon.compression import Compression
from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.core.errors import UserError
from echelon.sync.settings import SyncSettings

if TYPE_CHECKING:
    from echelon.compression.base import Codec
    from echelon.sync.base import Sync, SyncContext
    from echelon.sync.state_bytes import Piece, StateBytes

# Zheng et al. 2017: lambda of the constant form, and lambda_0 of the adaptive one in the authors' code.
MANY_WORKERS = 4
"""From which on stale gradients cost so much in a short run that they are scaled: measured with two and with four."""
STRENGTH = {"none": 0.0, "constant": 0.04, "adaptive": 2.0}


@dataclass(frozen=True)
class ServerSettings(SyncSettings):
    """Settings of `ps`.

    Attributes:
        mode: when gradients become an update: sync (all of one version of the parameters together), async (each as it
            arrives), ssp (as async, but no worker is more than `staleness` tasks ahead of the slowest; with staleness
            0, as sync).
        servers: how many processes hold the parameters.
        staleness: ssp only: how many tasks (parts of a batch, see `parts`) a worker may be ahead of the slowest.
        backup: sync only: how many of the workers' gradients an update does not wait for.
        compensation: correct stale gradients by g + lambda g*g*(w_now - w_then) (Zheng et al. 2017): none, constant or
            adaptive.
        strength: lambda (adaptive: lambda_0); left out: 0.04 (adaptive: 2).
        parts: async and ssp: into how many parts each batch is cut. Each part is an update of its own, with that part
            of the learning rate, so gradients are stale by less than a batch. Left out: as many as there are workers at
            the run's start. 1: workers take whole batches, which sends less, but gradients are batches old.
        by_staleness: divide the learning rate of a gradient by its staleness (Zhang et al. 2016). Left out: true with
            mode=async, SGD, and at least four workers for each part of a batch.
        momentum_correction: true: the servers keep one momentum for all gradients, lowered by what asynchrony adds, to
            1 - workers (1 - momentum), at least 0 (Mitliagkas et al. 2016); false: they keep it as given. Left out:
            with async and ssp, SGD and several workers, each worker keeps the momentum of its own gradients (Hakimi et
            al. 2019, DANA-Slim).
        decay_s: weigh a gradient by exp(-age / decay_s), its age in seconds since the pull that it was computed on; 0:
            off.
        snapshot_every: updates of a server between its snapshots; with a standby there are none.
        replicas: standbys for each server, 0 or 1; a standby holds every acknowledged update.
        chunk_kb: largest piece of the parameters in one message, in KiB.
        order: of a step's pushes and pulls; ready: as gradients and values are made, much on its way at a time;
            priority: what the next forward pass needs first, and little on its way, so that it overtakes. With
            mode=sync, ready begins a step when the one before is complete; with priority its forward pass begins at
            once, and each layer waits for its own parameters.
        ema: decay of a moving average of the parameters on the servers; set by --ema; 0: off.
    """

    name: ClassVar[str] = "ps"
    uses_servers: ClassVar[bool] = True
    mode: Annotated[str, OneOf(("sync", "async", "ssp"))] = "async"
    servers: Annotated[int, Bounds(least=1, most=64)] = 1
    staleness: Annotated[int, Bounds(least=0, most=10_000)] = 3
    backup: Annotated[int, Bounds(least=0, most=1_000)] = 0
    parts: Annotated[int | None, Bounds(least=1, most=4096)] = None
    compensation: Annotated[str, OneOf(("none", "constant", "adaptive"))] = "none"
    strength: Annotated[float | None, Bounds(least=0)] = None
    by_staleness: bool | None = None
    momentum_correction: bool | None = None
    decay_s: Annotated[float, Bounds(least=0)] = 0.0
    snapshot_every: Annotated[int, Bounds(least=1, most=1_000_000_000)] = 200
    replicas: Annotated[int, Bounds(least=0, most=1)] = 0
    chunk_kb: Annotated[int, Bounds(least=4, most=65_536)] = 1024
    order: Annotated[str, OneOf(("ready", "priority"))] = "ready"
    ema: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.backup and self.mode != "sync":
            raise ValueError(f"backup={self.backup} belongs to mode=sync; mode={self.mode} waits for no gradient")
        if self.backup and self.by_priority:
            raise ValueError(f"order=priority goes on into the next step, which backup={self.backup} may begin without "
                             "a worker's gradient: leave one of them out")  # fmt: skip
        if self.parts and self.aggregates:
            raise ValueError(f"parts={self.parts} belongs to mode=async and ssp: in mode=sync each worker has one")
        stale = self.compensation != "none" or bool(self.by_staleness) or self.momentum_correction or self.decay_s > 0
        if stale and self.aggregates:
            raise ValueError("compensation, by_staleness, momentum_correction and decay_s act on stale gradients: "
                             "with mode=sync there are none, use mode=async or mode=ssp")  # fmt: skip

    @property
    def warmup_share(self) -> float:
        """A tenth of the run, where gradients are stale: how high a rate is stable grows as training goes on."""
        return 0.0 if self.aggregates else 0.1

    @property
    def aggregates(self) -> bool:
        """Whether the gradients of one version are summed into one update."""
        return self.mode == "sync" or (self.mode == "ssp" and self.staleness == 0)

    @property
    def by_priority(self) -> bool:
        """Whether what the next forward pass needs first travels first."""
        return self.order == "priority"

    def workers_keep_momentum(self, workers: int) -> bool:
        """Whether each of so many workers keeps a momentum of its own gradients, where the optimizer is SGD.

        Delay compensation takes plain gradients; a single worker's momentum is in the servers' checkpoints.
        """
        return workers > 1 and not self.aggregates and self.momentum_correction is None and self.compensation == "none"

    def server_momentum(self, wanted: float, workers: int, batch_parts: int) -> float:
        """Return the servers' momentum with so many workers, where each batch is cut into parts."""
        if self.aggregates or self.momentum_correction is False:
            return wanted
        return corrected_momentum(wanted, workers if self.momentum_correction else workers / batch_parts)

    def scales_by_staleness(self, workers: int, batch_parts: int) -> bool:
        """Whether so many workers' gradients are scaled by staleness, of SGD."""
        is_default = self.mode == "async" and workers >= MANY_WORKERS * batch_parts
        return not self.aggregates and (is_default if self.by_staleness is None else self.by_staleness)

    @property
    def chunk_bytes(self) -> int:
        """Largest message body for a piece of the parameters."""
        return self.chunk_kb * 1024

    @property
    def compensation_strength(self) -> float:
        """Lambda, or lambda_0 of the adaptive form."""
        return STRENGTH[self.compensation] if self.strength is None else self.strength

    def with_ema(self, decay: float) -> ServerSettings:
        """Return the settings with the decay of the average that the servers keep.

        Raises:
            UserError: the spec names one itself.
        """
        if self.ema:
            raise UserError(f"--sync {self}: the average is asked for by --ema {self.ema:g}")
        return replace(self, ema=decay)

    def batch_parts(self, replicas: int) -> int:
        """Return how many leases a batch is in a run that begins with so many workers."""
        return self.parts or replicas

    def momentum_notes(self, momentum: float, workers: int) -> list[str]:
        """Say to what a momentum is lowered on the servers."""
        if self.workers_keep_momentum(workers):
            return []
        parts = self.batch_parts(workers)
        lowered = self.server_momentum(momentum, workers, parts)
        if lowered == momentum:
            return []
        stale = [] if workers < MANY_WORKERS * parts or self.by_staleness else [
            f"--sync {self}: gradients of {workers} workers that do not wait are old when they arrive, which costs "
            "accuracy, several points in a short run"
            + (": the learning rate of each is divided by its staleness (by_staleness=false: as given)"
               if self.scales_by_staleness(workers, parts) else ": by_staleness=true has lost the least there")
        ]  # fmt: skip
        return [
            f"--sync {self}: the servers use momentum {lowered:g} in place of {momentum:g}, because {workers} workers "
            f"that do not wait for each other add some by themselves (momentum_correction=false keeps {momentum:g})",
            *stale,
        ]

    def check_run(self, workers: int, clips: bool, has_momentum: bool) -> None:
        """Refuse a norm that no server sees, more backups than workers, and a correction of no momentum (UserError)."""
        if clips and self.aggregates:
            raise UserError(
                f"--sync {self}: no server sees the norm of the whole gradient: leave out --clip-norm, or mode=async"
            )
        if self.backup >= workers:
            raise UserError(f"--sync {self}: with {workers} workers at most {workers - 1} are backups")
        if self.momentum_correction and not has_momentum:
            raise UserError(
                f"--sync {self}: there is no momentum on the servers to correct: use --optimizer sgd with "
                "--momentum and a --compression that leaves it to the optimizer, or leave momentum_correction out"
            )

    def check(self, compression: Compression) -> None:
        """Refuse codecs that cannot serve a server.

        Raises:
            UserError: says what works instead.
        """
        server_codec(compression)

    def state_bytes(self, compression: Compression, piece: Piece) -> StateBytes:
        """Return what a worker keeps: parameters as they came from the servers, and the states of what it pushes.

        At the end of backward all gradients are there, and uncompressed copies of them on their way.
        """
        from echelon.sync.state_bytes import StateBytes, pushed, whole

        size, states = whole(piece.parameters), pushed(compression, piece.parameters)
        return StateBytes(size + states, (1 if compression.encodes else 2) * size, states)

    def build(self, context: SyncContext) -> Sync:
        """Refuse: a parameter server is more than one process's strategy.

        Raises:
            UserError: always; says how to start it.
        """
        raise UserError(
            "--sync ps(...) has roles of its own (scheduler, servers, workers): start it with `echelon train` "
            "and without torchrun"
        )


STRATEGY = ServerSettings


def corrected_momentum(wanted: float, workers: float) -> float:
    """Return the momentum that the optimizer needs so that it and asynchrony make up the wanted one.

    M asynchronous workers act like momentum 1 - 1/M (Mitliagkas et al. 2016, arXiv:1605.09774, theorem 1). Momenta
    compose here as their memories do: 1 - wanted = (1 - explicit) / M, so explicit = 1 - M (1 - wanted), at least 0.
    """
    return wanted if workers <= 1 else max(0.0, 1.0 - workers * (1.0 - wanted))


def server_settings(sync: SyncSettings) -> ServerSettings:
    """Return the settings of a run that has servers."""
    assert isinstance(sync, ServerSettings), f"{sync.name} has no servers"
    return sync


def server_codec(compression: Compression) -> Codec | None:
    """Build the codec of what is pushed; None: values travel as they are.

    Raises:
        UserError: the codec cannot serve a server.
    """
    if compression.codec.direction:
        raise UserError(
            f"--compression {compression} gives the direction of a vote over all workers, and a server has no vote: "
            "use --sync allreduce with it, or sign without vote"
        )
    return compression.build() if compression.encodes else None
