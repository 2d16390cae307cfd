"""A model to split whose processes kill themselves at points of a step, each fault once in a run.

`ECHELON_TEST_FAULTS` is a list of [process, point, how often it has come there]; `ECHELON_TEST_STRUCK` is a folder in
which each fault leaves a file, so that processes that are started again are well.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.models.base import ModelInput
from echelon.models.builtin.small_vit import Size, SmallViT

FAULTS, STRUCK = "ECHELON_TEST_FAULTS", "ECHELON_TEST_STRUCK"

_counts: dict[str, int] = {}


def come_to(point: str) -> None:
    """Come to a point; this process ends there where it is told to, or is stopped (`POINT, stopped`)."""
    count = _counts[point] = _counts.get(point, 0) + 1
    process = multiprocessing.current_process().name.partition(".")[0]
    for number, fault in enumerate(json.loads(os.environ.get(FAULTS, "[]"))):
        struck = Path(os.environ[STRUCK]) / str(number)
        stops = fault == [process, f"{point}, stopped", count]
        if (stops or fault == [process, point, count]) and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


def _points_of(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before:
            come_to(before)
        result = function(*arguments, **named)
        if after:
            come_to(after)
        return result

    return wrapped


def _points_of_launch(function: Callable[..., Any], point: str) -> Callable[..., Any]:
    """Return a collective that comes to a point once it is under way."""

    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        work = function(*arguments, **{**named, "async_op": True})
        come_to(point)
        if named.get("async_op"):
            return work
        return work.wait()

    return wrapped


def _install_sums() -> None:
    """Come to `reduce scatter`, of a part of the model, and to `share`, of each replica's parameters in turn."""
    from echelon.parallel.zero import DividedUpdate

    module: Any = dist
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # what FSDP calls, by torch's version
        if hasattr(dist, name):
            setattr(module, name, _points_of_launch(getattr(dist, name), "reduce scatter"))
    broadcast, share = dist.broadcast, DividedUpdate.share

    def shared(divided: DividedUpdate) -> None:
        """Share, and come to the point before each part of it, and after the last."""
        module.broadcast = _points_of(broadcast, before="share")
        try:
            share(divided)
        finally:
            module.broadcast = broadcast
        come_to("shared")

    divides: Any = DividedUpdate
    divides.share = shared


@cache
def install() -> None:
    """Let this process come to the points."""
    from echelon.trainer import batches, rescue, saving, second_copy, step, update

    changed: Any = step.Step
    changed.forward_backward = _points_of(changed.forward_backward, before="step")
    changed = update.Update
    changed.__call__ = _points_of(changed.__call__, before="sums")
    changed.apply = _points_of(changed.apply, after="after update")
    changed = update.UpdateGate
    changed.wait = _points_of(changed.wait, after="after flag")
    changed = saving.RanksState
    changed.captured = _points_of(changed.captured, before="checkpoint")
    changed = rescue._Rescue
    changed.save = _points_of(changed.save, before="rescue")
    changed = rescue._SurvivorsState
    changed.finish = _points_of(changed.finish, before="rescued part")
    changed = second_copy.ShardCopy
    changed.take = _points_of(changed.take, before="copy", after="copied")
    _install_sums()
    changed = torch.autograd
    changed.backward = _points_of(changed.backward, before="backward")
    module: Any = batches
    module.evaluate_agreed = _points_of(module.evaluate_agreed, before="evaluation")


class FaultyViT(SmallViT):
    """A small transformer that comes to the points; no tensor of it is large enough for a codec."""

    def __init__(self, data: ModelInput, width: int = 16) -> None:
        super().__init__(data, Size(depth=2, width=width, heads=4, hidden=2 * width))
        install()


class WideViT(FaultyViT):
    """One whose matrices are encoded."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__(data, width=64)
