"""A machine's link is down for some seconds, whether one machine leads or several may: each sample counts once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echelon.launch.link import ShapedNetwork, parse_link
from tests.ranks.links import LINK, NEEDS_LINKS
from tests.ranks.runs import Runs
from tests.ranks.test_elastic_machines import Group, reach, sizes, wait_for_size
from tests.ranks.test_voters import check_ended, group_of_voters

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(600), pytest.mark.slow]
LOST_S = 6.0  # a machine that gives no answer for so long is lost


@pytest.mark.parametrize("outage_s", [5.0, 20.0, 60.0])
@pytest.mark.parametrize("several_may_lead", [False, True], ids=["one leads", "several may lead"])
def test_an_outage_costs_no_sample(several_may_lead: bool, outage_s: float, tmp_path: Path) -> None:
    """That of the machine that leads, where another one may; else that of another one."""
    pace_s, cut = 1.0 + outage_s / 20, 0 if several_may_lead else 2
    with ShapedNetwork(3, parse_link(LINK)) as network, Runs(tmp_path) as runs:
        if several_may_lead:
            group = group_of_voters(runs, network, pace_s=pace_s)
        else:
            group = Group(runs, network, "nodes=3", pace_s=pace_s)
        machines = [group.start(i) for i in range(3)]
        reach(machines[0], 2)
        group.cut(cut, is_up=False)
        time.sleep(outage_s)  # what is tested is an outage of this length
        group.cut(cut, is_up=True)
        if outage_s > LOST_S:
            leader = machines[1] if several_may_lead else machines[0]
            wait_for_size(leader, 3)
            assert sizes(leader)[:3] == [3, 2, 3]
        assert [run.end() for run in machines] == [0] * 3, "\n".join(run.text()[-3000:] for run in machines)
        leader = next(run for run in machines if run.records("end"))
        check_ended(leader, *(run for run in machines if run is not leader))
        assert outage_s > LOST_S or sizes(leader) in ([3], [3, 2, 3])
