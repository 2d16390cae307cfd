"""Whole runs by averaging: they reach the accuracy that allreduce reaches, and send less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.run_many import run_many

LOCAL = "local(8)"
OTHERS = [
    "local(8, overlap=4)",
    "local(8, start=20, optimizer_state=average)",
    "diloco(10)",
    "diloco(10, fragments=2, overlap=2)",
    "easgd(4)",
]


def _train(folder: Path, variants: list[list[str]]) -> list[dict[str, float]]:
    common = ["train", "digits", "--workers", "2", "--threads", "1", "--device", "cpu"]
    commands: list[list[str | Path]] = [[*common, *v, "--run", folder / str(i)] for i, v in enumerate(variants)]
    results = run_many(folder, commands, deadline_s=150 * len(commands))
    assert [r.code for r in results] == [0] * len(commands), results
    summaries = [json.loads((folder / str(i) / "summary.json").read_text()) for i in range(len(commands))]
    return [{"top1": s["metrics"]["top1"], "wire": s["wire_bytes_per_step"]} for s in summaries]


@pytest.mark.slow
def test_local_sgd_learns_digits(tmp_path: Path) -> None:
    (found,) = _train(tmp_path, [["--sync", LOCAL]])
    assert found["top1"] >= 0.95


@pytest.mark.slow
def test_all_strategies_learn_digits(tmp_path: Path) -> None:
    variants = [["--sync", s] for s in ("allreduce", *OTHERS)]
    coded = [["--sync", LOCAL, "--compression", "int8"], ["--sync", "diloco(10)", "--compression", "int8"]]
    adamw = ["--sync", "diloco(10)", "--optimizer", "adamw", "--lr", "0.003", "--ema", "0.9"]
    every, *averaged = _train(tmp_path, [*variants, *coded, adamw])
    for found, variant in zip(averaged, [*variants[1:], *coded, adamw], strict=True):
        assert found["top1"] >= 0.95, variant
        assert found["wire"] < every["wire"], variant
