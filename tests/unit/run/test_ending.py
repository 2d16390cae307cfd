"""What is said of a run that ended before its last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.records.events import StartedOver
from echelon.records.file import Record, Recorder
from echelon.records.kinds import Checkpoint, Steps
from echelon.run.ending import why_cut

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
