"""Whole runs with a parameter server between split replicas: they learn, survive deaths, stop, resume, and refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.checkpoint import CheckpointStore
from tests.ranks import own_parts
from tests.ranks.links import NEEDS_LINKS
from tests.ranks.run_many import run_many
from tests.ranks.runs import Run, Runs

pytestmark = pytest.mark.timeout(600)
SERVED = ("--workers", "4", "--sync", "ps(mode=async, servers=2)", "--model", "mlp", "--lr", "0.02")
COMMON = ("--threads", "1", "--device", "cpu", "--eval-every", "0")


def done(folder: Path) -> Counter[int]:
    """Return how often each batch was counted since the last start."""
    lines = [json.loads(line) for line in (folder / "ps" / "scheduler.jsonl").read_text().splitlines()]
    return Counter(e["task"] for e in lines if e["kind"] == "done")


def pid_of(run: Run, role: str) -> int:
    """Return the process id of a role in its newest life."""
    pid: int = [r["pid"] for r in run.records("process") if r["role"] == role][-1]
    return pid


def parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a run's newest checkpoint."""
    found = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert found is not None and found[0] == 36
    return dict(found[1]["model"])


@pytest.mark.long
def test_it_learns_and_refuses_in_words(tmp_path: Path) -> None:
    train = ["train", "digits", *COMMON, *SERVED]
    results = run_many(tmp_path, [
        [*train, "--parallel", "pp=2", "--epochs", "12", "--compression", "int8", "--run", "pp"],
        [*train, "--parallel", "pp=2", "--dry-run"],
        [*train, "--parallel", "pp=2", "--workers", "3", "--run", "odd"],
        [*train, "--parallel", "pp=2", "--compile", "--run", "compiled"],
        [*train, "--parallel", "pp=2", "--sync", "ps(mode=sync, backup=2)", "--run", "backups"],
    ])  # fmt: skip
    assert [r.code for r in results] == [0, 0, 2, 2, 2], results
    summary = json.loads((tmp_path / "pp" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["metrics"]["top1"] > 0.85
    assert set(done(tmp_path / "pp").values()) == {1}
    starts = [json.loads(line) for line in (tmp_path / "pp" / "record.jsonl").read_text().splitlines()]
    start = next(r for r in starts if r["kind"] == "start")
    assert start["layout"] == {"dp": 2, "pp": 2} and start["world_size"] == 4
    assert {r["role"] for r in starts if r["kind"] == "process"} >= {"worker0", "worker0.1", "worker1", "worker1.1"}
    assert "its first rank has the whole model" in results[1].out
    assert "with 2 workers at most 1 are backups" in results[4].err


@pytest.mark.long
def test_a_follower_and_then_a_leader_are_killed(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *COMMON, *SERVED, "--parallel", "pp=2", "--epochs", "40", folder="run")
        for victim in ("worker1.1", "worker0"):
            reached = run.records("steps")[-1]["step"] if run.records("steps") else 0
            run.wait_for_step(reached + 20)
            os.kill(pid_of(run, victim), signal.SIGKILL)
            lives = len([r for r in run.records("process") if r["role"] == victim])
            run.wait_for(lambda v=victim, n=lives: run.records("process")[n:] and pid_of(run, v), "another life")
        assert run.end() == 0
        assert not run.left_behind()
    deaths = run.events("worker_died")
    assert [(d["role"], d["exit_code"]) for d in deaths] == [("worker1.1", -9), ("worker0", -9)]
    assert all("its worker's processes are started again" in d["message"] for d in deaths)
    assert "ended with worker1.1" in run.events("worker_gone")[0]["message"]
    assert set(done(run.folder).values()) == {1}
    assert run.summary()["status"] == "completed" and run.summary()["metrics"]["top1"] > 0.9


@pytest.mark.slow
def test_whole_and_split_workers_resume_each_other(tmp_path: Path) -> None:
    shutil.copy(own_parts.__file__, tmp_path)
    model = ("--model", "own_parts:SmallCNN64", "--lr", "0.02", "--epochs", "9", "--checkpoint-every", "12")
    train = ["train", "digits", *COMMON, *model, "--sync", "ps(mode=sync, servers=2)", "--workers", "2"]
    results = run_many(tmp_path, [
        [*train, "--max-steps", "36", "--run", "whole"],
        [*train, "--max-steps", "12", "--run", "mixed"],
        ["resume", "mixed", "--workers", "4", "--parallel", "fsdp=2", "--max-steps", "24"],
        ["resume", "mixed", "--workers", "2", "--parallel", "dp=2", "--max-steps", "36"],
        ["evaluate", "mixed"],
    ], deadline_s=500)  # fmt: skip
    assert [r.code for r in results] == [0] * 5, results
    wanted, got = parameters(tmp_path / "whole"), parameters(tmp_path / "mixed")
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "fsdp=2", "tp=2,pp=2"])
def test_stopped_and_resumed(tmp_path: Path, layout: str) -> None:
    where = ("--parallel", layout, *(("--cuts", "5") if "pp" in layout else ()))  # not between layers that tp pairs
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *COMMON, *SERVED, *where, "--epochs", "200", folder="run")
        run.wait_for_step(20)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143 and not run.left_behind()
        assert "stopped" in run.text() and run.records("checkpoint")[-1]["reason"] == "stop"
        stopped = run.records("checkpoint")[-1]["step"]
        resumed = runs.start("resume", "run", "--epochs", "15", folder="run")
        assert resumed.end() == 0 and not resumed.left_behind()
    assert resumed.events("resumed")[-1]["step"] >= stopped - 4  # copies of the servers are not of one moment
    assert set(done(run.folder).values()) == {1}
    assert resumed.summary()["status"] == "completed" and resumed.summary()["metrics"]["top1"] > 0.85


@pytest.mark.slow
def test_statistics_of_batchnorm_belong_to_the_whole_model(tmp_path: Path) -> None:
    common = ["train", "digits", *COMMON, "--workers", "4", "--model", "resnet20", "--lr", "0.05", "--epochs", "6"]
    results = run_many(tmp_path, [
        [*common, "--sync", "ps(mode=async)", "--parallel", "fsdp=2", "--run", "fsdp"],
        ["evaluate", "fsdp"],
    ], deadline_s=500)  # fmt: skip
    assert [r.code for r in results] == [0, 0], results
    assert json.loads((tmp_path / "fsdp" / "summary.json").read_text())["metrics"]["top1"] > 0.5
    lines = (tmp_path / "fsdp" / "record.jsonl").read_text()
    assert "worker_died" not in lines


@pytest.mark.slow
@pytest.mark.root
@NEEDS_LINKS[1]
def test_replicas_on_links_of_their_own(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *COMMON, *SERVED, "--parallel", "pp=2", "--link", "100mbit", "--epochs", "8",
                         folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        (link,) = run.records("link")
    assert len(link["hosts"]) == 2 and set(link["servers"]) == {"server0", "server1"}
    assert run.summary()["metrics"]["top1"] > 0.7
