"""The memory of training steps, found by taking them on tensors that have no data: of one rank, without the others.

Every storage that comes and goes is counted, so that the peak is that of the model, the layout and the optimizer as
they really run: what autograd keeps, blocks that are whole for a while, temporaries of an update.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.collectives.paths.backend import Backend
from echelon.compression.registry import Compression, codec_class
from echelon.core.layout import Layout
from echelon.data.base import Batch, DataInfo
from echelon.models.tables import make_dense, shrink_tables
from echelon.observe.phases import HostClock
from echelon.optim.choice import OptimizerChoice
from echelon.optim.traits import dense_name
from echelon.parallel.base import alone, place
from echelon.sync.allreduce import AllReduceSettings
from echelon.torch_compat import (
    CTC_LOSS,
    CTC_LOSS_BACKWARD,
    GATHERS,
    FakeTensorMode,
    TorchDispatchMode,
    fake_store,
    mesh_join_replaced,
    storage_key,
    tree_leaves,
    unset_fake_temporarily,
)
from echelon.trainer.inputs import any_inputs, blank_targets
from echelon.trainer.parts import build_parts
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import RunParts
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from echelon.trainer.world import World

_COPIED = GATHERS  # what gloo copies as a whole before it sends
_TEMPORARIES = {  # made within an operation: as large as an argument, how often
    torch.ops.aten.convolution.default: (1, 1),  # oneDNN copies weights into its own layout
    torch.ops.aten.convolution_backward.default: (2, 2),  # and their gradients
    CTC_LOSS_BACKWARD: (6, 1),  # what forward kept, from the end
}


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the losses `(B,)` and what forward keeps `(B, F, 2 L + 1)`, as if the longest target were L long."""
    frames, samples, _symbols = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, frames, 2 * targets.shape[-1] + 1)


def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


_OF_VALUES = {  # operations whose results have a shape that depends on values
    CTC_LOSS: _ctc_loss,
    CTC_LOSS_BACKWARD: _ctc_loss_backward,
}


@dataclass(frozen=True)
class Peaks:
    """Bytes on one rank.

    Attributes:
        held: parameters, buffers and averages, which are there all the time.
        parameters, buffers: those of `held`.
        gradients: of each trainable parameter.
        shapes: of each of them on this rank, with its type.
        optimizer: its state.
        peak: most at any time, all of it.
        without_gradients: most at any time of all but gradients that are ready for the update.
    """

    held: int
    parameters: int
    buffers: int
    gradients: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    optimizer: int
    peak: int
    without_gradients: int


