"""Machines on shaped links, which are network namespaces here: where that works, and a command on one of them."""

from __future__ import annotations

import pytest

from echelon.core.errors import UserError
from echelon.launch.link import ShapedNetwork, check_link, parse_link
from tests.ranks.runs import Run, Runs

LINK = "1gbit"


def _why_not() -> str:
    try:
        check_link(parse_link(LINK))
    except UserError as refusal:
        return str(refusal)
    return ""


_REASON = _why_not()
NEEDS_LINKS = [pytest.mark.root, pytest.mark.skipif(bool(_REASON), reason=_REASON or "this machine can shape links")]


def start_machine(
    runs: Runs, network: ShapedNetwork, i: int, *settings: str, folder: str = "", secret: str | None = None
) -> Run:
    """Start the same command on one machine, with one worker there; `secret` is the run's, of roles that have one."""
    where = ["--rendezvous", f"{network.addresses[0]}:29400", "--workers", "1", "--threads", "1", "--device", "cpu"]
    environment = {"ECHELON_RUN_SECRET": secret} if secret is not None else {}
    return runs.start("train", "digits", *where, *settings, folder=folder, prefix=network.command_prefix(i),
                      environment=environment)  # fmt: skip
