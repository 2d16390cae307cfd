"""A run in a container that gives little: no init, user, home, shared memory, place for sockets, or ptrace."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import orphan_parts
from tests.ranks.containers import NEEDS_NAMESPACES, Container, first_process_of, zombies_below
from tests.ranks.runs import SMALL, Runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), *NEEDS_NAMESPACES]
SHORT = ("--workers", "2", "--loaders", "1", "--epochs", "2", "--lr", "0.05")
POOR = Container(user=True, home="read-only", shm="small", temporary="long")
POORER = Container(user=True, home="none", shm="read-only", temporary="read-only", root="read-only")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder that any user can enter: pytest's own are this user's alone."""
    path = Path(tempfile.mkdtemp(prefix="echelon-container-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("container", [POOR, POORER], ids=["poor", "poorer"])
@pytest.mark.parametrize("sync", ["allreduce", "local(4)", "ps(mode=async)"])
def test_a_run_in_a_poor_container(folder: Path, sync: str, container: Container) -> None:
    shutil.copy(orphan_parts.__file__, folder)
    model = ("--model", "orphan_parts:mlp")
    with Runs(folder) as runs:
        command = ("train", "digits", *SMALL, *SHORT, *model, "--sync", sync)
        run = runs.start(*command, folder="run", prefix=container.prefix(folder))
        assert run.end() == 0, run.text()
        assert run.left_behind() == []
    assert run.summary()["status"] == "completed" and not run.events("worker_died")
    assert "Traceback" not in run.text(), run.text()


@pytest.mark.parametrize("sync", ["allreduce", "ps(mode=async)"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT])
def test_the_first_process_reaps_and_passes_signals_on(folder: Path, sync: str, signum: int) -> None:
    shutil.copy(orphan_parts.__file__, folder)
    endless = ("--workers", "2", "--model", "orphan_parts:mlp", "--epochs", "100000", "--eval-every", "0")
    with Runs(folder) as runs:
        command = ("train", "digits", *SMALL, *endless, "--sync", sync)
        run = runs.start(*command, folder="run", prefix=Container().prefix(folder))
        run.wait_for_step(5)
        first = first_process_of(run.process.pid)
        run.wait_for(lambda: not zombies_below(first), "no zombies")
        os.kill(first, signum)
        assert run.end() == 128 + signum, run.text()
        assert run.left_behind() == []
    assert run.records("checkpoint")[-1]["step"] == run.records("steps")[-1]["step"]
    assert run.records("end")[-1]["status"] == "stopped" and (run.folder / "report.html").exists()


def test_from_python_as_the_first_process(folder: Path) -> None:
    code = (
        "import echelon\n"
        "if __name__ == '__main__':\n"
        "    outcome = echelon.train('mlp', 'digits', run='run', epochs=1, workers=2, threads=1)\n"
        "    raise SystemExit(outcome.exit_code)\n"
    )
    (folder / "script.py").write_text(code)
    with Runs(folder) as runs:
        python = (shutil.which("python") or "python", "script.py")
        run = runs.start(program=python, folder="run", prefix=Container().prefix(folder))
        assert run.end() == 0, run.text()


def test_no_place_for_sockets_is_refused_in_one_line(folder: Path) -> None:
    nowhere = Container(root="read-only", temporary="none", shm="read-only").prefix(folder)
    with Runs(folder) as runs:
        run = runs.start("train", "digits", *SMALL, *SHORT, folder="run", prefix=nowhere)
        assert run.end() == 2, run.text()
        assert len(run.errors().splitlines()) == 1 and "set TMPDIR" in run.errors()
