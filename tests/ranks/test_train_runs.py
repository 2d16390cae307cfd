"""Whole runs: every option of training, the config that repeats a run, reports, launchers, Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.ranks.run_many import python_path, run_many
from tests.ranks.runs import Runs, losses_of, read_lines

pytestmark = pytest.mark.timeout(400)
COMMON = ("--threads", "1", "--device", "cpu", "--epochs", "2", "--batch-size", "100", "--workers", "2")
OPTIONS = {
    "ema": ("--ema", "0.9"),
    "clip": ("--clip-norm", "0.5"),
    "smooth": ("--label-smoothing", "0.1"),
    "balanced": ("--class-weights", "balanced"),
    "bf16": ("--precision", "bf16", "--model", "mlp"),  # CPUs without bf16 units take seconds for a convolution
    "accumulate": ("--accumulate", "2", "--optimizer", "adamw", "--lr", "0.003", "--warmup-epochs", "1"),
}
GOES_ON = """
import gc
from echelon.cli import main

try:
    main()
except SystemExit as done:
    assert done.code == 0 and gc.get_freeze_count() == 0, "what was trained can be collected"
"""


@pytest.mark.slow
def test_every_option_trains_and_the_config_alone_repeats_a_run(tmp_path: Path) -> None:
    commands = [["train", "digits", *COMMON, *extra, "--run", name] for name, extra in OPTIONS.items()]
    commands += [
        ["train", "digits", *COMMON, "--run", "plain"],
        ["train", "--config", "plain/config.yaml", "--run", "again"],
        ["evaluate", "ema"],
        ["report", "plain"],
    ]
    results = run_many(tmp_path, commands)
    assert [r.code for r in results] == [0] * len(commands), results
    losses = {name: losses_of(tmp_path / name) for name in [*OPTIONS, "plain", "again"]}
    assert losses["again"] == losses["plain"]
    for name in OPTIONS:
        assert list(losses[name]) == list(losses["plain"])
        assert losses[name][30] < losses[name][1]
        assert name == "ema" or losses[name] != losses["plain"]  # the option reached the loop
    *_, last = (r for r in _records(tmp_path / "ema") if r["kind"] == "evaluation")
    said = dict(line.split() for line in results[-2].out.splitlines())
    best = max(r["metrics"]["top1"] for r in _records(tmp_path / "ema") if r["kind"] == "evaluation")
    assert float(said["top1"]) == pytest.approx(best, abs=1e-4)
    assert last["samples"] == 359
    assert "report.html" in results[-1].out
    config = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert config["run"] == "again"


def _records(folder: Path) -> list[dict[str, object]]:
    return read_lines(folder)


@pytest.mark.long
def test_under_torchrun_and_from_python_with_own_parts(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "launched.py"]
    (tmp_path / "launched.py").write_text(GOES_ON)
    with Runs(tmp_path) as runs:
        # no --run: torchrun takes it for an option of its own
        run = runs.start("train", "digits", "--epochs", "2", "--device", "cpu", program=torchrun)
        program = [sys.executable, "-m", "tests.ranks.own_parts"]
        own = runs.start(program=program, environment={"PYTHONPATH": python_path()})
        assert run.end() == 0, run.text()
        (run.folder,) = (tmp_path / "runs").iterdir()
        assert run.summary()["status"] == "completed"
        (start,) = run.records("start")
        assert start["world_size"] == 2 and len(set(start["pids"])) == 2
        assert own.end() == 0, own.text()
        status, top1 = own.output.read_text().split()[-2:]
        assert status == "completed" and float(top1) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["allreduce", "ps(mode=sync)"])
def test_a_compiled_model_trains_alike(tmp_path: Path, sync: str) -> None:
    commands = [["train", "digits", *COMMON, *extra, "--sync", sync, "--run", name] for name, extra in
                (("plain", ()), ("compiled", ("--compile",)))]  # fmt: skip
    assert [r.code for r in run_many(tmp_path, commands)] == [0, 0]
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-3)
