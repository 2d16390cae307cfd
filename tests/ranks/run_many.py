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
    asked, answers = folder / "commands.json", folder / "results.json"
    asked.write_text(json.dumps([list(map(str, command)) for command in commands]))
    answers.unlink(missing_ok=True)
    paths = os.pathsep.join([str(REPOSITORY), str(folder)])
    with Runs(folder) as runs:
        program = [sys.executable, "-m", "tests.ranks.run_many"]
        run = runs.start(asked, answers, program=program, environment={"PYTHONPATH": paths})
        code = run.end(deadline_s)
    assert code == 0, run.text()
    if clean:
        assert "Traceback" not in run.text(), run.text()
    return [Result(**each) for each in json.loads(answers.read_text())]


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
    commands = json.loads(Path(sys.argv[1]).read_text())
    answers = Path(sys.argv[2])
    answers.write_text(json.dumps([asdict(_run(command)) for command in commands]))
