"""One rank of `slow_link`: a plain DDP loop, the same for every candidate, that runs as many steps as it is told to."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._cifar import DEVIATION, MEAN, arrays
from echelon.collectives.paths.backend import Backend
from echelon.compression import read as read_codec
from echelon.launch.link import Host, enter
from echelon.sync.base import Sync, SyncContext
from echelon.sync.registry import read as read_sync

ONE_BUCKET_MB = 1000
POST_LOCAL_START = 7  # averages after steps 8, 16, ...: windows and evaluations stand at multiples of 8
POWERSGD_START = 2  # the earliest that torch allows


@dataclass(frozen=True)
class RankPlan:
    """What a rank is started with.

    Attributes:
        candidate: `ddp`, `ddp-nesterov`, `torch-fp16`, `torch-powersgd(RANK)`, `torch-powersgd-buckets(RANK)` (default
            buckets), `torch-postlocal(PERIOD)`, `echelon:CODEC`, or `sync:STRATEGY` or `sync:STRATEGY;CODEC`.
        host: where the rank lives; None: this machine, over loopback.
        store: address and port of the rendezvous store.
        horizon: steps over which the learning rate falls to 0 (half a cosine); 0: it stays.
        timeout_s: how long a collective may take.
    """

    candidate: str
    rank: int
    world: int
    host: Host | None
    store: tuple[str, int]
    seed: int
    batch: int
    lr: float
    momentum: float
    horizon: int
    timeout_s: float


@dataclass
class Loop:
    """The parts of a step, and what was sent by the candidate's own count (None: it has none)."""

    net: nn.Module
    optimizer: Any
    batches: Iterator[tuple[Tensor, Tensor]]
    counted_bytes: Callable[[], int | None]
    sync: Sync | None = None
    step: int = 0


def main(plan: RankPlan, pipe: Connection) -> None:
    """Obey ("run", steps) and ("evaluate",) until the other end closes; a failure is sent and ends the rank."""
    try:
        loop = _prepare(plan)
        pipe.send({"parameters": sum(p.numel() for p in loop.net.parameters())})
        while True:
            try:
                command, *arguments = pipe.recv()
            except EOFError:
                break
            pipe.send(_run(loop, plan, *arguments) if command == "run" else _evaluate(loop, plan))
    except Exception:  # noqa: BLE001 - whatever it was, the other end reports it
        with contextlib.suppress(BrokenPipeError):  # the other rank failed first, and nobody listens any more
            pipe.send({"failed": traceback.format_exc()})
    os._exit(0)  # a group whose peer is gone must not keep this process waiting


def _prepare(plan: RankPlan) -> Loop:
    torch.set_num_threads(1)
    if plan.host is not None:
        enter(plan.host)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=plan.timeout_s)
    store = dist.TCPStore(*plan.store, plan.world, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=plan.rank, world_size=plan.world, timeout=timeout)
    torch.manual_seed(plan.seed)
    return _loop(plan, _model())


def _model() -> nn.Module:
    from echelon.models.base import ModelInput
    from echelon.models.builtin.bench_cnn import build

    return build(ModelInput(classes=10, channels=3, image_size=32))


def _loop(plan: RankPlan, model: nn.Module) -> Loop:
    """Wrap the model as the candidate does."""
    kind, _, argument = plan.candidate.partition(":")
    if kind == "sync":
        return _loop_of_strategy(plan, model, argument)
    number = int(found[1]) if (found := re.search(r"\((\d+)\)$", kind)) else 0
    kind = re.sub(r"\(\d+\)$", "", kind)
    net = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if kind == "torch-powersgd" else None)
    momentum = plan.momentum
    counted: Callable[[], int | None] = _uncounted
    wrap: Callable[[Any], Any] = _same
    if kind == "echelon":
        counted, momentum = _attach_ours(net, argument, plan)
    elif kind in ("torch-powersgd", "torch-powersgd-buckets"):
        _attach_powersgd(net, number)
    elif kind == "torch-fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        net.register_comm_hook(None, fp16_compress_hook)
    elif kind == "torch-postlocal":
        wrap = _attach_post_local(net, number)
    elif kind not in ("ddp", "ddp-nesterov"):
        raise ValueError(f"unknown candidate {plan.candidate!r}: see RankPlan")
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=plan.lr, momentum=momentum, nesterov=kind == "ddp-nesterov"))
    return Loop(net, optimizer, _batches(plan), counted)


