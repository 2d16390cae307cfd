"""Versions in a store: whole whatever is killed, one writer, damage named."""

import hashlib
import json
import random
import shutil
import uuid
from pathlib import Path

import pytest

from echelon.storage.archive import (
    MANIFESTS,
    Archive,
    ArchiveWriter,
    DamagedArchive,
    ForeignWriter,
    Version,
    honours_conditions,
    key_of,
)
from echelon.storage.base import Store, StoreAway, StoredObject, refused_in_words
from echelon.storage.codec import compressed, decompressed
from echelon.storage.url import LocalStore, open_store


class FaultyStore(Store):
    """A store that fails at chosen requests: before they are done, or after, so that only the answer is lost."""

    def __init__(self, store: Store, fails_at: int = -1, done: bool = False, honours: bool = True) -> None:
        self.store, self.fails_at, self.done, self.honours = store, fails_at, done, honours
        self.url, self.requests = store.url, 0

    def _fails(self) -> bool:
        self.requests += 1
        return self.requests - 1 == self.fails_at

    def _change(self, action) -> None:
        fails = self._fails()
        if not fails or self.done:
            action()
        if fails:
            raise StoreAway("it was killed")

    def put(self, key: str, data: bytes | Path) -> None:
        self._change(lambda: self.store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._change(lambda: (self.store.create if self.honours else self.store.put)(key, data))

    def delete(self, key: str) -> None:
        self._change(lambda: self.store.delete(key))

    def get(self, key: str) -> bytes:
        if self._fails():
            raise StoreAway("it was killed")
        return self.store.get(key)

    def fetch(self, key: str, path: Path) -> None:
        self.store.fetch(key, path)

    def stat(self, key: str) -> StoredObject:
        return self.store.stat(key)

    def list(self, prefix: str) -> list[StoredObject]:
        return self.store.list(prefix)


def files_in(folder: Path, **contents: bytes) -> dict[str, tuple[Path, str]]:
    result = {}
    for name, content in contents.items():
        path = folder / f"{name}-{uuid.uuid4().hex}"
        path.write_bytes(content)
        result[f"checkpoints/{name}"] = (path, hashlib.sha256(content).hexdigest())
    return result


def begun(store: Store, honours: bool = True, codec: str = "none") -> ArchiveWriter:
    archive = Archive(store)
    writer = ArchiveWriter(archive, honours, codec)
    writer.claim(archive.newest())
    return writer


def contents(store: Store, version: Version, folder: Path) -> dict[str, bytes]:
    result = {}
    for part in version.parts:
        Archive(store).fetch(part, folder / "fetched")
        result[part.name] = (folder / "fetched").read_bytes()
    return result


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_is_committed_comes_back(tmp_path: Path, codec: str) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    noise = random.Random(0).randbytes(4000)
    writer = begun(store, codec=codec)
    version = writer.commit(files_in(tmp_path, zeros=bytes(4000), noise=noise), "step 1")
    assert contents(store, version, tmp_path) == {"checkpoints/zeros": bytes(4000), "checkpoints/noise": noise}
    codecs = {part.name.rpartition("/")[2]: part.codec for part in version.parts}
    assert codecs == {"zeros": codec, "noise": "none"}  # what does not become smaller stays as it is
    assert Archive(store).newest() == version


def test_manifests_are_a_chain_and_what_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path / "s"))
    writer = begun(store)
    writer.commit(files_in(tmp_path, a=b"1", b=b"2"), "")
    sent = writer.sent_bytes
    writer.commit(files_in(tmp_path, a=b"1", b=b"3"), "")
    assert writer.sent_bytes - sent == 1
    numbers = Archive(store).numbers()
    assert numbers == [1, 2, 3]
    for number in numbers[1:]:
        before = hashlib.sha256(store.get(key_of(number - 1))).hexdigest()
        assert Archive(store).read(number).predecessor == before


def test_parts_of_the_last_two_versions_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    writer = begun(store)
    versions = [writer.commit(files_in(tmp_path, a=b"%d" % i), "") for i in range(4)]
    assert {each.key for each in store.list("data/")} == versions[-1].keys | versions[-2].keys


