"""Callbacks: a run tells code of its user's, and loggers, what happens, on its leading rank.

What they are given are plain numbers of all ranks; they change nothing in the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.core.errors import UserError, naming, nearest
from echelon.core.own import find_own, read_calls
from echelon.core.task import Metric

SettingOfRun = str | int | float | bool


@dataclass(frozen=True)
class RunInfo:
    """A run, or an attempt to go on with it, is about to train.

    Attributes:
        folder: of the run.
        settings: the run's description, by dotted name: `optimizer.lr`.
        metric: the primary one, by which checkpoints are compared.
        score: name of what is counted in training, such as `top1`; empty: nothing is.
        epochs, steps_per_epoch: how long it is.
        parameters: trainable numbers; None: not known.
        workers: processes that compute.
        start_step: optimizer steps that were done before; above 0 in a run that goes on.
    """

    folder: Path
    settings: Mapping[str, SettingOfRun]
    metric: Metric
    score: str = ""
    epochs: int = 0
    steps_per_epoch: int = 0
    parameters: int | None = None
    workers: int = 1
    start_step: int = 0


@dataclass(frozen=True)
class StepInfo:
    """An optimizer step is done.

    Attributes:
        step: its number, from 1.
        epoch: from 0.
        loss: the mean over the units of the global batch, of all ranks.
    """

    step: int
    epoch: int
    loss: float


@dataclass(frozen=True)
class WindowInfo:
    """Some seconds' consecutive steps are done, whose numbers were added up over the ranks.

    Attributes:
        step: the last one's number, from 1.
        epoch: from 0, of the last step.
        losses: of each step, in order.
        lr: learning rate of the last step; None: not known.
        samples_per_s: of all ranks, pauses left out.
        score: the share of training samples that were right, or what else the task counts; None: it counts nothing.
    """

    step: int
    epoch: int
    losses: Sequence[float]
    lr: float | None
    samples_per_s: float
    score: float | None = None

    def steps(self) -> list[StepInfo]:
        """Return each step."""
        first = self.step - len(self.losses) + 1
        return [StepInfo(first + i, self.epoch, loss) for i, loss in enumerate(self.losses)]


@dataclass(frozen=True)
class EvaluationInfo:
    """The evaluation set was gone through.

    Attributes:
        step: optimizer steps that were done.
        epoch: from 0.
        loss: the mean per unit.
        metrics: by name, the primary one among them; None: undefined.
        seconds: that it took.
        samples: of the evaluation set.
    """

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float | None]
    seconds: float
    samples: int


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint is on the disk, whole.

    Attributes:
        step: optimizer steps that it has.
        path: its folder; the run removes it when there are newer ones.
        reason: `interval`, `best`, `end`, `stop`, or `unfreeze` where more is trained from then on.
        n_bytes: that it takes.
        seconds: that writing took, in the background.
    """

    step: int
    path: Path
    reason: str
    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class EndInfo:
    """The run is over: `status` is `completed`, `stopped` or `failed`."""

    status: str


Info = RunInfo | WindowInfo | EvaluationInfo | CheckpointInfo | EndInfo


class Callback:
    """Code that a run tells what happens; every method may be left out.

    Training waits for it, on all ranks. An exception ends the run, with exit code 1 and one line that names the method.
    """

    def on_start(self, run: RunInfo) -> None:
        """Hear that a run, or another attempt after a failure, is about to train."""

    def on_step(self, step: StepInfo) -> None:
        """Hear of an optimizer step; of several at once, in order, when their losses are known (every few seconds)."""

    def on_window(self, window: WindowInfo) -> None:
        """Hear of some seconds' steps together: loss, speed, learning rate."""

    def on_evaluation(self, evaluation: EvaluationInfo) -> None:
        """Hear what an evaluation gave."""

    def on_checkpoint(self, checkpoint: CheckpointInfo) -> None:
        """Hear that a checkpoint is on the disk."""

    def on_end(self, end: EndInfo) -> None:
        """Hear that the run is over; not where it fails or is killed."""


