"""Evaluating a finished run again, in this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from echelon.config import RunConfig
from echelon.data import LoaderConfig, Shard, open_data
from echelon.data.loader import EvalLoader
from echelon.models import build_model
from echelon.optim.build import EMA
from echelon.run.machine import say
from echelon.tasks.registry import TaskChoice
from echelon.trainer.evaluate import evaluate
from echelon.trainer.inputs import model_input
from echelon.trainer.saving import best_state
from echelon.trainer.world import World


def rescore(folder: Path, config: RunConfig) -> Mapping[str, float | None]:
    """Evaluate the best checkpoint of a run on its evaluation data; returns the metrics.

    Raises:
        UserError: no whole checkpoint, or the data is gone.
    """
    state = best_state(folder)
    source = open_data(config.data, config.training.seed)
    for note in source.notes:
        say(note)
    info = source.info
    device = torch.device("cuda" if torch.cuda.is_available() and config.training.device != "cpu" else "cpu")
    task = TaskChoice.of(config).fitted(info)
    model = build_model(config.model, model_input(info, task)).to(device)
    model.load_state_dict(state["model"])
    average = EMA(model, config.training.ema) if config.training.ema else None
    if average is not None:
        average.load_state_dict(state["ema"])
    settings = LoaderConfig.of(config.data, config.training.seed, device)
    loader = EvalLoader(source, settings, Shard(0, 1))
    try:
        with average.swapped(model) if average else nullcontext():
            alone = World(0, 1, 0, device, None)
            report = evaluate(model, loader, task, alone)
    finally:
        loader.close()
    return {"loss": report.loss, **report.metrics}
