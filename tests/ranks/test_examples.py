"""The example scripts run as their first lines say, on two processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.spawn import Rank, run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "ddp_plain.py": (TORCHRUN, None),
    "ddp_accelerate.py": (TORCHRUN, "accelerate"),
    "ddp_lightning.py": ([sys.executable], "lightning"),
    "wrap_plain.py": (TORCHRUN, None),
    "wrap_accelerate.py": (TORCHRUN, "accelerate"),
    "wrap_lightning.py": ([sys.executable], "lightning"),
    "wrap_transformers.py": (TORCHRUN, "transformers"),
}
ONE_OF_EACH_PEER = ("ddp_lightning.py", "wrap_accelerate.py", "wrap_transformers.py")


def _run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Run a command in a session of its own, so that the time ends all of its processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=EXAMPLES,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -1, output
    return process.returncode, output


def _check(output: str) -> None:
    found = re.search(r"accuracy (0\.\d+|1\.0+), (\d+) bytes", output)
    assert found, output
    assert float(found[1]) > 0.8
    assert int(found[2]) < 76_840 / 4  # 2 (N - 1) / N of 19,210 parameters of 4 bytes, N = 2


@pytest.mark.parametrize(
    "script",
    [
        # The plain ones run without torchrun below, of each peer's one is enough, and torchrun starts two of these.
        pytest.param(script, marks=pytest.mark.long if script in ONE_OF_EACH_PEER else pytest.mark.slow)
        for script in COMMANDS
    ],
)
def test_an_example_learns_and_sends_less(script: str) -> None:
    launcher, needs = COMMANDS[script]
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: it is in the dependency group `peers`")
    code, output = _run([*launcher, script, "--epochs", "3"], timeout_s=170)
    assert code == 0, output
    _check(output)


def plain_example(rank: Rank, script: str, port: int) -> str:
    """The script itself, with the environment that torchrun would give it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank.index), "WORLD_SIZE": str(rank.world_size)}
    sys.argv = [script, "--epochs", "3"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("script", ["ddp_plain.py", "wrap_plain.py"])
def test_a_plain_example_without_the_time_that_torchrun_takes_to_start(script: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _check(run_ranks(plain_example, 2, script, port, backend=None)[0])