def values_of(info: WindowInfo | EvaluationInfo, score: str = "") -> dict[str, float]:
    """Return what is drawn of an event, by name: `train/loss`, `test/top1`.

    Args:
        score: name of what is counted in training (`RunInfo.score`).
    """
    if isinstance(info, EvaluationInfo):
        known = {name: value for name, value in info.metrics.items() if value is not None}
        return {f"test/{name}": value for name, value in {"loss": info.loss, **known}.items()}
    values = {"train/loss": info.losses[-1], "train/samples_per_s": info.samples_per_s}
    values |= {"train/lr": info.lr} if info.lr is not None else {}
    return values | ({f"train/{score}": info.score} if score and info.score is not None else {})


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackFailed(Exception):
    """A callback raised; says which, and what."""


def as_callback(value: object) -> object:
    """Return an object that has some of the methods of a callback; of a class, an object without arguments.

    Raises:
        UserError: it has none of them, or another `on_...` that nothing would call.
    """
    check_methods(value)
    return value() if isinstance(value, type) else value


def check_methods(value: object) -> None:
    """Refuse an object, or a class, that has no method of a callback, or another `on_...` that nothing would call.

    Raises:
        UserError: names the method, and the nearest.
    """
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    there = [method for method in dir(value) if method.startswith("on_") and callable(getattr(value, method))]
    if unknown := [method for method in there if method not in METHODS]:
        hint = nearest(unknown[0], METHODS)
        raise UserError(f"callback {name}: nothing calls {unknown[0]}: {hint}known: {', '.join(METHODS)}")
    if not there:
        raise UserError(f"callback {name} has none of {', '.join(METHODS)}")


_FLAG = "--callbacks"


def check_callbacks(text: str) -> None:
    """Import the callbacks that a description names.

    Raises:
        UserError: one does not exist, or has no method that is called.
    """
    with naming(_FLAG):
        for call in read_calls(text):
            if not call.is_own:
                raise UserError(f"{_FLAG} {call.name}: write module:Class, importable from the current folder")
            value = find_own(_FLAG, call.name)
            if isinstance(value, type) or not callable(value):
                check_methods(value)


def named_callbacks(text: str) -> tuple[object, ...]:
    """Build the callbacks that a description names.

    Raises:
        UserError: one does not exist, cannot be built, or has no method that is called.
    """
    with naming(_FLAG):
        return tuple(as_callback(call.build(_FLAG)) for call in read_calls(text))


@dataclass
class Listeners:
    """Who is told what happens in a run: loggers at once, and callbacks where they may take their time.

    Attributes:
        loggers: they take what they are told without waiting, and do not raise.
        callbacks: objects with some of the methods of `Callback`.
    """

    loggers: Sequence[Callback] = ()
    callbacks: Sequence[object] = ()
    _waiting: deque[Info] = field(default_factory=deque)

    def tell(self, info: Info) -> None:
        """Tell loggers now, and callbacks at the next `deliver`; any thread may call it."""
        for logger in self.loggers:
            _tell(logger, info)
        if self.callbacks:
            self._waiting.append(info)

    def deliver(self) -> None:
        """Tell callbacks what has happened since the last time.

        Raises:
            CallbackFailed: one raised.
        """
        while self._waiting:
            info = self._waiting.popleft()
            for callback in self.callbacks:
                _tell(callback, info)


def _tell(callback: object, info: Info) -> None:
    match info:
        case RunInfo():
            _call(callback, "on_start", info)
        case WindowInfo():
            if _implements(callback, "on_step"):
                for step in info.steps():
                    _call(callback, "on_step", step)
            _call(callback, "on_window", info)
        case EvaluationInfo():
            _call(callback, "on_evaluation", info)
        case CheckpointInfo():
            _call(callback, "on_checkpoint", info)
        case EndInfo():
            _call(callback, "on_end", info)


def _implements(callback: object, method: str) -> bool:
    function = getattr(callback, method, None)
    return function is not None and getattr(function, "__func__", None) is not getattr(Callback, method)


def _call(callback: object, method: str, info: Info | StepInfo) -> None:
    if not _implements(callback, method):
        return
    try:
        getattr(callback, method)(info)
    except Exception as error:
        where = f" at step {info.step}" if not isinstance(info, RunInfo | EndInfo) else ""
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise CallbackFailed(f"callback {type(callback).__name__}.{method} failed{where}: {said}") from error
