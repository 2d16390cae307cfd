"""Candidates run on equal terms: what each costs in accuracy, time, traffic and memory, with intervals and verdicts.

A study is a folder: `study.yaml` (which alone repeats it), an ordinary run folder for each run, two tables,
`summary.json` and one page. `run_study` runs what is missing, `write_study` writes the rest from what was recorded.
"""

from __future__ import annotations

from echelon.study.base import Study
from echelon.study.execute import StudyStopped, run_study
from echelon.study.file import from_tries, load_study, open_study
from echelon.study.grid import planned_runs
from echelon.study.write import write_study

__all__ = [
    "Study",
    "StudyStopped",
    "from_tries",
    "load_study",
    "open_study",
    "planned_runs",
    "run_study",
    "write_study",
]
