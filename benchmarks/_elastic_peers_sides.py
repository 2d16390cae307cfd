"""What each tool runs in the comparison of survivors; started by `benchmarks.elastic_peers`.

python -m benchmarks._elastic_peers_sides TOOL FOLDER STEPS

TOOL: `echelon`, `torchft` (a replica group, below torchrun), `torchrun` (a worker, below torchrun), or `ray`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks._elastic_peers_task import (
    BATCH,
    CHECKPOINT_STEPS,
    EPOCH,
    LR,
    RESTARTS,
    WORKERS,
    Model,
    Points,
    RecordedSGD,
    batch_at,
    loss_of_each,
    train_step,
)

CHECKPOINT = "checkpoint.pt"


def echelon(folder: Path, steps: int) -> None:
    """Train with Echelon's defaults: all-reduce, and survivors go on."""
    import echelon
    from benchmarks._elastic_peers_task import Model, Points, RecordedSGD

    ended = echelon.train(
        Model(), (Points(), Points()), run=folder / "run", workers=WORKERS, batch_size=BATCH, lr=LR, loss=loss_of_each,
        optimizer=RecordedSGD, schedule="constant", weight_decay=0.0, device="cpu", threads=1, epochs=steps // EPOCH,
        eval_every=0, max_restarts=RESTARTS,
    )  # fmt: skip
    sys.exit(ended.exit_code)


def torchft(folder: Path, steps: int) -> None:
    """Train a replica group of one worker, as torchft's `train_ddp.py` does, its batches by the manager's step.

    Of torchft 0.2.0, `DistributedDataParallel` ends all survivors with `assert fut._fut`: where gloo's `wait` raises,
    no future is set. So that survivors survive, it has a repaired hook here.
    """
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    class RepairedDDP(DistributedDataParallel):  # type: ignore[misc]
        """DDP that comes to `should_commit` after an error, which the manager knows by then."""

        _comm_hook = staticmethod(lambda state, bucket: _summed(state, bucket))

    group = int(os.environ["REPLICA_GROUP_ID"])
    net = Model()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, replica_id=f"group_{group}",
        load_state_dict=lambda state: net.load_state_dict(state["model"]),
        state_dict=lambda: {"model": net.state_dict()}, timeout=timedelta(seconds=30),
        init_sync=False,
    )  # fmt: skip
    model = RepairedDDP(manager, net)
    optimizer = Optimizer(manager, RecordedSGD(net.parameters(), lr=LR))
    sampler = DistributedSampler(
        Points(), replica_rank=group, num_replica_groups=WORKERS, group_rank=0, num_replicas=1, shuffle=True
    )
    _meet(folder, group)
    while manager.current_step() < steps:
        train_step(model, optimizer, *batch_at(sampler, manager.current_step()))
    manager.shutdown(wait=False)


def _summed(manager: Any, bucket: Any) -> Any:
    work = manager.allreduce(bucket.buffer())
    if work.wait():
        return work.get_future()._fut
    failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    failed.set_result(bucket.buffer())
    return failed


def _meet(folder: Path, group: int) -> None:
    """Wait until each group has been here: else the first steps have too few of them."""
    (folder / f"ready-{group}").touch()
    while len(list(folder.glob("ready-*"))) < WORKERS:
        time.sleep(0.05)


def torchrun(folder: Path, steps: int) -> None:
    """Train plain DDP that saves every so many steps, and goes on from there."""
    dist.init_process_group("gloo")

    def save(state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(folder / CHECKPOINT)

    path = folder / CHECKPOINT
    _train_ddp(Model(), DistributedDataParallel, torch.load(path) if path.exists() else None, steps, save)
    dist.destroy_process_group()


def _train_ddp(
    net: Model, wrap: Callable[[Model], Any], state: dict[str, Any] | None, steps: int,
    save: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    if state is not None:
        net.load_state_dict(state["model"])
    model, optimizer = wrap(net), RecordedSGD(net.parameters(), lr=LR)
    sampler: DistributedSampler[Any] = DistributedSampler(Points(), num_replicas=WORKERS, rank=dist.get_rank())
    for step in range(state["step"] if state else 0, steps):
        train_step(model, optimizer, *batch_at(sampler, step))
        if (step + 1) % CHECKPOINT_STEPS == 0:
            save({"model": net.state_dict(), "step": step + 1})


def ray(folder: Path, steps: int) -> None:
    """Train with Ray Train, on a Ray of its own."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from benchmarks._elastic_peers_sides import ray_worker

    ray.init(num_cpus=WORKERS + 1)  # a worker asks for one
    TorchTrainer(
        ray_worker, train_loop_config={"steps": steps}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=RESTARTS)
        ),
    ).fit()  # fmt: skip
    ray.shutdown()


def ray_worker(config: dict[str, Any]) -> None:
    """Train as one worker of Ray Train."""
    from ray import train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    state = None
    if (kept := train.get_checkpoint()) is not None:
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / CHECKPOINT)

    def save(state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            leads = dist.get_rank() == 0
            if leads:
                torch.save(state, Path(folder) / CHECKPOINT)
            train.report({"step": state["step"]}, train.Checkpoint.from_directory(folder) if leads else None)

    _train_ddp(Model(), prepare_model, state, config["steps"], save)


SIDES = {"echelon": echelon, "torchft": torchft, "torchrun": torchrun, "ray": ray}


if __name__ == "__main__":
    torch.set_num_threads(1)
    SIDES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
