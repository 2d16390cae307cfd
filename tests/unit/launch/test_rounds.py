"""Who starts when: deaths, machines that come, go and are lost, and the end; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from echelon.core.address import STORE_VARIABLE
from echelon.core.errors import LEFT, UserError
from echelon.launch.rounds import (
    INCIDENT_S,
    LAST_CALL_S,
    LOST_S,
    SUSPECT_S,
    Continue,
    Finished,
    Go,
    Leave,
    Left,
    Order,
    Over,
    OwnRounds,
    Ready,
    Rendezvous,
    Restarts,
    Round,
    RoundSettings,
    Running,
    State,
)


class Machines:
    """A rendezvous, a clock, and the state of each machine's processes."""

    def __init__(self, least: int, most: int, max_restarts: int = 3, elastic: bool = False) -> None:
        self.now = 0.0
        self.stores: Iterator[int] = count(1)
        self.elastic, self.lost = elastic, list[Round]()
        self.asked = self.complains = self.is_closed = False
        terms = RoundSettings(least, most, max_restarts, arrival_s=100.0, return_s=20.0, elastic=elastic)
        self.rendezvous = Rendezvous(terms, 0.0, self)

    def open_store(self, name: str) -> str:
        return f"store {next(self.stores)}"

    def lose(self, name: str, round_: Round) -> bool:
        self.lost.append(round_)
        return self.elastic

    def was_asked_to_leave(self, round_: Round) -> bool:
        return self.asked

    def complain(self) -> bool:
        return self.complains

    def takes_in(self, number: int) -> bool | None:
        return not self.is_closed if self.elastic else None

    def ask(self, name: str, state: State) -> Order:
        self.rendezvous.admit(name, 2, self.now)
        return self.rendezvous.handle(name, state, self.now)

    def begin(self, *names: str) -> int:
        """Bring machines into a round; returns its number."""
        for name in names:
            self.ask(name, Ready())
        self.now += LAST_CALL_S
        orders = [self.ask(name, Ready()) for name in names]
        assert all(isinstance(order, Go) for order in orders[-1:])
        orders = [self.ask(name, Ready()) for name in names]
        (number,) = {order.round.number for order in orders if isinstance(order, Go)}
        assert [self.ask(name, Running(number)) for name in names] == [Continue()] * len(names)
        return number

    def wait(self, seconds: float, *states: tuple[str, State]) -> None:
        """Let time pass, in which some machines go on asking."""
        ends = self.now + seconds
        while self.now < ends:
            self.now += 1.0
            for name, state in states:
                self.ask(name, state)


