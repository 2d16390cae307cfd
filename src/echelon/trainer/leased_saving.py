"""Checkpoints of a run with a parameter server: read from the servers' copies by one worker, written by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.checkpoint import RANKS, CheckpointStore
from echelon.coordinator.messages import EvaluateTask
from echelon.coordinator.runs import to_runs
from echelon.core.files import write_atomic
from echelon.ps.table import KeyTable
from echelon.records.file import Recorder
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.saving import EVALUATION_FILE, record_saved
from echelon.trainer.state import check_fingerprint


class LeasedSaver:
    """Writes and reads the checkpoints of one run; the worker that evaluates is the one that writes."""

    def __init__(self, folder: Path, keep: int, record: Recorder, fingerprint: dict[str, Any]) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._store = CheckpointStore(folder / "checkpoints", keep, partial(record_saved, record))

    def save(self, task: EvaluateTask, state: dict[str, Any], metric: float | None) -> None:
        """Write a checkpoint in the background."""
        whole = {**state, "fingerprint": self._fingerprint}
        self._store.save(task.step, whole, metric=metric, reason=task.reason or "best")

    def write_detail(self, task: EvaluateTask, report: EvaluationReport) -> None:
        """Write the detail of the best evaluation."""
        detail = {**report.detail, "epoch": task.epoch, "step": task.step}
        write_atomic(self._folder / EVALUATION_FILE, json.dumps(detail))

    def restore(self) -> dict[str, Any] | None:
        """Return the newest whole checkpoint.

        Raises:
            UserError: it is of another run.
        """
        found = self._store.newest()
        if found is None:
            return None
        check_fingerprint(found[1]["fingerprint"], self._fingerprint)
        return dict(found[1])

    def finish(self) -> None:
        """Wait until everything is on disk.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        self._store.close()


def run_state(
    model: nn.Module,
    table: KeyTable,
    keys: Mapping[int, dict[str, Any]],
    buffers: Tensor,
    ema: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint holds: the model (which has the copy's values now), and each key's whole state."""
    below, beyond = counted(keys)
    return {
        "model": model.state_dict(),
        "optimizer": {},
        "scaler": {},
        "ema": ema or {},
        "world_size": 1,
        RANKS: {},
        "ps": {
            "table": table.fingerprint,
            "keys": dict(keys),
            "buffers": buffers,
            "below": below,
            "beyond": to_runs(beyond),
        },
    }


def counted(keys: Mapping[int, dict[str, Any]]) -> tuple[int, set[int]]:
    """Return which tasks every key has counted: all below a number, and those beyond it.

    The servers keep their copies at slightly different moments, so a task may be in some keys and not in others: it
    is given out again, and the keys that have it know.
    """
    below = min(int(state["watermark"]) for state in keys.values())
    common: set[int] | None = None
    for state in keys.values():
        own = set(range(below, int(state["watermark"]))) | set(state["tasks"])
        common = own if common is None else common & own
    return below, common or set()


def average_state(model: nn.Module, keys: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the moving average as a checkpoint holds it, from a model that has the averages now.

    BatchNorm statistics are as the servers have them: the mean over workers, not averaged over time.
    """
    average = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"updates": min(int(state["averaged"]) for state in keys.values()), "average": average}


def flat_averages(keys: Mapping[int, dict[str, Any]]) -> dict[int, Tensor]:
    """Return the averages of keys' states."""
    return {index: torch.as_tensor(state["average"]) for index, state in keys.items()}


def flat_values(keys: Mapping[int, dict[str, Any]]) -> dict[int, Tensor]:
    """Return the values of keys' states."""
    return {index: torch.as_tensor(state["value"]) for index, state in keys.items()}
