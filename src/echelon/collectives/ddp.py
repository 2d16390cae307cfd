"""The communication hook for a DistributedDataParallel model that someone else wraps: plain, Lightning, Accelerate."""

# DDP compares the annotations of a hook with the types themselves: no `from __future__ import annotations` here.

import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import registry
from echelon.collectives.base import Path
from echelon.collectives.hook import BY_PRIORITY, GradientHook
from echelon.collectives.wire import WireCount
from echelon.compression import Compression, read
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView


class DdpHook:
    """A GradientHook for a model that someone else wraps: it averages, and may be made before the process group is.

        hook = echelon.ddp_hook("topk(density=0.01)")
        hook.attach(ddp, optimizer)                                                 # plain DDP
        hook.attach(trainer.strategy.model, trainer.optimizers[0])                  # Lightning, in on_train_start
        DDPStrategy(ddp_comm_state=hook, ddp_comm_hook=hook.function)               # the same, on GPUs only
        hook.attach(accelerator.prepare(model), optimizer)                          # Accelerate

    Registered without `attach` it sees no names: parameters are then numbered in the order of the first backward.
    """

    def __init__(self, compression: Compression, path: Path, seed: int) -> None:
        self._compression, self._path, self._seed = compression, path, seed
        self._inner: GradientHook | None = None
        self._saved: StateView = {}
        self._placed = not compression.leaves_momentum

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Register on a model, for the ranks that it is wrapped for.

        Args:
            optimizer: of the SGD family: a codec that wants momentum before its encoding (sign, topk, threshold,
                randomk) takes it over, and the optimizer's becomes 0: after decoding, it spoils training. SGD's weight
                decay, which momentum m has multiplied until then, becomes 1 / (1 - m) times as large. Without it, a
                warning says what to write. Attach before states are loaded.

        With a GradScaler call `rescale` where its scale has changed: what the codec remembers is of scaled gradients.

        Raises:
            UserError: the codec's momentum contradicts the optimizer's, or parameters differ in theirs.
        """
        if optimizer is not None and self._compression.encodes:
            self._compression = take_momentum(self._compression, optimizer)
            self._placed = True
        self._open(ddp.process_group, next(ddp.parameters()).device).attach(ddp)

    @staticmethod
    def function(state: "DdpHook", bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook as `register_comm_hook` wants it, with the DdpHook as its state."""
        inner = state._inner if state._inner is not None else state._open(None, bucket.buffer().device)
        return inner(inner, bucket)

    @property
    def compression(self) -> str:
        """The codec's spec, with the momentum that it took over."""
        return str(self._compression)

    @property
    def wire(self) -> WireCount:
        """Bytes sent by this rank so far."""
        return self._inner.wire if self._inner is not None else WireCount()

    def state_dict(self) -> StateTree:
        """Return error memories and counters, as tensors and numbers under flat keys; every rank has its own."""
        return self._inner.state_dict() if self._inner is not None else dict(self._saved)

    def load_state_dict(self, state: StateView) -> None:
        """Take over what `state_dict` returned on the same rank of as many; may come before the first step."""
        self._saved = state
        if self._inner is not None:
            self._inner.load_state_dict(state)

    def rescale(self, factor: float) -> None:
        """Hear that a GradScaler changed its scale by this factor (new / old), after `scaler.update()`."""
        if self._inner is not None:
            self._inner.rescale(factor)

    def close(self) -> None:
        """End the communication thread."""
        if self._inner is not None:
            self._inner.close()

    def _open(self, group: dist.ProcessGroup | None, device: torch.device) -> GradientHook:
        if not self._placed:
            warnings.warn(_WHERE_IS_MOMENTUM.format(str(self._compression)), UserWarning, stacklevel=3)
        warn_of_numpy(self._compression, device, dist.get_rank(group), stacklevel=4)
        self._inner = GradientHook(group, self._compression, self._path, average=True, seed=self._seed)
        if self._saved:
            self._inner.load_state_dict(self._saved)
        return self._inner


_WHERE_IS_MOMENTUM = (
    "ddp_hook({0!r}): momentum in the optimizer, after decoding, spoils training with this codec: "
    "write hook.attach(ddp, optimizer), which moves it in front of the encoding, or give it in the spec, as "
    "momentum=0.9 (and none to the optimizer); momentum=0 in the spec says that there is none"
)


def warn_of_numpy(compression: Compression, device: torch.device, rank: int, stacklevel: int) -> None:
    """Warn, in rank 0, where numpy computes on a CPU what codecs have compiled loops for."""
    for note in compression.numpy_notes() if device.type == "cpu" and rank == 0 else []:
        warnings.warn(f"compression {compression}: {note}", UserWarning, stacklevel=stacklevel)


def take_momentum(compression: Compression, optimizer: torch.optim.Optimizer) -> Compression:
    """Move an optimizer's momentum into the codec where that is its place; returns what travels then.

    Raises:
        UserError: the codec's momentum contradicts the optimizer's, or parameters differ in theirs.
    """
    groups = optimizer.param_groups
    found = {(float(group.get("momentum", 0.0)), bool(group.get("nesterov", False))) for group in groups}
    if len(found) > 1:
        raise UserError(
            f"compression {compression}: the optimizer has several momenta (momentum, nesterov: "
            f"{', '.join(str(each) for each in sorted(found))}): use one for all groups"
        )
    asked, nesterov = found.pop()
    settled, left = compression.with_momentum(asked, nesterov)
    for group in groups:
        if left != asked and isinstance(optimizer, torch.optim.SGD):
            group["weight_decay"] *= settled.decay_factor(asked)
        if "momentum" in group:
            group["momentum"] = left
    return settled


def ddp_hook(compression: str, collective: str = "backend", seed: int = 0) -> DdpHook:
    """Make a communication hook for a plain DistributedDataParallel model, in Lightning and Accelerate too.

    Args:
        compression: spec of the codec, such as `powersgd(rank=2)` or `topk(density=0.01)`. One with its own momentum
            (`topk(0.01, momentum=0.9)`) wants an optimizer without; `attach(ddp, optimizer)` sees to it.
        collective: spec of the path.
        seed: of the codec's draws, the same on every rank.

    Raises:
        UserError: a spec cannot be read, or asks for an update layer by layer (order=priority).
    """
    path: Path = registry.build(collective)
    if path.by_priority:
        raise UserError(f"ddp_hook({compression!r}, {collective!r}): {BY_PRIORITY}")
    return DdpHook(read(compression), path, seed)
