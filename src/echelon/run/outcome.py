"""How a run ended, and what came of it: numbers, their course, the trained model."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import load_run_config
from echelon.core.errors import LEFT, UserError
from echelon.core.stop import stopped_exit_code
from echelon.core.units import format_bytes
from echelon.records.events import CallbackError, RankFailed, RunDiverged, WorkerDied
from echelon.records.file import newest
from echelon.records.going import read_launch
from echelon.records.kinds import Evaluation, Steps
from echelon.records.summary import SUMMARY_FILE, RunSummary, read_summary
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from echelon.reporting.report.records import RunRecord
    from echelon.trainer.assemble import UserObjects

_EXIT_FAILED = 1
SUBMITTED = "submitted"


@dataclass(frozen=True, repr=False)
class Outcome:
    """How a run ended.

    Attributes:
        status: `completed`, `stopped` or `failed`; `submitted` where the run was left to its place; `left` where
            this machine's workers were asked to leave a run that goes on.
        summary: the numbers of `summary.json`.
        signum: the signal that stopped it; 0 where that came to another machine, or none did.
        words: what the report that was written since the command was given says in closing; empty where none was.
        objects: the caller's own model, data and task, in place of names.
        failure: why it failed, where that could not be written to its folder; else empty.
    """

    status: str
    folder: Path
    summary: Mapping[str, Any]
    signum: int = 0
    words: Sequence[str] = ()
    objects: UserObjects | None = field(default=None, compare=False)
    failure: str = ""

    @property
    def exit_code(self) -> int:
        """A command's exit code: 0 when completed, 1 when failed, 128 + signal when stopped (130 for Ctrl-C)."""
        if self.status == "stopped":
            return stopped_exit_code(self.signum)
        return 0 if self.status in ("completed", SUBMITTED, LEFT) else _EXIT_FAILED

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics of the last evaluation, the primary one first; None where one could not be computed."""
        return self.figures.metrics

    @property
    def figures(self) -> RunSummary:
        """The numbers of `summary` that runs of all versions have, by their types.

        Raises:
            UserError: one of them is not what it should be.
        """
        return RunSummary.of(self.summary)

    @property
    def history(self) -> pandas.DataFrame:
        """A row for each evaluation, and for each epoch without one.

        Columns: `epoch` and `step` (from 1), `train_loss`, `eval_loss`, each metric, `seconds` (of steps, since the row
        before), `samples_per_s`, `bytes` (that all workers sent for replicas to agree).

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("a history is a data frame of pandas, which is not installed: pip install pandas") from None
        from echelon.reporting.report.records import load_run

        rows = []
        for row in history_of(load_run(self.folder)):
            course = {"epoch": row.epoch, "step": row.step, "train_loss": row.train_loss, "eval_loss": row.eval_loss}
            costs = {"seconds": row.seconds, "samples_per_s": row.samples_per_s, "bytes": row.wire_bytes}
            rows.append({**course, **row.metrics, **costs})
        return pandas.DataFrame(rows)

    def model(self) -> nn.Module:
        """Return the model with the best weights (their moving average, where there is one): on the CPU, ready to call.

        It is in evaluation mode, of the class that was trained, and whole whatever the layout was. A module that was
        given to `train` stays as it is: this is a copy.

        Raises:
            UserError: no checkpoint is whole; or the data, by which a named model is built, is gone.
        """
        from echelon.run.trained import best_model
        from echelon.trainer.assemble import UserObjects

        return best_model(
            self.folder, load_run_config(self.folder / folders.CONFIG_FILE), self.objects or UserObjects()
        )

    def __repr__(self) -> str:
        told = [self.status, *(f"{name} {value}" for name, value in self._figures()[:3]), str(self.folder)]
        return f"Outcome({', '.join(told)})"

    def _repr_html_(self) -> str:
        """Return a table, as notebooks show it."""
        page = html.escape(str(self.folder / "report.html"))
        rows = [("status", self.status), *self._figures(), ("folder", str(self.folder))]
        cells = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows]
        return f'<table>{"".join(cells)}<tr><th>report</th><td><a href="{page}">{page}</a></td></tr></table>'

    def _figures(self) -> list[tuple[str, str]]:
        """Return the figures that say most, as text by name; what is not known is left out."""
        known = self.figures
        metric, value = next(iter(known.metrics.items()), ("", None))
        senders = "between replicas" if known.inner_axes else "all ranks"
        texts = {
            metric: _text(value, ".4g"),
            "seconds": _text(known.wall_s, ".1f"),
            "epochs": _text(known.epochs, ".4g"),
            "steps": _text(known.steps, "d"),
            "workers": _text(known.workers, "d"),
            "samples/s": _text(known.samples_per_s, ",.0f"),
            f"sent a step, {senders}": ""
            if known.wire_bytes_per_step is None
            else format_bytes(known.wire_bytes_per_step),
            f"best {metric}": _better(known, value),
        }
        return [(name, text) for name, text in texts.items() if text]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _better(known: RunSummary, last: float | None) -> str:
    """Return the best result, whose weights `Outcome.model` returns, where the last is another; else nothing."""
    if known.best is None or last is None or known.tested or f"{known.best:.4g}" == f"{last:.4g}":
        return ""
    return f"{known.best:.4g} at step {known.best_step}, of which model() has the weights"


