"""The contenders of the comparison of survivors: what each is started with, and what of it is not a default."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks.runs import Run, Runs

from benchmarks._common import REPOSITORY
from benchmarks._elastic_peers_task import BATCH, CHECKPOINT_STEPS, PACE, RECORD, RESTARTS, STEPS, WORKERS


@dataclass(frozen=True)
class Tool:
    """A contender. `package`: what is imported and whose version is told; `settings`: what is not a default."""

    name: str
    side: str
    package: str
    python: str
    settings: str
    heartbeat_ms: int = 5000  # torchft's
    environment: tuple[tuple[str, str], ...] = ()

    def version(self) -> str:
        """Return the versions of the package and of torch; "" where it is not installed."""
        code = f"import {self.package} as p, torch; from importlib.metadata import version as v; "
        code += f"print(v('{self.package}'), v('torch'))"
        given = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")} if self.side == "echelon" else None
        tried = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=100, env=given)
        return tried.stdout.strip() if tried.returncode == 0 else ""

    def start(self, runs: Runs, folder: Path, step_s: float) -> list[Run]:
        """Start all that this tool needs; whose last one is to be waited for."""
        share_s = step_s / (BATCH // WORKERS)
        common = {RECORD: str(folder), PACE: str(share_s), "PYTHONPATH": str(REPOSITORY), **dict(self.environment)}
        side = ["benchmarks._elastic_peers_sides", self.side, str(folder), str(STEPS)]
        if self.side == "torchft":
            return self._start_torchft(runs, side, common)
        launch = ["-m"]
        if self.side == "torchrun":
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
            launch += [f"--max-restarts={RESTARTS}", "-m"]
        return [runs.start(*side, program=[self.python, *launch], environment=common)]

    def _start_torchft(self, runs: Runs, side: Sequence[str], common: dict[str, str]) -> list[Run]:
        port = _free_port()
        lighthouse = [str(Path(self.python).parent / "torchft_lighthouse"), "--bind", f"[::]:{port}"]
        lighthouse += ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse += ["--heartbeat_timeout_ms", str(self.heartbeat_ms)]
        started = [runs.start(program=lighthouse)]
        for i in reversed(range(WORKERS)):
            launch = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--master-addr=localhost"]
            launch += [f"--master-port={_free_port()}", f"--max-restarts={RESTARTS}", "-m"]
            own = {"REPLICA_GROUP_ID": str(i), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", **common}
            started.append(runs.start(*side, program=[self.python, *launch], environment=own))
        return started


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def tools(torchft_python: str, ray_python: str) -> list[Tool]:
    """Return the contenders."""
    saves = f"a checkpoint every {CHECKPOINT_STEPS} steps, from which all go on in the middle of the epoch"
    readme = (
        "lighthouse as in its README (`--join_timeout_ms 10000`), groups of one worker, each under torchrun, as in its "
        "TorchX file; `DistributedSampler` of torchft, the batch by `manager.current_step()`, so that a step that is "
        "not committed is tried again with the same samples. Its `DistributedDataParallel` as it is ends all survivors "
        "(`assert fut._fut` after gloo's error), after which all begin again at step 0: measured is one whose hook "
        "was repaired"
    )
    return [
        Tool("Echelon", "echelon", "echelon", sys.executable, f"all defaults, `max_restarts={RESTARTS}`"),
        Tool("torchft", "torchft", "torchft", torchft_python, readme),
        Tool(
            "torchft, quick heartbeat", "torchft", "torchft", torchft_python,
            "the same, with `--heartbeat_timeout_ms 1000` (its default is 5000)", heartbeat_ms=1000,
        ),
        Tool(
            "torchrun", "torchrun", "torch", sys.executable,
            f"DDP, `--standalone --max-restarts {RESTARTS}`, {saves}. Its agent keeps one store for all starts "
            "and no prefix for each, so that new workers may read the addresses that the dead ones left there",
        ),
        Tool(
            "torchrun, a store a start", "torchrun", "torch", sys.executable,
            "the same, with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which is said to help in pytorch's issue 135712",
            environment=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
        ),
        Tool(
            "Ray Train", "ray", "ray", ray_python,
            f"`FailureConfig(max_failures={RESTARTS})`, {saves}. Its controller asks its workers every 2 s, and what "
            "they reported since is lost with them", environment=(("RAY_USAGE_STATS_ENABLED", "0"),),
        ),
    ]  # fmt: skip
