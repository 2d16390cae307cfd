"""Hand-written scripts for each layout, of the same torch parts: what someone writes who needs only this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks._gated import WORLD

BATCH, MICROBATCHES = 32, 4
Batches = Iterator[tuple[Any, Any]]


def model() -> Any:
    """Return the model of all contenders."""
    import torch

    from echelon.models.base import ModelInput
    from echelon.models.builtin.small_vit import Size, SmallViT

    torch.manual_seed(0)
    return SmallViT(ModelInput(classes=10, channels=3, image_size=32), Size(depth=4, width=128, heads=4, hidden=512))


def _optimizer(net: Any) -> Any:
    import torch

    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def _loop(net: Any, optimizer: Any, batches: Batches) -> None:
    import torch

    loss_of = torch.nn.CrossEntropyLoss()
    for step, (inputs, targets) in enumerate(batches):
        loss = loss_of(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            loss.item()


def one(batches: Batches) -> None:
    """One process."""
    net = model()
    _loop(net, _optimizer(net), batches)


def dp(batches: Batches) -> None:
    """DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(model())
    _loop(net, _optimizer(net), batches)


def zero1(batches: Batches) -> None:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    _loop(net, optimizer, batches)


def fsdp(batches: Batches) -> None:
    """`fully_shard` for each block and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    net = model()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    _loop(net, _optimizer(net), batches)


def tp(batches: Batches) -> None:
    """`parallelize_module`: heads and hidden units divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    net = model()
    plan = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
    plan |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
    for block in net.blocks:
        block.attn.num_heads //= WORLD
        parallelize_module(block, mesh, plan)
    _loop(net, _optimizer(net), batches)


def pp(batches: Batches) -> None:
    """`Schedule1F1B` over two halves."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class First(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.patches, self.positions, self.blocks = net.patches, net.positions, net.blocks[:2]

        def forward(self, images: Any) -> Any:
            return self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.positions).contiguous()

    class Last(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.blocks, self.norm, self.head = net.blocks[2:], net.norm, net.head

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.blocks(x)).mean(dim=1))

    rank = dist.get_rank()
    half = (Last if rank else First)(model())
    stage = PipelineStage(half, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=torch.nn.CrossEntropyLoss())
    optimizer = _optimizer(half)
    for inputs, targets in batches:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: dict[str, Callable[[Batches], None]] = {
    "one process": one,
    "dp": dp,
    "fsdp": fsdp,
    "zero1": zero1,
    "tp": tp,
    "pp": pp,
}
