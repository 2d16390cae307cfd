"""Gradients cut into pieces, and the order in which they travel."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from echelon.collectives.piece_order import MOST_BYTES, PieceOrder, cut_gradients

LARGE = MOST_BYTES // 4


def _parameters() -> list[Tensor]:
    shapes = [(64, 3, 3, 3), (64,), (64, 64), (64,), (3 * LARGE + 5, 1), (7,), (0,), (LARGE, 1), (20, 64)]
    return [torch.empty(shape) for shape in shapes] + [torch.empty(64, 64, dtype=torch.float64)]


def test_every_element_is_in_one_piece_and_none_is_too_long() -> None:
    parameters = _parameters()
    counts = [torch.zeros(p.numel()) for p in parameters]
    for piece in cut_gradients(parameters):
        types = {parameters[gradient.parameter].dtype for gradient in piece.slices}
        assert len(types) == 1, "a message has one type"
        assert piece.numel * types.pop().itemsize <= MOST_BYTES
        for gradient in piece.slices:
            counts[gradient.parameter][slice(*gradient.span)] += 1
    assert all(count.eq(1).all() for count in counts)


def test_large_tensors_are_cut_and_small_neighbours_travel_together() -> None:
    pieces = cut_gradients(_parameters())
    of_large = [piece for piece in pieces if piece.slices[0].parameter == 4]
    assert len(of_large) == 4 and all(len(piece.slices) == 1 for piece in of_large)
    assert sorted(len(piece.slices) for piece in pieces if piece.group == "small") == [3]
    assert [s.parameter for piece in pieces if piece.group == "weights" for s in piece.slices if s.parameter < 4] == [
        0,
        2,
    ]


def test_what_is_needed_first_overtakes_what_was_ready_before_it() -> None:
    order = PieceOrder(4)
    for piece in (3, 2, 1, 0):
        order.came(piece, step=0)
    assert [order.choose([0, 1, 2, 3]) for _ in range(4)] == [0, 1, 2, 3]
    order = PieceOrder(4)
    order.came(3, step=0)
    assert [order.choose([0, 1, 2, 3]) for _ in range(2)] == [3, 2], (
        "nothing is ready: the last ones are expected first"
    )
    order.came(2, step=0)
    order.came(1, step=0)
    order.came(0, step=0)
    assert [order.choose([0, 1, 2, 3]) for _ in range(2)] == [0, 1]


def test_every_piece_is_chosen_once_in_each_step_however_far_choices_are_ahead() -> None:
    draws = random.Random(0)
    for _ in range(50):
        count = draws.randint(1, 6)
        order, needed, chosen = PieceOrder(count), draws.sample(range(count), count), []
        for step in range(4):
            arrivals = draws.sample(range(count), count)
            for piece in arrivals:
                chosen += [order.choose(needed) for _ in range(draws.randint(0, 1))]
                order.came(piece, step)
            while len(chosen) < (step + 1) * count:
                chosen.append(order.choose(needed))
            for piece in chosen[(step + 1) * count :]:
                assert piece in range(count)
        for step in range(4):
            assert sorted(chosen[step * count : (step + 1) * count]) == [*range(count)]


def test_what_came_first_in_a_step_is_expected_first_in_the_next() -> None:
    order = PieceOrder(3)
    for piece in (1, 2, 0):
        order.came(piece, step=0)
    assert [order.choose([2, 1, 0]) for _ in range(3)] == [2, 1, 0]
    assert [order.choose([2, 1, 0]) for _ in range(3)] == [1, 2, 0]
