"""A worker whose model is split: its first rank leads, does what the scheduler says, and takes the others along.

A lease: `train` (all make their part of the batch) -> the leader waits for the servers' parameters, telling the others
now and then that it does -> `values`, its pieces to each rank -> forward and backward -> gradients to the leader.
"""

from __future__ import annotations

from echelon.coordinator.messages import TrainTask
from echelon.messages.plain import from_plain, to_plain
from echelon.observe.phases import Phase
from echelon.tasks.base import Batch
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.leased_assemble import LeasedWorker
from echelon.trainer.leased_bench import WorkerModel
from echelon.trainer.progress import record_pipeline
from echelon.trainer.replica import Replica, Sums


def begin_lease(replica: Replica, task: TrainTask) -> None:
    """Let the other ranks make their parts of a lease's batch."""
    replica.words.tell("train", task=to_plain(task))


def lead_lease(worker: LeasedWorker, replica: Replica, task: TrainTask, batch: Batch) -> Sums:
    """Forward and backward of a lease on all ranks; the leader's whole model then has the gradients."""
    bench, strategy = worker.bench, worker.strategy
    strategy.load_all(task.step)
    bench.clock.enter(Phase.COMMUNICATE)
    replica.words.tell("values", buffers=not worker.shared_buffers)
    _take_values(replica, not worker.shared_buffers)
    worker.shared_buffers = True
    sums = bench.compute(batch)
    strategy.begin_step(sums.units, sums.global_units)
    if worker.seat.number == 0:
        record_pipeline(worker.record, replica.split, task.step)
    return sums


def lead_evaluation(bench: WorkerModel, replica: Replica) -> EvaluationReport:
    """Evaluate the leader's whole model on all ranks."""
    replica.words.tell("evaluate")
    with replica.as_whole() as module:
        return bench.evaluate(module)


def follow(bench: WorkerModel, replica: Replica) -> None:
    """Do what the leader says, until it says that the run is over."""
    word = replica.words.hear()
    while word["kind"] != "over":
        match word["kind"]:
            case "train":
                batch = bench.part(from_plain(TrainTask, word["task"]))
                word = replica.words.hear()
                if word["kind"] != "values":
                    continue  # the run ended while the leader waited for parameters
                _take_values(replica, word["buffers"])
                bench.compute(batch)
                bench.clock.drain()
            case "evaluate":
                with replica.as_whole() as module:
                    bench.evaluate(module)
            case kind:
                raise RuntimeError(f"the leader said {kind!r}")
        word = replica.words.hear()


def _take_values(replica: Replica, buffers: bool) -> None:
    replica.share_parameters()
    if buffers:
        replica.share_buffers()
