"""Whole runs of `echelon train --sync ps(...)` with a fault: they finish, well, and count every batch once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.chaos import Setting, run_trial


@dataclass(frozen=True)
class Strike:
    """A planned fault: which role is killed (-9), in which setting."""

    victim: str
    setting: Setting


STRIKES = [
    Strike("worker1", Setting(epochs=15)),
    Strike("server0", Setting(epochs=15)),
    Strike("server1", Setting(epochs=15, replicas=1)),
    Strike("standby0", Setting(epochs=15, replicas=1)),
    Strike("scheduler", Setting(epochs=15)),
    Strike("worker0", Setting(epochs=15, mode="sync")),
    Strike("scheduler", Setting(epochs=15, mode="sync")),
]


def check(strike: Strike, folder: Path) -> None:
    trial = run_trial(strike.setting, 3, strike.victim, folder)
    assert trial.status == "completed"
    assert trial.counted_once
    assert trial.top1 >= 0.95


def test_a_worker_dies(tmp_path: Path) -> None:
    check(STRIKES[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strike", STRIKES[1:], ids=lambda s: f"{s.victim}-{s.setting.mode}-{s.setting.replicas}")
def test_any_role_dies(tmp_path: Path, strike: Strike) -> None:
    check(strike, tmp_path)
