"""Several commands one after the other in one process, so that what they import is imported once.

    results = run_many(tmp_path, [["train", "digits", ...], ["evaluate", ...]])
    results[0].code, results[0].out, results[0].err

Each goes through the same `main()` as a command typed by a user; its workers are processes of their own as ever.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.ranks.runs import DEADLINE_S, Runs

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """How a command ended: exit code, and what it printed itself (not its workers)."""

    code: int
    out: str
    err: str


def run_many(
    folder: Path, commands: Sequence[Sequence[str | Path]], deadline_s: float = DEADLINE_S, clean: bool = True
) -> list[Result]:
    """Run commands in a folder, in order, in one new process.

    Args:
        deadline_s: for all of them together.
        clean: fail when any process printed a traceback.
    """
    asked, answers = folder / "commands.json", folder / "results.jsonl"
    asked.write_text(json.dumps([list(map(str, command)) for command in commands]))
    answers.unlink(missing_ok=True)
    with Runs(folder) as runs:
        program = [sys.executable, "-m", "tests.ranks.run_many"]
        run = runs.start(asked, answers, program=program, environment={"PYTHONPATH": python_path(folder)})
        run.wait_for(lambda: len(_answered(answers)) == len(commands), f"all of {commands}", deadline_s)
        code = run.end(deadline_s)  # an import server that is still importing is waited for
    assert code == 0, run.text()
    if clean:
        assert "Traceback" not in run.text(), run.text()
    return [Result(**each) for each in _answered(answers)]


def python_path(*more: Path) -> str:
    """Return a PYTHONPATH with this checkout's package and tests first, and what the variable has last."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, [REPOSITORY / "src", REPOSITORY, *more]), *filter(None, given)])


def _answered(file: Path) -> list[dict[str, Any]]:
    """Return the results of the commands that have ended; a line that is being written is of none yet."""
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _run(command: list[str]) -> Result:
    from echelon.cli import main

    sys.argv = ["echelon", *command]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


if __name__ == "__main__":
    with Path(sys.argv[2]).open("w", buffering=1) as answers:
        for command in json.loads(Path(sys.argv[1]).read_text()):
            print(json.dumps(asdict(_run(command))), file=answers)