@pytest.mark.parametrize("honours", [True, False])
def test_of_two_writers_exactly_one_goes_on(tmp_path: Path, honours: bool) -> None:
    store = FaultyStore(LocalStore(tmp_path / "s"), honours=honours)
    assert honours_conditions(store) is honours
    first = begun(store, honours)
    first.commit(files_in(tmp_path, a=b"1"), "step 1")
    second = begun(store, honours)
    with pytest.raises(ForeignWriter, match="another process on"):
        first.commit(files_in(tmp_path, a=b"of the first"), "step 2")
    version = second.commit(files_in(tmp_path, a=b"of the second"), "step 2")
    assert contents(store, version, tmp_path) == {"checkpoints/a": b"of the second"}
    assert version.term == 2


def test_of_two_that_begin_at_once_one_is_refused(tmp_path: Path) -> None:
    archive = Archive(LocalStore(tmp_path / "s"))
    newest = begun(archive.store).last
    one, two = ArchiveWriter(archive, True), ArchiveWriter(archive, True)
    one.claim(newest)
    with pytest.raises(ForeignWriter):
        two.claim(newest)


@pytest.mark.parametrize("done", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("honours", [True, False])
def test_a_store_killed_at_any_request_leaves_a_whole_version_and_the_writer_goes_on(
    tmp_path: Path, done: bool, honours: bool
) -> None:
    at = 0
    while True:
        folder = tmp_path / f"{at}"
        folder.mkdir()
        store = FaultyStore(LocalStore(folder / "s"), honours=honours)
        writer = begun(store, honours)
        writer.commit(files_in(folder, a=b"1", b=b"2"), "step 1")
        store.requests, store.fails_at, store.done = 0, at, done
        files = files_in(folder, a=b"3", b=b"4")
        try:
            writer.commit(files, "step 2")
        except StoreAway:
            newest = Archive(store.store).newest()
            assert newest is not None
            whole = contents(store.store, newest, folder)
            old, new = ({"checkpoints/a": a, "checkpoints/b": b} for a, b in ((b"1", b"2"), (b"3", b"4")))
            assert whole in (old, new)
            store.fails_at = -1
            writer.commit(files, "step 2")
        newest = Archive(store.store).newest()
        assert newest is not None and newest.label == "step 2"
        assert contents(store.store, newest, folder) == {"checkpoints/a": b"3", "checkpoints/b": b"4"}
        if store.requests <= at:
            return
        at += 1


def test_damage_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    writer = begun(store)
    version = writer.commit(files_in(tmp_path, a=b"right", b=b"gone"), "step 1")
    keys = {part.name: part.key for part in version.parts}
    (store.folder / keys["checkpoints/a"]).write_bytes(b"wrong")
    store.delete(keys["checkpoints/b"])
    for part, words in zip(version.parts, ("checksum", "is gone"), strict=True):
        with pytest.raises(DamagedArchive, match=words):
            Archive(store).fetch(part, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_damaged_manifest_is_passed_over_and_its_number_stays_taken(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    begun(store).commit(files_in(tmp_path, a=b"1"), "step 1")
    store.put(key_of(2), b"{")
    newest = Archive(store).newest()
    assert newest is not None and newest.number == 1
    assert begun(store).last.number == 3


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "..\\x"])
def test_a_manifest_leads_to_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path / "s")
    part = {"name": name, "bytes": 1, "sha256": "0" * 64, "codec": "none", "stored_bytes": 1}
    values = {"number": 1, "predecessor": "", "term": 1, "writer": "w", "host": "h", "t": 0.0, "label": ""}
    store.put(f"{MANIFESTS}00000001.json", json.dumps({"format": 1, **values, "parts": [part]}).encode())
    with pytest.raises(DamagedArchive, match="no name of a file"):
        Archive(store).read(1)


def test_a_full_disk_of_this_machine_is_no_damage_of_the_archive(tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    with compressed(files_in(tmp_path, zeros=bytes(1 << 20))["checkpoints/zeros"][0], "zstd") as (file, _):
        shutil.copy(file, stored)
    with pytest.raises(OSError) as full:
        decompressed(stored, Path("/dev/full"), "zstd")
    said = str(refused_in_words("s3://bucket/run", full.value))
    assert "No space left on device on this machine" in said and "cannot be used" not in said
    stored.write_bytes(stored.read_bytes()[:-4])
    with pytest.raises(ValueError, match="Truncated"):
        decompressed(stored, tmp_path / "plain", "zstd")


def test_a_manifest_of_its_own_that_was_cut_short_is_passed_over_unless_another_writes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    writer = begun(store)
    store.put(key_of(2), b"{")
    files = files_in(tmp_path, a=b"1")
    assert writer.commit(files, "step 1").number == 3
    store.put(key_of(4), b"{")
    begun(store)
    with pytest.raises(ForeignWriter):
        writer.commit(files, "step 2")
