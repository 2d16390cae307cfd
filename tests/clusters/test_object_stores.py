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
import torch
from safetensors.torch import load_file

from echelon.core.patience import may_pass
from echelon.storage.archive import Archive, ForeignWriter, Version, honours_conditions
from echelon.storage.url import open_store
from tests.clusters.committer import PARTS, begin, commit_one
from tests.clusters.stores import ObjectStore, binary, rclone, seaweedfs
from tests.ranks.runs import Runs
from tests.unit.data.images import make_folder, make_shards

pytest.importorskip("s3fs", reason="s3fs is not installed: uv sync --group clusters")

ENGINES = {"seaweedfs": (seaweedfs, "weed"), "rclone": (rclone, "rclone")}
ONE_IS_ENOUGH = pytest.mark.parametrize(  # for what does not depend on the store
    "engine",
    [pytest.param("seaweedfs", marks=pytest.mark.long), pytest.param("rclone", marks=pytest.mark.slow)],
    indirect=True,
)
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


def put(url: str, folder: Path) -> None:
    """Send the files of a folder."""
    store = open_store(url)
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        store.put(file.relative_to(folder).as_posix(), file)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the model of a run's newest checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    weights: dict[str, torch.Tensor] = load_file(newest / "model-00001-of-00001.safetensors")
    return weights


def is_same(run: Path, other: Path) -> bool:
    """Whether two runs ended with the same model, bit for bit."""
    ours, theirs = weights_of(run), weights_of(other)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


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


@ONE_IS_ENOUGH
def test_a_run_at_a_url_goes_on_bit_for_bit_on_another_machine(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    from echelon.run.home import bring

    whole = echelon(tmp_path / "one", *RUN, "--run", "here")
    assert whole.returncode == 0, whole.stderr
    begun = echelon(tmp_path / "two", *RUN, "--run", url, "--max-steps", "17")
    assert begun.returncode == 0, begun.stderr
    shutil.rmtree(tmp_path / "two")
    there = echelon(tmp_path / "three", "resume", url, "--max-steps", "0")
    assert there.returncode == 0, there.stderr
    brought = bring(url, tmp_path / "brought")
    assert is_same(tmp_path / "one" / "here", brought)
    assert "not-a-secret" not in "".join(p.read_text(errors="replace") for p in brought.rglob("*") if p.is_file())


@ONE_IS_ENOUGH
def test_data_at_a_url_gives_the_bits_of_the_folder_and_is_brought_once(
    engine: ObjectStore, url: str, tmp_path: Path
) -> None:
    make_shards(make_folder(tmp_path / "images", per_class=40), tmp_path / "shards" / "train", per_shard=9)
    make_shards(make_folder(tmp_path / "others", per_class=8), tmp_path / "shards" / "val", per_shard=9)
    put(url, tmp_path / "shards")
    small = ["--model", "mlp", "--workers", "2", "--epochs", "2", "--batch-size", "16", "--loaders", "1"]
    here = echelon(tmp_path / "here", "train", str(tmp_path / "shards"), *small, "--run", "run")
    assert here.returncode == 0, here.stderr
    there = echelon(tmp_path / "there", "train", url, *small, "--run", "run")
    assert there.returncode == 0, there.stderr
    assert is_same(tmp_path / "here" / "run", tmp_path / "there" / "run")
    assert there.stderr.count("brought to") == 1
    open_store(url).put("train/000.tar", tmp_path / "shards" / "val" / "000.tar")
    changed = echelon(tmp_path / "there", "train", url, *small, "--run", "again", "--max-steps", "2")
    assert changed.returncode == 0, changed.stderr
    assert "1 file" in changed.stderr
    gone = echelon(tmp_path / "there", "train", f"{url}/none.csv", "--target", "y")
    assert gone.returncode == 2 and len(gone.stderr.strip().splitlines()) == 1, gone.stderr
    assert "there is no none.csv" in gone.stderr
    everything = [each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size < 1_000_000]
    assert not any(b"not-a-secret" in each.read_bytes() for each in everything)


@ONE_IS_ENOUGH
def test_a_table_at_a_url_and_a_store_that_is_away_for_a_while(engine: ObjectStore, url: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i},{i * i % 7},{i % 3}\n" for i in range(300)))
    open_store(url).put("t.csv", tmp_path / "t.csv")
    small = ["--target", "y", "--workers", "2", "--epochs", "2"]
    here = echelon(tmp_path / "here", "train", str(tmp_path / "t.csv"), *small, "--run", "run")
    assert here.returncode == 0, here.stderr
    engine.kill()
    with Runs(tmp_path) as runs:
        command = ("train", f"{url}/t.csv", *small, "--run", "there/run")
        there = runs.start(*command, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        there.wait_for(lambda: "it is tried again" in there.errors(), "that it is tried again")
        engine.start()
        assert there.end() == 0, there.text()
    assert is_same(tmp_path / "here" / "run", tmp_path / "there" / "run")
