"""Checkpoints of a run: gathered over the ranks, written by rank 0, found again by all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.checkpoint import (
    RANKS,
    Arriving,
    CheckpointStore,
    PartWriter,
    Saved,
    gather_rank_state,
    merge,
    take_parts,
    whole,
)
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.task import Metric
from echelon.parallel.local_shards import LocalShards
from echelon.records.events import CheckpointRejected
from echelon.records.file import Recorder
from echelon.records.kinds import Checkpoint
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.sharded_state import list_groups, to_parts
from echelon.trainer.state import (
    Cursor,
    RunParts,
    agreed_state,
    check_fingerprint,
    layout_of,
    load_rank_state,
    load_shared_state,
    rank_state,
    saved_layout,
)
from echelon.trainer.world import World

EVALUATION_FILE = "evaluation.json"


class Saver:
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self, folder: Path, keep: int, parts: RunParts, world: World, record: Recorder, fingerprint: dict[str, Any]
    ) -> None:
        self._folder, self._parts, self._world, self._record, self._fingerprint = (
            folder,
            parts,
            world,
            record,
            fingerprint,
        )
        self._store = CheckpointStore(folder / "checkpoints", keep, partial(record_saved, record), self._rejected)
        self._writer = PartWriter(self._store.deadline_s)
        self._last_step = -1
        self.bytes_sent = 0
        self._best: float | None = None

    def save(self, cursor: Cursor, reason: str, metric: float | None = None) -> None:
        """Write a checkpoint in the background; all ranks call it after the same step."""
        if cursor.step == self._last_step and metric is None:
            return
        self._last_step = cursor.step
        own = rank_state(self._parts, self._world)
        if self._parts.split is not None:
            self._save_parts(cursor, own, self._parts.split.pieces, metric, reason)
            return
        ranks = self._gather(own)
        with agreed_state(self._parts, cursor) as state:
            if self._world.leads:
                whole_state = {**state, **self._about(), RANKS: ranks}
                self._store.save(cursor.step, whole_state, metric=metric, reason=reason)

    def _save_parts(
        self, cursor: Cursor, own: dict[str, Any], pieces: LocalShards, metric: float | None, reason: str
    ) -> None:
        """Let every rank write its part, and rank 0 what is not a tensor of the model."""
        token = self._agree_on_token()
        ranks = self._gather(own)  # before the replicas agree: buffers are each rank's own here
        with agreed_state(self._parts, cursor) as state:
            marked, tensors = take_parts(to_parts(state, pieces), _part_file(self._world.rank))
            self._writer.write(self._store.parts_folder(token) / _part_file(self._world.rank), tensors)
            gathered = self._gather(marked)
        if not self._world.leads:
            return
        shared = list_groups(merge([gathered[rank] for rank in sorted(gathered)]))
        arriving = Arriving(self._store.parts_folder(token), [_part_file(rank) for rank in range(self._world.size)])
        state = {**shared, **self._about(), RANKS: ranks}
        self._store.save(cursor.step, state, metric=metric, arriving=arriving, reason=reason)

    def _gather(self, own: dict[str, Any]) -> Mapping[int, Any]:
        """Bring what each rank alone has to rank 0."""
        if self._world.group is None:
            return {0: own}
        if not self._world.leads:
            self.bytes_sent += tensor_bytes(own)
        return gather_rank_state(own, self._world.group)

    def _agree_on_token(self) -> int:
        """Make room for the ranks' parts, under a name that all of them then know."""
        token = torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(time.time_ns()))
        if self._world.leads:
            self._store.room_for_parts(int(token))
        if self._world.group is not None:
            token = token.to(self._world.device)
            dist.broadcast(token, 0, group=self._world.group)
        return int(token)

    def _about(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "best": self._best,
            "world_size": self._world.size,
            "layout": layout_of(self._world),
        }

    def consider_best(self, cursor: Cursor, report: EvaluationReport, primary: Metric) -> None:
        """Keep a checkpoint, and the detail of the evaluation, when the task's primary metric is the best so far."""
        value = report.metrics[primary.name]
        if value is None or not primary.better(value, self._best):
            return
        self._best = value
        if self._world.leads:
            detail = {**report.detail, "epoch": cursor.epoch, "step": cursor.step}
            write_atomic(self._folder / EVALUATION_FILE, json.dumps(detail))
        self.save(cursor, "best", metric=primary.score(value))

    def restore(self) -> Cursor | None:
        """Restore the newest whole checkpoint that any rank sees; None when there is none.

        Raises:
            UserError: the checkpoint is of another run, or not all machines see it.
        """
        found = self._store.newest(rank=self._world.rank)
        if found is not None and saved_layout(found[1]) != layout_of(self._world):
            found = self._store.newest()  # what other ranks had is merged
        step = -1 if found is None else found[0]
        self._check_same_step(step)
        if found is None:
            return None
        state = found[1]
        check_fingerprint(state["fingerprint"], self._fingerprint)
        self._best = state["best"]
        self._last_step = step
        cursor = load_shared_state(self._parts, state)
        load_rank_state(self._parts, self._world, saved_layout(state), state[RANKS])
        return cursor

    def _check_same_step(self, step: int) -> None:
        if self._world.group is None:
            return
        steps = torch.full((self._world.size,), 0, dtype=torch.int64, device=self._world.device)
        steps[self._world.rank] = step
        dist.all_reduce(steps, group=self._world.group)
        if len(set(steps.tolist())) > 1:
            seen = ", ".join("none" if s < 0 else f"step {s}" for s in steps.tolist())
            raise UserError(
                f"the ranks see different checkpoints in {self._folder} ({seen}): "
                "put --run on storage that all machines share"
            )

    def finish(self) -> None:
        """Wait until everything is on disk.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        self._writer.wait()
        self._store.close()

    def _rejected(self, path: Path, reason: str) -> None:
        if self._world.leads:
            message = f"checkpoint {path.name} is damaged and was passed over: {reason}"
            self._record.write(CheckpointRejected(message, str(path), reason))


def record_saved(record: Recorder, saved: Saved) -> None:
    """Record a checkpoint that is on the disk; called from the thread that wrote it."""
    record.write(Checkpoint(saved.step, saved.blocked_s, saved.total_s, saved.n_bytes, str(saved.path), saved.reason))


def _part_file(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def tensor_bytes(tree: Any) -> int:
    """Add up the bytes of all tensors in a tree of dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(tensor_bytes(part) for part in parts)


def best_state(folder: Path) -> Mapping[str, Any]:
    """Read the best checkpoint of a run, or the newest when none was evaluated.

    Raises:
        UserError: the run has no whole checkpoint.
    """
    store = CheckpointStore(folder / "checkpoints", keep=1)
    found = store.best() or store.newest()
    if found is None:
        raise UserError(f"{folder} holds no whole checkpoint to evaluate")
    state: Mapping[str, Any] = whole(found[1])
    return state
