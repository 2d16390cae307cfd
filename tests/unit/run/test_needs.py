"""What a run needs to be used again: objects from Python, and data that is here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.records.file import Recorder
from echelon.records.kinds import Start
from echelon.run.needs import EVALUATE, EXPORT, FINETUNE, PREDICT, RunUse, check_data_is_here, check_objects


def written(folder: Path, *objects: str) -> Path:
    with closing(Recorder(folder)) as record:
        record.write(Start(objects=objects))
    return folder


def test_a_run_of_objects_asks_for_those_without_which_it_is_another(tmp_path: Path) -> None:
    written(tmp_path, "model", "data", "callbacks")
    check_objects(tmp_path, ("model", "data"))
    again = rf"^data, callbacks of .* again, echelon.resume\('{tmp_path}', model=..., data=..., callbacks=...\)$"
    with pytest.raises(UserError, match=again):
        check_objects(tmp_path, ("model",))


@pytest.mark.parametrize(("use", "call"), [
    (EVALUATE, "evaluate('RUN', model=..., data=...)"),
    (EXPORT, "export('RUN', FILE, model=..., data=...)"),
    (PREDICT, "predict('RUN', SAMPLES, model=...)"),
    (FINETUNE, "finetune('RUN', DATA, model=...)"),
])  # fmt: skip
def test_each_command_says_the_call_that_gives_them_again(use: RunUse, call: str, tmp_path: Path) -> None:
    written(tmp_path, "model", "data", "optimizer")
    with pytest.raises(UserError) as refused:
        check_objects(tmp_path, (), use)
    assert f"echelon.{call.replace('RUN', str(tmp_path))}" in str(refused.value)
    check_objects(tmp_path, ("model", "data"), use)


def test_data_that_is_no_longer_where_the_run_found_it_is_said(tmp_path: Path) -> None:
    for source in ("digits", "hf:imdb", "mine:data", "s3://bucket/data", str(tmp_path)):
        check_data_is_here(tmp_path, source, "")
    with pytest.raises(UserError, match="the run's data is 'shapes', a path from the folder that the run was started"):
        check_data_is_here(tmp_path, "shapes", "give --data")
    with pytest.raises(UserError, match="data is '/no/where', which is not here: give --data"):
        check_data_is_here(tmp_path, "/no/where", "give --data")
