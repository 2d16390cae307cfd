"""What every source and every number of loaders obeys."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, TrainLoader, from_datasets, open_data
from echelon.data.pool import LoaderFailed
from tests.ranks.spawn import fork_server
from tests.unit.data.images import make_folder

CPU = torch.device("cpu")
DATA = ("digits", "folder", "crops", "kept", "own", "tensors")


class Own(Dataset[tuple[Tensor, int]]):
    """A user's data set with an augmentation of its own."""

    targets = (0, 1, 2) * 9

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i < 0:
            raise IndexError(i)
        return torch.rand(5) + i, self.targets[i]


def settings(**data: Any) -> LoaderConfig:
    return LoaderConfig(DataConfig(**data), seed=3, device=CPU, timeout_s=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"), per_class=15, side=120)


def describe(kind: str, folder: Path) -> tuple[Source, dict[str, Any]]:
    given: dict[str, dict[str, Any]] = {
        "digits": {"source": "digits", "batch_size": 100},
        "folder": {"source": str(folder), "batch_size": 7, "augment": "none"},
        "crops": {"source": str(folder), "batch_size": 7, "image_size": 128},
        "kept": {"source": str(folder), "batch_size": 7, "image_size": 32},
        "own": {"batch_size": 10},
        "tensors": {"batch_size": 10},
    }
    if kind == "tensors":
        own = TensorDataset(torch.randn(27, 4, generator=torch.Generator().manual_seed(0)), torch.arange(27) % 3)
        return from_datasets(own, Subset(own, range(5, 20))), given[kind]
    data = given[kind]
    return (from_datasets(Own(), Own()) if kind == "own" else open_data(DataConfig(**data), 3)), data


def epochs(source: Source, config: LoaderConfig, shard: Shard, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    loader = TrainLoader(source, config, shard)
    try:
        return [(b.inputs, b.targets) for epoch in range(count) for b in loader.epoch(epoch)]
    finally:
        loader.close()


@pytest.mark.parametrize("kind", DATA)
def test_batches_depend_neither_on_loaders_nor_on_ranks(kind: str, folder: Path) -> None:
    source, data = describe(kind, folder)
    whole = epochs(source, settings(**data, loaders=0), Shard(0, 1))
    for loaders, world in ((1, 1), (3, 1), (0, 3), (2, 2)):
        ranks = [epochs(source, settings(**data, loaders=loaders), Shard(r, world)) for r in range(world)]
        for batch, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            assert torch.equal(torch.cat([inputs[: len(targets)] for inputs, targets in parts]), batch[0])
            assert torch.equal(torch.cat([targets for _, targets in parts]), batch[1])


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("loaders", [0, 2])
def test_an_epoch_goes_on_where_it_stopped(kind: str, loaders: int, folder: Path) -> None:
    source, data = describe(kind, folder)
    whole = epochs(source, settings(**data, loaders=0), Shard(0, 1), count=1)
    loader = TrainLoader(source, settings(**data, loaders=loaders), Shard(0, 1))
    for start in (1, len(whole) - 1, 0):
        for batch, (inputs, targets) in zip(loader.epoch(0, start), whole[start:]):  # left early, too
            assert torch.equal(batch.inputs, inputs)
            assert torch.equal(batch.targets, targets)
            if batch.index == 1:
                break
    assert not list(loader.epoch(0, loader.batches_per_epoch))
    loader.close()


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("kind", DATA)
def test_parts_dealt_anew_between_two_batches_are_the_same_batches(kind: str, loaders: int, folder: Path) -> None:
    source, data = describe(kind, folder)
    size = data["batch_size"]
    deals = [(), (size - 1, 1), (size - 1, 1), (1, size - 1), ()]
    whole = epochs(source, settings(**data, loaders=0), Shard(0, 1), count=1)
    ranks = [TrainLoader(source, settings(**data, loaders=loaders), Shard(rank, 2), largest=size) for rank in range(2)]
    try:
        seen = [loader.epoch(0) for loader in ranks]
        for number, (inputs, targets) in enumerate(whole):
            parts = [next(batches) for batches in seen]
            assert torch.equal(torch.cat([part.inputs[: len(part.targets)] for part in parts]), inputs), number
            assert torch.equal(torch.cat([part.targets for part in parts]), targets)
            sizes = [len(part.targets) for part in parts]
            assert all(list(part.sizes) in ([], sizes) and part.index == number for part in parts)
            weights = deals[(number + 1) % len(deals)]
            for rank, loader in enumerate(ranks):
                loader.deal(Shard(rank, 2, weights))
        assert [next(batches, None) for batches in seen] == [None, None]
    finally:
        for loader in ranks:
            loader.close()


def test_a_part_that_there_is_no_room_for_is_refused() -> None:
    source, data = describe("tensors", Path())
    loader = TrainLoader(source, settings(**data, loaders=0), Shard(0, 2))
    with pytest.raises(ValueError, match="a part of 6 samples, and this loader has room for 5"):
        loader.deal(Shard(0, 2, (6, 4)))


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("loaders", [0, 1])
def test_evaluation_sees_each_sample_once(kind: str, loaders: int, folder: Path) -> None:
    source, data = describe(kind, folder)
    seen = []
    for rank in range(4):
        loader = EvalLoader(source, settings(**data, loaders=loaders, eval_batch_size=4), Shard(rank, 4))
        seen.append([batch.inputs for batch in loader])
        assert [len(x) for x in seen[-1]] == [len(batch.targets) for batch in loader]
        loader.close()
    whole = EvalLoader(source, settings(**data, loaders=0), Shard(0, 1))
    expected = torch.cat([batch.inputs for batch in whole])
    assert len(expected) == source.info.eval_size
    assert torch.equal(torch.cat([inputs for rank in seen for inputs in rank]), expected)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_bad_image_stops_or_is_skipped_and_listed(loaders: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "images")
    source = open_data(DataConfig(source=str(tmp_path / "images")), 3)
    bad = Path(source.train.path(4))  # type: ignore[attr-defined]
    bad.write_text("no image")
    data = {"source": str(tmp_path / "images"), "batch_size": 12, "loaders": loaders}
    loader = TrainLoader(source, settings(**data), Shard(0, 1))
    with pytest.raises(UserError, match=f"^{bad}: cannot be decoded"):
        list(loader.epoch(0))
    loader.close()
    loader = TrainLoader(source, settings(**data, on_bad_image="skip"), Shard(0, 1))
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert sum(len(b.targets) for b in batches) == source.info.train_size - 1
        assert sum(b.global_size for b in batches) == source.info.train_size
        assert all(len(b.inputs) == len(b.targets) for b in batches)
    assert loader.bad_images == [(str(bad), "it is no image")]
    loader.close()


def test_a_tail_smaller_than_the_ranks_leaves_some_without_samples() -> None:
    source = from_datasets(Own(), Own())
    for loaders in (0, 1):
        config = settings(batch_size=26, loaders=loaders)
        tails = [epochs(source, config, Shard(rank, 3), count=1)[-1] for rank in range(3)]
        assert [len(targets) for _, targets in tails] == [1, 0, 0]
        assert all(torch.equal(inputs, tails[0][0]) for inputs, _ in tails), "models run on the one that there is"


class Failing(Own):
    """Raises, or ends the process that reads it."""

    def __init__(self, how: str) -> None:
        self.how, self.owner = how, os.getpid()

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if os.getpid() != self.owner:
            if self.how == "raise":
                raise RuntimeError("the disk is on fire")
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"RuntimeError: the disk is on fire \(item \d+ of the data, .*test_data.py:\d+\)"),
        ("kill", "was ended by SIGKILL"),
        ("stop", "no loader process gave anything"),
    ],
)
def test_a_loader_that_fails_is_an_error_and_no_hang(how: str, words: str) -> None:
    source = from_datasets(Failing(how), Failing(how))
    config = LoaderConfig(DataConfig(loaders=2), seed=0, device=CPU, timeout_s=1.0 if how == "stop" else 30.0)
    loader = TrainLoader(source, config, Shard(0, 1))
    with pytest.raises(LoaderFailed, match=words):
        list(loader.epoch(0))
    pids = loader.loader_pids
    loader.close()
    assert not [pid for pid in pids if alive(pid)]


