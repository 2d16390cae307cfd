"""`--collective auto` between real processes: one choice for all ranks, the bits of its paths, kept with the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.collectives.chooser import PathBySize, SizeChoice, choose_paths
from echelon.collectives.route import Route
from echelon.records.events import Event
from echelon.records.file import read_records
from tests.ranks.spawn import Rank, run_ranks

pytestmark = pytest.mark.long


def _choose(rank: Rank) -> tuple[list[tuple[float, str]], bool]:
    group = dist.group.WORLD
    assert group is not None
    choices = choose_paths(group, budget_s=1.0)
    by_hand = PathBySize((SizeChoice(100, "halving_doubling"), SizeChoice(float("inf"), "ring")))
    right = True
    for numel in (10, 1000):
        vector = torch.full((numel,), float(rank.index + 1))
        Route(by_hand, group).sum_(vector)
        right = right and bool((vector == 6).all())
    return [(c.up_to_bytes, c.spec) for c in choices], right


def test_all_ranks_choose_alike() -> None:
    results = run_ranks(_choose, 3)
    assert all(result == results[0] for result in results) and results[0][1]


def test_a_resume_uses_the_choices_of_the_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    echelon.train(data="digits", collective="auto", workers=3, epochs=1, run=str(run))
    file = run / "paths.json"
    assert json.loads(file.read_text())["ranks"] == 3
    choices = [{"up_to_bytes": 4096, "spec": "halving_doubling"}, {"up_to_bytes": None, "spec": "ring"}]
    text = json.dumps({"ranks": 3, "choices": choices})
    file.write_text(text)
    echelon.resume(str(run), epochs=2)
    assert file.read_text() == text
    said = [event.message for event in read_records(run, Event) if "--collective auto" in event.message]
    assert "as at the run's start: halving_doubling up to 4.1 kB, ring beyond" in said[-1]
