"""Data by URL: the batches of the folder; brought once, checked, within a limit; refusals in one line."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, by_url, check_source, open_data, url_objects
from echelon.data.by_url import cached, local_path
from echelon.run.upkeep import removables, remove
from echelon.storage.base import StoreAway
from echelon.storage.remote import RemoteStore
from echelon.storage.url import open_store
from tests.unit.data.images import make_folder, make_shards
from tests.web_server import web_server

TABLE = "a,b,y\n" + "".join(f"{i},{i * i % 7},{i % 3}\n" for i in range(60))


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/data"


@pytest.fixture(autouse=True)
def nothing_is_used_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(by_url, "_in_use", {})
    yield


def put(url: str, folder: Path) -> None:
    store = open_store(url)
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        store.put(file.relative_to(folder).as_posix(), file)


def config(source: object, root: Path, **more: object) -> DataConfig:
    return DataConfig(source=str(source), root=str(root), batch_size=5, loaders=0, **more)  # type: ignore[arg-type]


def batches(data: DataConfig) -> list[torch.Tensor]:
    loader = TrainLoader(open_data(data, 1), LoaderConfig(data, 1, torch.device("cpu")), Shard(0, 1))
    try:
        return [torch.cat([b.inputs.flatten(1), b.targets[:, None]], 1) for b in loader.epoch(2, 0)]
    finally:
        loader.close()


def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the key of each object that is brought."""
    keys: list[str] = []
    real = RemoteStore.fetch

    def fetch(self: RemoteStore, key: str, path: Path) -> None:
        keys.append(key)
        real(self, key, path)

    monkeypatch.setattr(RemoteStore, "fetch", fetch)
    return keys


def release() -> None:
    """End the use of data by this process, as its end does."""
    for file in by_url._in_use.values():
        file.close()
    by_url._in_use.clear()


@pytest.mark.parametrize("part", ["", "train"])
def test_shards_give_the_batches_of_the_folder_and_are_brought_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    shards = make_shards(make_folder(tmp_path / "files", per_class=9), tmp_path / "shards" / part)
    put(url, tmp_path / "shards")
    open_store(url).put("README.md", b"what these are")
    keys = fetched(monkeypatch)
    data = config(url, tmp_path / "root")
    wanted = batches(config(tmp_path / "shards", tmp_path / "other"))
    assert all(map(torch.equal, batches(data), wanted))
    assert len(keys) == len(list(shards.iterdir()))
    assert all(map(torch.equal, batches(data), wanted))
    assert len(keys) == len(list(shards.iterdir()))
    assert open_data(data, 1).info.name == url


@pytest.mark.parametrize("name", ["t.csv", "train.csv"])
def test_tables_give_the_batches_of_the_file(tmp_path: Path, url: str, name: str) -> None:
    (tmp_path / "there").mkdir()
    file = tmp_path / "there" / name
    file.write_text(TABLE)
    put(url, tmp_path / "there")
    source = url if name == "train.csv" else f"{url}/{name}"
    ours = batches(config(source, tmp_path / "root", target="y"))
    wanted = batches(config(tmp_path / "there" if name == "train.csv" else file, tmp_path / "other", target="y"))
    assert len(ours) == len(wanted) and all(map(torch.equal, ours, wanted))


def test_a_file_url_is_the_folder_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my files", per_class=3)
    data = config(f"file://{str(folder).replace(' ', '%20')}", tmp_path / "root")
    check_source(data.source)
    assert all(map(torch.equal, batches(data), batches(config(folder, tmp_path / "root"))))
    assert not (tmp_path / "root" / "urls").exists()
    with pytest.raises(UserError, match="no such"):
        open_data(config("file:///nowhere/at/all", tmp_path), 1)


def test_what_changed_is_brought_again_and_what_is_gone_is_removed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(url)
    for name in ("train", "val", "test"):
        store.put(f"{name}.csv", TABLE.encode())
    data = config(url, tmp_path / "root", target="y")
    folder = local_path(data)
    keys = fetched(monkeypatch)
    time.sleep(0.01)
    store.put("val.csv", TABLE.replace("59", "58").encode())  # of the same size
    store.delete("test.csv")
    assert local_path(data) == folder and keys == ["val.csv"]
    assert sorted(each.name for each in folder.iterdir()) == ["train.csv", "val.csv"]
    assert (folder / "val.csv").read_text() == TABLE.replace("59", "58")
    (folder / "train.csv").write_text("cut off")
    local_path(data)
    assert keys == ["val.csv", "train.csv"] and (folder / "train.csv").read_text() == TABLE


