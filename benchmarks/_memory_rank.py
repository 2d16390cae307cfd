"""One rank of a training whose memory is measured: the parts of a run, on batches of any values."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CLASSES, CHANNELS, SIDE = 10, 3, 32
STEPS = 6  # DDP makes its buckets anew in the second, and replicas that agree every two steps do it twice


@dataclass(frozen=True)
class Case:
    """What is trained: a model of `build_case`, where, with which optimizer, what backward makes again, and how ranks
    agree.
    """

    model: str
    parallel: str
    optimizer: str
    recompute: str = "none"
    sync: str = "allreduce"
    compression: str = "none"
    batch: int = 16

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return math.prod(int(n) for n in re.findall(r"(?:dp|fsdp|tp|pp)=(\d+)", self.parallel))


def config_of(case: Case) -> Any:
    """Return the run's description."""
    from echelon.config import build

    settings = {"strategy.parallel": case.parallel, "optimizer.name": case.optimizer, "data.batch_size": case.batch}
    settings |= {"strategy.sync": case.sync, "strategy.compression": case.compression}
    settings |= {"launch.elastic": "off"}  # which keeps a copy of what replicas agreed on: no part of a step
    settings |= {"training.recompute": case.recompute, "optimizer.lr": 1e-4, "model.name": case.model}
    return build(None, settings).config


def info() -> Any:
    """Return the data's description."""
    from echelon.data.base import DataInfo

    return DataInfo("random", tuple("abcdefghij"), CHANNELS, SIDE, 1024, 16, (103,) * CLASSES)


def _vit() -> Any:
    from echelon.models import ModelInput
    from echelon.models.builtin.small_vit import Size, SmallViT

    return SmallViT(ModelInput(CLASSES, CHANNELS, SIDE), Size(depth=6, width=640, heads=8, hidden=2560))


def _mlp() -> Any:
    from torch import nn

    width = 2048
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)]
    return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, width), *layers, nn.Linear(width, CLASSES))


def _resnet() -> Any:
    from torchvision.models import resnet50

    return resnet50(num_classes=CLASSES)


MODELS: dict[str, Callable[[], Any]] = {"vit": _vit, "mlp": _mlp, "resnet": _resnet}


def build_case(name: str) -> Any:
    """Return a model of `MODELS`, or one that `--model` knows."""
    from echelon.config import ModelConfig
    from echelon.models import ModelInput, build_model

    return MODELS[name]() if name in MODELS else build_model(ModelConfig(name), ModelInput(CLASSES, CHANNELS, SIDE))


def measure_rank(case: Case, rank: int, address: tuple[str, int], pipe: Connection) -> None:
    """Train, and send the most bytes that the resident set grew by, beyond what a small training has left."""
    import torch
    import torch.distributed as dist

    from echelon.config.validate import check_world
    from echelon.parallel.base import alone, place
    from echelon.trainer.world import World

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wait = timedelta(seconds=120)
    group, placement = None, alone()
    if case.ranks > 1:
        store = dist.TCPStore(*address, case.ranks, False, wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=wait)
        placement = place(check_world(config_of(case), case.ranks), rank, "cpu", wait)
        group = dist.group.WORLD
    world = World(rank, case.ranks, rank, torch.device("cpu"), group, placement)
    _train(case, world, small=True)
    with torch.device("meta"):
        build_case(case.model)  # loads its library
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    cuts = _train(case, world, small=False)
    pipe.send((_status("VmHWM") - before, cuts))
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


def _train(case: Case, world: Any, small: bool) -> tuple[str, ...]:
    import torch

    from echelon.data.base import Batch
    from echelon.observe.phases import HostClock
    from echelon.run.resolve import resolve
    from echelon.trainer.parts import Work, build_parts
    from echelon.trainer.state import seed_everything
    from echelon.trainer.step import Step, StepSettings

    run, data = resolve(config_of(case)), info()
    seed_everything(0)
    if small:
        from echelon.models import ModelInput
        from echelon.models.builtin.small_vit import Size, SmallViT

        model = SmallViT(ModelInput(CLASSES, CHANNELS, SIDE), Size(depth=2, width=32, heads=4, hidden=64))
    else:
        model = build_case(case.model)
    task = run.task.fitted(data)
    clock = HostClock()
    parts = build_parts(run, Work(data, task, model), world, clock)
    del model
    step = Step(task, StepSettings(world.device, None, 1, 0.0, False), clock, parts.scaler, parts.split)
    samples = case.batch // world.data_size
    batch = Batch(torch.randn(samples, CHANNELS, SIDE, SIDE), torch.zeros(samples, dtype=torch.int64), case.batch, 0)
    for _ in range(STEPS):
        step.forward_backward(batch, parts.sync)
        parts.sync.step()
    parts.sync.close()
    pipeline = parts.split.pipeline if parts.split else None
    return tuple(stage.steps[0].name for stage in pipeline.plan[1:]) if pipeline else ()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
