"""A run on one machine opens no port that others reach: loopback, Unix sockets, or namespaces of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.sync.registry import names
from tests.ranks.links import NEEDS_LINKS
from tests.ranks.ports import HAS_SS, ports_during
from tests.ranks.runs import Runs

pytestmark = pytest.mark.skipif(not HAS_SS, reason="this machine has no `ss`")

RUNS = {
    "allreduce": ("--sync", "allreduce", "--serve"),
    "local": ("--sync", "local(period=4, overlap=1)"),
    "diloco": ("--sync", "diloco(period=4)"),
    "easgd": ("--sync", "easgd(period=4)"),
    "ps": ("--sync", "ps(mode=async, servers=2, replicas=1)"),
    "ps ssp": ("--sync", "ps(mode=ssp, staleness=2)"),
    "ps split": ("--workers", "4", "--sync", "ps(mode=sync)", "--parallel", "dp=2,tp=2"),
    "fsdp": ("--parallel", "fsdp=2"),
    "tp": ("--parallel", "tp=2"),
    "pp": ("--parallel", "pp=2"),
}
ON_LINKS = ("allreduce", "ps", "ps split")
# In the sockets they open, to one that is tried, or tried on links: a CI makes do with it.
ALIKE = {"diloco", "easgd", "fsdp", "local", "pp", "ps split", "ps ssp", "tp"}
ELSEWHERE = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}  # as a cluster's profile sets them for all


def test_every_strategy_is_looked_at() -> None:
    assert set(names()) <= set(RUNS)


@pytest.mark.parametrize(
    "run", [pytest.param(r, marks=getattr(pytest.mark, "slow" if r in ALIKE else "long")) for r in RUNS]
)
def test_only_this_machine_reaches_a_run(run: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        started = runs.start(*_command(run), folder="run", environment=ELSEWHERE)
        ports = ports_during(started)
        assert started.end() == 0, started.text()
    assert {port for port in ports if not port.is_private} == set()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(r, marks=[*NEEDS_LINKS, getattr(pytest.mark, "long" if r == "ps split" else "slow")])
        for r in ON_LINKS
    ],
)
def test_only_its_own_namespaces_reach_a_run_on_links(run: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        started = runs.start(*_command(run), "--link", "1gbit", folder="run")
        ports = ports_during(started)
        assert started.end() == 0, started.text()
    assert {port for port in ports if not port.is_private} == set()


def _command(run: str) -> list[str]:
    small = ["--model", "small_vit", "--threads", "1", "--device", "cpu", "--workers", "2"]
    return ["train", "digits", *small, "--max-steps", "12", "--eval-every", "1", *RUNS[run]]
