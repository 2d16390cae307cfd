"""Any signal that asks a run to stop leaves a checkpoint of the last step, an end and a report; the code tells which.

`Run`s are in sessions of their own, so `killpg` is what a terminal does on Ctrl-C, and on its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.runs import SMALL, Run, Runs

pytestmark = pytest.mark.timeout(400)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LONG_TEST, SLOW_TEST = pytest.mark.long, pytest.mark.slow
OF_SERVERS = (SLOW_TEST, LONG_TEST, SLOW_TEST, SLOW_TEST)
LONG = ("--workers", "2", "--model", "mlp", "--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "100000")


def last_step(run: Run) -> int:
    """Return the newest step of a run's record."""
    step: int = run.records("steps")[-1]["step"]
    return step


def _to_launcher(run: Run, signum: int) -> None:
    run.process.send_signal(signum)


def _to_group(run: Run, signum: int) -> None:
    os.killpg(run.process.pid, signum)


def _to_group_twice(run: Run, signum: int) -> None:
    os.killpg(run.process.pid, signum)
    os.killpg(run.process.pid, signum)


@pytest.mark.parametrize(
    "sync, send, signum",
    [
        # `tests/attack/scenarios/`: signals.py sends each to all processes of replicas, container.py SIGTERM to one.
        *(pytest.param("allreduce", _to_launcher, signum, marks=SLOW_TEST) for signum in SIGNALS),
        *(
            pytest.param("ps(mode=async)", _to_group, signum, marks=mark)
            for signum, mark in zip(SIGNALS, OF_SERVERS, strict=True)
        ),
    ],
)
def test_every_signal_saves_first(tmp_path: Path, sync: str, send: Callable[[Run, int], None], signum: int) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *LONG, "--sync", sync, folder="run")
        run.wait_for_step(5)
        send(run, signum)
        run.check_stopped(signum)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=mark, id=" ".join(setting))
        for setting, mark in (
            # `tests/attack/scenarios/container.py` stops each strategy, as a container's first process.
            (("--sync", "local(4)"), SLOW_TEST),
            (("--sync", "diloco(10)"), SLOW_TEST),
            (("--sync", "easgd(4)"), SLOW_TEST),
            (("--sync", "ps(mode=sync)"), SLOW_TEST),
            (("--sync", "ps(mode=sync, order=priority)"), SLOW_TEST),
            (("--sync", "ps(mode=ssp, staleness=2)"), SLOW_TEST),
            (("--parallel", "fsdp=2"), SLOW_TEST),
            (("--parallel", "pp=2"), SLOW_TEST),
            (("--workers", "1"), LONG_TEST),
        )
    ],
)
def test_every_way_of_training_saves_first(tmp_path: Path, setting: tuple[str, str]) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *LONG, *setting, folder="run")
        run.wait_for_step(5)
        _to_group_twice(run, signal.SIGHUP)
        run.check_stopped(signal.SIGHUP)


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=LONG_TEST), pytest.param("ps(mode=async)", marks=SLOW_TEST)]
)
def test_a_signal_before_the_first_step_ends_it_with_a_report(tmp_path: Path, sync: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *LONG, "--sync", sync, folder="run")
        run.wait_for(lambda: (run.folder / "logs").exists(), "the run's folder")
        _to_group(run, signal.SIGTERM)
        assert run.end(60) == 143, run.text()
        assert run.left_behind() == []
    assert run.records("end")[-1]["status"] == "stopped" and (run.folder / "report.html").exists()
    assert "Traceback" not in run.text()


@pytest.mark.long
def test_signals_that_were_ignored_stay_ignored(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        prefix = ("sh", "-c", """trap '' INT QUIT HUP; exec "$@" """, "sh")
        run = runs.start("train", "digits", *SMALL, *LONG, folder="run", prefix=prefix)
        run.wait_for_step(5)
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            before = last_step(run)
            _to_group(run, signum)
            run.wait_for_step(before + 200)
        _to_group(run, signal.SIGTERM)
        run.check_stopped(signal.SIGTERM)


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=LONG_TEST), pytest.param("ps(mode=async)", marks=SLOW_TEST)]
)
def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint(tmp_path: Path, sync: str) -> None:
    ours, theirs = pty.openpty()
    attach = (
        "import fcntl, os, sys, termios; fd = int(sys.argv[1]); fcntl.ioctl(fd, termios.TIOCSCTTY, 0);"
        "[os.dup2(fd, n) for n in (0, 1, 2)]; os.close(fd); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    os.set_inheritable(theirs, True)
    with Runs(tmp_path) as runs:
        run = runs.start(
            "train", "digits", *SMALL, *LONG, "--sync", sync, folder="run",
            prefix=(sys.executable, "-c", attach, str(theirs)), inherited=(theirs,),
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(ours, False)

        def has_stepped() -> bool:
            """Read what the run shows, as a terminal does."""
            with contextlib.suppress(BlockingIOError):
                os.read(ours, 1 << 16)
            return any(r["step"] >= 5 for r in run.records("steps"))

        run.wait_for(has_stepped, "step 5")
        os.close(ours)  # the kernel sends SIGHUP to who has the terminal, and their output fails from now on
        run.check_stopped(signal.SIGHUP)


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=LONG_TEST), pytest.param(signal.SIGHUP, marks=SLOW_TEST)]
)
def test_from_python_a_stopped_run_is_returned_with_its_signal(tmp_path: Path, signum: int) -> None:
    code = (
        "import echelon, json\n"
        "if __name__ == '__main__':\n"
        "    outcome = echelon.train('mlp', 'digits', run='run', epochs=100000, workers=2, threads=1, eval_every=0)\n"
        "    print(json.dumps([outcome.status, outcome.signum, outcome.exit_code]))\n"
        "    raise SystemExit(outcome.exit_code)\n"
    )
    (tmp_path / "script.py").write_text(code)
    with Runs(tmp_path) as runs:
        run = runs.start(program=(sys.executable, "script.py"), folder="run")
        run.wait_for_step(5)
        _to_group(run, signum)
        run.check_stopped(signum)
    assert json.loads(run.output.read_text().splitlines()[-1]) == ["stopped", signum, 128 + signum]


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=LONG_TEST), pytest.param(signal.SIGQUIT, marks=SLOW_TEST)]
)
def test_a_study_ends_with_the_signals_code(tmp_path: Path, signum: int) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(
            *("compare", "digits", *SMALL, "--model", "mlp", "--epochs", "100000"),
            *("--try", "sync=allreduce", "--try", "sync=local(4)", "--seeds", "1", "--run", tmp_path / "study"),
        )
        study = Run(run.process, tmp_path / "study", run.output, run.mark)
        study.wait_for(lambda: list((tmp_path / "study/runs").glob("*/record.jsonl")), "the first run")
        _to_group(run, signum)
        _to_group(run, signum)
        assert run.end() == 128 + signum, run.text()
        assert run.left_behind() == []
    assert (tmp_path / "study/report.html").exists() and "stopped; continue with" in run.text()
