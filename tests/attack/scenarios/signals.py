"""Signals that ask a run to stop: to the launcher, to all of its processes as a terminal does, and twice."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from pathlib import Path

from tests.attack.scenario import Scenario
from tests.ranks import wide_parts
from tests.ranks.runs import Run, Runs

WIDE_WAYS = {
    "allreduce": "allreduce", "local": "local(8)", "diloco": "diloco(8)", "easgd": "easgd(8)", "fsdp=2": "fsdp=2",
    "ps": "ps(mode=async)", "ps-ssp": "ps(mode=ssp)", "ps-sync": "ps(mode=sync)",
}  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WITHIN_S = 5.0
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


SCENARIOS = (
    Scenario(
        "each-signal",
        "TERM, INT, HUP and QUIT, to all processes and twice, leave a checkpoint of the last step, an end, a report, "
        "and exit code 128 + signal",
        _each_signal,
        short=False,  # tests/ranks/test_signals.py tries each, with every way of training
    ),
    Scenario("nohup", "A signal that was ignored when the run began stays ignored", _nohup),
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
