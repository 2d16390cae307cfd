"""Laws of every path: any number of ranks, any length gives the plain sum, the same bits on all ranks.

The schedules are carried out here on plain tensors, so that all sizes and lengths are tried without a process.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.collectives import build
from echelon.collectives.base import Path
from echelon.collectives.registry import examples

SPECS = [spec for specs in examples().values() for spec in specs if not build(spec).by_backend]


def carry_out(path: Path, vectors: list[Tensor]) -> list[Tensor]:
    """Do every rank's steps round by round; each message must be expected by its receiver, and none be lost."""
    size, numel = len(vectors), vectors[0].numel()
    now = [v.clone() for v in vectors]
    steps = [(rank, step) for rank in range(size) for step in path.schedule(rank, size, numel)]
    for number in sorted({step.round for _, step in steps}):
        current = [(rank, step) for rank, step in steps if step.round == number]
        assert len({rank for rank, _ in current}) == len(current), "a rank has one step in a round"
        messages = {
            (rank, s.send_to): (s.send, now[rank][slice(*s.send)].clone())
            for rank, s in current
            if s.send_to is not None
        }
        for rank, s in current:
            if s.recv_from is not None:
                span, data = messages.pop((s.recv_from, rank))
                assert span == s.recv
                target = now[rank][slice(*span)]
                target.copy_(target + data if s.add else data)
        assert not messages
    return now


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_path_gives_the_sum_on_every_rank(spec: str, size: int) -> None:
    path = build(spec)
    generator = torch.Generator().manual_seed(size)
    for numel in (0, 1, size - 1, size + 1, 64, 101):
        vectors = [torch.randn(numel, generator=generator) for _ in range(size)]
        results = carry_out(path, vectors)
        wanted = torch.stack(vectors).double().sum(dim=0)
        # float32: each of at most 8 additions rounds once, of values below 8 * 4.
        assert torch.allclose(results[0].double(), wanted, atol=8 * 32 * 2**-24, rtol=0)
        assert all(torch.equal(r, results[0]) for r in results)
