"""When training has to end for what follows it to fit."""

from __future__ import annotations

import math

from echelon.core.time_limit import TimeLimit


def test_it_leaves_time_for_what_was_timed_and_before_that_for_what_a_step_tells() -> None:
    limit = TimeLimit(100.0, evaluation_steps=20)
    assert not limit.is_up(96.0) and limit.is_up(97.0)  # it closes in 3 s
    limit.step_s = 1.0
    assert not limit.is_up(70.9) and limit.is_up(71.0)  # 3 + 1 + 1.25 * 20
    limit.took("evaluation", 8.0)
    limit.took("write", 4.0)
    assert not limit.is_up(80.9) and limit.is_up(81.0)
    assert not TimeLimit(math.inf, 1.0).is_up(1e9)
