"""Law 7: a worker that dies or falls silent does not end the run, and never makes anyone wait past the deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.ranks.runs import LEAVE_S, Run, Runs, losses_of

pytestmark = pytest.mark.timeout(400)
STEPS = 240
PLAIN = ("--workers", "2", "--epochs", "30", "--max-steps", str(STEPS), "--eval-every", "0", "--lr", "0.02")
SETTINGS = (*PLAIN, "--elastic", "off")
NOTICED_S = 5.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run in which nobody dies."""
    with Runs(tmp_path_factory.mktemp("whole")) as runs:
        whole = runs.train("digits", *SETTINGS, folder="whole")
        assert whole.end() == 0
        return whole.losses()


def _kill(run: Run, rank: int) -> tuple[int, float]:
    """Kill a rank; returns its process id and when."""
    pid = run.pids()[rank]
    os.kill(pid, signal.SIGKILL)
    return pid, time.time()


@pytest.mark.long
def test_where_nobody_says_the_others_go_on_and_the_curve_stays(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *PLAIN, folder="run")
        run.wait_for_step(20)
        pid, _ = _kill(run, rank=1)
        assert run.end() == 0
        (death,) = run.events("worker_died")
        assert death["pid"] == pid and "the others go on, and it joins them again" in death["message"]
        assert not run.events("resumed") and {start["attempt"] for start in run.records("start")} == {0}
        assert not run.left_behind()
        assert run.losses() == pytest.approx(undisturbed, abs=0.2), "what the dead one had not told is estimated"
        apart = [step for step, loss in run.losses().items() if abs(loss - undisturbed[step]) > 0.02]
        assert len(apart) <= 12, "within the rounding of sums of other parts, but for a window"


@pytest.mark.long
def test_killed_ranks_are_replaced_until_restarts_are_used_up_and_then_the_run_can_be_resumed(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *SETTINGS, "--checkpoint-every", "100", "--max-restarts", "1", folder="run")
        run.wait_for_step(105)
        first, killed_t = _kill(run, rank=1)
        again = run.wait_for_step(1, after_t=killed_t)
        second, _ = _kill(run, rank=0)  # before another checkpoint, which would give the restart back
        assert run.end() == 1
        assert not run.left_behind()

        deaths = run.events("worker_died")
        assert [(d["rank"], d["pid"], d["exit_code"]) for d in deaths] == [(1, first, -9), (0, second, -9)]
        assert all("SIGKILL" in d["message"] for d in deaths)
        assert deaths[0]["t"] - killed_t < NOTICED_S
        print(f"from the kill to the end of the next step: {again['t'] - killed_t:.1f} s")
        restarted = run.records("start")[1]
        assert restarted["attempt"] == 1 and restarted["start_step"] % 100 == 0 and restarted["start_step"] > 0
        assert run.summary()["status"] == "failed"
        assert "no restarts are left" in run.records("end")[-1]["message"]
        page = (run.folder / "report.html").read_text()
        assert f"rank 1 (pid {first}" in page and "until the next step began" in page
        assert "Traceback" not in run.errors()

        resumed = runs.start("resume", "run", folder="run")
        assert resumed.end() == 0
        assert resumed.summary()["status"] == "completed"
        assert list(resumed.losses()) == list(range(1, STEPS + 1))
        assert losses_of(run.folder) == undisturbed


@pytest.mark.long
def test_a_stopped_rank_is_named_and_replaced_when_the_timeout_is_over(tmp_path: Path) -> None:
    timeout_s = 6
    with Runs(tmp_path) as runs:
        settings = [*SETTINGS, "--timeout", f"{timeout_s}s", "--checkpoint-every", "10"]
        run = runs.train("digits", *settings, folder="run")
        run.wait_for_step(15)
        pid, stopped_t = run.pids()[1], time.time()
        os.kill(pid, signal.SIGSTOP)
        assert run.end() == 0
        (death,) = run.events("worker_died")
        assert (death["rank"], death["pid"]) == (1, pid)
        assert "does not answer" in death["message"] and "rank 0 waited in vain" in death["message"]
        assert "in step" in death["message"]
        assert "Timed out waiting" in (run.folder / "logs" / "rank0.log").read_text()  # the collective's own error
        assert death["t"] - stopped_t < timeout_s + NOTICED_S
        assert list(run.losses()) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed_and_its_run_can_be_resumed(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", *SETTINGS, "--checkpoint-every", "10", "--loaders", "1", folder="run")
        run.wait_for_step(15)
        run.process.kill()
        run.end()
        assert not run.left_behind(LEAVE_S)
        resumed = runs.start("resume", "run", folder="run")
        assert resumed.end() == 0
        assert list(resumed.losses()) == list(range(1, STEPS + 1))
