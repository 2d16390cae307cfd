"""A study from its description to what came of it, for the command and for Python."""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import build
from echelon.core.errors import UserError
from echelon.core.files import full_disk_in_words
from echelon.core.stop import stop_on_signals
from echelon.observe.environment import command_given_t
from echelon.run.machine import say
from echelon.run.trust import check_settings, check_trust
from echelon.study.base import COMPLETED, Study
from echelon.study.execute import How, StudyStopped, refused_settings, run_study
from echelon.study.file import STUDY_FILE, StudyRequest, is_study, load_study, open_study, study_file
from echelon.study.live import StudyDisplay
from echelon.study.report import StudyReport
from echelon.study.serving import live_page_of
from echelon.study.write import REPORT_FILE, write_study

if TYPE_CHECKING:
    import pandas

_CONTINUE = "echelon compare --run"


@dataclass(frozen=True, repr=False)
class StudyOutcome:
    """What came of a study.

    Attributes:
        report: its runs, comparisons with the baseline and recommendations, as objects.
        signum: the signal that stopped it, else 0.
    """

    folder: Path
    report: StudyReport
    signum: int = 0

    @property
    def status(self) -> str:
        """`completed`, `partial` (a run was refused or failed) or `stopped`."""
        if self.signum:
            return "stopped"
        return COMPLETED if self.report.completed == len(self.report.all_runs) else "partial"

    @property
    def words(self) -> Sequence[str]:
        """What the comparison says, in sentences."""
        return self.report.words

    @property
    def runs(self) -> pandas.DataFrame:
        """A row for each run: what it was, what it reached and what it cost; columns as in `runs.csv`.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("runs are a data frame of pandas, which is not installed: pip install pandas") from None
        return pandas.read_csv(self.folder / "runs.csv")

    def __repr__(self) -> str:
        done = f"{self.report.completed} of {len(self.report.all_runs)} runs"
        return f"StudyOutcome({self.status}, {done}, {self.folder})"

    def _repr_html_(self) -> str:
        """Return the sentences and a link to the page, as notebooks show them."""
        page = html.escape(str(self.folder / REPORT_FILE))
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.words)
        return f'<ul>{items}</ul><a href="{page}">{page}</a>'


def carry_out(
    path: Path, study: Study | None, retry: bool = False, serve: bool = False, at_once: int = 0
) -> StudyOutcome:
    """Run what is missing of a study, and write its tables and its page; None: of the study in that folder.

    Args:
        retry: run again what was refused or failed.
        serve: show it as a page on this machine while it goes.
        at_once: runs that go on at the same time, on a cluster; 0: one on this machine, four there.

    Raises:
        UserError: the folder holds another study, or none, or cannot be written.
    """
    given_t, study, signum = command_given_t(), open_study(path, study), 0
    how = How.of(study, at_once, retry)
    display = StudyDisplay(path, at_once=how.at_once)
    try:
        with full_disk_in_words(path, _CONTINUE), live_page_of(path, serve), display:
            run_study(path, study, display, how, given_t)
    except StudyStopped as stop:
        signum = stop.signum
    with stop_on_signals() if signum else nullcontext():  # another signal does not take the report away
        return concluded(path, signum, ends=True)


def concluded(path: Path, signum: int = 0, ends: bool = False) -> StudyOutcome:
    """Write a study's tables and page from what its runs recorded.

    Args:
        ends: record, too, that the command which ran it ends with that.

    Raises:
        UserError: the folder holds no study.
    """
    with full_disk_in_words(path, _CONTINUE):
        return StudyOutcome(path, write_study(path, ends), signum)


def warn_of_refusals(study: Study) -> None:
    """Say which candidates will be refused, before anything starts and before there is a folder.

    Raises:
        UserError: no run can start: the data, the model, or whatever else all have in common, is refused.
    """
    from echelon.run.start import check_described

    for name, reason in refused_settings(study, check_described).items():
        say(f"{name} will be refused: {reason}")


def check_study_trust(request: StudyRequest, folder: str, trust: bool) -> None:
    """Refuse code that a study's file, or a file of settings, names and this user has not used before.

    Raises:
        UserError: names the code and the file.
    """
    file = study_file(request) or (Path(folder) / STUDY_FILE if is_study(Path(folder)) else None)
    if request.config:
        check_trust(build(Path(request.config)), trust)
    if file is None:
        return
    study = load_study(file)
    for settings in [study.base, *(c.settings for c in study.candidates), *(t.settings for t in study.terms)]:
        check_settings(settings, dict.fromkeys(settings, str(file)), trust)