def _loop_of_strategy(plan: RankPlan, model: nn.Module, argument: str) -> Loop:
    """Let a strategy of ours keep the replicas together, as `echelon train --sync STRATEGY` does."""
    from echelon.observe.phases import HostClock

    strategy, _, codec = argument.partition(";")
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    context = SyncContext(
        model=model,
        update=update,
        optimizer=optimizer,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        compression=read_codec(codec or "none"),
        path=Backend(),
        seed=plan.seed,
        clock=HostClock(),
    )
    sync = read_sync(strategy).build(context)
    return Loop(sync.module, optimizer, _batches(plan), lambda: sum(sync.bytes_sent().values()), sync)


def _uncounted() -> int | None:
    return None


def _same(optimizer: Any) -> Any:
    return optimizer


def _attach_ours(net: DistributedDataParallel, spec: str, plan: RankPlan) -> tuple[Callable[[], int | None], float]:
    """Attach our hook; returns its byte count, and the momentum that is left for the optimizer."""
    from echelon.collectives.hook import GradientHook

    compression, momentum = read_codec(spec).with_momentum(plan.momentum)
    hook = GradientHook(None, compression, average=True, seed=plan.seed)
    hook.attach(net)
    return lambda: hook.wire.total, momentum


def _attach_powersgd(net: DistributedDataParallel, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
    net.register_comm_hook(state, powerSGD_hook)


def _attach_post_local(net: DistributedDataParallel, period: int) -> Callable[[Any], Any]:
    """Every rank is a machine of its own: no gradients are reduced after the start, parameters are averaged."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = PostLocalSGDState(None, None, POST_LOCAL_START, post_local_gradient_allreduce=False)
    net.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=POST_LOCAL_START)
    return lambda optimizer: PostLocalSGDOptimizer(optimizer, averager)


def _batches(plan: RankPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of each global batch; the global batches depend on the seed and the epoch alone."""
    images, labels = arrays("train")
    epoch = 0
    while True:
        order = np.random.default_rng((plan.seed, epoch)).permutation(len(labels))
        for start in range(0, len(order) - plan.batch + 1, plan.batch):
            mine = order[start : start + plan.batch][plan.rank :: plan.world]
            yield normalised(images[mine]), torch.from_numpy(labels[mine])
        epoch += 1


def normalised(images: np.ndarray) -> Tensor:
    """Return uint8 images (N, 3, H, W) as floats of mean 0 and deviation 1 per channel."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return torch.from_numpy(np.ascontiguousarray(images)).float().sub_(mean).div_(deviation)


def _run(loop: Loop, plan: RankPlan, steps: int) -> dict[str, Any]:
    loop.net.train()
    before = loop.counted_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        if plan.horizon:
            share = min(1.0, loop.step / plan.horizon)
            for group in loop.optimizer.param_groups:
                group["lr"] = plan.lr * 0.5 * (1 + math.cos(math.pi * share))
        loop.step += 1
        inputs, targets = next(loop.batches)
        if loop.sync is None:
            loop.optimizer.zero_grad()
            nn.functional.cross_entropy(loop.net(inputs), targets).backward()
            loop.optimizer.step()
        else:
            _step_of_strategy(loop.sync, inputs, targets, plan.batch)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    after = loop.counted_bytes()
    counted = None if before is None or after is None else after - before
    return {"seconds": seconds, "cpu_s": cpu, "counted_bytes": counted}


def _step_of_strategy(sync: Sync, inputs: Tensor, targets: Tensor, global_batch: int) -> None:
    divisor = sync.begin_step(len(targets), global_batch)
    with sync.micro_batch(True):
        total = nn.functional.cross_entropy(sync.module(inputs), targets, reduction="sum")
        (total / divisor).backward()
    sync.step()


def _evaluate(loop: Loop, plan: RankPlan) -> dict[str, float]:
    """Count correct predictions of what the replicas agree on, on this rank's share of the test images.

    `agreeing_s`: seconds until they did, which are the strategy's and not the evaluation's.
    """
    loop.net.eval()
    if loop.sync is None:
        module = loop.net.module
        assert isinstance(module, nn.Module)
        return _count(module, plan)
    start = time.perf_counter()
    with loop.sync.agreed():
        agreeing_s = time.perf_counter() - start
        return _count(loop.sync.module, plan) | {"agreeing_s": agreeing_s}


@torch.no_grad()
def _count(module: nn.Module, plan: RankPlan) -> dict[str, float]:
    images, labels = (array[plan.rank :: plan.world] for array in arrays("test"))
    correct = 0
    for start in range(0, len(labels), 500):
        guess = module(normalised(images[start : start + 500])).argmax(1)
        correct += int((guess == torch.from_numpy(labels[start : start + 500])).sum())
    return {"correct": correct, "of": len(labels)}
