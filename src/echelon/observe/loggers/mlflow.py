"""Curves and settings at an MLflow server, or in a folder of files or a database of its.

Helps: Runs of several people and machines are compared on one page, on a server of your own.
Needs: `pip install 'echelon[mlflow]'`, and MLFLOW_TRACKING_URI or `uri`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.observe.callbacks import RunInfo
from echelon.observe.loggers.base import LoggedRun, LoggerSettings, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "echelon.id"  # of the run, by which a later try finds what an earlier one made
_MOST_PARAMS = 100  # in a request
_MOST_METRICS = 1000
_MOST_LETTERS = 500
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(frozen=True)
class Mlflow(LoggerSettings):
    """Where runs go in MLflow.

    Attributes:
        experiment: that the run is part of.
        uri: of the server, the database or the folder; empty: MLFLOW_TRACKING_URI, or MLflow's default.
        name: of the run; empty: its folder's.
    """

    package: ClassVar[str] = "mlflow"
    experiment: str = "echelon"
    uri: str = ""
    name: str = ""

    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        """Begin a run with the settings as its parameters, or go on with it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.uri or None)
        if known_as:
            client.update_run(known_as, status="RUNNING")
            return _MlflowRun(client, known_as), known_as
        experiment = client.get_experiment_by_name(self.experiment)
        place = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        ours = client.search_runs([place], filter_string=f"tags.`{_TAG}` = '{new_id}'", max_results=1)
        if ours:  # made by a try that failed after that
            run_id = ours[0].info.run_id
        else:
            made = client.create_run(place, run_name=self.name or run.folder.name, tags={_TAG: new_id})
            run_id = made.info.run_id
        settings = [Param(name, str(value)[:_MOST_LETTERS]) for name, value in run.settings.items()]
        for first in range(0, len(settings), _MOST_PARAMS):
            client.log_batch(run_id, params=settings[first : first + _MOST_PARAMS])
        return _MlflowRun(client, run_id), run_id


LOGGER = Mlflow


class _MlflowRun(LoggedRun):
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log(self, points: Sequence[Point]) -> None:
        """Add points to its curves."""
        from mlflow.entities import Metric

        metrics = [Metric(name, v, round(1000 * p.t), p.step) for p in points for name, v in p.values.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def finish(self, status: str) -> None:
        """End it."""
        self._client.set_terminated(self._run_id, status=_STATUS[status])
