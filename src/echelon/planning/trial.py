"""Short runs that calibrate a plan: the run as described, then with half of its batch where workers can divide that."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.config import RunConfig, to_yaml
from echelon.config.schema import TrackingConfig
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.planning.calibration import Calibration, calibrate
from echelon.reporting.report.records import RunRecord, load_run

STEPS = 40
DEFAULTS = {"parallel": "dp=-1", "sync": "allreduce", "compression": "none"}
"""Of which a record says what other ways would cost."""
_DEADLINE_S = 900.0


def calibrate_by_runs(config: RunConfig) -> Calibration:
    """Train twice for a while, with half of the batch the second time; returns what the records say.

    What the runs print goes to standard error; their folders are removed.

    Raises:
        UserError: a run was refused, failed, or took no step.
    """
    batch = config.data.batch_size
    base = replace(config, strategy=replace(config.strategy, **DEFAULTS))
    records = [try_out(_with_batch(base, batch), f"batches of {batch}")]
    start, half = records[0].last_start, batch // 2
    if start is not None and half >= start.world_size:  # fewer samples than workers cannot be divided
        records.append(try_out(_with_batch(base, half), f"batches of {half}"))
    return calibrate(records)


def _with_batch(config: RunConfig, batch: int) -> RunConfig:
    return replace(config, data=replace(config.data, batch_size=batch))


def try_out(config: RunConfig, what: str) -> RunRecord:
    """Train for a while; returns the record.

    Args:
        what: is tried, for what is printed.

    Raises:
        UserError: the run was refused or failed.
    """
    training = replace(config.training, max_steps=STEPS, max_time="", eval_every=0, early_stop=0, profile=0)
    saving = replace(config.checkpoint, mirror="")
    config = replace(config, run="", training=training, checkpoint=saving, tracking=TrackingConfig())
    print(f"trying {what}: up to {STEPS} steps", file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="echelon-plan-") as folder:
        run, file = Path(folder) / "run", Path(folder) / "run.yaml"
        write_atomic(file, to_yaml(config))
        words = [sys.executable, "-m", "echelon", "train", "--config", str(file), "--run", str(run), "--trust"]
        try:
            ended = subprocess.run(words, stdout=sys.stderr, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"a trial with {what} did not end in {_DEADLINE_S:g} s") from None
        if ended.returncode:
            raise UserError(
                f"a trial with {what} ended with code {ended.returncode}, see above: a model that this machine cannot "
                "train is planned with tflops=... in --at"
            )
        return load_run(run)
