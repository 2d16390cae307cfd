"""Which checkpoints are kept, which one is found, and what goes wrong in words."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.checkpoint import Arriving, BaseState, CheckpointStore, Saved, export_weights, files
from echelon.core.errors import UserError
from tests.unit.checkpoint.states import assert_same, small_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path, keep=2)
    yield opened
    opened.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def step_of(found: tuple[int, Any] | None) -> int | None:
    return None if found is None else found[0]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    missing = CheckpointStore(tmp_path / "none", keep=1)
    assert missing.newest() is None
    assert missing.best() is None
    assert not (tmp_path / "none").exists()


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step, metric in enumerate([0.1, 0.9, None, float("nan"), 0.2]):
        store.save(step, small_state(), metric=metric, background=False)
    assert names(store.folder) == ["step-00000001", "step-00000003", "step-00000004"]
    assert (step_of(store.best()), step_of(store.newest())) == (1, 4)
    store.save(5, small_state(), metric=0.95, background=False)
    assert names(store.folder) == ["step-00000004", "step-00000005"]


def test_the_best_stays_where_its_step_is_saved_again(store: CheckpointStore) -> None:
    store.save(1, small_state(), metric=0.5, background=False)
    store.save(2, small_state(), metric=0.9, background=False)
    store.save(2, small_state(), background=False)  # by those who survived another
    assert step_of(store.best()) == 2 and store.keeps(0.9) and not store.keeps(0.7)
    store.save(2, small_state(), metric=0.8, background=False)
    assert not store.keeps(0.9), "its metric was taken anew"


def test_what_waits_for_lost_ranks_is_given_up_and_not_kept(store: CheckpointStore) -> None:
    folder = store.room_for_parts(1)
    arriving = Arriving(folder, ["rank1"], lambda state, parts: state)
    store.save(3, small_state(), metric=0.9, arriving=arriving)
    assert not store.keeps(0.9)
    store.wait()
    assert store.newest() is None


def test_each_checkpoint_is_told_with_its_own_reason(tmp_path: Path) -> None:
    saved: list[Saved] = []
    store = CheckpointStore(tmp_path, keep=2, on_saved=saved.append)
    for step, reason in enumerate(["interval", "best", "end"]):  # each while the one before is being written
        store.save(step, small_state(), reason=reason)
    store.close()
    assert [(each.step, each.reason) for each in saved] == [(0, "interval"), (1, "best"), (2, "end")]


def test_the_same_step_again_replaces_it(store: CheckpointStore) -> None:
    for fill in (1.0, 2.0, 3.0):
        store.save(7, small_state(fill), background=False)
    assert names(store.folder) == ["step-00000007.3"]
    newest = store.newest()
    assert newest is not None and newest[1]["model"]["weight"][0, 0] == 3


def test_a_rolled_back_run_replaces_its_later_steps(store: CheckpointStore) -> None:
    for step in (10, 20, 15):
        store.save(step, small_state(), metric=step / 100, background=False)
    assert names(store.folder) == ["step-00000010", "step-00000015"]


def test_the_copy_is_taken_at_once_and_the_caller_is_told(tmp_path: Path) -> None:
    saved: list[Saved] = []
    store = CheckpointStore(tmp_path, keep=2, on_saved=saved.append)
    state = small_state(1.0)
    store.save(1, state, metric=0.5)
    state["model"]["weight"].fill_(9.0)
    store.close()
    newest = store.newest()
    assert newest is not None and newest[1]["model"]["weight"][0, 0] == 1
    (event,) = saved
    assert (event.step, event.metric, event.path) == (1, 0.5, tmp_path / "step-00000001")
    assert 0 < event.blocked_s <= event.total_s
    assert event.n_bytes == sum(p.stat().st_size for p in event.path.iterdir() if "manifest" not in p.name)


def test_only_the_part_of_one_rank_is_read(store: CheckpointStore) -> None:
    parts = {rank: {"memory": torch.full((2,), float(rank)), "seed": rank} for rank in range(3)}
    store.save(1, {"shared": torch.ones(1), "ranks": parts}, background=False)
    newest = store.newest(rank=2)
    assert newest is not None
    assert_same({"shared": torch.ones(1), "ranks": {2: parts[2]}}, newest[1])


def test_load_by_path(store: CheckpointStore) -> None:
    state = small_state()
    store.save(1, state, background=False)
    assert_same(state, store.load(store.folder / "step-00000001"))
    with pytest.raises(UserError, match=r"step-00000002 is no checkpoint"):
        store.load(store.folder / "step-00000002")
    (store.folder / "step-00000001" / "tree.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000001 is damaged: tree.json has 2 bytes"):
        store.load(store.folder / "step-00000001")


def test_without_a_listener_a_damaged_one_is_logged(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        store.save(step, small_state(), background=False)
    (store.folder / "step-00000002" / "tree.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert step_of(store.newest()) == 1
    assert "step-00000002 is not used: missing files ['tree.json']" in caplog.text


def test_when_all_are_damaged_nothing_starts_over_silently(store: CheckpointStore) -> None:
    store.save(1, small_state(), background=False)
    (store.folder / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint here is whole"):
        store.newest()


def test_a_failure_in_the_background_is_raised_by_wait(tmp_path: Path) -> None:
    def listener(_: Saved) -> None:
        raise RuntimeError("from the listener")

    store = CheckpointStore(tmp_path, keep=1, on_saved=listener)
    store.save(1, small_state())
    with pytest.raises(RuntimeError, match="from the listener"):
        store.wait()
    store.close()


def test_two_writers_are_refused_and_readers_are_not(store: CheckpointStore) -> None:
    store.save(1, small_state(), background=False)
    child = os.fork()
    if child == 0:
        other = CheckpointStore(store.folder, keep=1, deadline_s=0.1)
        code = 1
        try:
            assert step_of(other.newest()) == 1
            other.save(2, small_state())
        except UserError as error:
            code = 0 if "another run is saving its checkpoints here" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_writers_of_one_run_take_turns(tmp_path: Path) -> None:
    """One that stopped in the middle holds the others up, one that has written does not."""
    store = CheckpointStore(tmp_path, keep=2)
    store.claim(in_turns=True)
    store.save(1, small_state(), background=False)
    child = os.fork()
    if child == 0:
        other = CheckpointStore(store.folder, keep=2)
        other.claim(in_turns=True)
        other.save(2, small_state(), background=False)
        other.claim(in_turns=True)  # and is not done
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert store.newest_step() == 2
    with pytest.raises(BlockingIOError, match="another process is saving"):
        store.claim(in_turns=True)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    store.save(3, small_state(), background=False)
    assert store.newest_step() == 3


def test_a_turn_is_taken_from_one_that_does_not_answer(tmp_path: Path) -> None:
    """It holds nobody up, and when it wakes it neither finishes nor removes what was saved since."""
    folder = tmp_path / "checkpoints"
    child = os.fork()
    if child == 0:
        code = 3
        try:
            sleeper = CheckpointStore(folder, keep=1, on_saved=lambda saved: os._exit(4))
            sleeper.claim(in_turns=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            sleeper.save(1, small_state(), background=False)
            code = 0 if not sleeper.is_writing else 2
        finally:
            os._exit(code)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    store = CheckpointStore(folder, keep=1)
    with pytest.raises(BlockingIOError, match="another process is saving"):
        store.claim(in_turns=True)
    for step in (2, 3):  # the next time nobody is in the way
        store.claim(in_turns=True, takes_over=step == 2)
        store.save(step, small_state(), background=False)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names(folder) == ["step-00000003"]
    store.claim(in_turns=True)
    store.save(4, small_state(), background=False)
    assert names(folder) == ["step-00000004"]


def test_one_whose_turn_was_taken_while_it_removed_an_old_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.claim(in_turns=True)
    store.save(1, small_state(), background=False)

    def taken(path: Path) -> None:
        """Find nothing to remove: another process took the lock, and cleaned up."""
        (tmp_path / ".lock").unlink()
        raise FileNotFoundError(2, "No such file or directory", str(path))

    store.claim(in_turns=True)
    with monkeypatch.context() as patched:
        patched.setattr("echelon.checkpoint.files.remove", taken)
        store.save(2, small_state(), background=False)
    store.wait()
    store.claim(in_turns=True)
    store.save(3, small_state(), background=False)
    assert names(tmp_path) == ["step-00000003"]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep checkpoints in .*file"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, small_state())
    with pytest.raises(UserError, match="keep at least 1"):
        CheckpointStore(tmp_path, keep=0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True, timeout=20
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=20)


@pytest.mark.root
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_and_leaves_the_older_one_whole(small_disk: Path, background: bool) -> None:
    store = CheckpointStore(small_disk, keep=3)
    big = {"weight": torch.randn(400_000)}
    store.save(1, big, background=False)
    with pytest.raises(UserError, match=r"is full: the checkpoint of step 2 needs 1600000 bytes and \d+ are free"):
        store.save(2, big, background=background)
        store.wait()
    assert names(small_disk) == ["step-00000001"]
    newest = store.newest()
    assert newest is not None
    assert_same(big, newest[1])
    store.save(3, small_state(), background=False)
    assert step_of(store.newest()) == 3
    with pytest.raises(UserError, match=r"cannot write the weights to .*: No space left"):
        export_weights(big, small_disk / "weights.safetensors")
    assert names(small_disk) == ["step-00000001", "step-00000003"]
    store.close()


def test_exported_weights_are_a_plain_file(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    path = tmp_path / "deep" / "weights.safetensors"
    for _ in range(2):
        export_weights({"weight": weight, "tied": weight, "count": torch.tensor(3)}, path)
    back = load_file(path)
    assert_same({"count": torch.tensor(3), "tied": weight, "weight": weight}, dict(sorted(back.items())))
    assert names(path.parent) == ["weights.safetensors"]


def _on_base(store: CheckpointStore, steps: int) -> None:
    frozen = {"model": {"a": torch.arange(6.0), "b": torch.ones(2)}}
    for step in range(steps):
        names = frozenset(frozen["model"])
        base = BaseState(names, None if store.has_base(names) else frozen)
        store.save(step, {"model": {"c": torch.full((3,), float(step))}, "n": step}, base=base, background=False)


def test_what_stays_is_written_once_and_found_with_every_checkpoint(store: CheckpointStore) -> None:
    _on_base(store, 4)
    assert [name.partition("-")[0] for name in names(store.folder)] == ["base", "step", "step"]
    found = CheckpointStore(store.folder, keep=1).newest()
    assert found is not None and found[1]["n"] == 3
    assert {name: t.tolist() for name, t in found[1]["model"].items()} == {
        "a": [0, 1, 2, 3, 4, 5], "b": [1, 1], "c": [3, 3, 3],
    }  # fmt: skip
    other = CheckpointStore(store.folder, keep=2)
    store.close()
    _on_base(other, 1)  # a process that has read nothing writes the same base again
    other.close()
    assert [name.partition("-")[0] for name in names(store.folder)] == ["base", "step"]


def test_a_base_goes_with_the_last_checkpoint_that_names_it(store: CheckpointStore) -> None:
    _on_base(store, 2)
    store.save(2, {"n": 2}, background=False)  # all is trained from now on
    assert [name.partition("-")[0] for name in names(store.folder)] == ["base", "step", "step"]
    store.save(3, {"n": 3}, background=False)
    assert names(store.folder) == ["step-00000002", "step-00000003"]
    _on_base(store, 6)
    assert names(store.folder)[0].startswith("base-") and store.newest() is not None


def test_a_base_that_a_damaged_checkpoint_may_name_stays(store: CheckpointStore) -> None:
    _on_base(store, 2)
    store.save(2, {"n": 2}, metric=1.0, background=False)
    (store.folder / "step-00000001" / "manifest.json").write_text("{}")
    assert files.unnamed_bases(store.folder) == []


def test_a_base_that_is_missing_or_damaged_is_named_in_one_line(store: CheckpointStore) -> None:
    _on_base(store, 2)
    (base,) = store.folder.glob("base-*")
    file = next(base.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"{base} is damaged .*good copy") as damaged:
        CheckpointStore(store.folder, keep=1).newest()
    assert "\n" not in str(damaged.value)
    base.rename(base.with_name("elsewhere"))
    with pytest.raises(UserError, match=f"{base} is missing"):
        CheckpointStore(store.folder, keep=1).newest()


def test_another_choice_of_what_stays_has_a_base_of_its_own(store: CheckpointStore) -> None:
    _on_base(store, 1)
    more = frozenset({"a", "b", "c"})
    assert not store.has_base(more)
    assert store.has_base(frozenset({"a"}))
    reader = CheckpointStore(store.folder, keep=1)
    assert reader.newest() is not None
    assert reader.has_base(frozenset({"a", "b"})) and not reader.has_base(more)
    another = CheckpointStore(store.folder, keep=1)  # that has read nothing so far, as where processes save in turns
    assert another.has_base(frozenset({"a"})) and not another.has_base(more)
