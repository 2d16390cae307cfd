"""A plain training loop beside a run of the product: the same arrays, model, optimizer and epochs, nothing else.

python -m benchmarks._tasks_hand FOLDER METRIC SEED [ARGUMENT OF `echelon train` ...]
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks._gated import Gate, fit, gated, train_gated
from echelon.config import RunConfig, build
from echelon.core.task import BestResult, sampling_interval
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, open_data
from echelon.data.order import Indices, global_batches, grouped_batches
from echelon.data.recipe import make_rows
from echelon.models import build_model
from echelon.run.defaults import with_task_defaults
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, ChosenSample, Task
from echelon.tasks.registry import TaskChoice
from echelon.trainer.inputs import model_input

CPU = torch.device("cpu")


_SETTINGS = {
    "--task": "task", "--input": "data.input", "--target": "data.target", "--epochs": "training.epochs",
}  # fmt: skip


def described(arguments: Sequence[str], seed: int) -> RunConfig:
    """Return the description of what `echelon train` would train with one worker, read in the present folder."""
    source, *words = arguments
    pairs = zip(words[::2], words[1::2], strict=True)
    settings: dict[str, Any] = {_SETTINGS[name]: int(value) if name == "--epochs" else value for name, value in pairs}
    settings |= {"data.source": source, "training.seed": seed, "launch.workers": 1, "strategy.parallel": "dp=1"}
    return with_task_defaults(build(None, settings)).config


def opened(config: RunConfig) -> tuple[Source, Task]:
    """Return the data and the task of a description."""
    source = open_data(config.data, config.training.seed, config.task)
    return source, TaskChoice.of(config).fitted(source.info)


class PlainLoop:
    """The loop that everyone writes, for a run's model, arrays, optimizer and schedule.

    Samples of different lengths come in batches of similar ones, as a run has them: else the loop would compute more
    padding.

    Raises:
        ValueError: the run uses something that this loop does not have.
    """

    def __init__(self, config: RunConfig) -> None:
        (self.source, self.task), self.config = opened(config), config
        optimizer = config.optimizer
        settings = optimizer.clip_norm, optimizer.label_smoothing, optimizer.scale_lr, config.training.ema
        if any(settings) or config.training.accumulate != 1 or optimizer.schedule != "cosine":
            raise ValueError("a plain loop has no clipping, smoothing, average or accumulation, and a cosine schedule")
        seed = config.training.seed
        torch.manual_seed(seed)
        self.model = build_model(config.model, model_input(self.source.info, self.task))
        self._optimizer = _optimizer(config, self.model)
        loading = LoaderConfig(config.data, seed, CPU)
        self._rows = make_rows(self.source.train, self.source.info, loading, training=True)
        self.size, self._draws = config.data.batch_size, np.random.default_rng(seed)
        self._n = self.source.info.train_size
        per_epoch = -(-self._n // self.size)
        steps, warmup = config.training.epochs * per_epoch, optimizer.warmup_epochs * per_epoch

        def rate(step: int) -> float:
            """Return the factor of the learning rate: a linear warm-up, then a cosine."""
            if step < warmup:
                return 1 / warmup + step * (1 - 1 / warmup) / warmup
            return (1 + math.cos(math.pi * step / steps)) / 2

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    def batches(self, epoch: int) -> Iterator[Indices]:
        """Give the samples of each batch of an epoch, in random order."""
        if self._rows.lengths is not None:
            yield from grouped_batches(self._rows.lengths, self.size, int(self._draws.integers(2**31)), epoch)
            return
        order = self._draws.permutation(self._n)
        yield from (order[start : start + self.size] for start in range(0, self._n, self.size))

    def run_batches(self) -> Iterator[Indices]:
        """Give the batches of a run's first epoch in the run's order: of texts, a step's time goes by their length."""
        seed = self.config.training.seed
        if self._rows.lengths is not None:
            yield from grouped_batches(self._rows.lengths, self.size, seed, 0)
        else:
            yield from global_batches(self._n, self.size, seed, 0)

    def step(self, epoch: int, batch: Indices) -> None:
        """Train on a batch."""
        arrays = _empty(self._rows.batch_specs(batch), len(batch))
        self._rows.fill(epoch, batch, *arrays)
        inputs, targets = nest.map_leaves(torch.from_numpy, arrays)
        units = len(batch) if self.task.unit == SAMPLE else self.task.units(targets)
        loss = self.task.loss_sum(nest.call(self.model, inputs), targets) / units
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._schedule.step()


