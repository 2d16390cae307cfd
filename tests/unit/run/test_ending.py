"""What is said of a run that ended before its last step."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from echelon.config import RunConfig, TrainingConfig
from echelon.core.errors import UserError
from echelon.records.events import DataGrew, StartedOver
from echelon.records.file import Record, Recorder
from echelon.records.kinds import Checkpoint, End, Start, Steps
from echelon.run.ending import epoch_lengths, nothing_left, why_cut
from echelon.run.overview import overview_of

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


def test_epochs_before_the_data_grew_count_with_their_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, grown = Start(steps_per_epoch=10), Start(steps_per_epoch=14)
    trained = [Steps(30, [1.0], 1.0, epoch=2), DataGrew("", 3), grown, Steps(58, [1.0], 1.0, epoch=4), Checkpoint(58)]
    _written(tmp_path, begun, *trained, End("completed"))
    lengths = epoch_lengths(tmp_path, grown)
    assert [lengths.steps(epochs) for epochs in (1, 3, 4, 5)] == [10, 30, 44, 58]
    assert [lengths.epochs(steps) for steps in (0, 15, 30, 37, 58)] == [0, 1.5, 3, 3.5, 5]
    (tmp_path / "config.yaml").write_text("training: {epochs: 5}")
    assert overview_of(tmp_path).progress == "58/58 steps"
    assert nothing_left(tmp_path, RunConfig(training=TrainingConfig(epochs=5)))
    assert "58 steps, 5 epochs" in capsys.readouterr().err
    with pytest.raises(UserError, match="has trained 5 epochs"):
        nothing_left(tmp_path, RunConfig(training=TrainingConfig(epochs=4)))
    _written(tmp_path, DataGrew("", 0), Start(steps_per_epoch=16))  # from scratch, with all that is there
    assert epoch_lengths(tmp_path, Start(steps_per_epoch=16)).stages == ((0, 16),)


def _written(folder: Path, *records: Record) -> None:
    with closing(Recorder(folder)) as record:
        for each in records:
            record.write(each)
