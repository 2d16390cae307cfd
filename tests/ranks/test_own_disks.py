"""Checkpoints of ranks whose disks are their own, when a run ends before what rank 0 lacks has come to it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint import transfer
from echelon.checkpoint.incomplete import HomeParts, PartNote, incompletes
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.records.file import Recorder
from echelon.trainer.saving import RanksState, Saver
from echelon.trainer.state import Cursor, Fingerprint
from tests.ranks.replicas import Trial, make_parts, train, world_of
from tests.ranks.spawn import Rank, run_ranks

TRIAL = Trial("diloco(4, outer_momentum=0.9)", momentum=0.9, compression="topk(0.1)")
WHOLE, LAST, STEPS = 3, 6, 12
DEADLINE_S = 60.0


def make_saver(rank: Rank, folder: Path, disk: int | None = None) -> tuple[Saver, object]:
    parts = make_parts(TRIAL)
    own = folder / f"disk{rank.index if disk is None else disk}"
    state = RanksState(parts, world_of(rank), Patience(own))
    return Saver(own, 1, state, Recorder(None), Fingerprint()), parts


def break_off(rank: Rank, folder: Path) -> list[dict[str, Tensor]]:
    """Save twice, and end when the second checkpoint is known, but lacks a part; returns how it would go on."""
    transfer.SHARE = 1e-9  # one block, and then nothing before the end
    saver, parts = make_saver(rank, folder)
    train(parts, rank, 0, WHOLE)
    assert saver.save(Cursor(step=WHOLE), "interval")
    saver.settle()
    train(parts, rank, WHOLE, LAST)
    assert saver.save(Cursor(step=LAST), "interval")
    trajectory = train(parts, rank, LAST, STEPS)
    ends = time.monotonic() + DEADLINE_S
    while rank.index == 0 and not any(each.notes() for each in incompletes(saver.folder / "checkpoints")):
        assert time.monotonic() < ends, "rank 0 has not learned of the part"
        time.sleep(0.02)
    dist.barrier()
    return trajectory


def go_on(rank: Rank, folder: Path) -> tuple[int, list[str], list[dict[str, Tensor]]]:
    """Return the step that a new start goes on from, what is said of others, and the trajectory from step `LAST`."""
    saver, parts = make_saver(rank, folder)
    cursor = saver.restore()
    assert cursor is not None
    train(parts, rank, cursor.step, LAST)
    assert saver.save(Cursor(step=LAST + 1), "interval")
    trajectory = train(parts, rank, LAST, STEPS)
    saver.finish()
    return cursor.step, saver.passed_over, trajectory


def go_on_over_a_slow_link(rank: Rank, folder: Path) -> tuple[int, list[str], list[dict[str, Tensor]]]:
    """Go on, though rank 0's disk is full at first, and another one cannot be read."""
    fast, room, is_there = transfer.coded, os.pwrite, HomeParts.is_there
    fails = [OSError(errno.ENOSPC, "No space left on device")]

    def slow(block: bytes) -> tuple[bytes, bool]:
        time.sleep(1.0)
        return fast(block)

    def full_at_first(fd: int, block: memoryview, position: int) -> int:
        if fails:
            raise fails.pop()
        return room(fd, block, position)

    def readable(home: HomeParts, token: int, of_rank: int, note: PartNote) -> bool:
        if of_rank != home.rank:
            raise OSError(errno.EIO, "Input/output error")
        return is_there(home, token, of_rank, note)

    transfer.coded, os.pwrite, HomeParts.is_there = slow, full_at_first, readable  # type: ignore[method-assign, assignment]
    return go_on(rank, folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name[:13] for path in (folder / "disk0" / "checkpoints").iterdir() if path.name[0] != ".")


def test_a_checkpoint_whose_part_is_on_its_machine_is_gone_on_from_there_and_from_no_other(tmp_path: Path) -> None:
    expected = run_ranks(break_off, 2, tmp_path / "run")
    assert names(tmp_path / "run") == ["incomplete-00", "step-00000003"]
    assert not (tmp_path / "run" / "disk1" / "checkpoints").exists()
    for name in ("lost", "alone"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    shutil.rmtree(tmp_path / "lost" / "disk1")

    of_another_number = HomeParts(tmp_path / "run" / "disk1", rank=5).path(token=1)
    of_another_number.write_bytes(b"an earlier start's")
    for rank, (step, said, trajectory) in enumerate(run_ranks(go_on, 2, tmp_path / "run")):
        assert (step, said) == (LAST, [])
        for a, b in zip(expected[rank], trajectory, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a), f"rank {rank}: other bits"
    assert names(tmp_path / "run") == ["step-00000007"]
    assert not list((tmp_path / "run" / "disk1" / "parts").iterdir()), "parts that nobody needs were left"

    step, said, _ = run_ranks(go_on, 2, tmp_path / "lost")[0]
    assert step == WHOLE and len(said) == 1
    assert "lacks parts and was passed over: the part of rank 1 is on no disk of the machines that are here" in said[0]
    step, said, _ = run_ranks(go_on, 1, tmp_path / "alone")[0]
    assert step == WHOLE and "2 workers saved it: only as many, on the same machines, can go on from it" in said[0]


def test_parts_come_over_a_link_that_is_slower_than_any_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(break_off, 3, tmp_path)
    for step, said, _ in run_ranks(go_on_over_a_slow_link, 3, tmp_path, group_timeout_s=2.0):
        assert (step, said) == (LAST, [])


def break_off_first(rank: Rank, folder: Path) -> None:
    """End when the first checkpoint is known, but lacks a part."""
    transfer.SHARE = 1e-9
    saver, parts = make_saver(rank, folder)
    train(parts, rank, 0, LAST)
    assert saver.save(Cursor(step=LAST), "interval")
    ends = time.monotonic() + DEADLINE_S
    while rank.index == 0 and not any(each.notes() for each in incompletes(saver.folder / "checkpoints")):
        assert time.monotonic() < ends, "rank 0 has not learned of the part"
        time.sleep(0.02)
    dist.barrier()


def refused(rank: Rank, folder: Path, swapped: bool = False) -> str:
    saver, _ = make_saver(rank, folder, 1 - rank.index if swapped else rank.index)
    with pytest.raises(UserError) as raised:
        saver.restore()
    return str(raised.value)


def test_a_start_that_cannot_complete_the_only_checkpoint_is_refused(tmp_path: Path) -> None:
    run_ranks(break_off_first, 2, tmp_path)
    (said,) = run_ranks(refused, 1, tmp_path)
    assert "no checkpoint in" in said and "2 workers saved it" in said and "--from-scratch" in said
    for said in run_ranks(refused, 2, tmp_path, True):
        assert "the ranks see different checkpoints" in said and "(none, step 6)" in said
    part = next((tmp_path / "disk1" / "parts").glob("*.safetensors"))
    aside = part.rename(tmp_path / "aside")
    for said in run_ranks(refused, 2, tmp_path):
        assert "the part of rank 1 is on no disk of the machines that are here" in said and "--from-scratch" in said
    changed = next((tmp_path / "disk0" / "checkpoints").glob("incomplete-*")) / "arrived" / "part-00001.safetensors"
    changed.write_bytes(aside.read_bytes()[:-1])
    aside.rename(part)
    assert [step for step, _, _ in run_ranks(go_on, 2, tmp_path)] == [LAST, LAST]
