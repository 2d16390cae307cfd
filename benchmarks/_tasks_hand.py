"""A plain training loop beside a run of the product: the same arrays, model, optimizer and epochs, nothing else.

python -m benchmarks._tasks_hand FOLDER RUN METRIC
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from echelon.config import RunConfig
from echelon.config.build import load_run_config
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, open_data
from echelon.data.recipe import make_rows
from echelon.models import build_model
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, Task
from echelon.tasks.registry import TaskChoice
from echelon.trainer.inputs import model_input

CPU = torch.device("cpu")


def opened(run: Path) -> tuple[RunConfig, Source, Task]:
    """Return a run's description, its data and its task."""
    config = load_run_config(run / "config.yaml")
    source = open_data(config.data, config.training.seed, config.task, run)
    return config, source, TaskChoice.of(config).fitted(source.info)


def train_by_hand(run: Path, metric: str) -> tuple[float, float]:
    """Train as a run is described, and return the metric at the end and samples per second of the loop."""
    config, source, task = opened(run)
    torch.manual_seed(config.training.seed)
    model = build_model(config.model, model_input(source.info, task))
    optimizer = _optimizer(config, model)
    rows = make_rows(source.train, source.info, LoaderConfig(config.data, config.training.seed, CPU), training=True)
    n, size, seen, spent = source.info.train_size, config.data.batch_size, 0, 0.0
    steps = config.training.epochs * -(-n // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    draws = np.random.default_rng(config.training.seed)
    for epoch in range(config.training.epochs):
        began = time.perf_counter()
        model.train()
        order = draws.permutation(n)
        for start in range(0, n, size):
            batch = order[start : start + size]
            arrays = _empty(rows.batch_specs(batch), len(batch))
            rows.fill(epoch, batch, *arrays)
            inputs, targets = nest.map_leaves(torch.from_numpy, arrays)
            units = len(batch) if task.unit == SAMPLE else task.units(targets)
            loss = task.loss_sum(nest.call(model, inputs), targets) / units
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seen, spent = seen + n, spent + time.perf_counter() - began
    return _evaluated(model, source, task, config, metric), seen / spent


def _empty(specs: nest.Nest, count: int) -> nest.Nest:
    return nest.map_leaves(lambda spec: np.empty((count, *spec.shape), spec.dtype), specs)


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, or SGD with Nesterov momentum, with no decay of what has one dim."""
    settings = config.optimizer
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, settings.lr)
    return torch.optim.SGD(groups, settings.lr, settings.momentum, nesterov=True)


def _evaluated(model: nn.Module, source: Source, task: Task, config: RunConfig, metric: str) -> float:
    model.eval()
    loader = EvalLoader(source, LoaderConfig(config.data, config.training.seed, CPU), Shard(0, 1), source.test)
    metrics, total, units = task.metrics(CPU), 0.0, 0
    with torch.inference_mode():
        for batch in loader:
            outputs = nest.exact(nest.call(model, batch.inputs))
            metrics.update(outputs, batch.targets)
            total += float(task.loss_sum(outputs, batch.targets))
            units += task.units(batch.targets)
    loader.close()
    return total / units if metric == "loss" else float(metrics.compute().metrics[metric] or 0.0)


def bias_rmse(run: Path, folder: Path, decay: float = 5.0) -> float:
    """Return the RMSE of biases of users and items alone, fitted to the training ratings of a run by turns."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        _, source, _ = opened(run)
    finally:
        os.chdir(here)
    (users, items), ratings = source.train.values, source.train.targets  # type: ignore[attr-defined]
    mean = float(ratings.mean())
    of_users, of_items = (np.zeros(int(ids.max()) + 1 + 10**5) for ids in (users, items))
    for _ in range(30):
        of_users = _means(users, ratings - mean - of_items[items], len(of_users), decay)
        of_items = _means(items, ratings - mean - of_users[users], len(of_items), decay)
    (users, items), ratings = source.evaluation.values, source.evaluation.targets  # type: ignore[attr-defined]
    return float(np.sqrt(np.mean((mean + of_users[users] + of_items[items] - ratings) ** 2)))


def _means(ids: np.ndarray, values: np.ndarray, count: int, decay: float) -> np.ndarray:
    sums, numbers = np.bincount(ids, values, count), np.bincount(ids, minlength=count)
    return sums / (numbers + decay)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    print(json.dumps(train_by_hand(Path(sys.argv[2]), sys.argv[3])))
