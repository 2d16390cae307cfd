"""What is chosen of measured seconds, and what a choice by size does."""

from __future__ import annotations

import math

import pytest

from echelon.collectives import build
from echelon.collectives.chooser import SIZES, TURNS, PathBySize, SizeChoice, by_size, fastest


def test_a_path_is_chosen_only_where_it_is_clearly_faster() -> None:
    backend = [1.0] * TURNS
    assert fastest({"backend": backend, "ring": [0.95] * TURNS}) == "backend"
    assert fastest({"backend": backend, "ring": [0.8] * TURNS, "halving_doubling": [0.7] * TURNS}) == "halving_doubling"
    wavering = [0.5] * (TURNS - 2) + [1.2] * 2
    assert fastest({"backend": backend, "ring": wavering}) == "backend"


def test_sizes_that_were_not_tried_are_the_backends() -> None:
    cut_short = by_size([(size, "ring") for size in SIZES[:2]])
    assert cut_short == (SizeChoice(SIZES[1], "ring"), SizeChoice(math.inf, "backend"))
    assert by_size([(size, "ring") for size in SIZES]) == (SizeChoice(math.inf, "ring"),)
    assert by_size([]) == (SizeChoice(math.inf, "backend"),)


def test_each_vector_takes_the_path_of_its_size() -> None:
    path = PathBySize((SizeChoice(1000, "halving_doubling"), SizeChoice(math.inf, "backend")))
    assert path.for_bytes(1000) == build("halving_doubling") and path.for_bytes(1001) == build("backend")
    assert not path.by_backend and build("auto").by_backend and build("ring").for_bytes(5) == build("ring")
    with pytest.raises(ValueError, match="ascend"):
        PathBySize((SizeChoice(1000, "ring"),))
