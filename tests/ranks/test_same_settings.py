"""What a run is told acts in every process that trains, whatever gives out its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.run_many import run_many
from tests.ranks.runs import losses_of
from tests.ranks.watched_parts import seen_in

pytestmark = pytest.mark.timeout(400)
COMMON = (
    "train", "digits", "--model", "tests.ranks.watched_parts:watched", "--workers", "2", "--threads", "1",
    "--device", "cpu", "--epochs", "1", "--batch-size", "100",
)  # fmt: skip
SYNCS = ("allreduce", "ps(mode=sync)", "ps(mode=async)")
SETTINGS = (
    "--deterministic",
    "--tf32",
    "on",
    "--recompute",
    "blocks",
    "--precision",
    "bf16-params",
    "--channels-last",
    "on",
)


@pytest.mark.long
def test_settings_of_training_reach_every_worker(tmp_path: Path) -> None:
    commands = [[*COMMON, *SETTINGS, "--sync", sync, "--run", str(i)] for i, sync in enumerate(SYNCS)]
    commands += [[*COMMON, "--sync", SYNCS[0], "--run", "plain"]]
    results = run_many(tmp_path, commands)
    assert [r.code for r in results] == [0] * len(commands), results
    told = {
        "deterministic": True, "matmul": "high", "block_calls": 4, "parameters": "torch.bfloat16",
        "channels_last": True,
    }  # fmt: skip
    plain = {
        "deterministic": False, "matmul": "highest", "block_calls": 2, "parameters": "torch.float32",
        "channels_last": False,
    }  # fmt: skip
    for name, expected in {**{str(i): told for i in range(len(SYNCS))}, "plain": plain}.items():
        seen = seen_in(tmp_path / name)
        assert seen and all(each == expected for each in seen), name
    reference, summed = losses_of(tmp_path / "0"), losses_of(tmp_path / "1")
    assert list(summed.values()) == pytest.approx(list(reference.values()), abs=0.02)  # narrow copies of the newest
