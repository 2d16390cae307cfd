"""One rank of `priority`: the same steps with sums in either order, in turns, and where the time of each step went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._common import interleave
from echelon.collectives import build
from echelon.compression import read as read_codec
from echelon.launch.link import Host
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
        on_device: layers take as long as a processor needs for them, and need none, as those of a GPU.
        steps: of a turn; the last one's update ends within it.
        turns: of each order.
    """

    rank: int
    world: int
    host: Host
    store: tuple[str, int]
    samples: int
    on_device: bool
    steps: int
    turns: int
    timeout_s: float


@dataclass(frozen=True)
class Turn:
    """What a step took in a turn: seconds, of each of `PHASES`, and of this process's processor time."""

    seconds: float
    phases: list[float]
    cpu_s: float


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


class _OnDevice(torch.autograd.Function):
    """Takes a time forwards and one backwards, in which the processor is free; gradients are small numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Return the input."""
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, and one of the weight."""
        time.sleep(ctx.backward_s)
        return gradient, torch.full_like(ctx.saved_tensors[0], 1e-3), None, None


class DeviceLayer(nn.Module):
    """A layer of so many parameters that computes on a device."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, once its time has passed."""
        x = x + self.weight[:1].detach()  # it reads its weight
        return _OnDevice.apply(x, self.weight, *self.seconds)


SAMPLE_S = 2.0e-3, 4.4e-3
"""Of a forward and a backward pass of a sample on a device: as on a processor here."""


def vgg_like_on_device(samples: int) -> nn.Module:
    """Return layers with the parameters of `vgg_like`, which take times like its operations."""
    weights = [1792, 36928, 73856, 147584, 295168, 8390656, 2098176, 10250]
    operations = [1.8, 37.7, 18.9, 37.7, 18.9, 8.4, 2.1, 0.01]
    shares = [each / sum(operations) for each in operations]
    layers = [
        DeviceLayer(n, *(samples * share * s for s in SAMPLE_S)) for n, share in zip(weights, shares, strict=True)
    ]
    return nn.Sequential(*layers)


def measure(plan: RankPlan) -> dict[str, list[Turn]]:
    """Return {order: its turns}."""
    generator = torch.Generator().manual_seed(plan.rank)
    inputs = torch.randn(plan.samples, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (plan.samples,), generator=generator)
    loops = {order: _loop(order, plan) for order in ORDERS}
    for loop in loops.values():
        _turn(loop, inputs, targets, WARM_UP)
    turns: dict[str, list[Turn]] = {order: [] for order in ORDERS}
    for _, order in interleave(ORDERS, plan.turns):
        turns[order].append(_turn(loops[order], inputs, targets, plan.steps))
    first, second = (torch.cat([p.detach().flatten() for p in loop.model.parameters()]) for loop in loops.values())
    same = torch.equal(first, second) if plan.world == 2 else torch.allclose(first, second, atol=1e-5)
    assert same, "both orders train alike"
    for loop in loops.values():
        loop.sync.close()
    return turns


def _loop(order: str, plan: RankPlan) -> Loop:
    torch.manual_seed(0)
    model, clock = vgg_like_on_device(plan.samples) if plan.on_device else vgg_like(), HostClock()
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


def _turn(loop: Loop, inputs: Tensor, targets: Tensor, steps: int) -> Turn:
    """Take steps, until the last update is made."""
    sync, clock, samples = loop.sync, loop.clock, len(inputs)
    dist.barrier()
    clock.enter(Phase.OTHER)
    clock.drain()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        divisor = sync.begin_step(samples, samples * dist.get_world_size())
        with sync.micro_batch(last=True):
            clock.enter(Phase.FORWARD)
            outputs = sync.module(inputs).flatten(1)
            loss = nn.functional.cross_entropy(outputs, targets, reduction="sum") / divisor
            clock.enter(Phase.BACKWARD)
            loss.backward()
            if (waits_from := sync.communication_began()) is not None:
                clock.split(Phase.COMMUNICATE, waits_from)
        clock.enter(Phase.UPDATE)
        sync.step()
    clock.enter(Phase.COMMUNICATE)
    sync.state_dict()  # completes the last update
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    phases = clock.drain()
    assert len(phases) == len(PHASE_NAMES)
    return Turn(seconds / steps, [spent / steps for spent in phases], cpu_s / steps)
