"""Torn and tampered checkpoints are found out, a writer may be killed at any moment, and nothing is unpickled."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint import CheckpointStore
from tests.unit.checkpoint.states import assert_same, small_state

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def fork(run: Callable[..., None], *args: Any) -> int:
    """Run a function in a forked child and return its id; exit code 1 and a traceback on stderr when it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            run(*args)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the child must not go on as a second test run
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


class Damaged:
    """Two checkpoints, of which a test damages the newer."""

    def __init__(self, folder: Path) -> None:
        self.rejected: list[tuple[str, str]] = []
        self.store = CheckpointStore(folder, keep=2, on_rejected=lambda p, why: self.rejected.append((p.name, why)))
        self.older = small_state(1.0)
        self.store.save(1, self.older, background=False)
        self.store.save(2, small_state(2.0), background=False)
        self.path = folder / "step-00000002"

    def assert_found_out(self, what: str) -> None:
        self.rejected.clear()
        newest = self.store.newest()
        assert newest is not None and newest[0] == 1, what
        assert_same(self.older, newest[1])
        assert [name for name, _ in self.rejected] == ["step-00000002"], what


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("damaged"))


FILES = [
    *("manifest.json", "manifest.sha256", "tree.json"),
    "model-00001-of-00001.safetensors",
]


def test_these_are_all_the_files(damaged: Damaged) -> None:
    assert sorted(path.name for path in damaged.path.iterdir()) == FILES[:2] + FILES[3:] + FILES[2:3]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_out(damaged: Damaged, name: str) -> None:
    path = damaged.path / name
    whole = path.read_bytes()
    # Every part of the file, and every one of a byte's bits, in about 100 places.
    for place in range(0, len(whole), max(1, len(whole) // 100)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        damaged.assert_found_out(f"{name}, byte {place}")
    path.write_bytes(whole)
    assert damaged.store.newest()[0] == 2  # type: ignore[index]


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_found_out(damaged: Damaged, name: str) -> None:
    path = damaged.path / name
    whole = path.read_bytes()
    for length in [*range(0, len(whole), max(1, len(whole) // 20)), len(whole) - 1]:
        path.write_bytes(whole[:length])
        damaged.assert_found_out(f"{name}, cut to {length}")
    path.write_bytes(whole + b"\n")
    damaged.assert_found_out(f"{name}, longer")
    path.unlink()
    damaged.assert_found_out(f"{name}, missing")
    path.write_bytes(whole)


def swap_file_for_folder(path: Path) -> None:
    (path / "tree.json").unlink()
    (path / "tree.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: shutil.copy(path / FILES[3], path / "model-2.safetensors"), "do not belong there"),
        (swap_file_for_folder, "tree.json has"),
        (lambda path: [file.unlink() for file in path.iterdir()], "no readable manifest"),
        (lambda path: shutil.copytree(path, path.with_name("step-00000003")), "written at step 2, not 3"),
        (lambda path: path.with_name("step-00000003").write_text("a file"), "no readable manifest"),
    ],
    ids=["added", "file-for-folder", "emptied", "renamed", "file-in-place"],
)
def test_other_damage_is_said(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    case = Damaged(tmp_path)
    damage(case.path)
    assert case.store.newest() is not None
    assert len(case.rejected) == 1 and words in case.rejected[0][1], case.rejected


def save_until_killed(folder: Path, at: int) -> None:
    """Save steps 1 to 3, keeping two, and die by SIGKILL right before the `at`-th change to the folder."""
    seen = 0

    def strike(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and isinstance(args[0], (str, Path)) and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(strike)
    store = CheckpointStore(folder, keep=2)
    for step in (1, 2, 3):
        store.save(step, {"x": torch.full((10,), float(step))}, background=step % 2 == 0)
    store.close()


@pytest.mark.long
def test_a_writer_killed_before_any_change_to_the_disk(tmp_path: Path) -> None:
    """Every moment at which the folder changes, in turn; each in a process of its own."""
    at, killed, newest_steps = 0, True, []
    while killed:
        at += 1
        folder = tmp_path / str(at)
        child = fork(save_until_killed, folder, at)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        newest_steps.append(check_after_kill(folder))
    assert at > 50, "the moments of a save were not seen"
    assert newest_steps == sorted(newest_steps)
    assert set(newest_steps) == {0, 1, 2, 3}


def check_after_kill(folder: Path) -> int:
    """Return the newest step, which is whole, after checking that the next run finds order and leaves order."""
    rejected: list[Path] = []
    store = CheckpointStore(folder, keep=2, on_rejected=lambda path, _: rejected.append(path))
    newest = store.newest()
    assert rejected == []
    step = 0
    if newest is not None:
        step = newest[0]
        assert_same({"x": torch.full((10,), float(step))}, newest[1])
    store.claim()
    assert [path.name for path in folder.iterdir() if path.name.startswith((".tmp", ".old"))] == []
    store.save(step + 1, {"x": torch.zeros(1)}, background=False)
    assert len([path for path in folder.iterdir() if path.name.startswith("step-")]) == min(step + 1, 2)
    store.close()
    return step


def save_forever(folder: Path, report: int) -> None:
    store = CheckpointStore(folder, keep=2)
    for step in range(1, 10_000):
        store.save(step, {"x": torch.full((500_000,), float(step))})
        os.write(report, b".")


@pytest.mark.parametrize("saves", [2, 3, 5, 8])
def test_kill_9_in_the_middle_of_saving(tmp_path: Path, saves: int) -> None:
    read, write = os.pipe()
    child = fork(save_forever, tmp_path, write)
    for _ in range(saves):
        assert os.read(read, 1) == b"."
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(read)
    os.close(write)
    check_writer_left_whole(tmp_path)


def check_writer_left_whole(folder: Path) -> None:
    rejected: list[Path] = []
    newest = CheckpointStore(folder, keep=2, on_rejected=lambda path, _: rejected.append(path)).newest()
    assert newest is not None and rejected == []
    assert torch.equal(newest[1]["x"], torch.full((500_000,), float(newest[0])))


def read_under_audit(folder: Path) -> None:
    """End with an error when a class is unpickled while a checkpoint is read (or when that would go unseen)."""
    seen: list[str] = []
    sys.addaudithook(lambda event, _: seen.append(event))
    newest = CheckpointStore(folder, keep=1).newest()
    assert newest is not None and newest[0] == 1
    assert "open" in seen and "pickle.find_class" not in seen, seen
    pickle.loads(pickle.dumps(torch.float32))
    assert "pickle.find_class" in seen


def test_reading_reaches_no_pickle(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, small_state(), background=False)
    store.close()
    for path in (tmp_path / "step-00000001").iterdir():
        assert not path.read_bytes().startswith(b"\x80"), f"{path.name} begins like a pickle"
    child = fork(read_under_audit, tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
