"""A run's copy at a URL: what is sent, what another machine gets back, and who may write."""

import errno
import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import echelon
from echelon.checkpoint import BaseState, CheckpointStore
from echelon.config import RunConfig, to_yaml
from echelon.config.schema import CheckpointConfig
from echelon.core.errors import UserError
from echelon.core.patience import DiskNotice, Patience
from echelon.core.stop import StopFlag
from echelon.records.decode import decode
from echelon.records.events import Event
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Checkpoint
from echelon.run.home import at_home, bring, local_copy, mend
from echelon.run.mirror import Mirror, MirrorState, MirrorTerms, begin_writing, mirrored
from echelon.run.snapshot import Hashes, held
from echelon.storage.archive import Archive, ArchiveWriter, ForeignWriter, Part, Version
from echelon.storage.base import StoreAway
from echelon.storage.remote import RemoteStore
from echelon.storage.url import open_store
from echelon.trainer.saving import start_over


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(RunConfig()))
    for hidden in ("machines", "ps", "logs"):
        (folder / hidden).mkdir()
        (folder / hidden / "secret").write_text("SECRET")
    return folder


def save(folder: Path, step: int, metric: float | None = None) -> None:
    store = CheckpointStore(folder / "checkpoints", keep=2)
    store.save(step, {"step": step, "weights": torch.full((100,), float(step))}, metric=metric, background=False)
    store.close()
    record = Recorder(folder)
    record.write(Checkpoint(step, 0.0, 0.0, 400, f"checkpoints/step-{step:08d}", "interval"))
    record.close()


def newest_step(folder: Path) -> int:
    found = CheckpointStore(folder / "checkpoints", keep=2, on_rejected=lambda *_: None).newest()
    assert found is not None and torch.equal(found[1]["weights"], torch.full((100,), float(found[0])))
    return found[0]


def mirror_once(folder: Path, url: str, codec: str = "none", stop: StopFlag | None = None) -> None:
    record = Recorder(folder)
    with mirrored(folder, MirrorTerms(url, codec, 5.0), record, stop or StopFlag()):
        pass
    record.close()


def send(folder: Path, writer: ArchiveWriter) -> None:
    with held(folder) as snapshot:
        writer.commit(Hashes().of(snapshot), snapshot.label)


def test_another_machine_gets_what_it_needs_and_no_secret(folder: Path, url: str) -> None:
    save(folder, 10, metric=0.5)
    save(folder, 20)
    mirror_once(folder, url, "zstd")
    there = bring(url)
    assert there == local_copy(url) and newest_step(there) == 20
    assert (there / "config.yaml").read_text() == (folder / "config.yaml").read_text()
    assert [line.step for line in read_records(there, Checkpoint)] == [10, 20]
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]
    assert not list(there.rglob("secret"))
    assert [event.name for event in read_records(folder, Event)] == ["mirror"]


def test_each_checkpoint_is_sent_while_the_run_goes_on(folder: Path, url: str) -> None:
    record = Recorder(folder)
    with mirrored(folder, MirrorTerms(url, "none", 5.0), record, StopFlag()):
        for step in (10, 20):
            save(folder, step)
            deadline = time.monotonic() + 30
            while (newest := Archive(open_store(url)).newest()) is None or newest.label != f"step {step}":
                assert time.monotonic() < deadline
                time.sleep(0.05)
    record.close()
    assert not (folder / ".mirror").exists()


def test_a_place_with_another_run_is_refused_and_so_is_one_that_was_continued_elsewhere(
    folder: Path, url: str, tmp_path: Path
) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    mirror_once(folder, url)  # its own, again
    elsewhere = bring(url)
    save(elsewhere, 20)
    mirror_once(elsewhere, url)
    with pytest.raises(UserError, match=r"continued elsewhere \(step 20.*echelon resume"):
        begin_writing(folder, url, "none")
    assert newest_step(bring(url, folder)) == 20  # given up for what is there
    mirror_once(folder, url)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="holds another run"):
        begin_writing(other, url, "none")


