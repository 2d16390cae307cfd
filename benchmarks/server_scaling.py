"""Updates/s of asynchronous workers by how many they are, beside one worker's: where it breaks, and why.

python -m benchmarks.server_scaling [--workers 1 2 4 8 16 32] [--widths 64 1024] [--seconds 10]

Whole runs of `echelon train digits --sync "ps(mode=async)"` on this machine. A step of a worker is a pause of 0.1 s, as
if it computed elsewhere, so that the cores are there for what the strategy itself costs: gradients and parameters on
their way, updates, leases, records. Each batch is cut into as many parts as there are workers, and each part is an
update of the servers: without any cost N workers make N times the updates of one. The rate is that of the second half
of a run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import Tensor, nn

from benchmarks._common import REPOSITORY, append_result, command_line, environment_line, markdown_table, update_section
from echelon.models.base import ModelInput
from echelon.records.file import read_records
from echelon.records.kinds import Steps

NAME, TITLE = "server_scaling", "Parameter server: updates/s by workers"
PAUSE_S, DEADLINE_S = 0.1, 600.0


class Elsewhere(nn.Module):
    """Two layers, and a pause in each forward pass of training instead of their computation."""

    def __init__(self, data: ModelInput, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(data.channels * data.image_size**2, width)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, data.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, classes]."""
        if self.training:
            time.sleep(PAUSE_S)
        scores: Tensor = self.last(self.second(self.first(images.flatten(1)).relu()).relu())
        return scores


def narrow(data: ModelInput) -> nn.Module:
    """Return a model of 9,000 parameters."""
    return Elsewhere(data, 64)


def wide(data: ModelInput) -> nn.Module:
    """Return a model of 1.1 million parameters."""
    return Elsewhere(data, 1024)


MODELS = {"narrow": "0.04 MB", "wide": "4.5 MB"}


def updates_per_s(model: str, workers: int, seconds: float) -> float:
    """Train for about so long; return the updates/s of all workers in the second half.

    Raises:
        CalledProcessError: the run failed.
    """
    steps = round(seconds / PAUSE_S)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "echelon", "train", "digits", "--model", f"benchmarks.server_scaling:{model}",
            "--trust", "--sync", "ps(mode=async)", "--workers", str(workers), "--threads", "1", "--device", "cpu",
            "--batch-size", "64", "--epochs", "9999", "--max-steps", str(steps), "--eval-every", "0", "--run", str(run),
        ]  # fmt: skip
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL, env=environment)
        half = [window for window in read_records(run, Steps) if window.step >= steps / 2]
    return workers * (half[-1].step - half[0].step) / (half[-1].t - half[0].t)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        alone = 0.0
        for workers in options.workers:
            rate = updates_per_s(model, workers, options.seconds)
            alone = alone or rate / workers
            append_result(NAME, {"model": model, "workers": workers, "rate": rate})
            rows.append([MODELS[model], workers, f"{rate:.1f}", f"{rate / alone:.2f}", f"{rate / alone / workers:.2f}"])
            print(rows[-1], flush=True)
    header = ["gradients", "workers", "updates/s", "x one worker", "of N"]
    words = "A step is a pause of 0.1 s; gradients and parameters travel whole, through one server."
    line = environment_line(command_line("benchmarks.server_scaling"))
    update_section(TITLE, f"{line}\n\n{words}\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