def test_ranks_and_the_store_are_the_same_for_all_and_new_in_each_round() -> None:
    machines = Machines(2, 2)
    assert isinstance(machines.ask("a", Ready()), Continue)
    second = machines.ask("b", Ready())
    first = machines.ask("a", Ready())
    assert isinstance(first, Go) and isinstance(second, Go)
    assert (first.round.first_rank, second.round.first_rank) == (0, 2)
    assert first.round.environment == second.round.environment
    assert first.round.environment["WORLD_SIZE"] == "4" and first.round.environment["ECHELON_STORE"] == "store 1"
    machines.ask("a", Running(1)), machines.ask("b", Running(1))
    assert isinstance(machines.ask("b", Ready(1, "rank 3 died")), Continue)
    assert machines.ask("a", Running(1)) == Leave(gracefully=False)
    again = machines.ask("a", Ready(1))
    assert isinstance(again, Go) and again.round.environment["ECHELON_STORE"] == "store 2"
    assert again.round.environment["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_a_death_that_another_one_led_to_uses_up_no_restart() -> None:
    machines = Machines(2, 2, max_restarts=1)
    number = machines.begin("a", "b")
    machines.ask("b", Ready(number, "rank 3 died"))
    assert isinstance(machines.ask("a", Ready(number, "rank 0 lost its peer")), Go)
    number = machines.begin("b", "a")
    over = machines.ask("a", Ready(number, "rank 1 died"))
    assert isinstance(over, Over) and over.reason == "rank 1 died" and "no restarts are left" in over.no_restart
    assert machines.ask("b", Running(number)) == over


def test_checkpoints_of_the_first_machine_give_restarts_back_to_all() -> None:
    machines = Machines(2, 2, max_restarts=1)
    for _ in range(3):
        number = machines.begin("a", "b")
        machines.rendezvous.saved(1)
        machines.ask("b", Ready(number, "rank 3 died"))
        assert isinstance(machines.ask("a", Ready(number)), Go)
    number = machines.begin("b", "a")
    assert isinstance(machines.ask("a", Ready(number, "rank 1 died")), Over)


def test_a_machine_that_comes_joins_after_a_checkpoint_of_the_others() -> None:
    machines = Machines(1, 2)
    number = machines.begin("a")
    assert isinstance(machines.ask("b", Ready()), Continue)
    assert machines.ask("a", Running(number)) == Leave(gracefully=True)
    assert machines.ask("a", Finished(number, stopped=True)) == Leave(gracefully=True)
    order = machines.ask("a", Ready(number))
    assert isinstance(order, Go) and order.round.environment["WORLD_SIZE"] == "4"
    with pytest.raises(UserError, match="has its 2 machines"):
        machines.ask("c", Ready())


def test_the_others_go_on_without_a_lost_machine_where_they_are_enough() -> None:
    machines = Machines(1, 2)
    number = machines.begin("a", "b")
    machines.wait(LOST_S + 2, ("a", Running(number)))
    assert machines.ask("a", Running(number)) == Leave(gracefully=False)
    machines.wait(LAST_CALL_S + 1, ("a", Ready(number)))
    order = machines.ask("a", Ready(number))
    assert isinstance(order, Go) and order.round.environment["WORLD_SIZE"] == "2"
    machines.ask("a", Running(2))
    assert isinstance(machines.ask("b", Ready()), Continue)
    assert machines.ask("a", Running(2)) == Leave(gracefully=True)


def test_a_run_without_a_machine_that_it_needs_waits_for_it_and_then_fails_and_names_it() -> None:
    machines = Machines(2, 2)
    number = machines.begin("a", "b")
    machines.wait(LOST_S + 2, ("a", Running(number)))
    machines.ask("a", Ready(number))
    machines.wait(5.0, ("a", Ready(number)))
    assert isinstance(machines.ask("b", Ready()), Go), "it came back in time"
    machines.ask("a", Running(2)), machines.ask("b", Running(2))
    machines.wait(LOST_S + 2, ("a", Running(2)))
    machines.wait(25.0, ("a", Ready(2)))
    order = machines.ask("a", Ready(2))
    assert isinstance(order, Over) and order.status == "failed" and "b is lost" in order.reason


def test_a_run_that_never_has_its_machines_fails() -> None:
    machines = Machines(2, 2)
    machines.wait(90.0, ("a", Ready()))
    assert isinstance(machines.ask("a", Ready()), Continue)
    machines.wait(20.0, ("a", Ready()))
    order = machines.ask("a", Ready())
    assert isinstance(order, Over) and "1 more of 2 machines" in order.reason


@pytest.mark.parametrize("stopped", [False, True])
def test_the_end_is_that_of_all_machines(stopped: bool) -> None:
    machines = Machines(2, 2)
    number = machines.begin("a", "b")
    assert isinstance(machines.ask("a", Finished(number, stopped)), Continue)
    assert not machines.rendezvous.all_know()
    over = Over("stopped" if stopped else "completed")
    assert machines.ask("b", Finished(number, stopped)) == over == machines.ask("a", Finished(number, stopped))
    assert machines.rendezvous.all_know()


def test_a_machine_that_leaves_ends_a_run_that_needs_it() -> None:
    machines = Machines(2, 2)
    number = machines.begin("a", "b")
    machines.ask("b", Left("a setting is refused there"))
    order = machines.ask("a", Running(number))
    assert isinstance(order, Over) and "b left the run: a setting is refused there" in order.reason


def test_a_machine_that_leaves_ends_no_run_that_others_work_on() -> None:
    machines = Machines(1, 3)
    number = machines.begin("a", "b")
    assert isinstance(machines.ask("c", Left("a setting is refused there")), Over)
    assert not isinstance(machines.ask("a", Running(number)), Over)


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_machine_that_is_asked_to_stop_between_two_rounds_stops_the_run(who: str) -> None:
    machines, other = Machines(1, 2), {"a": "b", "b": "a"}[who]
    number = machines.begin("a", "b")
    machines.ask("a", Ready(number, "rank 0 died"))
    assert machines.ask("b", Running(number)) == Leave(gracefully=False)
    assert machines.ask(who, Left(stops=True)) == Over("stopped")
    assert machines.ask(other, Ready(number)) == Over("stopped")


def test_a_leader_that_was_stopped_takes_nobody_for_lost_whom_it_has_not_heard() -> None:
    machines = Machines(1, 2)
    number = machines.begin("a", "b")
    machines.now += LOST_S + 2
    assert isinstance(machines.ask("a", Running(number)), Continue)
    assert isinstance(machines.ask("b", Running(number)), Continue)


def test_groups_of_their_own_share_the_restarts() -> None:
    restarts = Restarts(1)
    now = 0.0
    one, other = OwnRounds("one", restarts, lambda: now), OwnRounds("other", restarts, lambda: now)
    names = {
        order.round.environment["ECHELON_ROUND"] for r in (one, other) if isinstance(order := r.order(Ready()), Go)
    }
    assert len(names) == 2
    assert isinstance(one.order(Ready(1, "died")), Go)
    now = 1000.0
    over = other.order(Ready(1, "died"))
    assert isinstance(over, Over) and over.reason == "died" and "no restarts are left" in over.no_restart
    assert one.order(Finished(2, stopped=False)) == Over("completed")


def test_what_dies_at_the_same_time_is_one_incident_and_who_dies_again_is_not() -> None:
    restarts = Restarts(2)
    assert [restarts.take(name, (), 10.0 + i) for i, name in enumerate("abc")] == [""] * 3
    assert restarts.left == 1
    assert restarts.take("b", (), 14.0) == "" and restarts.left == 0  # again
    assert restarts.take("c", (), 15.0) == "" and restarts.left == 0  # with it
    assert "no restarts are left (--max-restarts 2, all with no new" in restarts.take("a", (), 15.0 + INCIDENT_S)


def test_restarts_come_back_with_checkpoints_up_to_their_number() -> None:
    restarts = Restarts(2)
    for i in range(10):
        assert restarts.take("a", (), 100.0 * i) == ""
        restarts.saved(1)
    restarts.saved(50)
    assert restarts.left == 2


def test_the_same_failure_twice_in_a_row_before_the_first_step_is_the_last() -> None:
    restarts = Restarts(9)
    same = ("ValueError: bad at model.py:3 in forward",)
    assert restarts.take("a", same, 0.0) == ""
    assert restarts.take("b", same, 0.1) == ""  # another one, of the same incident
    assert restarts.take("a", ("KeyError: 1 at model.py:9 in forward",), 1.0) == ""
    assert restarts.take("a", same, 2.0) == ""
    assert restarts.take("a", (), 3.0) == ""  # this time it had made steps
    assert restarts.take("a", same, 4.0) == ""
    assert "in the same way twice" in restarts.take("a", (*same, "another rank's"), 5.0)


def test_a_machine_that_is_asked_to_leave_goes_after_a_checkpoint_and_the_others_go_on() -> None:
    machines = Machines(1, 3)
    number = machines.begin("a", "b", "c")
    assert machines.rendezvous.drain([2, 3], machines.now) == ""  # the ranks of b
    assert [machines.ask(name, Running(number)) for name in "abc"] == [Leave(gracefully=True)] * 3
    assert machines.ask("a", Finished(number, stopped=True)) == Leave(gracefully=True)
    assert (
        machines.ask("a", Ready(number))
        == machines.ask("c", Ready(number))
        == Continue("waiting for the other machines")
    )
    assert machines.ask("b", Finished(number, stopped=True)) == Over("left")
    assert machines.ask("b", Ready(number)) == Over("left")  # until it has heard
    machines.wait(2 * LAST_CALL_S, ("a", Ready(number)), ("c", Ready(number)))
    orders = [machines.ask(name, Ready(number)) for name in "ac"]
    assert [order.round.environment["WORLD_SIZE"] for order in orders if isinstance(order, Go)] == ["4", "4"]
    machines.wait(2 * LOST_S, ("a", Running(number + 1)), ("c", Running(number + 1)))
    assert machines.ask("b", Ready()) == Continue("waiting for the other machines")  # its command was given again
    assert machines.ask("a", Running(number + 1)) == Leave(gracefully=True)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([2], "leaves as a whole, with rank 3"),
        ([0, 1], "the first machine leads the run"),
        ([2, 3, 4, 5], "the run needs 2 machines"),
        ([9], "no such rank"),
    ],
)
def test_machines_that_cannot_leave(ranks: list[int], reason: str) -> None:
    machines = Machines(2, 3)
    number = machines.begin("a", "b", "c")
    assert reason in machines.rendezvous.drain(ranks, machines.now)
    assert machines.ask("a", Running(number)) == Continue()


