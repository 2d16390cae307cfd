"""Shares by speed: what is decided of which times, and that it is decided again when steps are trained again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.shares import share_sizes
from echelon.observe.phases import PHASE_NAMES, PHASES, Phase
from echelon.parallel.base import alone
from echelon.records.events import SharesDealt, StartedOver
from echelon.records.file import Recorder
from echelon.records.kinds import Steps
from echelon.trainer.balance import MOST_CHANGE, Balancer, BatchParts, Deal, best_sizes, dealt_anew, make_balancer
from echelon.trainer.state import Cursor, seed_layers
from echelon.trainer.world import World

CPU = torch.device("cpu")


def window(step: int, own_s: Sequence[float], count: int = 10) -> Steps:
    """A window in which each rank worked so long in a step, and waited for the slowest."""
    longest = max(own_s)
    phases = []
    for seconds in own_s:
        row = [0.0] * len(PHASES)
        row[PHASES.index(Phase.FORWARD)] = seconds * count
        row[PHASES.index(Phase.COMMUNICATE)] = (longest - seconds) * count
        phases.append(row)
    return Steps(
        epoch=0, step=step, losses=[1.0] * count, correct=None, samples=100, lr=0.1, seconds=longest * count,
        phase_names=PHASE_NAMES, phases=phases, wire_bytes=0,
    )  # fmt: skip


def simulate(
    balancer: Balancer, seconds: Callable[[int, int], float], windows: int, first: int = 0
) -> list[tuple[int, Deal]]:
    """Let ranks work as long as `seconds(rank, samples)` says; returns what changed, by window."""
    deals = []
    for i in range(first, first + windows):
        own_s = [seconds(rank, size) for rank, size in enumerate(balancer.sizes)]
        if (deal := balancer.look(window(10 * i + 10, own_s))) is not None:
            deals.append((i, deal))
    return deals


def test_a_rank_of_a_quarter_gets_a_quarter_slowly() -> None:
    balancer = Balancer(BatchParts(256, 4))
    deals = simulate(balancer, lambda rank, n: n * (0.02 if rank == 3 else 0.005), 30)
    assert [deal.sizes for _, deal in deals] == [(75, 75, 74, 32), (79, 79, 79, 19)]
    assert [i for i, _ in deals] == [3, 7], "the first look after a change does not count, then three agree"
    assert all(new * MOST_CHANGE >= old for old, new in zip((64,) * 4, deals[0][1].sizes))
    slow = deals[0][1]
    assert slow.slowest == (3, pytest.approx(4)) and slow.gain == pytest.approx(2)
    assert "from step 41 on" in slow.event(40).message and "replica 3 takes 4 times as long" in slow.event(40).message


def test_no_rank_gets_less_than_it_needs_of_the_smallest_batch() -> None:
    """Of 64 samples 13 are 2 in a batch of 10, which is cut in the same proportions."""
    balancer = Balancer(BatchParts(64, 2, least=13))
    simulate(balancer, lambda rank, n: n * (0.05 if rank else 0.001), 60)
    assert balancer.sizes == (51, 13) and share_sizes(10, 2, balancer.sizes) == [8, 2]
    ranks = Balancer(BatchParts(64, 2, 2, least=7))
    simulate(ranks, lambda rank, n: n * (0.05 if rank > 1 else 0.001), 60)
    assert ranks.sizes == (25, 25, 7, 7)
    assert simulate(Balancer(BatchParts(64, 2, least=33)), lambda rank, n: n * (0.05 if rank else 0.001), 60) == []
    assert dealt_anew(64, (60, 4), 13) == (32, 32) and not BatchParts(64, 2, least=13).fits((60, 4))


def test_equal_ranks_that_are_noisy_stay_equal() -> None:
    draw = random.Random(0)
    balancer = Balancer(BatchParts(128, 4))
    assert simulate(balancer, lambda _, n: n * 0.005 * draw.uniform(0.9, 1.1), 2000) == []
    assert simulate(Balancer(BatchParts(128, 2)), lambda rank, n: n * (0.0107 if rank else 0.01), 50) == []


def test_a_rank_that_is_slow_for_a_moment_changes_nothing() -> None:
    balancer, calls = Balancer(BatchParts(128, 2)), iter(range(10**6))
    assert simulate(balancer, lambda rank, n: n * (0.04 if rank and next(calls) % 3 == 0 else 0.01), 100) == []


def test_a_rank_that_recovers_gets_equal_shares_again() -> None:
    balancer = Balancer(BatchParts(128, 2), (100, 28))
    simulate(balancer, lambda _, n: n * 0.01 + 0.05, 60)
    assert balancer.sizes == (64, 64)


def test_work_that_does_not_depend_on_samples_is_allowed_for() -> None:
    balancer = Balancer(BatchParts(200, 3))

    def seconds(rank: int, samples: int) -> float:
        return 0.3 + samples * (0.02 if rank == 0 else 0.01)

    deals = simulate(balancer, seconds, 100)
    longest = [max(seconds(rank, n) for rank, n in enumerate(sizes)) for sizes in [balancer.sizes, (40, 80, 80)]]
    assert longest[0] <= 1.04 * longest[1] and len(deals) < 6
    assert simulate(balancer, seconds, 200) == [], "it settles"


def test_replicas_of_several_ranks_divide_their_part_equally() -> None:
    balancer = Balancer(BatchParts(64, 2, 2))
    assert balancer.sizes == (16, 16, 16, 16)
    own_s = [0.1, 0.12, 0.5, 0.4]
    deals = [deal for i in range(4) if (deal := balancer.look(window(i, own_s)))]
    assert [deal.sizes for deal in deals] == [(24, 24, 8, 8)]


@given(
    st.integers(3, 12),
    st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 1), st.integers(6, 12)), min_size=3, max_size=3),
)
def test_the_longest_part_is_as_short_as_can_be(
    samples: int, costs: list[float], bounds: list[tuple[int, int]]
) -> None:
    least, most = [low for low, _ in bounds], [high for _, high in bounds]

    def longest(sizes: Sequence[int]) -> float:
        return max(n * cost for n, cost in zip(sizes, costs, strict=True))

    sizes = best_sizes(samples, costs, least, most)
    every = [sizes for sizes in product(*(range(low, high + 1) for low, high in bounds)) if sum(sizes) == samples]
    assert sizes in every
    assert longest(sizes) <= min(map(longest, every)) * (1 + 1e-9)


def _restored(folder: Path, cursor: Cursor, parts: BatchParts) -> Balancer:
    return make_balancer(parts, World(0, 1, 0, CPU, None, alone()), cursor, folder)


def test_what_was_decided_is_decided_again_at_the_same_steps(tmp_path: Path) -> None:
    record = Recorder(tmp_path)
    for step, sizes in ((5, (60, 4)), (20, (32, 32)), (30, (40, 24)), (40, (1, 2, 61)), (30, (44, 20))):
        record.write(SharesDealt("", step, sizes))
    record.close()
    balancer = _restored(tmp_path, Cursor(0, 10, 10, (60, 4)), BatchParts(64, 2))
    assert balancer.sizes == (60, 4)
    slow = window(11, [1.0, 9.0])
    assert [balancer.look(slow) for _ in range(9)] == [None] * 9, "it is known what comes"
    planned = {step: deal.sizes for step in range(11, 50) if (deal := balancer.planned(step))}
    assert planned == {20: (32, 32), 30: (44, 20)}, "of as many ranks alone; the newest word counts"
    assert "as when these steps were trained before" in Deal((44, 20)).event(30).message
    assert any(balancer.look(slow) for _ in range(9)), "then it is measured again"


def test_a_run_that_starts_over_forgets_what_was_decided(tmp_path: Path) -> None:
    record = Recorder(tmp_path)
    record.write(SharesDealt("", 20, (60, 4)))
    record.write(StartedOver(""))
    record.write(SharesDealt("", 30, (40, 24)))
    record.close()
    balancer = _restored(tmp_path, Cursor(), BatchParts(64, 2))
    assert [step for step in range(50) if balancer.planned(step)] == [30]


@given(st.integers(1, 200), st.lists(st.integers(0, 90), min_size=1, max_size=9))
def test_ranks_that_come_and_go_divide_the_whole_batch(samples: int, before: list[int]) -> None:
    sizes = dealt_anew(samples, before)
    assert sum(sizes) == samples and len(sizes) == len(before)
    assert min(sizes) > 0 or samples < len(before)


def test_those_that_stay_keep_their_proportions_and_a_new_one_gets_the_mean() -> None:
    assert dealt_anew(120, (60, 20)) == (90, 30) and dealt_anew(120, (60, 20, 0)) == (60, 20, 40)
    assert dealt_anew(128, (43, 42)) == (64, 64) and dealt_anew(128, (0, 0)) == (64, 64)
    assert "parts of a batch are 90, 30 samples, in the" in Deal((90, 30), anew=True).event(7).message


@pytest.mark.parametrize("shares", [(30, 34, 0), (60, 5), (64, 0)])
def test_shares_of_another_world_or_batch_are_not_taken_over(tmp_path: Path, shares: tuple[int, ...]) -> None:
    Recorder(tmp_path).close()
    cursor = Cursor(0, 1, 1, shares)
    assert _restored(tmp_path, cursor, BatchParts(64, 2)).sizes == (32, 32)
    assert cursor.shares == ()


def test_layers_draw_by_step_and_part_whatever_was_drawn_before() -> None:
    def drawn(step: int, seed: int = 3, before: int = 0) -> list[float]:
        torch.rand(before)
        seed_layers(seed, step, World(0, 1, 0, CPU, None, alone()))
        return torch.rand(2).tolist()

    state = torch.get_rng_state()
    assert drawn(7) == drawn(7, before=9)
    assert len({tuple(drawn(step, seed)) for step in range(5) for seed in range(5)}) == 25
    torch.set_rng_state(state)
