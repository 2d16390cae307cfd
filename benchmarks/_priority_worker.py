"""One rank of `priority`: the same steps with sums in either order, in turns, and where the time of each step went."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._common import interleave
from echelon.collectives import build
from echelon.compression import read as read_codec
from echelon.launch.link import Host, enter
from echelon.observe.phases import PHASE_NAMES, HostClock, Phase
from echelon.sync.base import Sync, SyncContext
from echelon.sync.registry import read as read_sync
from echelon.trainer.update import Update

ORDERS = ("ready", "priority")
WARM_UP = 3


@dataclass(frozen=True)
class RankPlan:
    """What a rank is started with.

    Attributes:
        host: where the rank lives.
        store: address and port of the rendezvous store.
        samples: of a rank's part of a batch.
        steps: of a turn; the last one's update ends within it.
        turns: of each order.
    """

    rank: int
    world: int
    host: Host
    store: tuple[str, int]
    samples: int
    steps: int
    turns: int
    timeout_s: float


@dataclass
class Loop:
    """A model that is trained with sums in one order."""

    model: nn.Module
    sync: Sync
    clock: HostClock


def vgg_like() -> nn.Module:
    """Return a network for images [3, 32, 32]: five convolutions compute, two dense layers have 10 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width, pools in ((64, False), (64, True), (128, False), (128, True), (256, True)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pools else [])]
        channels = width
    dense = [nn.Linear(256 * 16, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def main(plan: RankPlan, pipe: Connection) -> None:
    """Send {order: [(seconds per step, seconds per step and phase) of each turn]}, or the traceback as a text."""
    try:
        enter(plan.host)
        torch.set_num_threads(1)
        timeout = timedelta(seconds=plan.timeout_s)
        store = dist.TCPStore(*plan.store, plan.world, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=plan.rank, world_size=plan.world, timeout=timeout)
        pipe.send(_measure(plan))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever it was, the other end reports it
        pipe.send(traceback.format_exc())


def _measure(plan: RankPlan) -> dict[str, list[tuple[float, list[float]]]]:
    generator = torch.Generator().manual_seed(plan.rank)
    inputs = torch.randn(plan.samples, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (plan.samples,), generator=generator)
    loops = {order: _loop(order) for order in ORDERS}
    for loop in loops.values():
        _turn(loop, inputs, targets, WARM_UP)
    turns: dict[str, list[tuple[float, list[float]]]] = {order: [] for order in ORDERS}
    for _, order in interleave(ORDERS, plan.turns):
        turns[order].append(_turn(loops[order], inputs, targets, plan.steps))
    first, second = (torch.cat([p.detach().flatten() for p in loop.model.parameters()]) for loop in loops.values())
    same = torch.equal(first, second) if plan.world == 2 else torch.allclose(first, second, atol=1e-5)
    assert same, "both orders train alike"
    for loop in loops.values():
        loop.sync.close()
    return turns


def _loop(order: str) -> Loop:
    torch.manual_seed(0)
    model, clock = vgg_like(), HostClock()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    context = SyncContext(
        model=model,
        update=Update(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0.0),
        optimizer=optimizer,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        compression=read_codec("none"),
        path=build(f"backend(order={order})"),
        seed=0,
        clock=clock,
    )
    return Loop(model, read_sync("allreduce").build(context), clock)


def _turn(loop: Loop, inputs: Tensor, targets: Tensor, steps: int) -> tuple[float, list[float]]:
    """Return the seconds of a step, and those of each of `PHASES`; until the last update is made."""
    sync, clock, samples = loop.sync, loop.clock, len(inputs)
    dist.barrier()
    clock.enter(Phase.OTHER)
    clock.drain()
    began = time.perf_counter()
    for _ in range(steps):
        divisor = sync.begin_step(samples, samples * dist.get_world_size())
        with sync.micro_batch(last=True):
            clock.enter(Phase.FORWARD)
            loss = nn.functional.cross_entropy(sync.module(inputs), targets, reduction="sum") / divisor
            clock.enter(Phase.BACKWARD)
            loss.backward()
            if (waits_from := sync.communication_began()) is not None:
                clock.split(Phase.COMMUNICATE, waits_from)
        clock.enter(Phase.UPDATE)
        sync.step()
    clock.enter(Phase.COMMUNICATE)
    sync.state_dict()  # completes the last update
    seconds = time.perf_counter() - began
    phases = clock.drain()
    assert len(phases) == len(PHASE_NAMES)
    return seconds / steps, [spent / steps for spent in phases]
