"""Strategies between replicas that are split do what they do between whole ones: each rank agrees on its own pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.laws.test_layouts import train
from tests.ranks.layouts import Trial, assemble
from tests.ranks.spawn import run_ranks

STEPS = 8
# Without fragments: they are cut by the elements that a rank has, and a piece's differ from the whole's.
STRATEGIES = [
    "local(3)",
    "local(3, overlap=1)",
    "diloco(4, overlap=1)",
    "easgd(2)",
    "local(2, optimizer_state=average)",
]
SPLIT = ["dp=2,tp=2", "dp=2,fsdp=2", "dp=2,pp=2"]


def _trial(layout: str, sync: str, codec: str = "none") -> Trial:
    return Trial("vit", layout, {"strategy.sync": sync, "strategy.compression": codec})


def check_same_strategy(trials: Sequence[Trial]) -> None:
    """Compare the losses of each trial, on 4 ranks, with those of the same strategy between two whole replicas."""
    whole = [replace(trial, parallel="dp=2") for trial in trials]
    expected = run_ranks(train, 2, whole, STEPS, timeout_s=120)
    ranks = run_ranks(train, 4, trials, STEPS, timeout_s=240)
    for i, trial in enumerate(trials):
        for rank in ranks:
            assert np.allclose(rank[i][0], expected[0][i][0], rtol=0, atol=1e-9), f"{trial}"


def test_averaging_between_split_replicas() -> None:
    check_same_strategy([_trial("dp=2,tp=2", STRATEGIES[0]), _trial("dp=2,fsdp=2", STRATEGIES[2])])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_stage_that_trains_nothing_takes_part_in_every_strategy() -> None:
    syncs = ["local(3)", "local(3, start=2)", "diloco(4, overlap=1, fragments=2)", "easgd(2)"]
    trials = [_trial("dp=2,pp=2,microbatches=2", sync) for sync in syncs]
    check_same_strategy([replace(trial, settings={**trial.settings, "model.tune": "head"}) for trial in trials])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_strategy_between_replicas_of_every_kind() -> None:
    check_same_strategy([_trial(layout, sync) for layout in SPLIT for sync in STRATEGIES])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_codecs_leave_replicas_alike() -> None:
    codecs = ["int8", "topk(0.1)", "powersgd(rank=1)", "bf16"]
    trials = [_trial(layout, "allreduce", codec) for layout in SPLIT for codec in codecs]
    ranks = run_ranks(train, 4, trials, STEPS, timeout_s=240)
    for i, trial in enumerate(trials):
        assemble([rank[i][1] for rank in ranks])  # checks that copies are the same bits
        assert np.isfinite(ranks[0][i][0]).all(), trial
