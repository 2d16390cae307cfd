"""The communication hook of DistributedDataParallel: gradients of a bucket are reduced while backward still runs."""

# DDP compares the annotations of a hook with the types themselves: no `from __future__ import annotations` here.

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import codec_state
from echelon.collectives.base import Path
from echelon.collectives.buckets import lay_out
from echelon.collectives.comm_thread import BucketWork, CommThread, DdpBucket
from echelon.collectives.pace import LinkPace
from echelon.collectives.paths.backend import Backend
from echelon.collectives.priority_sums import PrioritySums
from echelon.collectives.reducer import Coding, check_combination
from echelon.collectives.route import Route, open_route
from echelon.collectives.times import ReduceTimes
from echelon.collectives.wire import WireCount, numel_by_group, ring_bytes
from echelon.collectives.work import CodecWork, PathWork
from echelon.compression import Compression
from echelon.compression.base import Codec
from echelon.compression.rungs import Switch
from echelon.core.errors import UserError
from echelon.core.listeners import closed_afterwards
from echelon.core.state_tree import StateTree, StateView
from echelon.torch_compat import same_ranks_group, uses_nccl

BY_PRIORITY = (
    "order=priority is of runs of `echelon train` whose gradients travel as they are: leave out order=priority here, "
    "or the codec"
)


