"""Copying, verifying and cleaning runs in folders and at URLs."""

import os
import shutil
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import BaseState, CheckpointStore
from echelon.config import RunConfig, to_yaml
from echelon.core.errors import UserError
from echelon.records.file import Recorder
from echelon.records.kinds import Checkpoint
from echelon.run.home import local_copy
from echelon.run.upkeep import copy_run, findings, removables, remove
from echelon.storage.archive import Archive, Part, key_of
from echelon.storage.url import open_store
from echelon.trainer.saving import start_over


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(RunConfig()))
    save(folder, 10)
    return folder


def save(folder: Path, step: int) -> None:
    store = CheckpointStore(folder / "checkpoints", keep=2)
    store.save(step, {"weights": torch.full((100,), float(step))}, background=False)
    store.close()


def damaged(place: str | Path) -> list[str]:
    return [each.name for each in findings(str(place)) if each.damage]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_run_is_copied_there_and_back_and_elsewhere(folder: Path, url: str, tmp_path: Path, codec: str) -> None:
    assert "step 10" in copy_run(str(folder), url, codec)
    save(folder, 20)
    assert "step 20" in copy_run(str(folder), url, codec)
    copy_run(url, f"{url}-2", codec)
    copy_run(f"{url}-2", str(tmp_path / "again"))
    for name in ("step-00000010", "step-00000020"):
        for path in (folder / "checkpoints" / name).iterdir():
            assert (tmp_path / "again" / "checkpoints" / name / path.name).read_bytes() == path.read_bytes()
    assert damaged(url) == damaged(f"{url}-2") == damaged(folder) == []


def test_a_file_whose_name_no_archive_may_have_stays_here(folder: Path, url: str, tmp_path: Path) -> None:
    (folder / "notes\\new.txt").write_text("mine")
    copy_run(str(folder), url)
    assert damaged(url) == []
    copy_run(url, str(tmp_path / "again"))


def test_a_copy_replaces_no_other_run(folder: Path, url: str, tmp_path: Path) -> None:
    copy_run(str(folder), url)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(to_yaml(RunConfig()))
    with pytest.raises(UserError, match="holds another run"):
        copy_run(str(other), url)
    with pytest.raises(UserError, match="holds another run"):
        copy_run(url, str(other))
    with pytest.raises(UserError, match="one of them is to be a URL"):
        copy_run(str(folder), str(tmp_path / "new"))
    with pytest.raises(UserError, match="holds no run"):
        copy_run(str(tmp_path / "nothing"), url)


def test_a_copy_goes_only_into_an_empty_folder_or_its_own(folder: Path, url: str, tmp_path: Path) -> None:
    copy_run(str(folder), f"{url}/")
    other = tmp_path / "project"
    (other / "checkpoints" / "step-1000").mkdir(parents=True)
    with pytest.raises(UserError, match="is not empty"):
        copy_run(url, str(other))
    copy_run(url, str(tmp_path / "again"))
    (tmp_path / "again" / "checkpoints" / "step-1000").mkdir()  # another tool's
    save(folder, 20)
    copy_run(str(folder), url)
    copy_run(f"{url}/", str(tmp_path / "again"))
    found = sorted(path.name for path in (tmp_path / "again" / "checkpoints").iterdir())
    assert found == ["step-00000010", "step-00000020", "step-1000"]
    assert local_copy(f"{url}/") == local_copy(url)


def test_a_copy_that_was_cut_is_taken_up_again(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_run(str(folder), url)
    fetch = Archive.fetch

    def cut(self: Archive, part: Part, path: Path) -> None:
        """Bring all but what makes the folder a run."""
        if part.name == "config.yaml":
            raise KeyboardInterrupt
        fetch(self, part, path)

    monkeypatch.setattr(Archive, "fetch", cut)
    with pytest.raises(KeyboardInterrupt):
        copy_run(url, str(tmp_path / "again"))
    assert (tmp_path / "again" / "checkpoints" / "step-00000010").exists()
    monkeypatch.undo()
    copy_run(url, str(tmp_path / "again"))
    assert (tmp_path / "again" / "config.yaml").exists()


def test_damage_is_found_in_a_folder_and_at_a_url(folder: Path, url: str) -> None:
    copy_run(str(folder), url)
    (folder / "checkpoints" / "step-00000010" / "tree.json").write_bytes(b"{}")
    assert damaged(folder) == ["step-00000010"]
    store = open_store(url)
    newest = Archive(store).newest()
    assert newest is not None
    store.put(next(part.key for part in newest.parts if part.name.endswith("tree.json")), b"{}")
    store.put("manifests/00000001.json", b"?")
    assert set(damaged(url)) == {"manifest 1", "manifests 1 to 2", "checkpoints/step-00000010/tree.json"}


def test_a_run_that_cannot_be_read_is_not_whole(folder: Path, url: str) -> None:
    store = CheckpointStore(folder / "checkpoints", keep=1)
    base = BaseState(frozenset({"b"}), {"model": {"b": torch.ones(3)}})
    store.save(30, {"model": {"a": torch.zeros(2)}}, base=base, background=False)
    store.close()
    assert damaged(folder) == []
    (path,) = (folder / "checkpoints").glob("base-*")
    path.rename(folder / "elsewhere")
    assert damaged(folder) == ["step-00000030"]
    with pytest.raises(UserError, match=f"{path} is missing"):
        copy_run(str(folder), url)
    with closing(Recorder(folder)) as record:
        record.write(Checkpoint(30))
    assert damaged(folder) == ["step-00000030"]
    shutil.rmtree(folder / "checkpoints")
    assert damaged(folder) == ["checkpoint of step 30"]
    start_over(folder)
    assert damaged(folder) == []


def test_what_a_killed_writer_left_may_go_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    url, now = f"file://{tmp_path}/store", time.time()
    store = open_store(url)
    copy_run(str(folder), url)
    manifest = key_of(Archive(store).numbers()[-1])
    orphan = tmp_path / "store" / "data" / "orphan"
    store.put("data/orphan", b"123")
    assert removables(url)[1] == []  # a writer may be about to name it
    os.utime(tmp_path / "store" / manifest, (now - 3 * 3600,) * 2)
    os.utime(orphan, (now - 2 * 3600,) * 2)
    assert removables(url)[1] == []  # the upload that it belongs to may take hours
    os.utime(orphan, (now - 4 * 3600,) * 2)
    found = removables(url)[1]
    assert [(each.name, each.n_bytes) for each in found] == [("data/orphan", 3)]
    os.utime(tmp_path / "store" / manifest, (now - 30 * 86400,) * 2)
    os.utime(orphan, (now - 8 * 86400,) * 2)
    assert removables(url)[1] == found, "no upload takes a week"
    remove(url, found)
    assert damaged(url) == [] and removables(url)[1] == []


def test_what_may_go_of_a_folder(folder: Path) -> None:
    (folder / "checkpoints-before-1").mkdir()
    (folder / "checkpoints-before-1" / "old").write_bytes(b"12345")
    (folder / "checkpoints" / ".tmp-step-00000020").mkdir()
    (folder / "checkpoints" / "base-0123456789abcdef").mkdir()
    found = removables(str(folder))[1]
    assert sorted(Path(each.name).name for each in found) == [
        ".tmp-step-00000020", "base-0123456789abcdef", "checkpoints-before-1"
    ]  # fmt: skip
    remove(str(folder), found)
    assert removables(str(folder))[1] == [] and damaged(folder) == []