def test_where_survivors_go_on_a_lost_machine_joins_the_same_round_again() -> None:
    machines = Machines(2, 2, elastic=True)
    number = machines.begin("a", "b")
    machines.wait(LOST_S + 2, ("a", Running(number)))
    assert [(round_.machine, round_.beside) for round_ in machines.lost] == [(1, 0)]
    assert machines.ask("a", Running(number)) == Continue()
    assert machines.ask("b", Running(number)) == Leave(gracefully=False)
    back = machines.ask("b", Ready(number))
    assert isinstance(back, Go) and (back.round.number, back.round.machine, back.round.beside) == (number, 1, 1)
    assert machines.ask("b", Ready(number)) == back, "an order that is lost is given again"
    assert machines.ask("b", Running(number)) == machines.ask("a", Running(number)) == Continue()


def test_a_silent_machine_is_lost_sooner_where_members_complain_that_others_are() -> None:
    machines = Machines(2, 2, elastic=True)
    number = machines.begin("a", "b")
    machines.wait(4, ("a", Running(number)))
    assert SUSPECT_S < 4 < LOST_S and not machines.lost
    machines.complains = True
    machines.wait(1, ("a", Running(number)))
    assert len(machines.lost) == 1


def test_where_survivors_go_on_a_command_that_is_given_again_at_once_joins_as_another_one() -> None:
    machines = Machines(2, 2, elastic=True)
    number = machines.begin("a", "b")
    again = machines.ask("b", Ready())
    assert isinstance(again, Go) and again.round.beside == 1 and len(machines.lost) == 1
    assert machines.ask("a", Running(number)) == Continue()


