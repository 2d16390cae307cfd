"""`--lr-find`: a run that searches the learning rate; its launcher ends it when its record says enough."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import UserError
from echelon.core.patience import may_pass
from echelon.core.rate_search import LR_FIND, STEPS, RateCurve, curve_of, suggestion
from echelon.core.stop import StopFlag
from echelon.launch.plan import is_worker
from echelon.records.file import newest
from echelon.records.kinds import End, Steps
from echelon.run.resolve import nodes_of
from echelon.trainer.folder import CONFIG_FILE

_LOOK_S = 0.5
_MOST_STEPS = 20 * STEPS  # by when it has been ended


def as_search(config: RunConfig) -> RunConfig:
    """Return a description as one of a search, where it asks for one: nothing is evaluated, saved or stopped early.

    Raises:
        UserError: the search is to run on several machines, or under another launcher.
    """
    if not config.optimizer.lr_find:
        return config
    if is_worker():
        raise UserError("--lr-find ends its ranks itself: run `echelon train` without torchrun")
    if nodes_of(config).most > 1:
        raise UserError("--lr-find is for runs on one machine: leave out --nodes")
    training = replace(
        config.training, epochs=_MOST_STEPS, max_steps=_MOST_STEPS, eval_every=0, early_stop=0, max_time="", profile=0
    )
    optimizer = replace(config.optimizer, warmup_epochs=0.0)
    return replace(config, training=training, optimizer=optimizer, checkpoint=replace(config.checkpoint, every="24h"))


def check_no_search(path: Path, config: RunConfig) -> None:
    """Refuse to go on with a run that searches the learning rate.

    Raises:
        UserError: it does.
    """
    if config.optimizer.lr_find:
        raise UserError(
            f"{path} is a search of the learning rate, not a run to go on with: train with the --lr it says"
        )


def curve_in(path: Path) -> RateCurve:
    """Return the losses by learning rate that a run's record has so far."""
    losses: dict[int, float] = {}
    for window in newest(path, Steps):
        for step, loss, _ in window.loss_points():
            losses.setdefault(step, loss)  # a step that was trained again counts as it was the last time
    return curve_of(losses)


def as_ended(path: Path, end: End) -> End:
    """Return the end of a run as it is to be recorded: a search that is over has completed, and says what it saw."""
    config = load_run_config(path / CONFIG_FILE)
    if not config.optimizer.lr_find or end.status not in ("stopped", "completed"):
        return end
    curve, per = curve_in(path), config.optimizer.scale_lr
    if not curve.over:
        return end
    said = suggestion(curve, config.data.batch_size / per if per else 1.0)
    return replace(end, status="completed", message=said, reason=LR_FIND)


class Search:
    """Looks at the record of a search while it goes, and asks the run to stop when it says enough."""

    def __init__(self, path: Path, stop: StopFlag) -> None:
        self._path, self._stop = path, stop
        self._looked_s = 0.0
        self.over = False

    def look(self) -> None:
        """Look, where the last time was long enough ago."""
        if self.over or self._stop or time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        try:
            self.over = curve_in(self._path).over
        except OSError as error:
            if not may_pass(error):
                raise
        if self.over:
            self._stop.ask()
