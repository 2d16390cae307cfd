"""A run in a container without an init, or without a place for sockets; see `tests/attack/scenarios/container.py`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.containers import NEEDS_NAMESPACES, Container
from tests.ranks.runs import SMALL, Runs

pytestmark = [pytest.mark.timeout(400), *NEEDS_NAMESPACES]
SHORT = ("--workers", "2", "--loaders", "1", "--epochs", "2", "--lr", "0.05")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder that any user can enter: pytest's own are this user's alone."""
    path = Path(tempfile.mkdtemp(prefix="echelon-container-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow  # the command as the first process: `tests/attack/scenarios/container.py`
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


@pytest.mark.long
def test_no_place_for_sockets_is_refused_in_one_line(folder: Path) -> None:
    nowhere = Container(root="read-only", temporary="none", shm="read-only").prefix(folder)
    with Runs(folder) as runs:
        run = runs.start("train", "digits", *SMALL, *SHORT, folder="run", prefix=nowhere)
        assert run.end() == 2, run.text()
        assert len(run.errors().splitlines()) == 1 and "set TMPDIR" in run.errors()