def test_the_least_recently_used_goes_first_and_what_is_used_stays(tmp_path: Path, url: str) -> None:
    store, size = open_store(url), len(TABLE)
    for name in "abc":
        store.put(f"{name}.csv", TABLE.encode())
    limits = {"cache_limit": f"{2.5 * size / 1000}kb"}

    def bring(name: str) -> Path:
        path = local_path(config(f"{url}/{name}.csv", tmp_path, **limits))
        time.sleep(0.01)
        return path

    a, b = bring("a"), bring("b")
    release()
    assert bring("a") == a
    release()
    bring("c")
    assert a.exists() and not b.exists()
    kept = cached(tmp_path)
    assert kept is not None
    assert [(each.url[-5:], each.is_used, each.n_bytes) for each in kept] == [
        ("a.csv", False, size),
        ("c.csv", True, size),
    ]
    assert len(cached(tmp_path / "urls") or ()) == 2
    bring("a")
    with pytest.raises(UserError, match=r"b\.csv: it has .* other processes use .*: raise it, or wait"):
        bring("b")
    with pytest.raises(UserError, match="--data-cache-limit keeps 100 B at most: raise it"):
        local_path(config(f"{url}/a.csv", tmp_path / "new", cache_limit="100b"))


def test_what_the_cache_holds_is_told_and_goes(tmp_path: Path, url: str) -> None:
    open_store(url).put("t.csv", TABLE.encode())
    path = local_path(config(f"{url}/t.csv", tmp_path))
    assert removables(str(tmp_path)) == (len(TABLE), [])
    release()
    assert (tmp_path / "urls" / ".gitignore").read_text() == "*\n"  # a place that takes the working folder leaves it
    total, found = removables(str(tmp_path))
    assert total == len(TABLE) and f"{url}/t.csv" in found[0].why
    remove(str(tmp_path), found)
    assert not path.exists() and removables(str(tmp_path)) == (0, [])


class _Away:
    """Raises as a store that is away, the first few times."""

    def __init__(self, times: int, error: OSError | None = None) -> None:
        self.times, self.error = times, error or StoreAway("it does not answer")

    def __call__(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise self.error


def test_a_store_that_is_away_is_asked_again_and_said_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    open_store(url).put("t.csv", TABLE.encode())
    real, away = RemoteStore.fetch, _Away(2)

    def fetch(self: RemoteStore, key: str, path: Path) -> None:
        real(self, key, path)
        path.write_text("half of it")
        away()
        real(self, key, path)

    monkeypatch.setattr(RemoteStore, "fetch", fetch)
    path = local_path(config(f"{url}/t.csv", tmp_path))
    assert path.read_text() == TABLE
    assert capfd.readouterr().err.count("it does not answer; it is tried again for 2m") == 1
    release()
    away.times = 1000
    monkeypatch.setattr(url_objects, "PATIENCE_S", 0.5)
    with pytest.raises(UserError, match=r"t\.csv cannot be used: it does not answer$"):
        local_path(config(f"{url}/t.csv", tmp_path / "new"))
    assert not [
        each for each in (tmp_path / "new").rglob("*") if "csv" in each.name and each.is_file() and each.stat().st_size
    ]


def test_an_object_that_changes_meanwhile_is_refused(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(url).put("t.csv", TABLE.encode())
    real = RemoteStore.fetch

    def fetch(self: RemoteStore, key: str, path: Path) -> None:
        real(self, key, path)
        time.sleep(0.01)
        self.put(key, TABLE.encode())

    monkeypatch.setattr(RemoteStore, "fetch", fetch)
    with pytest.raises(UserError, match=r"t\.csv was changed while it was read: start again"):
        local_path(config(f"{url}/t.csv", tmp_path))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("s3://key:secret@bucket/t.csv", "bucket/t.csv: a URL is recorded: leave credentials out"),
        ("https://host/t.csv?signature=secret", "host/t.csv: a URL is recorded: leave out what follows"),
        ("nothing://host/t.csv", "Protocol not known"),
        ("memory://none/t.csv", "there is no t.csv at memory://none"),
        ("memory://none/folder", "there are no tar shards, and no train.csv"),
        ("memory://t.csv", "it names no object"),
        ("memory://none/t-{1..3}.csv", "a range of numbers is for tar shards"),
        ("memory://none/t-{3..1}.tar", "is no range of numbers"),
        ("https://host/folder", "a web server lists nothing: name files"),
    ],
)
def test_refusals_are_one_line_and_hold_no_secret(tmp_path: Path, name: str, why: str) -> None:
    for attempt in (partial(check_source, name), lambda: open_data(config(name, tmp_path), 1)):
        with pytest.raises(UserError) as refusal:
            attempt()
        assert why in str(refusal.value) and "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"package for s3:// is not installed: pip install 'echelon\[s3\]'"):
        check_source("s3://bucket/t.csv")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with web_server(tmp_path / "web") as url:
        yield url