def test_a_run_ends_in_one_line_when_another_process_takes_over(folder: Path, url: str) -> None:
    record = Recorder(folder)
    with (
        pytest.raises(ForeignWriter, match="this one stops"),
        mirrored(folder, MirrorTerms(url, "none", 5.0), record, StopFlag()) as mirror,
    ):
        begin_writing(folder, url, "none")
        save(folder, 10)
        deadline = time.monotonic() + 30
        while mirror.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        mirror.check()
    record.close()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> Iterator[tuple[Mirror, list[DiskNotice]]]:
    """Give a mirror whose store is away, and what is said."""
    writer = begin_writing(folder, url, "none")
    said: list[DiskNotice] = []
    mirror = Mirror(folder, writer, url, Patience(url, math.inf, said.append))
    with monkeypatch.context() as patched:
        patched.setattr(writer._store, "put", lambda *_: (_ for _ in ()).throw(StoreAway("no answer")))
        yield mirror, said


def test_a_store_that_is_away_ends_no_run_and_is_said_once(folder: Path, away: tuple[Mirror, list[DiskNotice]]) -> None:
    mirror, said = away
    save(folder, 10)
    mirror.start()
    deadline = time.monotonic() + 30
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    mirror.check()
    assert "did not take it" in mirror.close(1.0, StopFlag())
    assert [notice.reason for notice in said] == ["no answer"]
    assert "until the run ends" in said[0].message


def test_a_store_that_is_away_at_the_start_is_refused(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, key: str, data: bytes) -> None:
        """Refuse."""
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr("echelon.storage.remote.RemoteStore.create", refuse)
    with pytest.raises(UserError, match=r"Access Denied.*credentials in the environment"):
        begin_writing(folder, url, "none")


def test_what_is_damaged_here_is_taken_from_the_mirror(folder: Path, url: str) -> None:
    save(folder, 10)
    save(folder, 20)
    mirror_once(folder, url)
    (folder / "checkpoints" / "step-00000020" / "tree.json").write_bytes(b"{}")
    said: list[str] = []
    mend(folder, url, said.append)
    assert newest_step(folder) == 20
    assert "step-00000020 is damaged" in said[0] and f"is taken from {url}" in said[1]


def test_nothing_is_brought_back_to_a_run_that_starts_over(folder: Path, url: str) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    start_over(folder)
    mend(folder, url, print)
    assert not (folder / "checkpoints").exists()
    save(folder, 5)
    mend(folder, url, print)
    assert newest_step(folder) == 5


def test_what_checkpoints_leave_out_is_copied_and_brought_back(folder: Path, url: str) -> None:
    store = CheckpointStore(folder / "checkpoints", keep=1)
    base = BaseState(frozenset({"b"}), {"model": {"b": torch.ones(3)}})
    store.save(10, {"model": {"a": torch.zeros(2)}}, base=base, background=False)
    store.close()
    mirror_once(folder, url)
    there = CheckpointStore(bring(url) / "checkpoints", keep=1).newest()
    assert there is not None and there[1]["model"].keys() == {"a", "b"}
    (path,) = (folder / "checkpoints").glob("base-*")
    (path / "tree.json").unlink()
    said: list[str] = []
    mend(folder, url, said.append)
    assert len(said) == 1 and path.name in said[0] and "is taken from" in said[0]
    assert CheckpointStore(folder / "checkpoints", keep=1).newest() is not None


def test_what_is_damaged_at_the_url_is_named_and_the_checkpoint_before_it_used(folder: Path, url: str) -> None:
    save(folder, 10)
    save(folder, 20)
    mirror_once(folder, url)
    store = open_store(url)
    newest = Archive(store).newest()
    assert newest is not None
    store.put(next(p.key for p in newest.parts if p.name.endswith("step-00000020/tree.json")), b"?")
    said: list[str] = []
    assert newest_step(bring(url, tell=said.append)) == 10
    assert len(said) == 1 and "tree.json" in said[0]
    mirror_once(local_copy(url), url)


def test_a_local_copy_that_is_newer_stays(folder: Path, url: str) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    there = bring(url)
    mirror_once(there, url)
    save(there, 20)  # and its process died before that was sent
    assert newest_step(bring(url)) == 20


