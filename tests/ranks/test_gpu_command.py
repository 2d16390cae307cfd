"""The command that tries everything on a GPU: without one it says so, and a group that takes too long is cut off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks.gpu_all", "--device", "cpu", "--out", str(out), *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_without_a_gpu_it_says_what_it_skips(tmp_path: Path) -> None:
    done = command(tmp_path / "table.md", "--groups", "versions", "nccl", "timings")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table.count("| skipped | no CUDA device here |") == 3 and "| torch | ok |" in table


@pytest.mark.slow
def test_a_group_that_takes_too_long_is_cut_off_and_the_table_stands(tmp_path: Path) -> None:
    done = command(tmp_path / "table.md", "--groups", "versions", "runs", "timings", "--seconds", "15")
    assert done.returncode == 1, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "| torch | ok |" in table and "| cut off after" in table and "| no time left |" in table
