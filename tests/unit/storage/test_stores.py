"""What every store must do, whatever it is: whole objects, a conditional put, words for what cannot be used."""

import errno
import os
import time
import uuid
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.storage.archive import honours_conditions
from echelon.storage.base import Store
from echelon.storage.url import check_url, is_url, open_store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    places = {"folder": str(tmp_path / "s"), "file": f"file://{tmp_path}/s", "memory": f"memory://{uuid.uuid4().hex}/s"}
    return open_store(places[request.param])


def test_an_object_is_written_read_listed_and_removed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    store.put("data/b", b"two")
    store.put("data/a", tmp_path / "large")
    store.put("other/c", b"")
    assert store.get("data/b") == b"two"
    store.fetch("data/a", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"x" * 100_000
    assert [(each.key, each.n_bytes) for each in store.list("data/")] == [("data/a", 100_000), ("data/b", 3)]
    store.put("data/b", b"again")
    assert store.get("data/b") == b"again"
    store.delete("data/b")
    store.delete("data/b")
    assert [each.key for each in store.list("data/")] == ["data/a"]
    assert store.list("nothing/") == []


def test_what_is_not_there_is_a_file_that_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.get("data/none")
    with pytest.raises(FileNotFoundError):
        store.fetch("data/none", tmp_path / "none")


def test_an_object_is_told_from_another_of_its_size(store: Store) -> None:
    store.put("data/a", b"one")
    first = store.stat("data/a")
    assert (first.key, first.n_bytes) == ("data/a", 3)
    assert [each.tag for each in store.list("data/")] == [first.tag]
    time.sleep(0.01)
    store.put("data/a", b"two")
    assert store.stat("data/a").tag != first.tag
    for key in ("data/none", "data"):
        with pytest.raises(FileNotFoundError):
            store.stat(key)


def test_an_object_is_created_only_where_there_is_none(store: Store) -> None:
    store.create("manifests/1", b"first")
    with pytest.raises(FileExistsError):
        store.create("manifests/1", b"second")
    assert store.get("manifests/1") == b"first"


def test_a_disk_without_links_takes_objects_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(str(tmp_path / "s"))
    store.create("data/a", b"one")
    with pytest.raises(FileExistsError):
        store.create("data/a", b"two")
    assert store.get("data/a") == b"one" and [each.key for each in store.list("data/")] == ["data/a"]


def test_conditions_are_tried_and_nothing_is_left_of_that(store: Store) -> None:
    assert honours_conditions(store)
    assert store.list("probe/") == []


def test_a_local_object_that_was_not_finished_is_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".a.123").write_bytes(b"half")
    assert store.list("data/") == []


@pytest.mark.parametrize(
    "url",
    ["s3://KEY:SECRET@bucket/run", "s3://bucket/run?X-Amz-Signature=SECRET", "https://KEY:SECRET@host/run#SECRET"],
)
def test_credentials_in_a_url_are_refused_and_never_said(url: str) -> None:
    with pytest.raises(UserError, match="environment") as refused:
        check_url(url)
    assert "SECRET" not in str(refused.value) and "KEY" not in str(refused.value)


def test_urls_are_told_from_folders() -> None:
    assert is_url("s3://b/n") and is_url("file:///n") and not is_url("runs/a") and not is_url("C:/a")
    with pytest.raises(UserError, match="names no place"):
        check_url("s3://")
    with pytest.raises(UserError, match="such as s3://"):
        open_store("nosuch://bucket/name")
    with pytest.raises(UserError, match="write file:///FOLDER"):
        check_url("file://backup/run")
    assert check_url("file://localhost/run/") == "file://localhost/run"
    with pytest.raises(UserError, match="this is no URL"):
        check_url("s3://[x")
