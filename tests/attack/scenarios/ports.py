"""Who can reach a run, and what comes of trying."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.attack.scenario import CannotRunHere, Scenario
from tests.ranks.ports import HAS_SS, ports_during
from tests.ranks.runs import SMALL, Runs


def _open_ports(sync: str, folder: Path) -> str:
    if not HAS_SS:
        raise CannotRunHere("this machine has no `ss`")
    with Runs(folder) as runs:
        run = runs.start("train", "digits", *SMALL, "--workers", "2", "--max-steps", "10", "--sync", sync, folder="run")
        ports = ports_during(run)
        assert run.end() == 0, run.text()
    others = sorted(f"{port.address}:{port.number}" for port in ports if not port.is_private)
    assert not others, f"{sync} listens on {', '.join(others)}"
    return f"{len(ports)} ports, all on loopback"


SCENARIOS = [
    Scenario(
        f"{name}-on-one-machine",
        f"A run on one machine ({sync}) opens no port that another machine reaches.",
        functools.partial(_open_ports, sync),
    )
    for name, sync in (("allreduce", "allreduce"), ("servers", "ps(mode=async, servers=2)"))
]