class RunFailed(Exception):
    """A run could not go on. Says in one line why, and where the log is.

    Attributes:
        outcome: how it ended; its folder has the record and a report.
    """

    def __init__(self, outcome: Outcome) -> None:
        """Take how the run ended."""
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        reason = " ".join(str(self.outcome.failure or self.outcome.figures.message or "the run failed").split())
        return f"{reason.rstrip('.')}; log: {failed_log(self.outcome.folder)}"


def failed_log(folder: Path) -> Path:
    """Return the log of the process that a run failed with, else the folder of its logs."""
    logs = folder / "logs"
    died = next(newest(folder, WorkerDied, RunDiverged, CallbackError), None) or next(newest(folder, RankFailed), None)
    if not isinstance(died, WorkerDied | RunDiverged | CallbackError | RankFailed):
        return logs
    log = died.log if isinstance(died, WorkerDied) else ""
    file = logs / f"{log or died.role or f'rank{died.rank}'}.log"
    return file if file.exists() else logs


def outcome_of(path: Path, status: str, signum: int = 0) -> Outcome:
    """Return how the run of a folder ended, with the numbers of its summary."""
    outcome, file = Outcome(status, path, read_summary(path), signum), path / SUMMARY_FILE
    if not file.exists() or file.stat().st_mtime < (read_launch(path).launched_t or math.inf):
        return outcome
    return replace(outcome, words=outcome.figures.words)


@dataclass(frozen=True)
class HistoryRow:
    """What was trained since the row before, and the evaluation after it.

    Attributes:
        epoch: from 1.
        step: the last one, from 1.
        train_loss: mean over the steps.
        eval_loss: None where nothing was evaluated.
        metrics: of the evaluation.
        seconds: of steps, pauses between them left out.
        wire_bytes: that all ranks sent so that replicas agree.
    """

    epoch: int
    step: int
    train_loss: float | None
    eval_loss: float | None
    metrics: Mapping[str, float | None]
    seconds: float
    samples: float
    wire_bytes: float

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained on per second of steps."""
        return self.samples / self.seconds if self.seconds > 0 else None


def history_of(record: RunRecord) -> list[HistoryRow]:
    """Return the rows of a run; what a restart undid is left out."""
    windows, evaluations = record.kept_windows(), {e.step: e for e in record.kept_evaluations()}
    evaluated = {e.epoch for e in evaluations.values()}
    ends = {w.epoch: w.step for w in windows if w.epoch not in evaluated}
    rows, before = [], 0
    for step in sorted({*evaluations, *ends.values()}):
        rows.append(_row(windows, before, step, evaluations.get(step)))
        before = step
    return rows


def _row(windows: Sequence[Steps], before: int, step: int, evaluation: Evaluation | None) -> HistoryRow:
    """Add up the windows after a step and up to another; one that reaches past either counts by its share."""
    shares = [(w, _share(w, before, step)) for w in windows if before < w.step and w.step - w.count < step]
    steps = sum(w.count * share for w, share in shares)
    return HistoryRow(
        epoch=1 + (evaluation.epoch if evaluation else shares[-1][0].epoch),
        step=step,
        train_loss=sum(w.mean_loss * w.count * share for w, share in shares) / steps if steps else None,
        eval_loss=evaluation.loss if evaluation else None,
        metrics=evaluation.metrics if evaluation else {},
        seconds=sum(w.seconds * share for w, share in shares),
        samples=sum(w.samples * share for w, share in shares),
        wire_bytes=sum(w.wire_bytes * share for w, share in shares),
    )


def _share(window: Steps, before: int, step: int) -> float:
    first = window.step - window.count
    return (min(step, window.step) - max(before, first)) / window.count
