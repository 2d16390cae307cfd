from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.train.metrics import Evaluation
from tests.ranks.spawn import Rank, run_ranks

SAMPLES, CLASSES = 101, 6
LIMITS = (10**6, 300, 50)  # exact ROC; binned at the end; binned while counting


def evaluate(parts: tuple[int, ...], index: int, group: dist.ProcessGroup | None, limit: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    mine = slice(sum(parts[:index]), sum(parts[: index + 1]))
    evaluation = Evaluation(CLASSES, torch.device("cpu"), exact_roc_limit=limit)
    for part in zip(logits[mine].split(7), targets[mine].split(7), strict=True):
        evaluation.update(*part)
    return evaluation.compute(group)


def on_rank(rank: Rank, parts: tuple[int, ...]) -> list[dict[str, Any]]:
    return [evaluate(parts, rank.index, dist.group.WORLD, limit) for limit in LIMITS]


@pytest.mark.parametrize("parts", [(51, 50), (100, 0, 1)], ids=str)
def test_each_sample_counts_once_however_the_set_is_cut(parts: tuple[int, ...]) -> None:
    expected = [evaluate((SAMPLES,), 0, None, limit) for limit in LIMITS]
    assert all(result == expected for result in run_ranks(on_rank, len(parts), parts))
