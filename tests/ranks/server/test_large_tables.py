"""Tables of four times the memory that a worker may have: made on servers, trained, evaluated, saved, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint import CheckpointStore, whole
from echelon.coordinator.config import TrainingPlan
from echelon.observe.oom import memory_group
from tests.ranks.server.limited_worker import LIMIT_BYTES, LR, SETTINGS, built, loss_of
from tests.ranks.server.roles import Cluster

STEPS = 3
DEADLINE_S = 380.0


def adagrad(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(tensors, lr=LR)


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.ranks.server.limited_worker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a cgroup in which a worker may have a quarter of a table's memory."""
    own = memory_group(os.getpid())
    if own is None:
        pytest.skip("this process's cgroup cannot be seen")
    folder = own.events.parent / f"echelon-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        (folder / own.limit.name).write_text(str(LIMIT_BYTES))
        yield folder
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"no limit of memory can be set: {error}")
    finally:
        folder.rmdir()


def run(folder: Path, group: Path, steps: int) -> list[float]:
    """Train up to so many steps, from the newest checkpoint; returns the losses, that of the copy behind them."""
    roles = folder / f"to-{steps}"  # snapshots of servers are of one life of theirs
    roles.mkdir()
    cluster = Cluster(roles, SETTINGS, adagrad, TrainingPlan(1, steps, 0, None, None), timeout_s=120.0)
    cluster.start()
    ended = limited(cluster.scheduler.listener.address, str(folder), str(group))
    cluster.stop() if ended.returncode == 0 else cluster.end()
    assert ended.returncode == 0, ended.stderr[-2000:]
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_table_four_times_the_memory_of_a_worker_trains_is_saved_and_resumed(tmp_path: Path, group: Path) -> None:
    assert limited("tcp://127.0.0.1:1", str(tmp_path), str(group), "whole").returncode == -signal.SIGKILL
    losses = run(tmp_path, group, STEPS)
    resumed = run(tmp_path, group, 2 * STEPS)
    model = built(None)
    optimizer, expected = adagrad(model.parameters()), []
    for step in range(2 * STEPS):
        if step == STEPS:
            expected.append(float(loss_of(model, 0).detach()))
        loss = loss_of(model, step)
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    expected.append(float(loss_of(model, 0).detach()))
    assert losses + resumed == pytest.approx(expected, rel=1e-5)
    found = CheckpointStore(tmp_path / "checkpoints", 2).newest()
    assert found is not None and found[0] == 2 * STEPS
    saved = whole(found[1]["model"])
    assert saved.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-6, rtol=1e-5)
