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
import zipfile
from pathlib import Path

import pytest

from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of
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


def small_ratings(folder: Path) -> Path:
    """Write an archive of the form of ml-latest-small; taste, by even and odd numbers, decides on a rating."""
    films = "\n".join(f'{film},"Film, {film}",{("Drama", "Drama|War")[film % 2]}' for film in range(40))
    rated = "\n".join(
        f"{u},{i},{4.5 - 3 * ((u + i) % 2)},{1000 + u * i}" for u in range(50) for i in range(u % 3, 40, 3)
    )
    path = folder / "ratings.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-latest-small/movies.csv", f"movieId,title,genres\n{films}\n")
        archive.writestr("ml-latest-small/ratings.csv", f"userId,movieId,rating,timestamp\n{rated}\n")
    return path


@pytest.mark.long
def test_the_example_of_tables_learns_however_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CLICKS", str(tmp_path / "clicks"))
    monkeypatch.setenv("MOVIELENS", str(small_ratings(tmp_path)))
    runpy.run_path(str(EXAMPLES / "recommender.py"))["write_clicks"](tmp_path / "clicks", 20_000, seed=0)
    rows = ("--sparse-tables", "--optimizer", "sparse_adam", "--weight-decay", "0", "--batch-size", "250", *SMALL)
    clicks, ratings = (
        ("train", f"recommender:{data}", *rows, "--lr", "0.01", "--epochs", epochs, "--model")
        for data, epochs in (("clicks", "1"), ("movielens", "12"))
    )
    ways = {
        "one": ("--workers", "1"),
        "cut": ("--workers", "2", "--parallel", "dp=2,table=2"),
        "served": ("--workers", "1", "--sync", "ps(mode=async)"),
    }
    commands = [
        [*clicks, "recommender:two_tower", *ways["cut"], "--run", "towers"],
        [*ratings, "recommender:dlrm", *ways["cut"], "--run", "films"],
        *([*clicks, "recommender:dlrm", *ways[way], "--run", way] for way in ways),
        [*ratings, "recommender:two_tower", "--workers", "2", "--sync", "local(4)", "--run", "averaged"],
    ]
    results = run_many(tmp_path, commands)
    assert [result.code for result in results] == [0] * len(commands), results
    for way in ("cut", "served"):
        assert losses_of(tmp_path / way) == pytest.approx(losses_of(tmp_path / "one"), rel=1e-3), way
    for run in ("towers", "films", "averaged", "one"):
        losses = list(losses_of(tmp_path / run).values())
        assert sum(losses[-10:]) < 0.97 * sum(losses[:10]), run
