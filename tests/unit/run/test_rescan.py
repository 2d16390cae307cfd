"""New samples that are taken into a run: what is said of them, and what leaves the run as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.checkpoint import CheckpointStore
from echelon.config import DataConfig, RunConfig
from echelon.core.errors import UserError
from echelon.data.sample_index import RUN_FILE
from echelon.records.events import DataGrew
from echelon.records.file import read_records
from echelon.run.rescan import take_new_samples
from echelon.run.resolve import resolve
from echelon.trainer.resolved import ResolvedRun
from tests.unit.checkpoint.test_incomplete import save

ROWS = ["user,town,stars,kind", *(f"{i % 4},{'ab'[i % 2]},{i / 7},{'xy'[i % 2]}" for i in range(30))]


def write(table: Path, *new: str) -> None:
    table.write_text("\n".join([*ROWS, *new]) + "\n")


def begun(folder: Path, **data: str) -> tuple[Path, ResolvedRun]:
    """Return the folder and the description of a run that has begun with 30 rows."""
    table, run = folder / "t.csv", folder / "run"
    write(table)
    run.mkdir()
    config = replace(RunConfig(run=str(run)), data=DataConfig(str(table), **data))
    source = resolve(config).source.open()
    assert source.sample_index is not None
    source.sample_index.keep(run)
    return table, resolve(config)


def test_new_categories_are_counted_in_the_record_and_the_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, run = begun(tmp_path, target="stars", input="town,kind")
    write(table, "0,c,1.5,x", "0,c,1.5,x", "0,a,1.5,x", "0,,1.5,x")
    take_new_samples(tmp_path / "run", run, from_python=False)
    (grew,) = read_records(tmp_path / "run", DataGrew)
    told = "2 of 4 new rows have a value of town that was not there when the run began"
    assert (grew.count, grew.total) == (4, 34) and "value of kind" not in grew.message
    assert told in grew.message and told in "".join(capsys.readouterr())
    assert sum(told in note for note in run.source.open().notes) == 1


def test_new_users_and_items_are_counted(tmp_path: Path) -> None:
    table, run = begun(tmp_path, target="stars", input="user,town")
    run = resolve(replace(run.config, task="recommendation"))
    (tmp_path / "run" / "columns.json").unlink()
    run.source.open()
    write(table, "9,a,1.5,x", "1,c,2.5,x", "8,c,1.5,x")
    take_new_samples(tmp_path / "run", run, from_python=False)
    (grew,) = read_records(tmp_path / "run", DataGrew)
    assert "2 of 3 new rows have a value of user that" in grew.message
    assert "2 of 3 new rows have a value of town that" in grew.message


def test_rows_of_a_new_class_leave_the_run_as_it_was(tmp_path: Path) -> None:
    table, run = begun(tmp_path, target="kind", input="town,stars")
    kept = (tmp_path / "run" / RUN_FILE).read_text()
    write(table, "1,a,1.5,other")
    with pytest.raises(UserError, match="column kind has the class 'other', which the run's data does not have"):
        take_new_samples(tmp_path / "run", run, from_python=False)
    assert (tmp_path / "run" / RUN_FILE).read_text() == kept and not list(read_records(tmp_path / "run", DataGrew))
    write(table)
    assert run.source.open().sample_index.count == 30  # type: ignore[union-attr]


def test_data_that_cannot_grow_is_refused(tmp_path: Path) -> None:
    text, run = tmp_path / "t.txt", tmp_path / "run"
    text.write_text("and so it goes on, " * 100)
    run.mkdir()
    resolved = resolve(RunConfig(run=str(run), data=DataConfig(str(text), root=str(tmp_path))))
    source = resolved.source.open()
    assert source.sample_index is not None
    source.sample_index.keep(run)
    with pytest.raises(UserError, match=r"--rescan is for folders of images, .*: not for"):
        take_new_samples(run, resolved, from_python=False)
    text.write_text(text.read_text() + "and on")
    with pytest.raises(UserError, match=r"is not what it was when the run began, and cannot grow under a run"):
        take_new_samples(run, resolved, from_python=False)


def test_epochs_of_a_checkpoint_that_lacks_parts_are_trained(tmp_path: Path) -> None:
    table, run = begun(tmp_path, target="stars", input="town")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    store.save(5, {"cursor": {"epoch": 0, "batch": 3}}, background=False)
    save(store, 10, token=1, cursor={"epoch": 2, "batch": 1})
    store.close()
    write(table, "0,a,1.5,x")
    take_new_samples(tmp_path / "run", run, from_python=False)
    assert [grew.epoch for grew in read_records(tmp_path / "run", DataGrew)] == [3]
