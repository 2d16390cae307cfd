"""Callbacks are told everything in order, and cannot fail silently; TensorBoard hears what they hear."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.core.task import BEFORE_TASKS
from echelon.observe.callbacks import (
    Callback,
    CallbackFailed,
    CheckpointInfo,
    EndInfo,
    EvaluationInfo,
    Listeners,
    RunInfo,
    StepInfo,
    WindowInfo,
    as_callback,
    check_callbacks,
    named_callbacks,
)
from echelon.observe.tensorboard import TensorBoard
from echelon.records.kinds import Start
from echelon.trainer.progress import run_info

SETTINGS = {"optimizer.lr": 0.1, "training.deterministic": False, "data.source": "digits"}
RUN = RunInfo(Path(), SETTINGS, BEFORE_TASKS.primary, "top1")
WINDOW = WindowInfo(4, 0, [2.0, 1.5], 0.05, 1000.0, 0.75)
EVALUATION = EvaluationInfo(4, 0, 1.25, {"top1": 0.5, "roc_auc": None}, 0.1, 100)
CHECKPOINT = CheckpointInfo(4, Path("step-4"), "best", 10, 0.1)


class Steps:
    """A callback of one method, which needs no base class."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.heard = every, []

    def on_step(self, step: StepInfo) -> None:
        if step.step % self.every == 0:
            self.heard.append(step)


class All(Callback):
    def __init__(self) -> None:
        self.heard = []
        self.on_start = self.on_window = self.on_evaluation = self.on_checkpoint = self.on_end = self.heard.append


class Misspelt:
    def on_epoch(self) -> None: ...


class Nothing: ...


class Fails(Callback):
    def on_step(self, step: StepInfo) -> None:
        if step.step == 4:
            raise ValueError("two\nlines")


def test_callbacks_hear_in_order_when_they_may_take_their_time() -> None:
    steps, everything = Steps(), All()
    listeners = Listeners((), (steps, everything))
    said = [RUN, WINDOW, CHECKPOINT, EVALUATION, EndInfo("completed")]
    for info in said:
        listeners.tell(info)
    assert not steps.heard and not everything.heard
    listeners.deliver()
    assert steps.heard == [StepInfo(3, 0, 2.0), StepInfo(4, 0, 1.5)]
    assert everything.heard == said
    listeners.deliver()
    assert everything.heard == said


def test_a_callback_that_raises_is_named() -> None:
    listeners = Listeners((), (Fails(),))
    listeners.tell(WINDOW)
    with pytest.raises(CallbackFailed, match=r"^callback Fails.on_step failed at step 4: ValueError: two lines$"):
        listeners.deliver()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Misspelt, "callback Misspelt: nothing calls on_epoch: .*known: on_start, on_step, on_window, on_evaluation"),
        (Nothing(), "callback Nothing has none of on_start, "),
    ],
)
def test_what_nothing_would_call_is_refused(value: object, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        as_callback(value)


def test_callbacks_are_named_with_arguments() -> None:
    first, second = named_callbacks(f"{__name__}:Steps(every=2)+{__name__}:All")
    assert isinstance(first, Steps) and first.every == 2
    assert isinstance(second, All)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Timer", r"^--callbacks Timer: write module:Class"),
        (f"{__name__}:Step", r"--callbacks .*:Step: .* has no 'Step'; did you mean Steps\?"),
        (f"{__name__}:Misspelt", "nothing calls on_epoch"),
        ("no_such_module_here:A", "there is no module 'no_such_module_here'"),
        (f"{__name__}:Steps(evry=2)", "unexpected keyword argument 'evry'"),
    ],
)
def test_a_name_that_is_no_callback_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_callbacks(text)
        named_callbacks(text)


def test_a_run_that_begins_is_told_its_settings() -> None:
    info = run_info(Start(epochs=2, steps_per_epoch=6, start_step=6, world_size=2), RunConfig(), Path("here"))
    assert info.settings["optimizer.lr"] == 0.1 and info.settings["data.source"] == "digits"
    assert (info.metric.name, info.score, info.epochs, info.start_step, info.workers) == ("top1", "top1", 2, 6, 2)


def test_tensorboard_has_curves_of_training_and_evaluation_and_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    board = TensorBoard(tmp_path, Patience(tmp_path))
    listeners = Listeners((board,))
    for info in (RUN, WINDOW, EVALUATION, EndInfo("completed")):
        listeners.tell(info)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    drawn = {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert drawn == {
        "train/loss": [(4, 1.5)], "train/samples_per_s": [(4, 1000.0)], "train/lr": [(4, 0.05)],
        "train/top1": [(4, 0.75)], "test/loss": [(4, 1.25)], "test/top1": [(4, 0.5)],
    }  # fmt: skip
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["optimizer.lr"].number_value == 0.1 and settings["data.source"].string_value == "digits"
    assert "_hparams_/session_end_info" in events.summary_metadata
