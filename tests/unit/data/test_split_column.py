"""A column that names the part of each row: it divides a table, and is no input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.base import DataRequest, Source
from echelon.data.sources.table import open_tables
from echelon.data.table_files import TableParts
from tests.unit.data.test_table import write

PARTS = ["train"] * 20 + ["Validation"] * 6 + ["TEST"] * 4


def columns(split: list[Any] = PARTS, name: str = "split") -> dict[str, list[Any]]:
    shuffled = [split[i * 7 % 30] for i in range(30)]
    return {"a": [float(i) for i in range(30)], name: shuffled, "y": [i / 2 for i in range(30)]}


def opened(source: str, **settings: Any) -> Source:
    return open_data(DataConfig(source, **{"target": "y", **settings}), 0)


def sizes(source: Source) -> tuple[int, ...]:
    return tuple(len(part) for part in (source.train, source.evaluation, source.test) if part is not None)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ["split", "Set", "fold"])
def test_a_column_of_parts_divides_the_rows(tmp_path: Path, suffix: str, name: str) -> None:
    source = opened(write(tmp_path / f"t{suffix}", columns(name=name)))
    assert sizes(source) == (20, 6, 4) and source.info.columns == ("a",)
    assert source.notes[0] == (
        f"column {name} divides the rows, 20 train, 6 val, 4 test, and is no input (--split none makes it one)"
    )
    rows = columns()["split"]
    for part, wanted in (("train", source.train), ("TEST", source.test)):
        assert [y * 2 for y in wanted.targets.tolist()] == [i for i in range(30) if rows[i] == part]  # type: ignore[union-attr]
        assert wanted.origin.tolist() == [i for i in range(30) if rows[i] == part]  # type: ignore[union-attr]


def test_without_validation_rows_some_of_those_to_train_on_are_held_out(tmp_path: Path) -> None:
    text = Path(write(tmp_path / "t.csv", columns(["train"] * 26 + ["test"] * 4))).read_text()
    (tmp_path / "t.tsv").write_text(text.replace(",", "\t"))
    assert sizes(opened(str(tmp_path / "t.tsv"))) == (23, 3, 4)


def test_a_column_is_named_or_none_is_taken(tmp_path: Path) -> None:
    named = write(tmp_path / "named.csv", columns(name="used_for"))
    assert sizes(opened(named, split="used_for")) == (20, 6, 4)
    assert opened(named).info.columns == ("a", "used_for")
    usual = write(tmp_path / "usual.csv", columns())
    for settings in ({"split": "none"}, {"input": "a,split"}):
        source = opened(usual, **settings)
        assert sizes(source) == (24, 6) and source.info.columns == ("a", "split")


def test_a_column_that_names_other_things_too_stays_an_input_and_is_told(tmp_path: Path) -> None:
    name = write(tmp_path / "t.csv", columns(["train"] * 28 + ["spare", "test"]))
    source = opened(name)
    assert source.info.columns == ("a", "split")
    assert source.notes[0] == "column split is an input: it names parts, but also 'spare'"
    assert not [note for note in opened(write(tmp_path / "f.csv", columns(["x", "y"] * 15))).notes if "split" in note]


def test_parts_by_file_go_before_a_column(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", columns(["train"] * 30))
    write(tmp_path / "test.csv", columns(["test"] * 30))
    source = opened(str(tmp_path))
    assert sizes(source) == (27, 3, 30) and source.info.columns == ("a",)
    assert "names the parts that the files are" in source.notes[0]
    with pytest.raises(UserError, match=r"--split split: train.csv, test.csv are its parts already: leave out"):
        opened(str(tmp_path), split="split")
    (tmp_path / "test.csv").unlink()
    write(tmp_path / "train.csv", columns())
    assert sizes(opened(str(tmp_path))) == (20, 6, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "sPlit"}, "no column 'sPlit'"),
        ({"split": "a"}, "--split a: it holds no strings; values are names of parts: train, val, test"),
        ({"split": "mixed"}, "--split mixed: it holds 'x', 'z'; values are names"),
        ({"split": "later"}, "--split later: no row is for training, but 30 test"),
        ({"split": "split", "input": "a,split"}, "--split split: it is an input or the target too"),
        ({"input": "a", "split": "split,part"}, "no column"),
    ],
)
def test_what_names_no_parts_is_refused(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    more = {"mixed": ["train", "x", "z"] * 10, "later": ["test"] * 30}
    with pytest.raises(UserError) as refusal:
        opened(write(tmp_path / "t.csv", columns() | more), **settings)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_two_columns_of_parts_are_for_the_user_to_choose_from(tmp_path: Path) -> None:
    name = write(tmp_path / "t.csv", columns() | {"subset": ["train", "test"] * 15})
    with pytest.raises(UserError, match="the columns split and subset both name parts: choose one with --split"):
        opened(name)


def test_a_missing_target_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    table = columns()
    table["y"][11] = None
    with pytest.raises(UserError, match="y is missing in row 12"):
        opened(write(tmp_path / "t.csv", table))


def test_who_took_what_is_divided_by_user(tmp_path: Path) -> None:
    table = {"user": [i // 5 for i in range(30)], "item": [i % 7 for i in range(30)], "split": ["train", "test"] * 15}
    name = write(tmp_path / "t.csv", table)
    source = open_data(DataConfig(name), 0, "recommendation")
    assert source.info.columns == ("user", "item")
    assert source.notes[0] == "column split does not divide the rows: the last of each user are held out"
    with pytest.raises(UserError, match="--split split: without --target, the last of each user are held out"):
        open_data(DataConfig(name, split="split"), 0, "recommendation")


def test_a_run_that_began_with_such_an_input_goes_on_with_it(tmp_path: Path) -> None:
    name, run = write(tmp_path / "t.csv", columns()), tmp_path / "run"
    run.mkdir()
    open_data(DataConfig(name, target="y", input="a,split"), 0, folder=run)  # as all columns were once
    assert open_data(DataConfig(name, target="y"), 0, folder=run).info.columns == ("a", "split")


def test_tables_that_are_read_already_are_divided_too() -> None:
    request = DataRequest(DataConfig("hf:x", target="y"))
    tables = {"train": pa.table(columns())}
    assert sizes(open_tables(request, tables)) == (20, 6, 4)
    assert TableParts.of_tables(request, tables).columns(request) == (("a",), ("y",))
