"""Short runs that calibrate a plan: the run as described, then with half of its batch where workers can divide that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from echelon.config import RunConfig, to_yaml
from echelon.config.schema import TrackingConfig
from echelon.core.errors import UserError
from echelon.core.files import scratch_folder, write_atomic
from echelon.core.units import many
from echelon.planning.calibration import Calibration, calibrate
from echelon.reporting.report.records import RunRecord, load_run
from echelon.run.start import launch_request, plan_of

STEPS = 40
DEFAULTS = {"parallel": "dp=-1", "sync": "allreduce", "compression": "none"}
"""Of which a record says what other ways would cost."""
_DEADLINE_S = 900.0
_STOPS_WITHIN_S = 60.0


def calibrate_by_runs(config: RunConfig, pipelines: Sequence[str] = ()) -> Calibration:
    """Train twice for a while, with half of the batch the second time, and as pipelines; returns what the records say.

    What a run prints goes to standard error where it fails; their folders are removed.

    Args:
        pipelines: layouts of two ranks. One that fails is told in the notes, and pipelines follow from the others.

    Raises:
        UserError: a run of whole replicas was refused, failed, or took no step; or it would have one worker.
    """
    if workers_of(config) < 2:
        raise UserError("plan measures what 2 workers send each other, and there would be 1: give --workers 2")
    batch = config.data.batch_size
    base = replace(config, strategy=replace(config.strategy, **DEFAULTS))
    records = [try_out(_with_batch(base, batch), f"batches of {batch}")]
    start, half = records[0].last_start, batch // 2
    parts = config.training.accumulate * (start.world_size if start is not None else 0)
    if 0 < parts <= half:  # fewer samples than workers, or their micro-batches, cannot be divided
        records.append(try_out(_with_batch(base, half), f"batches of {half}"))
    piped, notes = run_pipelines(base, pipelines)
    known = calibrate(records, pipelined=piped)
    runs = many(len(records) + len(piped), "short run")
    return replace(known, source=f"{runs} on this machine", notes=(*known.notes, *notes))


def run_pipelines(config: RunConfig, layouts: Sequence[str]) -> tuple[list[RunRecord], list[str]]:
    """Train two ranks as pipelines, with the threads of a run's workers; returns records, and what failed."""
    plan = plan_of(launch_request(config), Path(config.run))
    two = replace(config, launch=replace(config.launch, workers=2, threads=plan.threads))
    records, notes = [], []
    for layout in layouts:
        try:
            records.append(try_out(replace(two, strategy=replace(two.strategy, parallel=layout)), layout))
        except UserError as error:
            notes.append(f"{layout} was tried, and is not counted: {error}.")
    return records, notes


def workers_of(config: RunConfig) -> int:
    """Return how many workers a run has on this machine."""
    return plan_of(launch_request(config), Path(config.run)).workers


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
    launch = replace(config.launch, on="local", nodes="1", rendezvous="", log_dir="")
    config = replace(config, run="", training=training, checkpoint=saving, tracking=TrackingConfig(), launch=launch)
    print(f"trying {what}: up to {STEPS} steps", file=sys.stderr, flush=True)
    with scratch_folder() as folder:
        run, file = folder / "run", folder / "run.yaml"
        write_atomic(file, to_yaml(config))
        words = [sys.executable, "-m", "echelon", "train", "--config", str(file), "--run", str(run), "--trust"]
        code = _ended(words, folder / "printed", what)
        if code:
            print((folder / "printed").read_text(errors="replace"), file=sys.stderr, flush=True)
            raise UserError(
                f"a trial with {what} ended with code {code}, see above: a model that this machine cannot train is "
                "planned with tflops=... in --at"
            )
        return load_run(run)


def _ended(words: Sequence[str], printed: Path, what: str) -> int:
    """Run a command to its end; returns its exit code. Whatever comes between, it has ended before its folder goes.

    Args:
        printed: the file for what it prints, which would read like the run that it is tried for.

    Raises:
        UserError: it did not end in time.
    """
    # A session of its own: it is told to stop by this process alone, once.
    with (
        printed.open("wb") as file,
        subprocess.Popen(words, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True) as trial,
    ):
        try:
            return trial.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            last = printed.read_text(errors="replace").strip().rpartition("\n")[2]
            raise UserError(f"a trial with {what} did not end in {_DEADLINE_S:g} s; it printed last: {last}") from None
        finally:
            if trial.poll() is None:
                trial.terminate()
                with suppress(subprocess.TimeoutExpired):
                    trial.wait(_STOPS_WITHIN_S)
                with suppress(ProcessLookupError):
                    os.killpg(trial.pid, signal.SIGKILL)  # with its ranks