class GradientHook:
    """Reduces the gradients of a DDP model: sums them, or averages them as plain DDP does.

        hook = GradientHook(group, read("topk(0.01)"), average=True)
        hook.attach(ddp)                                              # or, where only these two can be handed over:
        ddp.register_comm_hook(state=hook, hook=hook.function)

    Attributes:
        codec: what encodes the gradients; None: they travel as they are.
        sums: of a path by priority, once attached: what gradients go through, which backward then leaves unsummed.
        pace: of a codec that follows the link: which way gradients go; else None.
        wire: bytes sent by this rank, by group of parameters.
        times: how long buckets were under way; on a GPU only the host's part, which says nothing.
        last_ready_s: time.perf_counter() when backward handed over its last bucket: what follows only waits.
        last_ready_event: the same as a recorded CUDA event; None on a CPU.
        on_last_bucket: called at that moment.
        is_complete: whether backward has handed over its last bucket since this was set to False.
        after_backward: buckets go to the communication thread when backward has handed over the last one. So with
            torch's SyncBatchNorm: what it gathers in backward and what the thread sends are kernels of two NCCL
            communicators, and ranks that queue them in different orders may wait for each other forever.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        compression: Compression | None = None,
        path: Path | None = None,
        *,
        average: bool,
        seed: int = 0,
    ) -> None:
        """Prepare; every rank of the group calls this.

        Args:
            group: ranks to reduce over, whose timeout holds for every wait; None: all.
            compression: what travels; None: the gradients as they are.
            path: along which it travels; None: as the backend chooses.
            average: divide the sum by the number of ranks.
            seed: of the codec's draws, the same on every rank.

        Raises:
            UserError: the codec cannot travel along the path.
        """
        self.codec: Codec | None = compression.build() if compression and compression.encodes else None
        self.average, self.seed = average, seed
        self.wire = WireCount()
        self.times = ReduceTimes()
        self.last_ready_s = 0.0
        self.last_ready_event: torch.cuda.Event | None = None
        self.on_last_bucket: Callable[[], None] = _nothing
        self.is_complete = self.after_backward = False
        self._held_back: list[DdpBucket] = []
        self._route = open_route(path or Backend(), group)
        self._counts: dict[tuple[int, int], dict[str, int]] = {}
        self._names: dict[int, str] = {}
        self._thread: CommThread | None = None
        self._closed = self._silent = False
        self._work: BucketWork | None = None
        self.sums: PrioritySums | None = None
        if self.codec is not None:
            check_combination(self.codec, self._route.path, self._route.size)
        by_priority = self._route.path.by_priority
        if by_priority and (self.codec is not None or average):
            raise UserError(BY_PRIORITY)
        if self.codec is not None or by_priority or not self._route.path.by_backend:
            with closed_afterwards(with_nccl=uses_nccl(self._route.group)):
                self._route = Route(self._route.path, same_ranks_group(self._route.group))
            self._work = None if by_priority else self._make_work()
        follows = self.codec is not None and compression is not None and compression.codec.follows_link
        self.pace = LinkPace() if follows and self._route.path.by_backend else None
        self._pace_before: StateTree = {}  # the step that was begun last, until it is made
        self._heard: Tensor | None = None  # 1 element: of ranks' seconds, in a step whose gradients went as they are

    def _make_work(self) -> BucketWork:
        if self.codec is None:
            return PathWork(self._route, self.average, self.wire)
        return CodecWork(Coding(self.codec, self._route, self.average, self.seed), self.wire)

    @staticmethod
    def function(state: "GradientHook", bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook as `register_comm_hook` wants it, with the GradientHook as its state."""
        return state(state, bucket)

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register on a model and learn its parameters' names, which saved states are then keyed by."""
        skipped = set(ddp.parameters_to_ignore)
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in skipped]
        self._names = {id(p): n for n, p in named}
        if isinstance(self._work, CodecWork):
            self._work.build(lay_out(reversed(named)))
        if self._route.path.by_priority:
            self.sums = PrioritySums([p for _, p in named], self._route, self.wire, self.times)
        self.after_backward = any(isinstance(each, nn.SyncBatchNorm) for each in ddp.modules())
        ddp.register_comm_hook(self, GradientHook.function)

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to reduce a bucket; called by DDP in backward, in the same order on every rank."""
        self.is_complete = bucket.is_last()
        if bucket.buffer().is_sparse:
            raise UserError("the hook reduces dense gradients, and a table has sparse=True: build it with sparse=False")
        if self._closed or self._silent:
            return noop_hook(None, bucket)
        handed_s = self.times.handed(bucket.index() == 0, bucket.is_last())
        if bucket.is_last():
            self._mark_ready(bucket, handed_s)
        if self.sums is not None:
            return _submitted(self.sums, bucket)
        if self.pace is not None and bucket.index() == 0:
            self._begin_step(self.pace, handed_s)
        work = None if self.pace is not None and self.pace.is_plain else self._work
        reduced = self._direct(bucket) if work is None else self._on_thread(bucket, work)
        return reduced.then(functools.partial(_noted, self.times, handed_s))

    def _begin_step(self, pace: LinkPace, now_s: float) -> None:
        """Settle which way this step's gradients go."""
        adaptations = self._work.adaptations() if isinstance(self._work, CodecWork) else []
        if self._heard is not None:
            heard_s = float(self._heard) / (1 if self.average else self._route.size)
        else:
            heard_s = adaptations[0].heard_s if adaptations else 0.0
        self._heard = None
        self._pace_before = dict(pace.state_dict())
        pace.begin(now_s, heard_s)
        for adaptation in adaptations:
            adaptation.tells_s, adaptation.is_whole = pace.tells_s, pace.leaves_nothing

    def _mark_ready(self, bucket: dist.GradBucket, now_s: float) -> None:
        self.wire.steps += 1
        self.last_ready_s = now_s
        self.on_last_bucket()
        if bucket.buffer().is_cuda:
            self.last_ready_event = torch.cuda.Event(enable_timing=True)
            self.last_ready_event.record()

    def _direct(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The backend reduces the bucket in place; nothing of ours runs beside it."""
        buffer = bucket.buffer()
        key = (bucket.index(), buffer.numel())
        size = self._route.size
        if key not in self._counts:
            numel = numel_by_group(bucket.parameters())
            sent = {name: ring_bytes(n * buffer.element_size(), size, on_gpu=True) for name, n in numel.items()}
            sent["weights"] += ring_bytes(0, size, buffer.is_cuda)
            self._counts[key] = sent
        for name, n_bytes in self._counts[key].items():
            self.wire.add(name, n_bytes)
        told = self.pace is not None and bucket.index() == 0
        message = buffer
        if told and self.pace is not None:  # one element more says how long this rank's last step took
            message = torch.cat([buffer, buffer.new_tensor([self.pace.tells_s])])
        if self.average:
            message.div_(size)
        summed = dist.all_reduce(message, group=self._route.group, async_op=True).get_future()
        return summed.then(functools.partial(self._split_told, buffer)) if told else summed

    def _split_told(self, buffer: Tensor, future: Future[Any]) -> Tensor:
        """Return a bucket without the element that came with it, which is kept."""
        value = future.value()
        message = value if isinstance(value, Tensor) else value[0]
        self._heard = message[-1:]
        return buffer.copy_(message[:-1])

    def _on_thread(self, bucket: dist.GradBucket, work: BucketWork) -> Future[Tensor]:
        buffer = bucket.buffer()
        on_gpu = buffer.is_cuda
        if self._thread is None:
            self._thread = CommThread(self, buffer.device)
        future: Future[Tensor] = Future(devices=[buffer.device] if on_gpu else [])
        names = [self._names.setdefault(id(p), str(len(self._names))) for p in bucket.parameters()]
        ready = None
        if on_gpu:
            ready = torch.cuda.Event()
            ready.record()
        views = _gradient_views(bucket)
        handed = DdpBucket(names, views, buffer, future, bucket.index() == 0, bucket.is_last(), ready)
        if handed.first:
            self._held_back.clear()
        self._held_back.append(handed)
        if handed.last or not self.after_backward:
            for each in self._held_back:
                self._thread.submit(work, each)
            self._held_back.clear()
        return future

    def entropy_coded(self) -> dict[str, float]:
        """Return what entropy coding did on this rank since the start; empty without it."""
        return codec_state.entropy_coded(self._work.shards()) if isinstance(self._work, CodecWork) else {}

    def density(self) -> float | None:
        """Return the share of the encoded elements that this rank's last step sent; None without a sparse codec."""
        return codec_state.density(self._work.shards()) if isinstance(self._work, CodecWork) else None

    def take_switches(self) -> list[Switch]:
        """Return what an adaptive codec has changed since it was last asked; call it between steps."""
        if not isinstance(self._work, CodecWork):
            return []
        found: list[Switch] = []
        lists = [a.switches for a in self._work.adaptations()]
        for switches in [*lists, *([self.pace.switches] if self.pace is not None else [])]:
            found += switches
            switches.clear()
        return found

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Leave every rank its own gradients in a backward pass inside the block; all ranks of the group enter it."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def close(self) -> None:
        """End the communication thread; from now on the model's gradients stay each rank's own."""
        self._closed = True
        if self._thread is not None:
            self._thread.close()
        if self.sums is not None:
            self.sums.close()

    def state_dict(self) -> StateTree:
        """Return what must survive a restart: tensors and numbers under flat keys; see `codec_state.state_dict`.

        Call it between steps. Tensors are not copied.
        """
        pace = self.pace.state_dict() if self.pace is not None else {}
        return self._work.state_dict() | pace if self._work is not None else {}

    def memories(self) -> codec_state.StepMemories | None:
        """Return the codec's states after the step that was begun last and before it; None: there is no codec.

        For a rank that leaves its group, whose other members may have made that step or not; nothing is reduced after.
        """
        if not isinstance(self._work, CodecWork):
            return None
        pace, memories = self.pace.state_dict() if self.pace is not None else {}, self._work.memories()
        return codec_state.StepMemories(memories.after | pace, memories.before | (self._pace_before or pace))

    def undo_step(self) -> None:
        """Put the codec's states back to what they were before the step that was begun last, unless it was made."""
        if isinstance(self._work, CodecWork):
            self._work.undo_step()
        if self.pace is not None and self._pace_before:
            self.pace.load_state_dict(self._pace_before)

    def step_made(self) -> None:
        """Hear that the sums of a step have been applied."""
        self._pace_before = {}
        if isinstance(self._work, CodecWork):
            self._work.step_made()

    def load_common(self, saved: StateView) -> None:
        """Take over a codec's counters and factors from another rank, and which way gradients go."""
        if self.pace is not None:
            self.pace.load_state_dict(saved)
        if isinstance(self._work, CodecWork):
            self._work.load_common(saved)

    def rescale(self, factor: float) -> None:
        """Hear that gradients are multiplied by so much more from now on: what codecs remember of them is, too."""
        if isinstance(self._work, CodecWork):
            codec_state.rescale(self._work.shards(), factor)

    def take_velocity(self, velocity: Mapping[str, Tensor]) -> None:
        """Go on with a velocity, by parameter and of its shape, that the optimizer has kept; call it after `attach`."""
        if isinstance(self._work, CodecWork):
            self._work.take_velocity(velocity)

    def load_state_dict(self, state: StateView) -> None:
        """Take over what `state_dict` returned on the same number of ranks, or what `merge` made of several.

        Raises:
            ValueError: it was saved with another codec, model or number of ranks.
        """
        if self.pace is not None:
            self.pace.load_state_dict(state)
        if self._work is not None:
            self._work.load_state_dict(state)
        elif state:
            raise ValueError(f"this hook keeps no state, but the saved one has {min(state)!r}")


def _nothing() -> None:
    """Do nothing."""


def _submitted(sums: PrioritySums, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hand a bucket's gradients over to be summed in place; backward goes on with what this rank has."""
    if bucket.index() == 0:
        sums.begin()
    buffer, start = bucket.buffer(), 0
    for parameter in bucket.parameters():
        sums.submit(parameter, buffer[start : start + parameter.numel()])
        start += parameter.numel()
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future


def _gradient_views(bucket: dist.GradBucket) -> list[Tensor]:
    """View a bucket's 1-D buffer as one gradient a parameter, each of the parameter's shape.

    DDP writes a gradient in the memory order of its parameter where that fills its memory without gaps (channels_last
    too). `GradBucket.gradients` views it in row-major order all the same: elements would stand at other indices.
    """
    buffer = bucket.buffer()
    views: list[Tensor] = []
    start = 0
    for parameter in bucket.parameters():
        flat = buffer[start : start + parameter.numel()]
        by_stride = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
        dense = parameter.permute(by_stride).is_contiguous()
        views.append(flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape))
        start += parameter.numel()
    return views


def _noted(times: ReduceTimes, handed_s: float, future: Future[Any]) -> Tensor:
    """Note when a bucket came back and return it: the backend's as the first of a list.

    An exception that is set in a future is a plain result to DDP; one that this callback raises is an error.
    """
    value = future.value()
    times.done(handed_s)
    return value if isinstance(value, Tensor) else value[0]
