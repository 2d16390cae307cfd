"""Strategies in a training loop of somebody else's: plain torch, Lightning, Accelerate, the Hugging Face Trainer.

The same strategies, codecs and paths as those of a run, around the optimizer's step of the loop.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import registry as paths
from echelon.collectives.ddp import take_momentum, warn_of_numpy
from echelon.collectives.wire import nothing_to_encode
from echelon.compression import Compression
from echelon.compression import read as read_codec
from echelon.core.errors import UserError, naming
from echelon.core.state_tree import StateTree
from echelon.observe.phases import HostClock
from echelon.sync.base import SyncContext
from echelon.sync.registry import read as read_sync
from echelon.sync.same_start import equalise
from echelon.sync.settings import SyncSettings
from echelon.torch_compat import has_comm_hook, set_unscales_itself, unscales_itself

Closure = Callable[[], float]


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: str = "allreduce",
    compression: str = "none",
    collective: str = "backend",
    seed: int = 0,
) -> Replica:
    """Let replicas of a model agree as a strategy says, in a loop of one's own; returns this process's replica.

    From then on `optimizer.step()` does what the strategy does at a step. Each process calls `wrap` once, where the
    process group stands and before states are loaded; the first one's weights become those of all.

    Args:
        model: the module as it is; or the DistributedDataParallel of a trainer, whose processes then agree.
        optimizer: of the module's parameters; changed in place. Of a codec that wants momentum before its encoding
            (sign, topk, ...) it gives up its own, as `ddp_hook` says.
        sync: spec of the strategy: `allreduce`, `local(8)`, `local(8, start=1000)`, `diloco(50)`, `easgd(10)`, ...
        compression: spec of what travels, such as `topk(0.01)`.
        collective: spec of the path, such as `ring`.
        seed: of the codec's draws, the same in every process.

    Raises:
        UserError: a spec cannot be read or does not fit; servers would be needed; processes that cannot meet.

    Example:
        >>> replica = echelon.wrap(model, optimizer, sync="local(8)")  # doctest: +SKIP
        >>> for inputs, targets in loader:  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss_of(replica.model(inputs), targets).backward()
        ...     optimizer.step()
    """
    settings = _settings_of(sync)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    plain = ddp.module if ddp is not None else model
    group = _group(ddp)
    stepped = _innermost(optimizer)
    _check(plain, ddp, stepped)
    path, codec = paths.build(collective), _codec_for(settings, compression, plain, stepped, group)
    if group is not None and ddp is None:
        equalise(plain, group)
    patched = SteppedOptimizer(stepped, encodes=codec.encodes and _sums_gradients(settings))
    context = SyncContext(
        model=plain,
        update=patched.update,
        optimizer=stepped,
        group=group,
        device=next(plain.parameters()).device,
        compression=codec,
        path=path,
        seed=seed,
        clock=HostClock(),
        averages_gradients=True,
        ddp=ddp,
    )
    return Replica(ddp or plain, optimizer, patched, settings, context)


class Replica:
    """This process's replica of a model in a loop of one's own, and how it agrees with those of the others.

    Attributes:
        model: what the forward pass goes through; the module that was given, or a DistributedDataParallel around it.
        optimizer: the one that was given.
        steps: optimizer steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        patched: SteppedOptimizer,
        settings: SyncSettings,
        context: SyncContext,
    ) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._replicas = 1 if context.group is None else context.group.size()
        self._patched, self._settings = patched, settings
        self._sync = settings.build(context)
        self.model: nn.Module = model
        if self._sync.module is not context.model:  # gradients are reduced in its backward, at least at first
            self.model = self._sync.module
        elif context.ddp is not None:
            context.ddp.register_comm_hook(None, noop_hook)  # each replica keeps its own gradients
        if context.ddp is not None and not settings.sums_in_backward:
            context.ddp.broadcast_buffers = False  # and its own statistics, until all agree
        patched.begin(self._step)

    def __repr__(self) -> str:
        return f"Replica({self._settings}, 1 of {self._replicas}, steps={self.steps})"

    def _step(self) -> None:
        self._sync.begin_step(1, self._replicas)
        self._sync.step()
        self.steps += 1

    def agreed(self) -> AbstractContextManager[object]:
        """Give the model, inside the block, what the replicas would agree on now: to evaluate or to save it.

        All processes enter it together; each gets its own values back afterwards.
        """
        return self._sync.agreed()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent so that the replicas agree."""
        return sum(self._sync.bytes_sent().values())

    def state_dict(self) -> StateTree:
        """Return counters, what was agreed on last and what codecs have not sent yet: tensors and plain values.

        It is this process's own, as the model's and the optimizer's states are where replicas step by themselves:
        each process saves all three. Tensors may be live: save them, or copy them, before the next step.
        """
        return {"sync": str(self._settings), "steps": self.steps, "state": self._sync.state_dict()}

    def load_state_dict(self, state: StateTree) -> None:
        """Take back what `state_dict` returned in the same one of as many processes.

        Raises:
            UserError: it is another strategy's.
        """
        if state["sync"] != str(self._settings):
            raise UserError(f"the saved state is of sync {state['sync']}, and this is {self._settings}")
        self.steps = int(state["steps"])
        self._sync.load_state_dict(state["state"])

    def close(self) -> None:
        """Let what is on its way arrive, end threads, and give the optimizer its own step back."""
        self._sync.close()
        self._patched.end()


class SteppedOptimizer:
    """An optimizer whose `step` goes through a strategy, in place: trainers and schedules that hold it notice nothing.

    A GradScaler calls the step of such an optimizer also where a gradient overflowed: the replica then takes no step,
    but it agrees with the others, which count theirs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, encodes: bool) -> None:
        """Prepare; `encodes`: a codec remembers gradients from step to step."""
        self._optimizer, self._own, self._encodes = optimizer, optimizer.step, encodes
        self._scales_itself = unscales_itself(optimizer)

    def begin(self, step: Callable[[], None]) -> None:
        """Replace the optimizer's step by this one."""

        @functools.wraps(self._own)
        def stepping(_: torch.optim.Optimizer, closure: Closure | None = None) -> float | None:
            """Compute the loss where that is asked for, then update and agree."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            step()
            return loss

        stepping.agrees = True  # type: ignore[attr-defined]
        self._optimizer.step = MethodType(stepping, self._optimizer)  # type: ignore[method-assign]
        set_unscales_itself(self._optimizer, True)

    def update(self) -> None:
        """Take the optimizer's own step, unless a GradScaler says that a gradient overflowed.

        Raises:
            UserError: a codec remembers gradients, whose scale changes.
        """
        optimizer = self._optimizer
        overflowed, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if overflowed is not None and self._encodes:
            raise UserError(
                "a GradScaler changes the scale of gradients, and the codec remembers some of the steps before: "
                "use bfloat16, or echelon.ddp_hook, which has `rescale`"
            )
        if overflowed is not None and not self._scales_itself:
            optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
            if overflowed:
                return
            self._divide(scale)
        self._own()

    def _divide(self, scale: Tensor | None) -> None:
        """Take the scale out of the gradients; None: that was done."""
        for group in self._optimizer.param_groups if scale is not None else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)

    def end(self) -> None:
        """Give the optimizer its own step back."""
        self._optimizer.step = self._own  # type: ignore[method-assign]
        set_unscales_itself(self._optimizer, self._scales_itself)


def _settings_of(sync: str) -> SyncSettings:
    with naming("sync"):
        settings = read_sync(sync)
    if settings.uses_servers:
        raise UserError(
            f"sync {sync}: servers hold the parameters and hand out the samples, which takes a run of `echelon train`; "
            "in a loop of your own use local(8) or easgd(10)"
        )
    return settings


def _codec_for(
    settings: SyncSettings,
    compression: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
) -> Compression:
    """Return what travels, with the momentum that it takes over from the optimizer; warns where nothing is encoded.

    Raises:
        UserError: it cannot be read, or does not fit the strategy or the optimizer.
    """
    codec = read_codec(compression)
    settings.check(codec)
    settings.check_momentum(codec, any(each.get("momentum", 0.0) for each in optimizer.param_groups))
    unused = nothing_to_encode(compression, model.parameters()) if codec.encodes else ""
    if unused and group is not None and group.rank() == 0:
        warnings.warn(unused.removeprefix("--"), stacklevel=3)
    if codec.encodes and group is not None:
        warn_of_numpy(codec, next(model.parameters()).device, group.rank(), stacklevel=4)
    takes = settings.encodes_gradients and codec.encodes and group is not None
    return take_momentum(codec, optimizer) if takes else codec


def _sums_gradients(settings: SyncSettings) -> bool:
    return settings.sums_in_backward or settings.synchronous_steps > 0


def _group(ddp: DistributedDataParallel | None) -> dist.ProcessGroup | None:
    """Return the processes that agree; None for a single one."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("the processes have not met: call torch.distributed.init_process_group before echelon.wrap")
        return None
    group = ddp.process_group if ddp is not None else dist.group.WORLD
    return group if group is not None and group.size() > 1 else None


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that a trainer has wrapped in its own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if getattr(optimizer, "scaler", None) is not None:
            raise UserError("this trainer's fp16 keeps the step that the optimizer had: use bf16")
        optimizer = inner
    return optimizer


def _check(model: nn.Module, ddp: DistributedDataParallel | None, optimizer: torch.optim.Optimizer) -> None:
    parameters = list(model.parameters())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UserError("the model is sharded, and replicas agree as a whole: give a plain module, or one under DDP")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in stepped for parameter in parameters):
        raise UserError("the optimizer updates none of the model's parameters: build it of this very model's")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS computes the loss several times a step: use an optimizer that does so once")
    if getattr(optimizer.step, "agrees", False):
        raise UserError("this optimizer is wrapped already: call close() of the replica before, or wrap once")
    if ddp is not None and has_comm_hook(ddp):
        raise UserError("this DistributedDataParallel has a communication hook already: give wrap a fresh one")