def train_by_hand(config: RunConfig, metric: str) -> float:
    """Train as a run is described, and return the metric.

    It is that of the end, on the evaluation data. Where there is a test set apart, it is what the model gives there
    after the epoch that is best on the evaluation data, as a run has it.
    """
    loop = PlainLoop(config)
    best: BestResult | None = None
    found, data = 0.0, loop.source.evaluation
    for epoch in range(loop.config.training.epochs):
        loop.model.train()
        for batch in loop.batches(epoch):
            loop.step(epoch, batch)
        if loop.source.test is None:
            continue
        held_out = _evaluated(loop, data)
        result = BestResult(held_out[loop.task.primary.name], held_out["loss"])
        at_end = _evaluated(loop, loop.source.test)[metric]
        if result.improves(best, loop.task.primary):
            best, found = result, at_end
        print(json.dumps({"epoch": epoch, "held out": held_out, "test": at_end}), file=sys.stderr)
    return found if best else _evaluated(loop, data)[metric]


def plain_windows(folder: Path, arguments: Sequence[str], rank: int, gate: Gate) -> None:
    """Train with the plain loop on a run's batches, in steps that pass a gate."""
    os.chdir(folder)
    loop = PlainLoop(described(arguments, 0))
    loop.model.train()
    for batch in gated(loop.run_batches, gate):
        loop.step(0, batch)


def product_windows(folder: Path, arguments: Sequence[str], rank: int, gate: Gate) -> None:
    """Train with the product's loop and all that it does, in steps that pass a gate."""
    os.chdir(folder)
    train_gated(described(arguments, 0), (None, None), rank, gate, fit)


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


def _evaluated(loop: PlainLoop, data: Dataset[Any]) -> dict[str, float]:
    """Return the loss and the metrics of a data set."""
    task, config = loop.task, loop.config
    loop.model.eval()
    loader = EvalLoader(loop.source, LoaderConfig(config.data, config.training.seed, CPU), Shard(0, 1), data)
    metrics, total, units, place = task.metrics(CPU), 0.0, 0, 0
    every = sampling_interval(task.generation_samples, loader.total) if task.generation_samples else 0
    chosen: list[ChosenSample] = []
    with torch.inference_mode():
        for batch in loader:
            outputs = nest.exact(nest.call(loop.model, batch.inputs))
            metrics.update(outputs, batch.targets)
            total += float(task.loss_sum(outputs, batch.targets))
            units += task.units(batch.targets)
            for i in range(-place % every, nest.rows(batch.targets), every) if every else ():
                row = [i]
                chosen.append(ChosenSample(place + i, nest.take(batch.inputs, row), nest.take(batch.targets, row)))
            place += nest.rows(batch.targets)
        generated = task.generated(lambda inputs: nest.exact(nest.call(loop.model, inputs)), chosen, None)
    loader.close()
    found = {**metrics.compute().metrics, **generated.metrics}
    return {**{name: float(value or 0.0) for name, value in found.items()}, "loss": total / units}


def bias_rmse(arguments: Sequence[str], seed: int, folder: Path, decay: float = 5.0) -> float:
    """Return the RMSE of biases of users and items alone, fitted to the training ratings of a run by turns."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        source, _ = opened(described(arguments, seed))
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
    print(json.dumps(train_by_hand(described(sys.argv[4:], int(sys.argv[3])), sys.argv[2])))
