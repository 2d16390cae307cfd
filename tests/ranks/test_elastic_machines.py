"""A group that spans machines, which are network namespaces here, goes on whoever dies, and each sample counts once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from echelon.launch.link import ShapedNetwork, parse_link
from echelon.launch.netns import run_in
from tests.ranks.counting_parts import FAULTS, PACE
from tests.ranks.links import LINK, NEEDS_LINKS
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs, marked_processes
from tests.ranks.test_elastic import check_counted

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]
SECRET = "5a" * 32


class Group:
    """A counting run on several machines, each with a disk of its own."""

    def __init__(self, runs: Runs, network: ShapedNetwork, *settings: str, pace_s: float = 0.05) -> None:
        self.runs, self.network, self.settings, self.pace_s = runs, network, settings, pace_s

    def start(self, i: int, *faults: tuple[str, str, int], workers: int = 1) -> Run:
        """Give the run's command on one machine, whose workers have faults."""
        environment = {FAULTS: json.dumps(faults), PACE: str(self.pace_s), "ECHELON_RUN_SECRET": SECRET}
        folder = f"machine{i}"
        program = (
            sys.executable, "-m", "tests.ranks.counting_parts", str(self.runs.root / folder), str(workers),
            f"rendezvous={self.network.addresses[0]}:29400", "checkpoint_every=3", "timeout=60s", *self.settings,
        )  # fmt: skip
        environment["PYTHONPATH"] = python_path()
        prefix = self.network.command_prefix(i)
        return self.runs.start(folder=folder, program=program, environment=environment, prefix=prefix)

    def cut(self, i: int, is_up: bool) -> None:
        """Cut a machine's cable, or mend it."""
        host = self.network.hosts[i]
        run_in(host.namespace, ["ip", "link", "set", host.interfaces[0], "up" if is_up else "down"])


def sizes(run: Run) -> list[int]:
    """Return how many workers there were, start by start and term by term."""
    return [start["world_size"] for start in run.records("start")]


def reach(run: Run, step: int) -> None:
    """Wait until a run has trained to a step."""
    run.wait_for(lambda: max(run.losses(), default=0) >= step, f"step {step}")


def wait_for_size(run: Run, size: int) -> None:
    """Wait until so many workers train."""
    run.wait_for(lambda: sizes(run)[-1:] == [size], f"{size} workers")


def check_ended(*machines: Run) -> None:
    """Check that commands ended well, nothing was started again as a whole, and each sample counts once an epoch."""
    assert [run.end() for run in machines] == [0] * len(machines), "\n".join(run.text()[-3000:] for run in machines)
    check_counted(machines[0])
    assert not machines[0].events("resumed") and {s["attempt"] for s in machines[0].records("start")} == {0}


