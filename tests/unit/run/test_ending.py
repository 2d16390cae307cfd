"""What is said of a run that ended before its last step."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from echelon.config import RunConfig, TrainingConfig
from echelon.core.errors import UserError
from echelon.records.events import StartedOver
from echelon.records.file import Record, Recorder
from echelon.records.kinds import Checkpoint, End, Start, Steps
from echelon.run.ending import check_objects, nothing_left, why_cut

STEPS = Steps(47, [1.0] * 7, 0.7)


@pytest.mark.parametrize(("records", "words"), [
    ([], "nothing was saved"),
    ([STEPS], "nothing was saved, 47 steps are lost"),
    ([Checkpoint(40), STEPS], "the checkpoint of step 40 is the last one, 7 steps after it are lost"),
    ([STEPS, Checkpoint(47)], "the checkpoint of step 47 is the last one"),
    ([Checkpoint(90), StartedOver("over"), STEPS], "nothing was saved, 47 steps are lost"),
])  # fmt: skip
def test_a_stop_that_was_cut_says_what_it_cost(records: list[Record], words: str, tmp_path: Path) -> None:
    record = Recorder(tmp_path)
    for each in records:
        record.write(each)
    record.close()
    said = why_cut(tmp_path, 27.0, 30.0)
    assert said == f"it did not end within 27 s of being asked to stop (--on gives 30 s), and was ended: {words}"


@pytest.mark.parametrize(("objects", "words"), [
    ((), "echelon resume {} --epochs 3"),
    (("model", "data"), "echelon.resume('{}', model=..., data=..., epochs=3)"),
])  # fmt: skip
def test_what_trains_a_run_further_is_what_can(
    objects: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _written(tmp_path, Start(steps_per_epoch=5, objects=objects), Checkpoint(10), End("completed"))
    assert nothing_left(tmp_path, RunConfig(training=TrainingConfig(epochs=2)))
    assert words.format(tmp_path) in capsys.readouterr().err


def test_a_run_of_objects_asks_for_those_without_which_it_is_another(tmp_path: Path) -> None:
    _written(tmp_path, Start(objects=("model", "data", "callbacks")))
    check_objects(tmp_path, ("model", "data"))
    again = rf"^data, callbacks of .* again, echelon.resume\('{tmp_path}', model=..., data=..., callbacks=...\)$"
    with pytest.raises(UserError, match=again):
        check_objects(tmp_path, ("model",))


def _written(folder: Path, *records: Record) -> None:
    with closing(Recorder(folder)) as record:
        for each in records:
            record.write(each)
