"""The record's line of the start of a run with servers, as the workers tell it and the scheduler writes it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from echelon.config import build
from echelon.config.validate import Nodes
from echelon.coordinator.messages import JoinWorker, SetupDone
from echelon.observe.callbacks import Listeners
from echelon.ps.worker_rank import WorkerRank
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Start
from echelon.run.resolve import resolve
from echelon.run.servers import Chronicle
from echelon.trainer.assemble import workers_at_start


@pytest.mark.parametrize(
    ("workers", "ranks", "nodes", "expected"),
    [(1, 1, Nodes(1, 1), 1), (2, 1, Nodes(1, 1), 2), (2, 2, Nodes(1, 1), 4), (6, 1, Nodes(2, 3), 4)],
)
def test_all_workers_count(workers: int, ranks: int, nodes: Nodes, expected: int) -> None:
    """Processes count, as in other runs; of machines that may join later, none."""
    assert workers_at_start(WorkerRank(0, 0, size=ranks, workers=workers), nodes) == expected


@pytest.mark.parametrize(
    ("joins", "pids"),
    [
        ([JoinWorker("m", pid=7, host="a"), JoinWorker("m", pid=8, host="b")], (7, 8)),
        ([JoinWorker("m", pid=7, host="a", pids=[7, 9])], (7, 9)),  # split over two processes
        ([JoinWorker("m", pid=7, host="a")], ()),  # one was late
    ],
)
def test_the_start_has_the_workers_that_there_are(
    tmp_path: Path, joins: list[JoinWorker], pids: tuple[int, ...]
) -> None:
    """Without `--workers` a run has as many as the machine offers: the description does not know how many."""
    run = resolve(build(None, {"strategy.sync": "ps"}).config)
    assert run.config.launch.workers is None or not run.config.launch.workers
    record = Recorder(tmp_path)
    chronicle = Chronicle(run, tmp_path, record, Listeners())
    told = Start(world_size=2, backend="zmq", steps_per_epoch=4, served=True)
    about = {name: value for name, value in asdict(told).items() if name != "t"}
    about |= {name: list(value) for name, value in about.items() if isinstance(value, tuple)}  # as it is carried
    about["task"] |= {name: list(value) for name, value in about["task"].items() if isinstance(value, tuple)}
    about["environment"] |= {"gpus": []}
    chronicle.callbacks().started(SetupDone(0, "model", 4, 5, [], about=about), joins)
    chronicle.close("completed")
    record.close()
    (start,) = read_records(tmp_path, Start)
    assert (start.world_size, start.served, start.start_step, start.start_epoch) == (2, True, 5, 1)
    assert start.pids == pids and len(start.hosts) == len(pids)