def test_where_survivors_go_on_a_command_that_is_given_again_while_the_others_end_waits() -> None:
    machines = Machines(1, 2, elastic=True)
    number = machines.begin("a", "b")
    machines.is_closed = True
    for _ in range(2):
        waits = machines.ask("b", Ready())
        assert isinstance(waits, Continue) and "about to end" in waits.reason
    assert machines.ask("a", Finished(number, stopped=False)) == machines.ask("b", Ready()) == Over("completed")


def test_where_survivors_go_on_a_machine_whose_members_left_is_told_so() -> None:
    machines = Machines(2, 2, elastic=True)
    number = machines.begin("a", "b")
    machines.asked = True
    order = machines.ask("b", Finished(number, stopped=False))
    assert isinstance(order, Over) and order.status == LEFT
    machines.asked = False
    assert machines.ask("a", Finished(number, stopped=False)) == Over("completed")


def test_where_survivors_go_on_a_failure_is_the_whole_groups() -> None:
    machines = Machines(2, 2, elastic=True)
    number = machines.begin("a", "b")
    machines.ask("b", Ready(number, "rank 1 died"))
    assert machines.ask("a", Running(number)) == Leave(gracefully=False) and not machines.lost


def test_another_machine_goes_on_with_the_rounds_of_one_that_is_lost() -> None:
    run = Machines(2, 3, elastic=True)
    number = run.begin("a", "b", "c")
    state = run.rendezvous.state()
    assert state.members()[:3] == ["rank0.0", "rank1.0", "machine1-rank0.0"] and len(state.members()) == 6
    run.rendezvous = Rendezvous(run.rendezvous._terms, run.now, run)
    run.rendezvous.take_over(state, "b", "meeting:b:1", run.now)
    run.rendezvous.give_up("a", run.now)
    assert [round_.machine for round_ in run.lost] == [0] and run.rendezvous.others() == ["c"]
    assert [run.ask(name, Running(number)) for name in "bc"] == [Continue()] * 2
    assert run.ask("a", Running(number)) == Leave(gracefully=False), "it has to begin anew"
    order = run.ask("a", Ready(after=number))
    assert isinstance(order, Go) and (order.round.machine, order.round.beside) == (0, 1)
    assert order.round.environment[STORE_VARIABLE] == "meeting:b:1"


def test_a_round_that_begins_under_another_machine_has_its_ranks_first() -> None:
    run = Machines(2, 3)
    number = run.begin("a", "b", "c")
    state = run.rendezvous.state()
    run.rendezvous = Rendezvous(run.rendezvous._terms, run.now, run)
    run.rendezvous.take_over(state, "b", "meeting:b:1", run.now)
    run.rendezvous.give_up("a", run.now)
    assert run.ask("b", Running(number)) == run.ask("c", Running(number)) == Leave(gracefully=False)
    for name in "bc":
        run.ask(name, Ready(after=number))
    run.now += LAST_CALL_S
    orders = {name: run.ask(name, Ready(after=number)) for name in "cb"}
    rounds = {name: order.round for name, order in orders.items() if isinstance(order, Go)} or {}
    last = run.ask("c", Ready(after=number))
    assert isinstance(last, Go) and rounds["b"].first_rank == 0 and last.round.first_rank == 2
    assert rounds["b"].number == number + 1 and rounds["b"].others == ("machine2-rank0.0", "machine2-rank1.0")
