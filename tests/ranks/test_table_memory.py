"""A table of four times the memory that each worker may have, by the kernel: cut over workers, and on servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.observe.oom import memory_group
from tests.ranks.limited_parts import LIMIT_BYTES, LIMITS
from tests.ranks.run_many import python_path
from tests.ranks.runs import SMALL, Run, Runs, losses_of

DEADLINE_S = 280.0
RATINGS = (
    *("train", "tests.ranks.limited_parts:ratings", "--model", "two_tower", "--sparse-tables", "--weight-decay", "0"),
    *("--optimizer", "sgd", "--momentum", "0", "--lr", "0.1", "--batch-size", "512", "--max-steps", "6", *SMALL),
)
pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.timeout(4 * DEADLINE_S)]


@pytest.fixture
def limits() -> Iterator[Path]:
    """Make a folder of cgroups, for each process one."""
    own = memory_group(os.getpid())
    if own is None:
        pytest.skip("this process's cgroup cannot be seen")
    folder = own.events.parent / f"echelon-limits-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "tried").mkdir()
        (folder / "tried" / own.limit.name).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no cgroup with a limit can be made: {error}")
    yield folder
    for each in folder.iterdir():
        if each.is_dir():
            each.rmdir()
    folder.rmdir()


def start(runs: Runs, limits: Path | None, *settings: str, folder: str) -> Run:
    """Start a run; each process that reads the data is limited, unless `limits` is None."""
    environment = {"PYTHONPATH": python_path(), **({LIMITS: str(limits)} if limits else {})}
    return runs.start(*RATINGS, *settings, folder=folder, environment=environment)


WAYS = {
    # a rank has a twelfth of the table, and as much again while it is saved
    "cut": ("--workers", "12", "--parallel", "dp=12,table=12"),
    "served": ("--workers", "1", "--sync", "ps(mode=async,servers=2)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_table_of_four_times_the_memory_of_each_worker(tmp_path: Path, limits: Path, way: str) -> None:
    with Runs(tmp_path) as runs:
        alone = start(runs, None, "--workers", "1", folder="alone")
        assert alone.end(DEADLINE_S) == 0, alone.text()[-2000:]
        run = start(runs, limits, *WAYS[way], "--max-restarts", "0", folder=way)
        assert run.end(DEADLINE_S) == 0, run.text()[-2000:]
    assert len(losses_of(tmp_path / "alone")) == 6
    assert losses_of(tmp_path / way) == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-4)
    assert any(each.name.isdigit() for each in limits.iterdir())


def test_the_whole_table_does_not_fit(tmp_path: Path, limits: Path) -> None:
    with Runs(tmp_path) as runs:
        whole = start(runs, limits, "--workers", "1", "--max-restarts", "0", folder="whole")
        assert whole.end(DEADLINE_S) != 0 and "out of memory" in whole.text(), whole.text()[-2000:]
