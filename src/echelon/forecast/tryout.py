"""What the workers of a run would refuse, found in this process and before there are any: for a dry run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.config import RunConfig
from echelon.data import LoaderConfig, open_data
from echelon.data.base import DataInfo
from echelon.data.recipe import make_rows
from echelon.forecast.memory import Forecast, forecast
from echelon.models import build_model
from echelon.trainer.assemble import check_enough
from echelon.trainer.inputs import model_input, run_task
from echelon.trainer.precision import to_fp8
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.world import choose_device


@dataclass(frozen=True)
class Findings:
    """What was found out about a run that can start."""

    info: DataInfo
    forecast: Forecast


def try_out(run: ResolvedRun, workers: int, ranks: int) -> Findings:
    """Open the data, find the devices, and rehearse the model, as workers will.

    Args:
        workers: of this machine.
        ranks: of all machines.

    Raises:
        UserError: a worker would refuse this.
    """
    config = run.config
    devices = [choose_device(config.training.device, local_rank, workers) for local_rank in range(workers)]
    layout = run.layout_for(ranks)
    source = open_data(config.data, config.training.seed)
    check_enough(source.info, layout.dp * layout.fsdp)
    settings = LoaderConfig.of(config.data, config.training.seed, devices[0])
    make_rows(source.train, source.info, settings, training=True)
    make_rows(source.evaluation, source.info, settings, training=False)
    run_task(config, source.info)
    _try_model(config, source.info, devices[0])
    return Findings(source.info, forecast(run, source.info, ranks))


def _try_model(config: RunConfig, info: DataInfo, device: torch.device) -> None:
    """Build what the rehearsal leaves out: weights from a file, and 8-bit layers."""
    in_8_bits = config.training.precision == "fp8"
    if not (config.model.weights or in_8_bits):
        return
    model = build_model(config.model, model_input(info, run_task(config, info)))
    if in_8_bits:
        to_fp8(model, device)
