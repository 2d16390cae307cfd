"""Runs in real object stores: one that honours conditions, one that ignores them, killed, shared and slow.

They need the group `clusters` (uv sync --group clusters); without it they skip.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from echelon.core.patience import may_pass
from echelon.storage.archive import Archive, ForeignWriter, Version, honours_conditions
from echelon.storage.url import open_store
from tests.clusters.committer import PARTS, begin, commit_one
from tests.clusters.stores import ObjectStore, binary, rclone, seaweedfs

pytest.importorskip("s3fs", reason="s3fs is not installed: uv sync --group clusters")

ENGINES = {"seaweedfs": (seaweedfs, "weed"), "rclone": (rclone, "rclone")}
KILLS = 25
PATIENCE_S = 60.0


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    make, program = ENGINES[request.param]
    if binary(program) is None:
        pytest.skip(f"{program} is not installed: uv sync --group clusters")
    running: AbstractContextManager[ObjectStore] = make(tmp_path_factory.mktemp(request.param))
    with running as store:
        yield store


@pytest.fixture
def url() -> str:
    return f"s3://runs/{uuid.uuid4().hex}"


def is_seaweedfs(engine: ObjectStore) -> bool:
    return "weed" in engine.command[0]


def patiently(action):
    """Return what an action returns, which is tried again while the store is away."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return action()
        except OSError as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def check_whole(url: str, folder: Path, at_least: int = 0) -> Version:
    """Return the newest version, each part of which must be there and of that one version."""
    archive = Archive(open_store(url))
    newest = patiently(archive.newest)
    assert newest is not None
    step = int(newest.label.split()[1]) if newest.label else 0
    assert step >= at_least
    assert len(newest.parts) == (PARTS if step else 0)
    for part in newest.parts:
        patiently(lambda part=part: archive.fetch(part, folder / "fetched"))
        assert int.from_bytes((folder / "fetched").read_bytes()[:8], "big") == step
    return newest


@pytest.mark.long
def test_conditions_are_honoured_or_that_is_known(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    store = open_store(url)
    assert honours_conditions(store) is is_seaweedfs(engine)
    (tmp_path / "large").write_bytes(b"x" * 3_000_000)
    store.put("data/b", b"two")
    store.put("data/a", tmp_path / "large")
    assert [(each.key, each.n_bytes) for each in store.list("data/")] == [("data/a", 3_000_000), ("data/b", 3)]
    store.fetch("data/a", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"x" * 3_000_000
    store.delete("data/b")
    with pytest.raises(FileNotFoundError):
        store.get("data/b")
    assert store.list("none/") == []


@pytest.mark.long
def test_of_two_writers_exactly_one_goes_on(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    first = begin(url)
    commit_one(first, tmp_path, 1)
    second = begin(url)
    with pytest.raises(ForeignWriter, match="this one stops"):
        commit_one(first, tmp_path, 2)
    commit_one(second, tmp_path, 3)
    assert check_whole(url, tmp_path).label == "step 3"


def kill_writers(url: str, folder: Path, kills: int, seed: int) -> None:
    """Kill a process that commits, each time at another moment; what is there is whole each time."""
    chance, step = random.Random(seed), 0
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.clusters.committer", url, str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 1.0))  # where in its requests it is killed
        writer.kill()
        writer.wait()
        writer.stdout.close()
        newest = check_whole(url, folder, at_least=step)
        step = int(newest.label.split()[1]) if newest.label else 0


def kill_stores(engine: ObjectStore, url: str, folder: Path, kills: int, seed: int) -> None:
    """Kill the store under a writer, which goes on once it is back; what is there is whole each time."""
    chance, step = random.Random(seed), 0
    writer = begin(url)
    for _ in range(kills):
        killer = threading.Timer(chance.uniform(0.0, 0.5), engine.kill)
        killer.start()
        try:
            while True:
                commit_one(writer, folder, step + 1)
                step += 1
        except OSError as error:
            assert may_pass(error), error
        killer.join()
        engine.start()
        check_whole(url, folder, at_least=step)
        patiently(lambda: commit_one(writer, folder, step + 1))  # noqa: B023 - called at once
        step += 1


@pytest.mark.long
def test_a_writer_or_a_store_that_is_killed_leaves_the_last_whole_version(
    engine: ObjectStore, url: str, tmp_path: Path
) -> None:
    kill_writers(url, tmp_path, 2, seed=0)
    kill_stores(engine, f"{url}-2", tmp_path, 1, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_kills_at_random_requests(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    kill_writers(url, tmp_path, KILLS, seed=1)
    kill_stores(engine, f"{url}-2", tmp_path, KILLS, seed=2)


ECHELON = [sys.executable, "-m", "echelon"]
RUN = ["train", "digits", "--model", "mlp", "--workers", "2", "--epochs", "3", "--checkpoint-every", "6"]


def echelon(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on a machine of its own: another cache, another working folder."""
    cache.mkdir(exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [*ECHELON, *arguments], cwd=cache, env=environment, text=True, capture_output=True, timeout=300
    )


@pytest.mark.long
def test_a_run_at_a_url_goes_on_bit_for_bit_on_another_machine(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    if not is_seaweedfs(engine):
        pytest.skip("one store is enough for what does not depend on it")
    from echelon.run.home import bring

    whole = echelon(tmp_path / "one", *RUN, "--run", "here")
    assert whole.returncode == 0, whole.stderr
    begun = echelon(tmp_path / "two", *RUN, "--run", url, "--max-steps", "17")
    assert begun.returncode == 0, begun.stderr
    shutil.rmtree(tmp_path / "two")
    there = echelon(tmp_path / "three", "resume", url, "--max-steps", "0")
    assert there.returncode == 0, there.stderr
    brought = bring(url, tmp_path / "brought")
    newest = [sorted((run / "checkpoints").glob("step-*"))[-1] for run in (tmp_path / "one" / "here", brought)]
    assert newest[0].name == newest[1].name
    own, other = (load_file(folder / "model-00001-of-00001.safetensors") for folder in newest)
    assert own.keys() == other.keys() and all(own[name].equal(other[name]) for name in own)
    assert "not-a-secret" not in "".join(p.read_text(errors="replace") for p in brought.rglob("*") if p.is_file())