class Counter(TorchDispatchMode):
    """Counts the bytes of storages that are alive, as operations make them and their last user lets go."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._gradients: set[int] = set()
        self.now = self.gradients = self.peak = self.without_gradients = 0

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, any shape, once."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resize(key, storage.nbytes())

    def is_gradient(self, parameter: Tensor) -> None:
        """Say that the gradient of a parameter, any shape, is ready."""
        assert parameter.grad is not None
        key = storage_key(parameter.grad.untyped_storage())
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self.gradients += self._sizes[key]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it goes on with its local parts, which come by here
        if function in _COPIED:
            self._note(args[_COPIED[function]].untyped_storage().nbytes())
        known = _OF_VALUES.get(function)
        result = known(*args) if known else function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.see(value)
        place, copies = _TEMPORARIES.get(function, (0, 0))
        self._note(copies * args[place].nbytes if copies else 0)
        return result

    def _note(self, more: int = 0) -> None:
        self.peak = max(self.peak, self.now + more)
        self.without_gradients = max(self.without_gradients, self.now + more - self.gradients)

    def _resize(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        self._sizes[key] = size
        self.now += more
        if key in self._gradients:
            self.gradients += more

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        self._gradients.discard(key)
        del self._sizes[key], self._watched[key]

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Also count storages that are resized where they are, which is no operation: `fully_shard` does so."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> None:
            """Resize, and count the storage anew."""
            resize(storage, size)
            if (key := storage_key(storage)) in self._sizes:
                self._resize(key, size)

        torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@dataclass(frozen=True)
class Role:
    """Which rank is rehearsed: of a pipeline, in a layout without replicas; the names that stages begin with.

    Attributes:
        pulls_rows: of tables it has the rows that a batch looks up, and servers have the others.
    """

    layout: Layout
    pipeline_rank: int
    cuts: tuple[str, ...]
    pulls_rows: bool = False


def rehearse(run: ResolvedRun, info: DataInfo, model: nn.Module, role: Role, samples: int) -> Peaks:
    """Take steps without data; returns the bytes that they take on this rank.

    Args:
        model: the whole one, on any device; it stays as it is.
        samples: of this rank, in one optimizer step.
    """
    cut_over, all_tables = run.layout.table, run.config.model.sparse_tables
    most_rows = _lookups(info, samples) if role.pulls_rows else None
    run = _alone(run, role)
    config = run.config
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter()
    with _world(role) as world, torch.random.fork_rng(), real_meshes(), mode:
        copied = without_data(model, world.device)
        if cut_over > 1 or most_rows is not None:
            shrink_tables(copied, cut_over, all_tables, most_rows)
        make_dense(copied)
        work = Work(info, run.task.fitted(info), copied, tuning=run.tuning.last)
        clock = HostClock()
        parts = build_parts(run, work, world, clock)
        settings = StepSettings(
            device=world.device,
            autocast=PRECISIONS[config.training.precision].autocast,
            accumulate=config.training.accumulate,
            clip_norm=config.optimizer.clip_norm,
            channels_last=False,
        )
        step = _RehearsedStep(work.task, settings, clock, parts.scaler, parts.split)
        held = _see_held(counter, parts)
        batch = _batch(info, samples, role.layout)
        pipelined = parts.split is not None and parts.split.pipeline is not None
        if pipelined:
            _take(step, batch, parts)  # also runs the whole model for shapes between stages: without real memory
            _see_optimizer(counter, parts)
        with counter, counter.resizing():
            if pipelined or not _take_two(step, batch, parts, counter):
                _take(step, batch, parts)
        trainable = [p for p in parts.local_model.parameters() if p.requires_grad]
        optimizer = sum(_bytes(state) for state in parts.optimizer.state.values())
        return Peaks(
            held,
            parameters=sum(p.nbytes for p in parts.local_model.parameters()),
            buffers=sum(b.nbytes for b in parts.local_model.buffers()),
            gradients=tuple(p.nbytes for p in trainable),
            shapes=tuple((tuple(p.shape), p.dtype) for p in trainable),
            optimizer=optimizer,
            peak=counter.peak,
            without_gradients=counter.without_gradients,
        )


class _RehearsedStep(Step):
    """A step on targets that have no values, by which units could be counted: memory does not depend on them."""

    def count_units(self, batch: Batch) -> tuple[int, int]:
        """Return the number of samples."""
        return batch.global_size, batch.global_size


def _alone(run: ResolvedRun, role: Role) -> ResolvedRun:
    """Leave out what acts between replicas, what a CPU does not have, and scaling, which looks at values.

    8-bit layers and float16 train as bfloat16. Workers of a parameter server have no optimizer and no average:
    these are the servers'; plain SGD is the least. Gradients of tables are counted whole, for only values tell which
    rows a batch touches.
    """
    config = run.config
    optimizer, ema, choice = config.optimizer, config.training.ema, run.optimizer
    if run.sync.uses_servers:
        optimizer, ema = replace(optimizer, name="sgd", momentum=0.0, weight_decay=0.0), 0.0
        choice = OptimizerChoice(optimizer.name)
    if (dense := dense_name(optimizer.name)) != optimizer.name:
        optimizer, choice = replace(optimizer, name=dense), OptimizerChoice(dense)
    precision = "bf16" if config.training.precision in ("fp8", "fp16") else config.training.precision
    config = replace(
        config,
        optimizer=optimizer,
        model=replace(config.model, compile=False, weights="", sparse_tables=False),
        training=replace(config.training, precision=precision, ema=ema),
    )
    return replace(
        run, config=config, optimizer=choice, sync=AllReduceSettings(), compression=Compression(codec_class("none")()),
        path=Backend(), cuts=role.cuts, layout=replace(run.layout, table=1),
    )  # fmt: skip


def without_data(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model without the data of its tensors, inside a mode in which tensors have none."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        blank = torch.empty_like(parameter, device=device)
        memo[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device=device))
    return copy.deepcopy(model, memo)


def _see_held(counter: Counter, run_parts: RunParts) -> int:
    held = run_parts.local_model
    averages = run_parts.ema.state_dict()["average"].values() if run_parts.ema else ()
    for tensor in (*held.parameters(), *held.buffers(), *averages):
        counter.see(tensor)
    for parameter in run_parts.model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(counter.is_gradient)
    return counter.now


def _see_optimizer(counter: Counter, run_parts: RunParts) -> None:
    for state in run_parts.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                counter.see(value)


def _take(step: Step, batch: Batch, run_parts: RunParts) -> None:
    step.forward_backward(batch, run_parts.sync)
    _finish(run_parts)


def _finish(run_parts: RunParts) -> None:
    run_parts.sync.step()
    if run_parts.ema:
        run_parts.ema.update(run_parts.local_model)


def _take_two(step: Step, batch: Batch, run_parts: RunParts, counter: Counter) -> bool:
    """Take a step, which makes the optimizer's state, and of a second one the update alone: its forward and backward
    are those of the first beside that state. Returns False where they are not: the second step is still to be taken.
    """
    before, parameters, optimizer = counter.now, list(run_parts.model.parameters()), run_parts.optimizer
    step.forward_backward(batch, run_parts.sync)
    reached = [parameter for parameter in parameters if parameter.grad is not None]
    begun = bool(optimizer.state)  # parameters are updated in backward
    peak, without_gradients = counter.peak, counter.without_gradients
    _finish(run_parts)
    state = sum(_bytes(each) for each in optimizer.state.values())
    if begun or counter.now != before + state or any(p.grad is not None for p in parameters):
        return False
    counter.peak = max(counter.peak, peak + state)
    counter.without_gradients = max(counter.without_gradients, without_gradients + state)
    for parameter in reached:
        parameter.grad = torch.empty_like(parameter)
        if not isinstance(parameter, DTensor):
            counter.is_gradient(parameter)
    _finish(run_parts)
    return True


def _batch(info: DataInfo, samples: int, layout: Layout) -> Batch:
    return Batch(any_inputs(info, samples), blank_targets(info, samples), samples * layout.fsdp, 0)


def _lookups(info: DataInfo, samples: int) -> int:
    """Return the most rows of a table that a batch can look up."""
    inputs = [value for value in tree_leaves(any_inputs(info, samples)) if isinstance(value, Tensor)]
    return sum(value.numel() for value in inputs if not value.is_floating_point())


def _bytes(values: Mapping[str, object]) -> int:
    return sum(value.nbytes for value in values.values() if isinstance(value, Tensor))


@contextmanager
def real_meshes() -> Iterator[None]:
    """Let `fully_shard` join its mesh with that of tensor parallelism: it reads values of the mesh, which are known."""

    def with_values(join: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
        """Return the join of meshes whose values are known."""
        return unset_fake_temporarily()(join)

    with mesh_join_replaced(with_values):
        yield


@contextmanager
def _world(role: Role) -> Iterator[World]:
    """Stand in a world whose other ranks do not exist: what they would send is never looked at."""
    device, size = torch.device("cpu"), role.layout.model_size
    if size == 1:
        yield World(0, 1, 0, device, None, alone())
        return
    rank = role.pipeline_rank * role.layout.fsdp * role.layout.tp
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake_store())
    try:
        placement = place(role.layout, rank, "cpu", timedelta(seconds=60))
        yield World(rank, size, rank, device, dist.group.WORLD, placement)
    finally:
        dist.destroy_process_group()
