"""A path is one file: another one in the folder is found, built and tried by every law, and breaks no test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.collectives import build, names, paths
from echelon.core.errors import UserError

STAR = '''"""star: all send to one rank, which sends the sum back."""

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep


@dataclass(frozen=True)
class Star(Path):
    """2 (N - 1) rounds through the centre.

    Attributes:
        centre: the rank that sums.
    """

    name: ClassVar[str] = "star"
    examples: ClassVar[tuple[str, ...]] = ("star(centre=0)", "star(centre=1)")
    centre: int

    def schedule(self, rank, size, numel):
        """Give each other rank one round towards the centre and one back."""
        whole, centre = (0, numel), min(self.centre, size - 1)
        others = [r for r in range(size) if r != centre]
        if rank != centre:
            at = others.index(rank)
            back = len(others) + at
            return [PathStep(at, send_to=centre, send=whole), PathStep(back, recv_from=centre, recv=whole)]
        gathered = [PathStep(i, recv_from=r, recv=whole, add=True) for i, r in enumerate(others)]
        return gathered + [PathStep(len(others) + i, send_to=r, send=whole) for i, r in enumerate(others)]


PATH = Star
'''
RUN_TESTS = "import sys, pytest; from echelon.collectives import paths; paths.__path__.append(sys.argv[1]);"
TESTS = ("tests/unit/collectives/test_schedule.py", "tests/laws/test_collectives.py")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "star.py").write_text(STAR)
    return tmp_path


def test_a_new_file_is_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "__path__", [*paths.__path__, str(folder)])
    assert "star" in names()
    assert build("star(centre=2)").schedule(0, 3, 7)[0].send_to == 2
    with pytest.raises(UserError, match="did you mean centre"):
        build("star(center=2)")
    sys.modules.pop("echelon.collectives.paths.star")


@pytest.mark.long
def test_a_new_path_is_tried_by_the_laws_and_breaks_no_test(folder: Path) -> None:
    code = f"{RUN_TESTS} sys.exit(pytest.main(['-rA', '-k', 'not 400003', '-p', 'no:cacheprovider', *{TESTS!r}]))"
    command = [sys.executable, "-c", code, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    tried = [line for line in ended.stdout.splitlines() if line.startswith("PASSED") and "star(centre=1)" in line]
    assert any("gives_the_sum_on_every_rank" in line for line in tried)