def test_shards_of_a_web_server_are_named_by_a_range(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards(make_folder(tmp_path / "files", per_class=9), tmp_path / "web" / "shards")
    last = len(list(shards.iterdir())) - 1
    data = config(f"{web}/shards/{{000..{last:03}}}.tar", tmp_path / "root")
    assert all(map(torch.equal, batches(data), batches(config(shards, tmp_path / "other"))))
    keys = fetched(monkeypatch)
    os.utime(shards / "000.tar", (1, 1))
    local_path(data)
    assert keys == ["000.tar"]  # by the time of its last change
    with pytest.raises(UserError, match=r"there is no 9\.tar"):
        check_source(f"{web}/shards/9.tar")
    monkeypatch.setattr(url_objects, "PATIENCE_S", 0.2)
    with pytest.raises(UserError, match=r"cannot be used: .*[Cc]onnect"):
        check_source("http://127.0.0.1:1/9.tar")


def _bring(url: str, root: str, fetches: str) -> None:
    real = RemoteStore.fetch

    def fetch(self: RemoteStore, key: str, path: Path) -> None:
        with Path(fetches).open("a") as file:
            file.write(f"{key}\n")
        time.sleep(0.3)
        real(self, key, path)

    RemoteStore.fetch = fetch  # type: ignore[method-assign]
    local_path(DataConfig(source=url, root=root))


def test_processes_of_a_machine_bring_each_file_once(tmp_path: Path, url: str) -> None:
    for i in range(3):
        open_store(url).put(f"{i}.tar", b"x" * 1000)
    context = multiprocessing.get_context("fork")  # what memory:// holds is in this process
    fetches = tmp_path / "fetches"
    processes = [context.Process(target=_bring, args=(url, str(tmp_path / "root"), str(fetches))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(fetches.read_text().split()) == ["0.tar", "1.tar", "2.tar"]


def test_a_process_that_is_killed_leaves_what_the_next_one_completes(tmp_path: Path, web: str) -> None:
    for i in range(3):
        (tmp_path / "web" / f"{i}.tar").write_bytes(bytes([i]) * 5000)
    root, url = tmp_path / "root", f"{web}/{{0..2}}.tar"
    code = (
        "import os, sys; from pathlib import Path; from echelon.config import DataConfig\n"
        "from echelon.data.by_url import local_path; from echelon.storage.remote import RemoteStore\n"
        "def fetch(self, key, path):\n"
        "    path.write_bytes(b'half')\n"
        "    os._exit(9) if key == '2.tar' else real(self, key, path)\n"
        "real = RemoteStore.fetch; RemoteStore.fetch = fetch\n"
        "local_path(DataConfig(source=sys.argv[1], root=sys.argv[2]))"
    )
    assert subprocess.run([sys.executable, "-c", code, url, str(root)], timeout=120, check=False).returncode == 9
    folder = local_path(DataConfig(source=url, root=str(root)))
    assert [(folder / f"{i}.tar").read_bytes() for i in range(3)] == [bytes([i]) * 5000 for i in range(3)]
    assert sorted(each.name for each in folder.iterdir()) == ["0.tar", "1.tar", "2.tar"]
