"""Layers that some ranks of a replica leave out under `fsdp`: ranks are threads of this process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.hints import Style
from echelon.core.layout import Layout
from echelon.parallel.base import Placement
from echelon.parallel.blocks import find_blocks, shard
from echelon.parallel.local_shards import LocalShards
from echelon.parallel.reach import is_asked_in
from echelon.parallel.tensor.apply import apply_plan
from echelon.parallel.tensor.plan import TensorPlan

STEPS, SAMPLES, WIDTH = 24, 6, 16


def on_threads(work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Return what each rank returns; each is a thread, with a default group of its own."""
    found: list[Any] = [None] * ranks
    store = dist.HashStore()

    def be_rank(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            found[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  # the others must not wait for this one
            threaded.ProcessLocalGroup.exception_handle(error)
            found[rank] = error

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    return found


class BranchBlock(nn.Module):
    """A layer for all samples, and one for those that begin with a large number, which a batch may have none of."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.always(x).tanh()
        large = x[:, 0] > 1.2
        return y.index_put((large,), self.rare(x[large])) if large.any() else y


def branches() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(BranchBlock(), BranchBlock()), nn.Linear(WIDTH, 4)).double()


def batch(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return one that moves what has a gradient of zeros, and nothing without a gradient."""
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def train_sharded(rank: int, start: nn.Module) -> dict[str, Tensor]:
    """Train a copy on this rank's part of each batch; returns the whole parameters."""
    model, mesh = copy.deepcopy(start), init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    assert list(find_blocks(model, None)) == ["0.0", "0.1"]
    at = {axis: rank if axis is Axis.FSDP else 0 for axis in Axis}
    placement = Placement(Layout({Axis.DP: 1, Axis.FSDP: 2}), at, mesh, None, dist.group.WORLD, dist.group.WORLD)  # type: ignore[arg-type]
    pieces = LocalShards([model], placement, [shard(model, find_blocks(model, None), mesh)])
    update = optimizer(pieces)
    for step in range(STEPS):
        (model(batch(step).tensor_split(2)[rank]).square().sum() / SAMPLES).backward()
        pieces.take_gradients()
        update.step()
        update.zero_grad(set_to_none=True)
    return {name: value.full_tensor().detach().clone() for name, value in model.state_dict().items()}


def test_layers_that_ranks_leave_out_are_trained_as_in_one_process() -> None:
    start, left_out, uneven = branches(), 0, 0
    model = copy.deepcopy(start)
    update = optimizer(model)
    for step in range(STEPS):
        (model(batch(step)).square().sum() / SAMPLES).backward()
        left_out += any(parameter.grad is None for parameter in model.parameters())
        uneven += len({bool((part[:, 0] > 1.2).any()) for part in batch(step).tensor_split(2)}) == 2
        update.step()
        update.zero_grad(set_to_none=True)
    assert left_out > 5 and uneven > 5, "steps in which no rank needs a layer, and in which one of them does"
    for state in on_threads(lambda rank: train_sharded(rank, start)):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


class Skipping(nn.Module):
    """Blocks of one size, of which each rank leaves out another one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self._rank = rank
        self.begun = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != self._rank or not self.begun:
                x = block(x)
        return x


def enter(rank: int, passes: int) -> str:
    """Return what is said of a model whose ranks leave out different blocks after so many passes."""
    model = Skipping(rank)
    shard(model, find_blocks(model, None), init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    for _ in range(passes):
        model(torch.randn(4, 8)).sum().backward()
    model.begun = True
    try:
        model(torch.randn(4, 8))
    except UserError as error:
        return str(error)
    return ""


def test_a_block_that_single_ranks_leave_out_is_refused() -> None:
    for said in on_threads(lambda rank: enter(rank, 0)):
        assert "a rank is at blocks.0 of the model where another is at blocks.1" in said
        assert "use --parallel dp=N" in said
    assert not is_asked_in(17)
    for said in on_threads(lambda rank: enter(rank, 17)):
        assert "ranks have called the blocks of the model in different orders" in said


def test_a_split_table_refuses_ids_that_it_has_not() -> None:
    def look_up(rank: int) -> list[bool]:
        model = nn.Sequential(nn.Embedding(10, 4))
        apply_plan(
            model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), TensorPlan(2, {"0": Style("vocabulary")})
        )
        assert model(torch.tensor([[0, 9]])).shape == (1, 2, 4)
        refused = []
        for wrong in (10, -1):
            try:
                model(torch.tensor([[3, wrong]]))
            except RuntimeError as error:
                refused.append("not all among the 10 rows" in str(error))
        return refused

    assert on_threads(look_up) == [[True, True]] * 2