def test_a_copy_of_a_run_that_goes_on_follows_it(folder: Path, url: str) -> None:
    writer = begin_writing(folder, url, "none")
    for step in (10, 20):
        save(folder, step)
        send(folder, writer)
        assert newest_step(bring(url)) == step


def test_a_run_that_goes_on_while_it_is_brought_is_brought_as_it_is_then(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin_writing(folder, url, "none")
    save(folder, 10)
    send(folder, writer)
    fetch, notices, later = Archive.fetch, list[str](), [20, 30, 40]

    def slow(self: Archive, part: Part, path: Path) -> None:
        """Bring a part once the run has saved three times more."""
        while later:
            save(folder, later.pop(0))
            send(folder, writer)
        fetch(self, part, path)

    monkeypatch.setattr(Archive, "fetch", slow)
    assert newest_step(bring(url, tell=notices.append)) == 40
    assert notices == []


def test_a_checkpoint_of_the_same_step_and_another_history_leaves_no_file(folder: Path, url: str) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    elsewhere = bring(url)
    save(folder, 20)  # and the store did not take it
    (folder / "checkpoints" / "step-00000020" / "of-two-workers").write_bytes(b"1")
    save(elsewhere, 20)
    mirror_once(elsewhere, url)
    bring(url, folder)
    assert newest_step(folder) == 20


def test_a_claim_whose_answer_is_lost_is_the_folders_own(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    save(folder, 20)  # here alone
    create = RemoteStore.create

    def lost(self: RemoteStore, key: str, data: bytes) -> None:
        """Write a manifest, and lose the answer."""
        create(self, key, data)
        if key.startswith("manifests/"):
            raise StoreAway("no answer")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="no answer"):
        patched.setattr(RemoteStore, "create", lost)
        begin_writing(folder, url, "none")
    assert newest_step(bring(url, folder)) == 20
    mirror_once(folder, url)


def test_a_place_without_a_run_is_said(url: str) -> None:
    with pytest.raises(UserError, match="holds no run"):
        bring(url)


def test_a_run_at_a_url_has_a_local_copy_that_is_mirrored_there(url: str) -> None:
    config = at_home(replace(RunConfig(), run=url))
    assert config.run == str(local_copy(url)) and config.checkpoint.mirror == url
    with pytest.raises(UserError, match="leave --mirror out"):
        at_home(replace(config, run="s3://other/place"))


def test_a_folder_for_the_mirror_is_the_same_one_wherever_the_run_is_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("copy", "~/copy", str(tmp_path / "copy")):
        config = RunConfig(run="run", checkpoint=CheckpointConfig(mirror=name))
        assert at_home(config).checkpoint.mirror == str(tmp_path / "copy")
    save(folder, 10)
    mirror_once(folder, "copy")  # as described before names were made absolute
    mirror_once(folder, str(tmp_path / "copy"))


def test_a_run_at_a_url_that_is_resumed_stays_there(folder: Path, url: str) -> None:
    save(folder, 10)
    mirror_once(folder, url)
    with pytest.raises(UserError, match=f"--mirror s3://other/run: the run is kept at {url} already"):
        echelon.resume(url, mirror="s3://other/run")


def test_the_last_copy_has_the_time_that_the_place_leaves() -> None:
    terms, stop = MirrorTerms("file:///x", "none", 600.0, stop_s=20.0), StopFlag()
    assert terms.last_s(stop) == 600.0  # it ended by itself: a store that is away is waited for
    stop.ask()
    assert 15.0 < terms.last_s(stop) <= 20.0
    assert MirrorTerms("file:///x", "none", 600.0).last_s(stop) == 60.0
    stop.since_s -= 100.0
    assert terms.last_s(stop) == 0.0


def test_an_earlier_files_writer_is_not_taken_for_the_folders_own() -> None:
    """Of a folder that was brought it is somebody else's, who may have gone on."""
    earlier = {"url": "file:///x", "writer": "theirs", "number": 3, "sha256": "a"}
    state, newest = decode(MirrorState, earlier), Version(3, "", 1, "theirs", "host", 0.0, "", (), sha256="a")
    assert state.is_at(newest) and not state.is_at(replace(newest, number=4, sha256="b"))
