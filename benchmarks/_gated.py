"""Training loops that are alive at once and take turns: a gate lets all ranks of one through for a window of steps."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORLD = 2
DEADLINE_S = 600
Windows = list[tuple[float, float]]
"""Seconds, and CPU seconds of all ranks, of each window of one contender."""

_FOLDER = "BENCH_FOLDER"
_SETTINGS: dict[str, Any] = {
    "training.epochs": 1000, "data.loaders": 0, "checkpoint.every": "1000000", "optimizer.name": "momentum",
    "optimizer.lr": 0.01, "optimizer.weight_decay": 0.0,
}  # fmt: skip


class Gate:
    """Lets a rank through for one window of steps at a time, and reports what the window cost."""

    def __init__(self, pipe: Connection, steps: int) -> None:
        self._pipe, self._steps, self._count = pipe, steps, 0
        self._began = (0.0, 0.0)

    @property
    def open(self) -> bool:
        """Whether the next step is let through at once."""
        return self._count % self._steps != 0

    def __call__(self) -> bool:
        """Call before each step; False once the benchmark is over."""
        if self._count % self._steps == 0:
            if self._count:
                self._pipe.send((time.perf_counter() - self._began[0], time.process_time() - self._began[1]))
            if not self._pipe.poll(DEADLINE_S) or not self._pipe.recv():
                return False
            self._began = (time.perf_counter(), time.process_time())
        self._count += 1
        return True


@dataclass(frozen=True)
class Contender:
    """A loop that takes turns with others: what each of its ranks calls (it must pickle), and how many there are."""

    train: Callable[[int, Gate], None]
    ranks: int = WORLD


def gated(batches: Callable[[], Iterator[Any]], gate: Callable[[], bool]) -> Iterator[Any]:
    """Repeat epochs of batches for as long as the gate lets through."""
    while True:
        for batch in batches():
            if not gate():
                return
            yield batch


def random_images(samples: int) -> Any:
    """Return (inputs, targets): random images and labels, the same in every contender."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, 32, 32, generator=generator), torch.randint(10, (samples,), generator=generator)


def gated_run(
    rank: int, gate: Gate, train: Callable[[Any, Any], Any], settings: Mapping[str, Any], own: tuple[Any, Any]
) -> None:
    """Assemble a run of Echelon and train it with steps that pass a gate.

    Args:
        train: is given the run and its cursor.
        settings: beside those that all such runs have.
        own: the model, and (inputs, targets) to train it on.
    """
    from torch.utils.data import TensorDataset

    from echelon.config import build
    from echelon.data import from_datasets

    model, tensors = own
    data = from_datasets(TensorDataset(*tensors), TensorDataset(*(t[:64] for t in tensors)))
    train_gated(build(None, {**_SETTINGS, **settings}).config, (model, data), rank, gate, train)


def train_gated(config: Any, own: tuple[Any, Any], rank: int, gate: Gate, train: Callable[[Any, Any], Any]) -> None:
    """Assemble the run of a description and train it with steps that pass a gate.

    Args:
        own: the caller's model and data; None: the description's.
    """
    from echelon.observe.notes import RankNotes
    from echelon.records.file import Recorder
    from echelon.run.resolve import resolve
    from echelon.trainer import folder as folders
    from echelon.trainer.assemble import UserObjects, assemble
    from echelon.trainer.process import keep_freed_memory
    from echelon.trainer.world import join_world

    keep_freed_memory()  # as the processes of a run do
    path = Path(os.environ[_FOLDER])
    described = resolve(config)
    folders.prepare(path, config)
    with join_world(described, path, RankNotes()) as world:
        recorder = Recorder(path if rank == 0 else None)
        run, cursor, _ = assemble(described, path, world, recorder, UserObjects(*own))
        run.train_loader = _GatedLoader(run.train_loader, gate)  # type: ignore[assignment]
        try:
            train(run, cursor)
        except EOFError:
            return


class _GatedLoader:
    """A TrainLoader whose batches pass a gate; epochs never end."""

    def __init__(self, loader: Any, gate: Gate) -> None:
        self._loader, self._gate = loader, gate
        self.batches_per_epoch = 10**9
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext

    def steps_at_present_size(self, epoch: int, batch: int, step: int) -> int:
        return step  # the data does not grow

    def batches_in(self, epoch: int) -> int:
        return self.batches_per_epoch

    def epoch(self, epoch: int, start_batch: int = 0, begin: Any = None) -> Iterator[Any]:
        yield from gated(lambda: self._loader.epoch(epoch, 0, begin), self._passed)
        raise EOFError

    def _passed(self) -> bool:
        if self._gate.open:
            return self._gate()
        with self.waiting():
            return self._gate()


def fit(run: Any, cursor: Any) -> None:
    """Train as a run does: with phases, record, curves and progress.

    Waiting for the others' turns is a pause: it would count as steps, and make windows of fewer of them, so that the
    run would add up over the ranks, write and show several times as often as it does.
    """
    from echelon.core.stop import StopFlag
    from echelon.trainer.batches import EpochOrder
    from echelon.trainer.loop import fit as fit_run
    from echelon.trainer.step_watch import RECORDING

    batches = EpochOrder(run, cursor, StopFlag())
    if isinstance(run.train_loader, _GatedLoader):
        run.train_loader.waiting = lambda: batches.window.pause(RECORDING)
    fit_run(run, batches)


def take_turns(contenders: Mapping[str, Contender], windows: int, steps: int) -> dict[str, Windows]:
    """Measure windows of steps of each contender, in turn forwards and backwards; the first window is warm-up."""
    names = list(contenders)
    pipes: dict[str, list[Connection]] = {}
    processes: list[Any] = []
    results: dict[str, Windows] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (name, contender) in enumerate(contenders.items()):
                pipes[name] = list(_start(contender, steps, f"{folder}/{number}", processes))
            for window in range(windows + 1):
                for name in names if window % 2 else names[::-1]:
                    for pipe in pipes[name]:
                        pipe.send(True)
                    costs = [_receive(pipe, name) for pipe in pipes[name]]
                    if window:
                        results[name].append((max(c[0] for c in costs), sum(c[1] for c in costs)))
        finally:
            for process in processes:
                process.kill()
                process.join(10)
    return results


def _start(contender: Contender, steps: int, folder: str, processes: list[Any]) -> Iterator[Connection]:
    from torch.distributed import TCPStore

    context = mp.get_context("spawn")
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    for rank in range(contender.ranks):
        ours, theirs = context.Pipe()
        arguments = (contender, rank, port, theirs, steps, folder)
        processes.append(context.Process(target=_be_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # a rank that dies is then the end of its pipe, at once
        yield ours


def _be_rank(contender: Contender, rank: int, port: int, pipe: Connection, steps: int, folder: str) -> None:
    """Train, in an environment as a launcher would give it."""
    import torch

    torch.set_num_threads(1)
    ranks = contender.ranks
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "b", _FOLDER: folder}
    os.environ.update({key: str(value) for key, value in settings.items()})
    contender.train(rank, Gate(pipe, steps))
    pipe.send(None)


def _receive(pipe: Connection, name: str) -> tuple[float, float]:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"{name} did not finish a window in {DEADLINE_S} s")
    try:
        cost: tuple[float, float] = pipe.recv()
    except EOFError:
        raise RuntimeError(f"a rank of {name} died; what it said is above") from None
    return cost
