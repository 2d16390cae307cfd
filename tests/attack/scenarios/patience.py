"""What is transient ends no run: disks that fail for a while, deaths that are far apart."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.attack.faulty_disk import FaultyDisk, small_disk
from tests.attack.scenario import Scenario
from tests.ranks.runs import Run, Runs

SYNCS: dict[str, tuple[str, ...]] = {
    "allreduce": ("--sync", "allreduce"),
    "local": ("--sync", "local(period=4)"),
    "ps": ("--sync", "ps(mode=async)"),
    "fsdp": ("--parallel", "fsdp=2"),
}
STEADY = ("--workers", "2", "--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "20", "--lr", "0.01")
FAILS_S = 2.0


def _checkpoints_after(run: Run, moment_t: float) -> list[int]:
    return [record["step"] for record in run.records("checkpoint") if record["t"] > moment_t]


def _fails_for_a_while(run: Run, begin: Callable[[], None], end: Callable[[], None]) -> str:
    """Let a run's disk fail until it has been told, and train on; returns what became of it."""
    run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
    begin()
    run.wait_for(lambda: "training goes on" in run.text(), "that the disk fails")
    time.sleep(FAILS_S)
    end()
    works = run.wait_for(lambda: run.events("disk_works"), "that the disk works again")[0]
    saved = run.wait_for(lambda: _checkpoints_after(run, works["t"] - works["seconds"]), "a checkpoint afterwards")
    os.kill(run.process.pid, signal.SIGTERM)
    run.end()
    steps = [r["step"] for r in run.records("steps")]
    assert len(set(steps)) == len(steps) and sorted(run.losses()) == list(range(1, max(steps) + 1)), "steps are missing"
    assert len(run.records("start")) == 1 and not run.events("worker_died"), "it was restarted"
    trained = sum(1 for r in run.records("steps") if works["t"] - works["seconds"] < r["t"] <= works["t"])
    assert trained, "training stood still"
    assert run.text().count("training goes on") == 1 and run.text().count("works again") == 1, run.text()
    return f"{trained} records of steps while it failed for {works['seconds']:.1f} s; saved again at step {saved[0]}"


def _full_disk(sync: str, folder: Path) -> str:
    with small_disk(folder / "disk") as disk, Runs(folder) as runs:
        run = runs.train("digits", *STEADY, *SYNCS[sync], folder="disk/run")
        return _fails_for_a_while(run, disk.fill, disk.free)


def _error(code: int, below: str, sync: str, folder: Path) -> str:
    disk = FaultyDisk(folder, folder / "run" / below)
    with Runs(folder) as runs:
        arguments = ("train", "digits", "--threads", "1", "--device", "cpu", *STEADY, *SYNCS[sync])
        run = runs.start(*arguments, folder="run", environment=disk.environment)
        return _fails_for_a_while(run, partial(disk.fail, code), disk.work)


def _no_more_files(folder: Path) -> str:
    with Runs(folder) as runs:
        run = runs.train("digits", *STEADY, folder="run")
        pid = run.wait_for(lambda: run.records("checkpoint") and run.pids()[0], "a checkpoint")
        none, all_of_them = _limits(pid)
        return _fails_for_a_while(run, partial(_set_limit, pid, none), partial(_set_limit, pid, all_of_them))


