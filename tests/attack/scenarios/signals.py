"""Signals that ask a run to stop: to the launcher, to all of its processes as a terminal does, and twice."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import time
from pathlib import Path

from tests.attack.faulty_disk import FaultyDisk
from tests.attack.scenario import Scenario
from tests.ranks import wide_parts
from tests.ranks.runs import Run, Runs

WIDE_WAYS = {
    "allreduce": "allreduce", "local": "local(8)", "diloco": "diloco(8)", "easgd": "easgd(8)", "fsdp=2": "fsdp=2",
    "ps": "ps(mode=async)", "ps-ssp": "ps(mode=ssp)", "ps-sync": "ps(mode=sync)",
}  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WITHIN_S = 5.0
GRACE_S = 20.0
ENDLESS = ("--epochs", "1000000", "--eval-every", "0", "--checkpoint-every", "1000000")
SMALL_MODEL = ("--workers", "2", "--model", "mlp", *ENDLESS)
WIDE_MODEL = ("--workers", "2", "--model", "wide_parts:wide", "--batch-size", "8", "--lr", "0.001", *ENDLESS)


def stop(run: Run, signum: int, step: int = 5, deadline_s: float = 600.0) -> tuple[float, int]:
    """Signal a run, all its processes twice, past a step; returns the seconds until it had ended, and its last step.

    Raises:
        AssertionError: it left no checkpoint of its last step, no end, no report, or another exit code.
    """
    run.wait_for(lambda: any(r["step"] >= step for r in run.records("steps")), f"step {step}", deadline_s)
    began = time.monotonic()
    os.killpg(run.process.pid, signum)
    os.killpg(run.process.pid, signum)
    run.end()
    return time.monotonic() - began, run.check_stopped(signum)


def _each_signal(folder: Path) -> str:
    """Stop a small run with each signal."""
    times = []
    with Runs(folder) as runs:
        for signum in SIGNALS:
            run = runs.train("digits", *SMALL_MODEL, folder=signum.name)
            times.append(stop(run, signum)[0])
    names = ", ".join(f"{s.name} after {t:.1f} s" for s, t in zip(SIGNALS, times, strict=True))
    return f"a checkpoint of the last step, an end and a report each time; {names}"


def _nohup(folder: Path) -> str:
    """Hang up on a run that began with SIGHUP ignored."""
    with Runs(folder) as runs:
        run = runs.start(
            "train", "digits", "--threads", "1", "--device", "cpu", *SMALL_MODEL, folder="run", prefix=("nohup",)
        )
        before = run.wait_for_step(5)["step"]
        os.killpg(run.process.pid, signal.SIGHUP)
        after = run.wait_for_step(before + 300)["step"]
        stop(run, signal.SIGTERM)
    return f"hung up at step {before}, trained on past step {after}, then SIGTERM stopped it"


def _wide(folder: Path, sync: str = "allreduce", parallel: str = "") -> str:
    """Stop a model of 24 million parameters, whose steps are cheap."""
    shutil.copy(wide_parts.__file__, folder)
    layout = ("--parallel", parallel) if parallel else ()
    with Runs(folder) as runs:
        run = runs.train("digits", *WIDE_MODEL, "--sync", sync, *layout, folder="run")
        took_s, last = stop(run, signal.SIGTERM)
        saved = run.records("checkpoint")[-1]
    assert took_s <= WITHIN_S, f"{took_s:.1f} s"
    return f"{took_s:.1f} s from the signal to the exit, {saved['n_bytes'] / 1e6:.0f} MB saved, of step {last}"


def _ten_thousand_steps(folder: Path) -> str:
    """Stop a run that has done ten thousand steps."""
    with Runs(folder) as runs:
        run = runs.train("digits", *SMALL_MODEL, "--batch-size", "32", folder="run")
        took_s, last = stop(run, signal.SIGINT, 10_000)
    assert took_s <= WITHIN_S, f"{took_s:.1f} s"
    return f"{took_s:.1f} s from the signal to the exit, after {last} steps"


def _cut(folder: Path, sync: str, frozen: bool = False) -> str:
    """Stop a run that cannot save, for its disk is full or a rank is frozen, in a place that gives it a time."""
    disk = FaultyDisk(folder, folder / "run" / "checkpoints")
    small = ("--threads", "1", "--device", "cpu", "--workers", "2", "--model", "mlp", "--eval-every", "0")
    with Runs(folder) as runs:
        place = ("--on", f"local(grace={GRACE_S:g}s)", "--epochs", "1000000", "--checkpoint-every", "20")
        settings = (*small, *place, "--sync", sync)
        run = runs.start("train", "digits", *settings, folder="run", environment=disk.environment)
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        if frozen:
            os.kill(run.pids()[1], signal.SIGSTOP)
        else:
            disk.fail(errno.ENOSPC)
        saved = run.records("checkpoint")[-1]["step"]
        began = time.monotonic()
        os.kill(run.process.pid, signal.SIGTERM)
        code = run.end()
        took_s = time.monotonic() - began
        assert code == 128 + signal.SIGTERM, f"exit code {code}: {run.text()[-2000:]}"
        assert took_s <= GRACE_S, f"{took_s:.1f} s"
        assert run.left_behind() == [], "processes were left"
        (end,) = run.records("end")
        assert end["status"] == run.summary()["status"] == "stopped" and (run.folder / "report.html").exists()
        kept = run.records("checkpoint")[-1]["step"]
        assert kept >= saved and f"the checkpoint of step {kept} is the last one" in end["message"], end
        assert end["message"] in run.text() and not run.events("worker_died"), run.text()
        if not frozen:
            disk.work()
        again = ("--on", "local", "--max-steps", str(kept + 40))
        resumed = runs.start("resume", "run", *again, folder="run", environment=disk.environment)
        assert resumed.end() == 0, resumed.text()
        assert run.records("start")[-1]["start_step"] == kept and set(run.losses()) >= set(range(1, kept + 41))
    return f"ended {took_s:.1f} s after the signal, of {GRACE_S:g} s: {end['message']}; resumed from there"


SCENARIOS = (
    *(
        Scenario(
            f"deadline-{word}",
            "What cannot be saved is given up in time for an end and a report before the place ends the run by force: "
            + promise,
            functools.partial(_cut, sync=sync, frozen=frozen),
            short,
        )
        for word, promise, sync, frozen, short in (
            ("allreduce", "a full disk, allreduce", "allreduce", False, True),
            ("local", "a full disk, local(8)", "local(8)", False, False),
            ("ps", "a full disk, ps(mode=async)", "ps(mode=async)", False, False),
            ("frozen", "a rank that does not run, allreduce", "allreduce", True, False),
        )
    ),
    Scenario(
        "each-signal",
        "TERM, INT, HUP and QUIT, to all processes and twice, leave a checkpoint of the last step, an end, a report, "
        "and exit code 128 + signal",
        _each_signal,
        short=False,  # tests/ranks/test_signals.py tries each, with every way of training
    ),
    Scenario(
        "nohup",
        "A signal that was ignored when the run began stays ignored",
        _nohup,
        short=False,  # tests/ranks/test_signals.py has a shell ignore this signal and two more
    ),
    Scenario(
        "ten-thousand-steps",
        "After 10,000 steps a signal ends a run within 5 s",
        _ten_thousand_steps,
        short=False,
    ),
    *(
        Scenario(
            f"wide-{word}",
            f"A model of 24 million parameters is saved and ended within 5 s of a signal, with {name}",
            functools.partial(_wide, **{"sync" if "=2" not in name else "parallel": name}),
            short=False,
        )
        for word, name in WIDE_WAYS.items()
    ),
)
