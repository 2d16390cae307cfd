"""How runs stand, from folders and queues alone; their logs; asking one to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.launch.places.cluster import PlaceFiles
from echelon.records.file import Recorder
from echelon.records.going import holder, is_held
from echelon.records.kinds import End, Evaluation, Start, Steps
from echelon.run import overview
from echelon.run.elsewhere import LogTail, stop
from echelon.run.home import folder_of, local_copies
from echelon.run.overview import cluster_of, overview_of, runs_below, until_over
from echelon.trainer import folder as folders

HOLD = """
import sys
from pathlib import Path
from echelon.trainer.folder import locked
with locked(Path(sys.argv[1]), shared=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def _run(folder: Path, place: str = "local") -> Path:
    folders.prepare(folder, build(None, {"launch.on": place, "training.epochs": "4"}).config, 1000.0)
    recorder = Recorder(folder)
    recorder.write(Start(steps_per_epoch=10))
    recorder.write(Steps(step=15, losses=[1.0], seconds=0.1))
    recorder.write(Evaluation(step=10, loss=0.5, metrics={"top1": 0.9}))
    recorder.close()
    return folder


def _slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> Path:
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"squeue": f"echo '{answer}'", "scancel": f'echo "$@" >>{programs}/cancelled'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs / "cancelled"


def test_a_run_of_this_machine(tmp_path: Path) -> None:
    run = _run(tmp_path / "runs" / "a")
    now = overview_of(run)
    assert (now.place, now.state, now.progress, now.metric) == ("local", "interrupted", "15/40 steps", "top-1 0.9")
    recorder = Recorder(run)
    recorder.write(End("completed", ""))
    recorder.close()
    assert overview_of(run).state == "completed" and list(runs_below(tmp_path / "runs")) == [run]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not tell who holds a lock")
def test_who_holds_a_run(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    assert holder(run) is None
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert is_held(run) and holder(run) == process.pid and overview_of(run).state == "running"
        process.send_signal(signal.SIGTERM)
    assert holder(run) is None


def test_a_run_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "a", "slurm(nodes=2)")
    files, cluster = PlaceFiles(run), cluster_of(run)
    files.prepare()
    assert cluster is not None and not stop(run, cluster)
    files.add_job("7")
    cancelled = _slurm_says(tmp_path, monkeypatch, "7|RUNNING|None|n[1-2]|N/A")
    assert overview_of(run).state == "running on n[1-2] (job 7)"
    assert stop(run, cluster) and files.stop.exists()
    assert cancelled.read_text() == "--batch --signal=TERM 7\n"
    _slurm_says(tmp_path, monkeypatch, "7|PENDING|Resources||N/A")
    assert overview_of(run).state == "waiting for 2 nodes (Resources) (job 7)"
    assert stop(run, cluster) and cancelled.read_text().endswith("\n7\n")
    _slurm_says(tmp_path, monkeypatch, "COMPLETED|None||N/A")
    assert overview_of(run).state == "interrupted" and not stop(run, cluster)


def test_hosts_of_a_run_that_has_ended_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "a", "ssh(hosts=a+b)")
    PlaceFiles(run).prepare()
    PlaceFiles(run).add_job("7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh is not there" in overview_of(run).state
    PlaceFiles(run).end(143)
    recorder = Recorder(run)
    recorder.write(End("stopped", ""))
    recorder.close()
    assert overview_of(run).state == "stopped"


def test_a_run_that_lives_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"file://{tmp_path}/store/one"
    run = folder_of(url)
    described = {"run": str(run), "checkpoint.mirror": url}
    folders.prepare(run, build(None, described).config, 1000.0)
    assert list(runs_below(local_copies())) == [run] and overview_of(run).home == url
    assert overview_of(_run(tmp_path / "other")).home == "" and folder_of("runs/a") == Path("runs/a")


def test_a_log_is_followed_until_the_run_of_this_machine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "ASK_S", 0.01)
    run = _run(tmp_path / "a")
    assert sum(1 for _ in until_over(run, 0.01)) == 2  # it is over: what is there, and the rest
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        looks = until_over(run, 0.05)
        assert len([next(looks) for _ in range(5)]) == 5
        process.stdin.close()
        process.wait(30)
        assert len(list(looks)) < 5


def test_a_log_is_followed_until_the_run_has_left_the_queue_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "ASK_S", 0.01)
    monkeypatch.setattr(overview, "SETTLE_S", 0.3)
    run = _run(tmp_path / "a", "slurm(nodes=2)")
    PlaceFiles(run).prepare()
    PlaceFiles(run).add_job("7")
    _slurm_says(tmp_path, monkeypatch, "7|RUNNING|None|n1|N/A")
    looks = until_over(run, 0.01)
    assert len([next(looks) for _ in range(4)]) == 4
    _slurm_says(tmp_path, monkeypatch, "")
    began = time.monotonic()
    assert list(looks) and time.monotonic() - began > 0.3  # it may be queued again
    PlaceFiles(run).end(0)
    monkeypatch.setattr(overview, "SETTLE_S", 60.0)
    assert sum(1 for _ in until_over(run, 0.01)) == 2


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        overview_of(tmp_path)


def test_a_log_that_grows_and_is_shortened(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    tail = LogTail(log)
    assert tail.read() == ""
    log.write_text("one\ntw")
    assert tail.read() == "one\n"
    log.write_text("one\ntwo\n")
    assert tail.read() == "two\n" and tail.read() == ""
    log.write_text("x\n")
    assert tail.read() == "x\n"
    assert LogTail(log).read() == "" and LogTail(log, from_start=True).read() == "x\n"