def _dies_without_files(sync: str, folder: Path) -> str:
    with Runs(folder) as runs:
        run = runs.train("digits", *STEADY, *SYNCS[sync], folder="run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        none, all_of_them = _limits(run.process.pid)
        _set_limit(run.process.pid, none)
        os.kill({r["role"]: r["pid"] for r in run.records("process")}.get("worker1") or run.pids()[1], signal.SIGKILL)
        run.wait_for(lambda: "cannot start yet" in run.text(), "that nothing can be started")
        time.sleep(FAILS_S)
        _set_limit(run.process.pid, all_of_them)
        free_t = time.time()
        saved = run.wait_for(lambda: _checkpoints_after(run, free_t + 1.0), "a checkpoint afterwards")
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        assert run.summary()["status"] == "stopped" and len(run.events("worker_died")) == 1, run.text()
        return f"it was started again once it could, and saved at step {saved[0]}"


def _limits(pid: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the limits of files under which a process can open no more, and those that it has."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    least = min(set(range(soft)) - {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()})
    return (least, hard), (soft, hard)


def _set_limit(pid: int, limits: tuple[int, int]) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _stays_full(folder: Path) -> str:
    with small_disk(folder / "disk") as disk, Runs(folder) as runs:
        run = runs.train("digits", *STEADY, "--io-patience", "3s", folder="disk/run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        disk.fill()
        full_t = time.monotonic()
        code = run.end()
        seconds = time.monotonic() - full_t
        *notices, line = run.errors().splitlines()
        assert notices and all("training goes on" in notice for notice in notices), run.text()
        assert code == 1 and "No space left" in line, run.text()
        assert "free or mend the disk, then continue with `echelon resume" in line, run.text()
        disk.free()
        last = run.records("checkpoint")[-1]["step"] + 50
        resumed = runs.start("resume", "disk/run", "--max-steps", str(last), folder="disk/run")
        assert resumed.end() == 0, resumed.text()
        assert run.records("start")[-1]["start_step"] > 0 and set(run.losses()) >= set(range(1, last + 1))
        return f"it failed, with code 1, after {seconds:.1f} s of a full disk, and could be resumed"


def _full_at_the_end(folder: Path) -> str:
    with small_disk(folder / "disk") as disk, Runs(folder) as runs:
        run = runs.train("digits", *STEADY, "--max-steps", "400", folder="disk/run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        disk.fill()
        time.sleep(6 * FAILS_S)
        assert run.process.poll() is None, run.text()
        disk.free()
        assert run.end() == 0, run.text()
        assert run.records("checkpoint")[-1]["step"] == 400 and sorted(run.losses()) == list(range(1, 401))
        assert run.summary()["status"] == "completed"
        return f"the last save waited: {run.events('disk_works')[0]['message']}"


def _report_waits(folder: Path) -> str:
    disk = FaultyDisk(folder, folder / "run" / ".report.html")
    with Runs(folder) as runs:
        disk.fail(errno.ENOSPC)
        arguments = ("train", "digits", "--threads", "1", "--device", "cpu", *STEADY, "--max-steps", "40")
        run = runs.start(*arguments, folder="run", environment=disk.environment)
        run.wait_for(lambda: "cannot write to" in run.text(), "that the report cannot be written")
        time.sleep(FAILS_S)
        assert run.process.poll() is None, "a disk that is full for a while is waited for"
        os.kill(run.process.pid, signal.SIGTERM)
        asked_s = time.monotonic()
        code, seconds = run.end(), time.monotonic() - asked_s
        assert code == 0 and seconds < 10, (code, seconds, run.text())
        assert "`echelon report" in run.errors(), run.errors()
        disk.work()
        assert runs.start("report", "run", folder="run").end() == 0
        assert run.summary()["status"] == "completed" and run.records("checkpoint")[-1]["step"] == 40
        return f"it ended {seconds:.1f} s after a signal, `echelon report` wrote the report, of all 40 steps"


def _dies_while_full(folder: Path) -> str:
    with small_disk(folder / "disk") as disk, Runs(folder) as runs:
        run = runs.train("digits", *STEADY, folder="disk/run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        disk.fill()
        run.wait_for(lambda: "training goes on" in run.text(), "that the disk fails")
        os.kill(run.pids()[1], signal.SIGKILL)
        run.wait_for(lambda: run.text().count("steps an epoch") == 2, "another start")
        time.sleep(2 * FAILS_S)
        assert run.process.poll() is None, run.text()
        disk.free()
        free_t = time.time()
        saved = run.wait_for(lambda: _checkpoints_after(run, free_t), "a checkpoint afterwards")
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        deaths, losses = run.events("worker_died"), run.losses()
        assert len(deaths) == 1 and len(run.records("start")) == 2, run.text()
        assert sorted(losses) == list(range(1, max(losses) + 1)), "steps are missing"
        return f"it restarted on the full disk, and saved again at step {saved[0]}"


def _far_apart(folder: Path) -> str:
    deaths = 5
    with Runs(folder) as runs:
        run = runs.train("digits", *STEADY, "--max-restarts", "2", folder="run")
        for number in range(deaths):
            started = run.wait_for(lambda n=number: run.records("start")[n:], f"start {number + 1}")[0]
            run.wait_for(lambda t=started["t"]: len(_checkpoints_after(run, t)) >= 1, "a checkpoint")
            os.kill(run.pids()[number % 2], signal.SIGKILL)
        started = run.wait_for(lambda: run.records("start")[deaths:], "the last start")[0]
        run.wait_for(lambda: _checkpoints_after(run, started["t"]), "a checkpoint")
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        assert run.summary()["status"] == "stopped", run.text()
        return f"{deaths} deaths with a checkpoint between each two, --max-restarts 2: the run went on"


BROKEN_MODEL = """
import torch

class Broken(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = torch.nn.Linear(64, classes)

    def forward(self, x):
        if self.training:
            raise RuntimeError(f"this model at {object()} cannot work")
        return self.layer(x.flatten(1))

def build(num_classes=10, **settings):
    return Broken(num_classes)
"""


def _never_works(folder: Path) -> str:
    (folder / "broken.py").write_text(BROKEN_MODEL)
    with Runs(folder) as runs:
        environment = {"PYTHONPATH": str(folder)}
        run = runs.start(
            "train", "digits", "--threads", "1", "--device", "cpu", *STEADY, "--model", "broken:build",
            folder="run", environment=environment,
        )  # fmt: skip
        assert run.end() == 1, run.text()
        deaths = run.events("worker_died")
        assert len(deaths) == 2 and "in the same way twice" in deaths[1]["message"], run.text()
        return f"the run ended at the second start of --max-restarts 3: {deaths[1]['message'].rpartition('; ')[2]}"


def _one_incident(folder: Path) -> str:
    with Runs(folder) as runs:
        run = runs.train("digits", *STEADY, "--sync", "ps(mode=async)", "--max-restarts", "1", folder="run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        started = {r["role"]: r["pid"] for r in run.records("process")}
        for name in ("worker0", "worker1"):
            os.kill(started[name], signal.SIGKILL)
        died_t = time.time()
        run.wait_for(lambda: len(run.events("worker_died")) == 2, "both deaths")
        run.wait_for_step(1, after_t=died_t + 2)
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        assert run.summary()["status"] == "stopped", run.text()
        return "two workers killed at once, --max-restarts 1: the run went on"


_FULL = "A disk that is full for a while ends no run ({}): training goes on, and a checkpoint follows when it has room."
_ERROR = "{} while checkpoints are saved ends no run: training goes on, and the save is tried again."

SCENARIOS = [
    Scenario(
        "report-waits",
        "A signal ends a command that has trained, and waits for a disk that takes no report.",
        _report_waits,
        False,
    ),
    *(
        Scenario(f"full-disk-{name}", _FULL.format(name), partial(_full_disk, name), name == "allreduce")
        for name in SYNCS
    ),
    *(
        Scenario(
            f"error-{errno.errorcode[code].lower()}",
            _ERROR.format(errno.errorcode[code]),
            partial(_error, code, "checkpoints", "allreduce"),
            short=False,  # full-disk-allreduce differs in the error alone
        )
        for code in (errno.EIO, errno.ESTALE)
    ),
    *(
        Scenario(
            f"error-{errno.errorcode[code].lower()}-recording",
            f"{errno.errorcode[code]} in all that a run ({sync}) writes ends no run: records wait, as checkpoints do.",
            partial(_error, code, "", sync),
            short=False,
        )
        for code, sync in ((errno.EIO, "allreduce"), (errno.ESTALE, "ps"))
    ),
    Scenario("error-emfile", _ERROR.format("EMFILE"), _no_more_files, short=False),
    *(
        Scenario(
            f"dies-without-files-{name}",
            f"A worker ({name}) that dies while the launcher can open no file is started again when it can.",
            partial(_dies_without_files, name),
            short=False,
        )
        for name in ("allreduce", "ps")
    ),
    Scenario(
        "stays-full",
        "A disk that stays full fails the run after --io-patience; it can be resumed.",
        _stays_full,
        short=False,
    ),
    Scenario("full-at-the-end", "The last save waits for a full disk.", _full_at_the_end),
    Scenario(
        "dies-while-full", "A rank that dies while the disk is full is started again.", _dies_while_full, short=False
    ),
    Scenario("far-apart", "Deaths with a checkpoint between never use up --max-restarts.", _far_apart, short=False),
    Scenario("never-works", "A model that fails in its first forward ends the run at the second start.", _never_works),
    Scenario("one-incident", "Workers that die at once use up one restart.", _one_incident),
]
