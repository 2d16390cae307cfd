"""Split replicas over several machines, which are network namespaces here and share a disk: a death costs no step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.launch.link import ShapedNetwork, parse_link
from tests.ranks.links import LINK, NEEDS_LINKS
from tests.ranks.runs import Run, Runs, marked_processes
from tests.ranks.test_rescue import Fault, check_recorded, check_undisturbed, train

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]


class Machines:
    """A run on two machines."""

    def __init__(self, runs: Runs, network: ShapedNetwork, layout: str) -> None:
        self.runs, self.network, self.layout = runs, network, layout
        self.settings = ("--nodes", "2", "--rendezvous", f"{network.addresses[0]}:29400", "--timeout", "60s")

    def start(self, i: int, faults: Sequence[Fault] = ()) -> Run:
        """Give the command on a machine."""
        settings = (*self.settings, "--workers", "2")
        return train(self.runs, self.layout, faults, *settings, prefix=self.network.command_prefix(i))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,tp=2", "fsdp=4"])
@pytest.mark.parametrize(
    ("where", "fault"), [(0, ("rank0", "sums", 7)), (0, ("rank1", "after update", 7)), (1, ("rank0", "step", 7))]
)
def test_workers_of_each_machine_die_and_no_step_is_lost(layout: str, where: int, fault: Fault, tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        machines = Machines(runs, network, layout)
        first, other = (machines.start(i, [fault] if i == where else []) for i in range(2))
        assert other.end() == 0, f"{first.text()[-3000:]}\n{other.text()[-3000:]}"
        check_undisturbed(first, layout)


@pytest.mark.long
def test_a_machine_is_lost_and_no_step_is(tmp_path: Path) -> None:
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        machines = Machines(runs, network, "dp=2,fsdp=2")
        first, other = machines.start(0), machines.start(1)
        first.wait_for_step(3)
        for pid in marked_processes(other.mark):
            os.kill(pid, signal.SIGKILL)
        other.process.wait()
        rescued = first.wait_for(lambda: [r for r in first.records("checkpoint") if r["reason"] == "rescue"], "a save")
        assert machines.start(1).end() == 0, first.text()[-3000:]
        assert first.end() == 0, first.text()[-3000:]
        check_recorded(first)
        assert [event["step"] for event in first.events("resumed")] == [rescued[0]["step"]]
        assert not any(event["lost_steps"] for event in first.events("resumed"))