@pytest.mark.long
def test_workers_of_each_machine_die_and_join_the_others_again(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2")
        first = group.start(0, ("rank0.0", "forward", 5), workers=2)
        second = group.start(1, ("machine1-rank1.0", "after update", 9), ("machine1-rank0.0", "sum", 20), workers=2)
        check_ended(first, second)
        deaths = first.events("worker_died")  # of all machines
        assert (
            len(deaths) >= 3
            and len(second.events("worker_died")) >= 2
            and all("the others go on" in death["message"] for death in deaths)
        )


@pytest.mark.long
def test_the_others_keep_what_is_trained_until_the_first_machines_only_worker_is_back(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=3")
        first, *others = (group.start(i, ("rank0.0", "backward", 9)) for i in range(3))
        check_ended(first, *others)
        (death,) = first.events("worker_died")
        assert "the others wait until it joins them again" in death["message"] and sizes(first) == [3, 3]


@pytest.mark.long
def test_a_machine_is_lost_and_comes_back_between_two_steps(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2", pace_s=0.7)
        first, second = (group.start(i) for i in range(2))
        reach(first, 3)
        for pid in marked_processes(second.mark):
            os.kill(pid, signal.SIGKILL)
        second.process.wait()
        wait_for_size(first, 1)
        again = group.start(1)
        wait_for_size(first, 2)
        check_ended(first, again)
        assert sizes(first) == [2, 1, 2] and "is lost with its workers; the others go on" in first.text()


@pytest.mark.long
def test_a_machine_whose_link_is_down_for_long_comes_back_by_itself(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=3", pace_s=1.0)
        machines = [group.start(i) for i in range(3)]
        reach(machines[0], 2)
        group.cut(2, is_up=False)
        wait_for_size(machines[0], 2)
        group.cut(2, is_up=True)
        wait_for_size(machines[0], 3)
        check_ended(*machines)


@pytest.mark.slow
def test_a_link_that_is_down_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2", pace_s=0.1)
        machines = [group.start(i) for i in range(2)]
        reach(machines[0], 3)
        group.cut(1, is_up=False)
        time.sleep(3.0)  # what is tested is an outage of this length
        group.cut(1, is_up=True)
        check_ended(*machines)
        assert sizes(machines[0]) == [2]


@pytest.mark.slow
def test_a_machine_joins_a_run_that_takes_more(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2:3", pace_s=1.0)
        first, second = (group.start(i) for i in range(2))
        reach(first, 2)
        third = group.start(2)
        wait_for_size(first, 3)
        check_ended(first, second, third)
        assert sizes(first) == [2, 3]


@pytest.mark.long
def test_a_machine_that_is_taken_away_leaves_the_others(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=3", pace_s=0.5)
        first, second, third = (group.start(i, workers=2 if i == 2 else 1) for i in range(3))
        reach(first, 3)
        third.process.send_signal(signal.SIGTERM)
        assert third.end() == 143 and "have left the run, which goes on" in third.text(), third.text()
        check_ended(first, second)
        (left,) = first.events("worker_left")
        assert "its workers leave after the step under way (SIGTERM)" in left["message"]
        assert sizes(first)[-1] == 2 and not first.events("worker_died")


@pytest.mark.slow
def test_a_signal_to_all_machines_stops_them_together(tmp_path: Path) -> None:
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=3", pace_s=0.5)
        machines = [group.start(i) for i in range(3)]
        reach(machines[0], 3)
        for machine in reversed(machines):
            machine.process.send_signal(signal.SIGTERM)
        assert [machine.end() for machine in machines[1:]] == [143] * 2, machines[1].text()
        machines[0].check_stopped(signal.SIGTERM)
        assert sizes(machines[0]) == [3] and not machines[0].events("worker_left")


@pytest.mark.slow
def test_ctrl_c_at_another_machine_stops_the_run_and_a_signal_to_its_processes_alone_does_not(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2", pace_s=0.5)
        first, second = (group.start(i) for i in range(2))
        reach(first, 3)
        os.kill(first.pids()[1], signal.SIGTERM)  # of all of a machine's processes its command decides what follows
        reach(first, 6)
        second.process.send_signal(signal.SIGINT)
        assert second.end() == 130, second.text()
        first.check_stopped(signal.SIGTERM)
        (asked,) = first.events("stop_asked")
        assert "SIGINT: the whole run is to stop" in asked["message"]


@pytest.mark.slow
def test_a_machine_leaves_after_the_step_under_way_and_comes_again(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        group = Group(runs, network, "nodes=2", pace_s=1.0)
        first, second = (group.start(i) for i in range(2))
        reach(first, 2)
        refused = runs.start("nodes", first.folder, "drain", "rank0")
        assert refused.end() == 2 and "nobody of the first machine" in refused.text(), refused.text()
        asked = runs.start("nodes", first.folder, "drain", "rank1")
        assert asked.end() == 0, asked.text()
        wait_for_size(first, 1)
        assert second.end() == 0 and "have left the run, which goes on" in second.text(), second.text()
        again = group.start(1)
        wait_for_size(first, 2)
        check_ended(first, again)
        assert sizes(first) == [2, 1, 2] and not first.events("worker_died")