def trainer(pipe: Connection, folder: Path) -> None:
    """A trainer as a daemonic process: it must not have children by multiprocessing's rules."""
    torch.set_num_threads(1)
    source, data = describe("crops", folder)
    loader = TrainLoader(source, settings(**data, loaders=2), Shard(0, 1))
    held = EvalLoader(source, settings(**data, loaders=1), Shard(0, 1))
    next(loader.epoch(0))
    pipe.send(loader.loader_pids + held.loader_pids)
    time.sleep(60)


@pytest.fixture
def running(folder: Path) -> Iterator[tuple[Any, list[int]]]:
    context = fork_server()  # this process has threads by now: a fork of it may hang
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(theirs, folder), daemon=True)
    process.start()
    assert ours.poll(60)
    yield process, ours.recv()
    process.kill()
    process.join()


def test_loaders_end_with_a_killed_trainer(running: tuple[Any, list[int]]) -> None:
    process, pids = running
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # as a cluster sends it to all: the trainer decides when its loaders end
        os.kill(pid, signal.SIGINT)
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if alive(pid)]


def test_a_loader_left_behind_ends_its_processes() -> None:
    loader = TrainLoader(from_datasets(Own(), Own()), settings(loaders=2), Shard(0, 1))
    pids = loader.loader_pids
    assert all(alive(pid) for pid in pids)
    del loader
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
