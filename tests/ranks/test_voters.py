"""A run with several machines that may lead, which are network namespaces here: the loss of any one is survived."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from echelon.launch.link import ShapedNetwork, parse_link
from tests.ranks.counting_parts import STEPS
from tests.ranks.links import LINK, NEEDS_LINKS
from tests.ranks.runs import Run, Runs, marked_processes
from tests.ranks.test_elastic import check_counted
from tests.ranks.test_elastic_machines import Group, reach, sizes, wait_for_size

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]


def group_of_voters(runs: Runs, network: ShapedNetwork, *settings: str, pace_s: float) -> Group:
    """Return machines of which each may lead."""
    voters = ",".join(f"{address}:29400" for address in network.addresses)
    return Group(runs, network, f"nodes={len(network.addresses)}", f"rendezvous={voters}", *settings, pace_s=pace_s)


def trains_on_three(runs: Runs, network: ShapedNetwork, *settings: str, pace_s: float) -> tuple[Group, list[Run]]:
    """Return three such machines and their commands, once the first one has made 3 steps."""
    group = group_of_voters(runs, network, *settings, pace_s=pace_s)
    commands = [group.start(i) for i in range(3)]
    reach(commands[0], 3)
    return group, commands


def kill(run: Run) -> None:
    """Lose a machine: all of its processes at once."""
    for pid in marked_processes(run.mark):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()


def check_ended(leader: Run, *others: Run) -> None:
    """Check that commands ended well, that each sample counts once, and that the record of who led last is whole."""
    machines = (leader, *others)
    assert [run.end() for run in machines] == [0] * len(machines), "\n".join(run.text()[-3000:] for run in machines)
    check_counted(leader)
    assert not leader.events("resumed") and {s["attempt"] for s in leader.records("start")} == {0}
    assert len({s["launched_t"] for s in leader.records("start")}) == 1, "one command began the run"
    assert [end["status"] for end in leader.records("end")] == ["completed"]
    assert (leader.folder / "report.html").exists() and not any(run.records("end") for run in others)


@pytest.mark.long
def test_the_first_machine_is_lost_and_the_next_one_leads(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = group_of_voters(runs, network, "checkpoint_every=5", pace_s=0.4)
        first, second, third = (group.start(i) for i in range(3))
        reach(first, 4)
        kill(first)
        wait_for_size(second, 2)
        check_ended(second, third)
        assert sizes(second) == [3, 2] and "is lost with its workers; the others go on" in second.text()
        assert max(first.losses()) < STEPS


@pytest.mark.slow
def test_the_first_machine_comes_back_as_a_newcomer_and_the_next_one_is_lost_too(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group, (first, second, third) = trains_on_three(runs, network, pace_s=1.5)
        kill(first)
        wait_for_size(second, 2)
        again = group.start(0)
        wait_for_size(second, 3)
        reach(second, max(second.losses()) + 1)  # the others have a copy of what was recorded before
        kill(second)
        check_ended(again, third)
        assert sizes(again) == [3, 2, 3, 2], "of those that are left it is the first in the list"


@pytest.mark.long
def test_a_first_machine_that_is_cut_off_waits_and_joins_the_others_when_its_link_is_back(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group, (first, second, third) = trains_on_three(runs, network, pace_s=1.2)
        group.cut(0, is_up=False)
        wait_for_size(second, 2)
        done = max(first.losses())
        reach(second, max(second.losses()) + 2)
        assert max(first.losses()) <= done + 1 and sizes(first) == [3], "one side alone goes on"
        group.cut(0, is_up=True)
        wait_for_size(second, 3)
        check_ended(second, first, third)
        assert sizes(second) == [3, 2, 3]


@pytest.mark.slow
def test_another_machine_is_lost_and_comes_back_as_with_one_that_leads(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group, (first, second, third) = trains_on_three(runs, network, pace_s=1.0)
        kill(third)
        wait_for_size(first, 2)
        again = group.start(2)
        wait_for_size(first, 3)
        check_ended(first, second, again)
        assert sizes(first) == [3, 2, 3]


@pytest.mark.slow
def test_who_is_left_of_the_voters_keeps_what_is_trained_until_another_is_back(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group, (first, second, third) = trains_on_three(runs, network, pace_s=1.0)
        kill(third)
        wait_for_size(first, 2)
        kill(second)
        time.sleep(6.0)  # for longer than a member that is stuck in a collective is given
        again = [group.start(1), group.start(2)]
        check_ended(first, *again)
        assert not first.events("resumed") and {r["attempt"] for r in first.records("start")} == {0}


@pytest.mark.slow
def test_nobody_goes_on_where_half_of_the_voters_or_more_are_lost(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        _, (first, second, third) = trains_on_three(runs, network, "machine_patience=12s", pace_s=0.5)
        kill(second)
        kill(third)
        assert first.end() == 1, first.text()
        assert "more than half of the voters" in first.text() and max(first.losses()) < STEPS
