"""Which machine gets which numbers, and which is refused in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.errors import UserError
from echelon.launch.meeting import Admission, Arrival, Register, Shape

FIRST = Arrival("a", 2, {"--lr": "0.1", "--sync": "ps"})


def test_numbers_follow_each_other_and_stay_when_a_machine_comes_back() -> None:
    register = Register(Shape(2, 3, 2, 0), FIRST)
    second, third = replace(FIRST, machine="b", workers=3), replace(FIRST, machine="c", workers=1)
    assert register.admit(second) == Admission(1, 2)
    assert register.admit(third) == Admission(2, 5)
    assert register.admit(second) == Admission(1, 2)


@pytest.mark.parametrize("arrival, words", [
    (replace(FIRST, machine="b", settings={**FIRST.settings, "--lr": "0.2"}), "--lr 0.2, the first machine with 0.1"),
    (replace(FIRST, machine="b", settings={}), "--lr None"),
    (replace(FIRST, workers=3), "had 2"),
    (replace(FIRST, machine="c"), "has its 2 machines"),
])  # fmt: skip
def test_what_is_refused(arrival: Arrival, words: str) -> None:
    register = Register(Shape(2, 2, 1, 0), FIRST)
    register.admit(replace(FIRST, machine="first guest"))
    with pytest.raises(UserError, match=words):
        register.admit(arrival)


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_every_server_is_somewhere_once_and_its_standby_elsewhere(least: int, servers: int) -> None:
    shape = Shape(least, least + 1, servers, 1)
    machines = range(least + 1)
    assert sorted(i for m in machines for i in shape.servers_of(m)) == list(range(servers))
    assert sorted(i for m in machines for i in shape.standbys_of(m)) == list(range(servers))
    if least > 1:
        assert not any(set(shape.servers_of(m)) & set(shape.standbys_of(m)) for m in machines)
