"""The adaptive codec in the all-reduce of gradients: ranks decide alike, nothing is lost, a resumed run goes on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import GradientHook
from echelon.collectives.pace import LinkPace
from echelon.compression import read
from tests.ranks.spawn import Rank, run_ranks

STEPS = 40


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)))


def _gradient(ddp: DistributedDataParallel, rank: int, step: int) -> Tensor:
    ddp.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def _waiting(hook: GradientHook) -> float:
    """Sum over ranks of what waits in the error memories, as a mean's part: one number."""
    waits = 0.0
    for key, value in hook.state_dict().items():
        if isinstance(value, Tensor) and "error" in key:
            waits += float(value.double().sum()) / (dist.get_world_size() if key.startswith("sent") else 1)
    total = torch.tensor(waits, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def conserve(rank: Rank) -> tuple[bool, float, list[str]]:
    """Return whether ranks agree, how far put in is from come out and waiting, and the codecs that were used."""
    plain, coded = _model(), _model()
    hook = GradientHook(None, read("adaptive(error=0.3, follow_link=false)"), average=True)
    hook.attach(coded)
    wanted, got, codecs, same = 0.0, 0.0, [], True
    for step in range(STEPS):
        wanted += float(_gradient(plain, rank.index, step).double().sum())
        gradient = _gradient(coded, rank.index, step)
        got += float(gradient.double().sum())
        first = gradient.clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(first, gradient)
        codecs += [f"{switch.vector}: {switch.new}" for switch in hook.take_switches()]
    left = abs(wanted - got - _waiting(hook))
    hook.close()
    return same, left, codecs


def test_ranks_switch_alike_and_what_was_not_sent_waits() -> None:
    found = run_ranks(conserve, 3)
    assert all(same for same, _, _ in found)
    assert max(left for _, left, _ in found) < 1e-3
    assert found[0][2] == found[1][2] == found[2][2]
    assert any("topk" in codec for codec in found[0][2])


def flush(rank: Rank) -> tuple[list[bool], float]:
    """Return which steps' gradients went as they were, and what waits after the last way back from the codec."""
    ddp = _model()
    hook = GradientHook(None, read("adaptive(error=0.3)"), average=True)
    hook.attach(ddp)
    pace = hook.pace
    assert isinstance(pace, LinkPace)
    ways = []
    for step in range(STEPS):
        _gradient(ddp, rank.index, step)
        ways.append(pace.is_plain)
    while not pace.is_plain:
        _gradient(ddp, rank.index, step)
    waits = max(float(v.abs().max()) for k, v in hook.state_dict().items() if "error" in k)
    hook.close()
    return ways, waits


def test_going_back_to_whole_gradients_empties_the_error_memories_on_all_ranks_at_once() -> None:
    found = run_ranks(flush, 2)
    assert found[0] == found[1]
    assert found[0][0][0] and not all(found[0][0]) and found[0][1] == 0.0
