"""Tables: what their columns become, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from echelon.config import DataConfig, build
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, open_data
from echelon.data.base import Source
from echelon.data.columns import ColumnFacts, numbered
from echelon.data.file_names import TABLES
from echelon.data.sources.table import TableFile
from echelon.data.table_files import TablePart
from echelon.models import build_model
from echelon.run.defaults import with_task_defaults
from echelon.tasks.base import TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.registry import build_task
from echelon.trainer.inputs import model_input

ROWS = 40


def columns() -> dict[str, list[Any]]:
    return {
        "size": [10.0 + i for i in range(ROWS)],
        "town": ["Ulm", "Bonn"] * (ROWS // 2),
        "price": [0.5 * i for i in range(ROWS)],
        "rooms": [i % 3 + 1 for i in range(ROWS)],
        "tags": ["new|low", "low", "", "new"] * (ROWS // 4),
    }


def write(path: Path, table: dict[str, list[Any]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(table), path)
        return str(path)
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        lines = [",".join(table), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def opened(name: str, target: str, input: str = "", task: str = "auto", holdout: float = 0.2) -> Source:
    return open_data(DataConfig(source=name, target=target, input=input, holdout=holdout), 0, task)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_arrays(tmp_path: Path, suffix: str) -> None:
    source = opened(write(tmp_path / f"homes{suffix}", columns()), "price", "size,town")
    assert (len(source.train), len(source.evaluation)) == (32, 8)
    inputs, targets = source.train.values, source.train.targets
    assert inputs["numbers"].mean() == pytest.approx(0, abs=1e-6) and inputs["numbers"].std() == pytest.approx(1)
    prices = targets.astype(np.float64)
    assert source.info.target_mean == (pytest.approx(prices.mean()),)
    assert sorted(np.unique(inputs["categories"]).tolist()) == [1, 2]
    assert source.info.several["categories"] == TensorSpec((1,), "int64", 3)


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [
        ("price", "regression", ()),
        ("price,size", "regression", ()),
        ("rooms", "classification", ("1", "2", "3")),
        ("town", "classification", ("Bonn", "Ulm")),
        ("tags", "multi_label", ("low", "new")),
    ],
)
def test_the_target_decides_on_the_task(tmp_path: Path, target: str, task: str, classes: tuple[str, ...]) -> None:
    name = write(tmp_path / "homes.csv", columns())
    info = opened(name, target, "").info
    assert (info.task, info.classes) == (task, classes)
    fitted = build_task(task).fitted(info, TaskSettings())
    assert fitted.outputs == (len(classes) or len(target.split(",")))
    described = with_task_defaults(build(None, {"data.source": name, "data.target": target}))
    assert described.origins["optimizer.name"] == f"task {task.replace('_', '-')}"
    assert described.config.model.name == "table_mlp"


def test_labels_from_one_and_labels_in_lists_are_taken(tmp_path: Path) -> None:
    rooms = opened(write(tmp_path / "homes.csv", columns()), "rooms", "size")
    assert set(rooms.train.targets.tolist()) == {0, 1, 2} and sum(rooms.info.class_counts) == 32
    table = columns() | {"tags": [["a", "b"], ["b"], [], ["a"]] * (ROWS // 4)}
    tags = opened(write(tmp_path / "homes.jsonl", table), "tags", "size")
    assert tags.info.classes == ("a", "b") and set(tags.train.targets.sum(1).tolist()) == {0, 1, 2}


def test_numbers_alone_are_one_plain_tensor_and_missing_ones_are_said(tmp_path: Path) -> None:
    table = columns()
    table["size"][3] = None
    source = opened(write(tmp_path / "homes.csv", table), "price", "size,rooms")
    assert (source.info.shape, source.info.several) == ((2,), None)
    assert source.notes[-1] == "size: 1 of 40 values are missing: the mean stands there"
    assert np.isfinite(source.train.values).all()


@pytest.mark.parametrize("missing", ["", "NA", "null"])
def test_missing_categories_are_said(tmp_path: Path, missing: str) -> None:
    table = columns()
    table["town"][3] = table["town"][4] = missing
    told = (
        "town: 2 of 40 values are missing (empty, or such as NA or null): they are one category, with those that no "
        "training row has"
    )
    assert opened(write(tmp_path / "a.csv", table), "price", "size,town").notes[-1] == told
    source = opened(write(tmp_path / "b.csv", table), "price", "rooms,town", "recommendation")
    assert told in source.notes and not any("held out have a value" in note for note in source.notes)
    assert not opened(write(tmp_path / "c.csv", columns()), "price", "size,town").notes


def test_parts_by_file_and_a_test_set_that_nothing_is_chosen_by(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", columns())
    write(tmp_path / "test.csv", columns() | {"town": ["Rome"] * ROWS})
    source = opened(str(tmp_path), "price")
    assert (len(source.train), len(source.evaluation), len(source.test)) == (36, 4, ROWS)  # type: ignore[arg-type]
    assert source.notes[0].startswith("4 of 40 training rows are held out")
    assert set(source.test.values["categories"][:, 0].tolist()) == {0}, "a value that no training row has"  # type: ignore[union-attr]
    write(tmp_path / "val.csv", columns())
    source = opened(str(tmp_path), "price")
    assert (len(source.train), len(source.evaluation), len(source.test)) == (ROWS, ROWS, ROWS)  # type: ignore[arg-type]


def test_ids_are_numbered_by_the_training_rows(tmp_path: Path) -> None:
    table = {"user": [7, 7, 900, 900] * 5, "item": list("abcd") * 5, "stars": [1.0, 4.5, 3.0, 2.0] * 5}
    info = opened(write(tmp_path / "stars.csv", table), "stars", "user,item", "recommendation", 0.1).info
    assert [spec.count for spec in info.several] == [3, 5] and info.train_size == 18
    clicks = write(tmp_path / "clicks.csv", table | {"stars": [0, 1, 1, 0] * 5})
    fitted = build_task("recommendation").fitted(
        opened(clicks, "stars", "user,item", "recommendation").info, TaskSettings()
    )
    assert fitted.primary.name == "roc_auc"


def test_floats_of_0_and_1_are_clicks_and_what_never_varies_is_refused(tmp_path: Path) -> None:
    table = {"user": [7, 7, 900, 900] * 5, "item": list("abcd") * 5, "bought": [0.0, 1.0, 1.0, 0.0] * 5}
    source = opened(write(tmp_path / "floats.parquet", table), "bought", "user,item", "recommendation")
    assert source.info.targets == TensorSpec(count=2) and not source.info.target_mean
    assert source.notes[-1] == "bought is 0 or 1 in each row: it is learnt as clicks"
    for value in (1, 1.0, 5):
        name = write(tmp_path / "same.csv", table | {"bought": [value] * 20})
        with pytest.raises(UserError, match=rf"bought is {value:g} in each row, .* leave out --target"):
            opened(name, "bought", "user,item", "recommendation")


def test_other_rows_of_a_run_with_clicks_are_clicks_though_all_were_taken(tmp_path: Path) -> None:
    table = {"user": [7, 7, 900, 900] * 5, "item": list("abcd") * 5, "bought": [0.0, 1.0, 1.0, 0.0] * 5}
    for name, values, is_click in (("clicks", [0, 1], True), ("stars", [0.0, 4.0], False)):
        folder = tmp_path / name
        folder.mkdir()
        counts = []
        for bought in (values * 10, [1] * 20):
            path = write(folder / "rows.csv", table | {"bought": bought})
            config = DataConfig(path, target="bought", input="user,item")
            counts.append(open_data(config, 0, "recommendation", folder).info.targets.count)
        assert counts == [2 * is_click] * 2


def test_floats_beside_ids_are_numbers_for_a_network(tmp_path: Path) -> None:
    table = {"user": [7, 7, 900, 900] * 5, "cost": [0.5, 1.5] * 10, "item": list("abcd") * 5, "click": [0, 1, 1, 0] * 5}
    name = write(tmp_path / "clicks.csv", table)
    source = opened(name, "click", "user,cost,item", "recommendation", 0.1)
    specs, values = source.info.several, source.train.values
    assert (specs["numbers"].shape, specs["categories"].shape, specs["categories"].count) == ((1,), (2,), 3 + 5)
    assert set(values["categories"][:, 0]) == {1, 2} and set(values["categories"][:, 1]) == {4, 5, 6, 7}
    task = build_task("recommendation").fitted(source.info, TaskSettings())
    assert (task.primary.name, task.auto_model(source.info)) == ("roc_auc", "dlrm")
    described = with_task_defaults(
        build(
            None,
            {"data.source": name, "data.target": "click", "data.input": "user,cost,item", "task": "recommendation"},
        )
    )
    assert (described.config.optimizer.name, described.config.data.batch_size) == ("adamw", 1024)


@pytest.mark.parametrize(
    ("target", "input", "task", "message"),
    [
        ("", "", "auto", r"name the column to predict with --target: size, town, price, rooms, tags"),
        ("prize", "", "auto", r"no column 'prize': did you mean price\? it has size"),
        ("price", "size,twn", "auto", r"no column 'twn': did you mean town\?"),
        ("price", "price", "auto", "price is both input and target"),
        ("price", "", "classification", r"column price holds numbers that are no class numbers \(double\)"),
        ("town", "", "regression", "the target town holds no numbers, but such as 'Ulm': is another --task meant"),
        ("price", "", "multi-label", r"column price holds double: labels are strings joined by \| or ;, lists, or sev"),
        ("price", "size,rooms", "recommendation", "needs two columns of ids, whole numbers or strings"),
        ("price", "rooms", "recommendation", "needs two columns of ids, .*: --input USER,ITEM"),
        ("price,rooms", "size", "classification", "2 targets are for --task regression"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, target: str, input: str, task: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        opened(write(tmp_path / "homes.csv", columns()), target, input, task)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as csv"),
        ("a,b\n", "it has no rows"),
        ("a,b\n1,2\n3,4,5\n", "cannot be read as csv .*Expected 2 columns, got 3"),
        ("a,b\n1,2\n3,\n", r"the target b is missing in row 2 \(empty, or such as NA or null\): remove such rows"),
        (
            "a,b\n" + "".join(f"{i},{i + 1_600_000_000}\n" for i in range(60)),
            "the target b lies within 1.* of 1.60000003e.09, which single precision cannot tell apart: subtract",
        ),
        (
            "a,b\n" + "".join(f"{i}.25,{i}.5\n" for i in range(80)) + "1O,1.5\n",
            r"column a has another value in nearly each row, .*\(most are numbers, but not such as '1O'\)",
        ),
        ("a,a,b\n1,2,3\n", "two columns have the same name"),
        ("a,b\n1,2\n", "one row cannot be split"),
        ("a,b\n,2.5\n,3.5\n", "column a holds nothing, neither numbers nor categories"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        opened(str(tmp_path / "rows.csv"), "b")


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("a,b\n1,gr\u00fcn\n2,rot\n".encode("latin-1") * 2)
    with pytest.raises(UserError, match="column b holds text that is not UTF-8: save the file as UTF-8"):
        opened(str(tmp_path / "rows.csv"), "b")


def test_lists_of_numbers_are_no_labels(tmp_path: Path) -> None:
    table = {"x": list(range(ROWS)), "y": [[0.5 * i, 1.5 * i] for i in range(ROWS)]}
    with pytest.raises(UserError, match=r"the target y holds lists, such as \[0.0, 0.0\]: .* --target y_1,y_2"):
        opened(write(tmp_path / "a.parquet", table), "y")


@pytest.mark.parametrize("kind", [int, float, bool])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_lists_of_0_and_1_are_a_mark_for_each_label(tmp_path: Path, suffix: str, kind: type) -> None:
    marks = [[kind(i % 2), kind(0), kind(i % 3 == 0)] for i in range(ROWS)]
    table = {"x": list(range(ROWS)), "y": marks}
    source = opened(write(tmp_path / f"a{suffix}", table), "y")
    assert (source.info.task, source.info.classes) == ("multi_label", ("y_0", "y_1", "y_2"))
    assert source.train.targets.tolist() == [[float(mark) for mark in marks[i]] for i in source.train.origin]  # type: ignore[union-attr]
    assert source.notes[-1] == "y holds lists of 0 and 1: a mark for each of 3 labels"


@pytest.mark.parametrize(
    "labels", [[[0, 1], [1]], [[0, 1], []], [[0, 1], [1, 2]], [["0", "1"], ["1", "0"]], [[0], [1]]], ids=str
)
def test_lists_of_other_lengths_or_values_are_labels(tmp_path: Path, labels: list[list[Any]]) -> None:
    table = {"x": list(range(ROWS)), "y": labels * (ROWS // 2)}
    source = opened(write(tmp_path / "a.parquet", table), "y")
    assert source.info.classes == tuple(sorted({str(label) for row in labels for label in row}))
    assert not any("mark" in note for note in source.notes)


def test_other_rows_of_a_run_have_labels_as_its_own_have(tmp_path: Path) -> None:
    marks, labels = [[0, 1, 1], [1, 0, 0]], [[0, 1, 2], [1]]
    for name, own, others in (("marks", marks, [[1, 1, 1], [1, 1, 0]]), ("labels", labels, [[0, 1, 1], [1, 0, 0]])):
        run = tmp_path / name
        run.mkdir()
        first, second = (
            open_data(
                DataConfig(write(tmp_path / f"{i}.jsonl", {"x": [0.5] * 20, "y": rows * 10}), target="y"), 0, folder=run
            )
            for i, rows in enumerate((own, others))
        )
        assert first.info.classes == second.info.classes
    assert second.train.targets.max(0).tolist() == [1, 1, 0], "labels 0 and 1 by their names"  # type: ignore[union-attr]


def test_short_texts_that_hardly_repeat_are_texts(tmp_path: Path) -> None:
    table = {"text": [f"good film {i}" for i in range(ROWS)], "label": ["yes", "no"] * (ROWS // 2)}
    assert opened(write(tmp_path / "a.csv", table), "label", "text").info.task == "text_classification"
    dates = {**table, "text": [f"{i % 28 + 1}/{i % 12 + 1}/20{i:02}" for i in range(ROWS)]}
    with pytest.raises(
        UserError, match=r"column text has another value in nearly each row, .*, such as '1/1/2000': conv"
    ):
        opened(write(tmp_path / "b.csv", dates), "label", "text")


def texts_table() -> dict[str, list[Any]]:
    return {
        "review": [f"one long enough review of the house number {i}" for i in range(ROWS)],
        "other": [f"{i} words that are another text for it" for i in range(ROWS)],
        "tags": ["new|low", "low", "high", "new"] * (ROWS // 4),
        "price": [0.5 * i for i in range(ROWS)],
        "stars": [i % 5 for i in range(ROWS)],
        "rank": [*range(ROWS - 2), 0, 1],
        "p": [i % 2 for i in range(ROWS)],
        "q": [float(i % 3 == 0) for i in range(ROWS)],
    }


@pytest.mark.parametrize(
    ("target", "asked", "task", "model", "outputs"),
    [
        ("tags", "auto", "multi_label", "text_classifier", 3),
        ("tags", "multi-label", "multi_label", "text_classifier", 3),
        ("price", "auto", "regression", "text_classifier", 1),
        ("price,q", "auto", "regression", "text_classifier", 2),
        ("stars", "regression", "regression", "text_classifier", 1),
        ("stars", "auto", "text_classification", "text_classifier", 5),
        ("p,q", "multi-label", "multi_label", "text_classifier", 2),
        ("tags", "text-classification", "text_classification", "text_classifier", 4),
    ],
)
def test_one_column_of_texts_is_for_classes_labels_and_numbers(
    tmp_path: Path, target: str, asked: str, task: str, model: str, outputs: int
) -> None:
    settings = {"data.source": write(tmp_path / "t.csv", texts_table()), "data.input": "review", "data.target": target}
    settings |= {"data.root": str(tmp_path)}
    config = with_task_defaults(build(None, settings if asked == "auto" else {**settings, "task": asked})).config
    assert (config.model.name, config.training.epochs, config.optimizer.lr) == (model, 6, 5e-3)
    source = open_data(config.data, 0, config.task)
    assert source.info.task == task and set(source.info.several) == {"input_ids", "attention_mask"}
    fitted = build_task(task).fitted(source.info, TaskSettings())
    assert fitted.outputs == outputs and fitted.auto_model(source.info) == model
    loader = TrainLoader(source, LoaderConfig(config.data, 0, torch.device("cpu")), Shard(0, 1))
    try:
        batch = next(iter(loader.epoch(0)))
    finally:
        loader.close()
    model_of_it = build_model(config.model, model_input(source.info, fitted))
    assert fitted.loss_sum(model_of_it(**batch.inputs), batch.targets).isfinite()


def test_a_run_of_texts_takes_other_rows_as_texts_however_short(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = DataConfig(write(tmp_path / "t.csv", texts_table()), input="review", target="price", root=str(tmp_path))
    first = open_data(config, 0, "regression", run)
    short = texts_table() | {"review": ["good", "bad"] * (ROWS // 2)}
    again = open_data(replace(config, source=write(tmp_path / "u.csv", short)), 0, "regression", run)
    assert again.info.several["input_ids"].count == first.info.several["input_ids"].count
    assert again.info.target_mean == first.info.target_mean


def test_columns_of_0_and_1_are_labels_where_these_are_asked_for(tmp_path: Path) -> None:
    name = write(tmp_path / "t.csv", texts_table())
    source = opened(name, "p,q", "price,stars", "multi-label")
    assert (source.info.classes, source.info.task, source.info.targets) == (("p", "q"), "multi_label", TensorSpec((2,)))
    assert source.info.class_counts == tuple(source.train.targets.sum(0).tolist())
    plain = opened(name, "p,q", "price,stars")
    assert plain.info.task == "regression"
    assert plain.notes[-1] == "p, q are 0 or 1 in each row: --task multi-label learns them as labels"
    assert not opened(name, "p,q", "price,stars", "regression").notes[1:]
    for target, words in (("p,stars", "column stars holds 2: several targets"), ("p", r"\(--target p,OTHER\)")):
        with pytest.raises(UserError, match=words):
            opened(name, target, "price", "multi-label")


def test_what_is_recommended_for_a_column_of_texts_is_taken(tmp_path: Path) -> None:
    name = write(tmp_path / "t.csv", texts_table())
    for given, task in (("review", "classification"), ("review,price", "classification"), ("review,price", "auto")):
        with pytest.raises(UserError, match="--input review with --task text-classification, multi-label or regr"):
            opened(name, "stars", given, task)
    with pytest.raises(UserError, match="use --task regression"):
        opened(name, "price", "review", "text-classification")


def test_paths_of_sounds_are_told_their_task(tmp_path: Path) -> None:
    spoken = {"path": [f"clips/{i}.wav" for i in range(ROWS)], "said": [f"{i} and {i}" for i in range(ROWS)]}
    with pytest.raises(UserError, match=r"column path .* are for --task speech-recognition"):
        opened(write(tmp_path / "a.csv", {**spoken, "kind": ["a", "b"] * (ROWS // 2)}), "kind", "path")


def test_a_class_that_is_not_evaluated_is_said(tmp_path: Path) -> None:
    table = {"x": [float(i) for i in range(ROWS)], "label": ["yes", "no"] * (ROWS // 2)}
    write(tmp_path / "train.csv", {**table, "label": ["once", *table["label"][1:]]})
    write(tmp_path / "val.csv", table)
    assert (
        "no row for evaluation has the class once: how that is learnt is not seen"
        in opened(str(tmp_path), "label").notes
    )


def test_what_one_part_of_a_table_alone_has_is_said(tmp_path: Path) -> None:
    table = {"x": [float(i) for i in range(ROWS)], "label": ["yes", "no"] * (ROWS // 2)}
    write(tmp_path / "train.csv", table)
    write(tmp_path / "test.csv", {**table, "label": ["yes", "perhaps"] * (ROWS // 2)})
    notes = opened(str(tmp_path), "label").notes
    assert any(
        f"no training row has the class perhaps: {ROWS // 2} rows for evaluation have it" in note for note in notes
    ), notes
    write(tmp_path / "test.csv", {**table, "x": [*range(ROWS - 1), "?"]})
    with pytest.raises(
        UserError, match=r"column x holds numbers in one of its files, and strings in another .*such as '\?'"
    ):
        opened(str(tmp_path), "label")


def test_suffixes_are_known_without_an_import() -> None:
    assert TableFile.suffixes == TABLES


def test_spaces_around_the_names_of_columns_are_no_part_of_them(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a, b, price \n" + "".join(f"{i}.5, {i % 3}.5, {i}.25\n" for i in range(ROWS)))
    source = opened(str(tmp_path / "rows.csv"), "price", "b,a")
    assert source.info.columns == ("b", "a") and source.info.target_names == ("price",)


def test_what_pandas_writes_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """Its categories are the values that they stand for, and its index is no input."""
    table = pa.table({name: columns()[name] for name in ("size", "town", "price")})
    table = table.set_column(1, "town", table["town"].dictionary_encode())
    parquet.write_table(table.append_column("__index_level_0__", pa.array(range(ROWS))), tmp_path / "homes.parquet")
    source = opened(str(tmp_path / "homes.parquet"), "price")
    assert source.info.columns == ("size", "town") and source.info.several["categories"].count == 3  # type: ignore[index]
    source = opened(str(tmp_path / "homes.parquet"), "town")
    assert source.info.classes == ("Bonn", "Ulm")


@pytest.mark.parametrize("head", [",", "Unnamed: 0,"])
def test_the_index_that_pandas_writes_to_a_file_is_no_input(tmp_path: Path, head: str) -> None:
    rows = "".join(f"{i},{i}.5,{i % 3}.25\n" for i in range(ROWS))
    (tmp_path / "rows.csv").write_text(f"{head}a,price\n{rows}")
    assert opened(str(tmp_path / "rows.csv"), "price").info.columns == ("a",)


def test_columns_without_a_name_are_left_out_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",,a,b\n0,1,2.5,x\n0,2,3.5,y\n")
    assert TablePart.of(tmp_path / "t.csv").names == ("a", "b")


def test_columns_of_very_small_numbers_are_standardised(tmp_path: Path) -> None:
    table = {"farad": [1e-12 * (1 + i) for i in range(ROWS)], "price": [1e-11 * i for i in range(ROWS)]}
    source = opened(write(tmp_path / "small.parquet", table), "price")
    assert 0.8 < np.std(source.train.values) < 1.2
    assert source.info.target_std[0] == pytest.approx(1e-11 * np.std(range(ROWS)), rel=0.3)


def test_labels_that_are_asked_for_are_taken_apart_however_few_rows_have_several(tmp_path: Path) -> None:
    tags = ["red", "blue"] * (ROWS // 2)
    table = {"size": [1.0 + i for i in range(ROWS)], "tags": [*tags[1:], "red|blue"]}
    assert opened(write(tmp_path / "tags.csv", table), "tags", task="multi-label").info.classes == ("blue", "red")


def test_a_category_that_no_row_has_is_missing_in_each() -> None:
    found = numbered("town", pa.chunked_array([pa.nulls(3)]), ColumnFacts(known=("Bonn", "Ulm")))
    assert found.ids.tolist() == [0, 0, 0] and found.count == 3


def test_a_file_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from echelon.data import check_source

    with pytest.raises(UserError, match="no such file"):
        check_source(str(tmp_path / "nowhere.csv"))


def test_other_rows_are_encoded_as_the_run_s_own_were(tmp_path: Path) -> None:
    """What was measured stays with the run: on other rows its model would else see other numbers."""
    run = tmp_path / "run"
    run.mkdir()
    table = columns()
    config = DataConfig(source=write(tmp_path / "a.csv", table), target="rooms", input="size,town")
    first = open_data(config, 0, "classification", run)
    shifted = {**table, "size": [each + 100 for each in table["size"]], "town": ["Ulm", "Rome"] * (ROWS // 2)}
    other = replace(config, source=write(tmp_path / "b.csv", shifted))
    again = open_data(other, 0, "classification", run)
    spread = float(np.std([table["size"][i] for i in range(ROWS)]))
    moved = again.train.values["numbers"] - first.train.values["numbers"]
    assert moved.min() == pytest.approx(moved.max(), abs=1e-4) and moved.mean() == pytest.approx(100 / spread, rel=0.2)
    before, after = first.train.values["categories"], again.train.values["categories"]
    assert (after[before == before.max()] == before.max()).all()  # Ulm
    assert (after[before != before.max()] == 0).all()  # Rome, which no training row had
    assert again.info.several == first.info.several and again.info.classes == first.info.classes
    write(tmp_path / "b.csv", {**shifted, "rooms": [9] * ROWS})
    with pytest.raises(UserError, match="column rooms has the class 9, which the run's data does not have"):
        open_data(other, 0, "classification", run)


def of_a_run(folder: Path) -> tuple[DataConfig, dict[str, list[Any]]]:
    """Return what a run in a folder was started with, which keeps its columns: 40 rows, of which none is held out."""
    table = {
        "origin": [f"a country with a long name {i % 4}" for i in range(ROWS)],
        "code": ["0012", "12", "A1", "B7"] * (ROWS // 4),
        "size": [10.0 + i for i in range(ROWS)],
        "count": list(range(1, ROWS + 1)),
        "at": ["07:00:00", "19:30:00"] * (ROWS // 2),
        "kind": ["x", "y"] * (ROWS // 2),
    }
    (folder / "data").mkdir()
    write(folder / "data" / "train.csv", table)
    write(folder / "data" / "val.csv", table)
    config = DataConfig(str(folder / "data"), target="kind", columns="count=number")
    open_data(config, 0, folder=folder)
    return config, table


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("origin", [f"a country with a long name {i}" for i in range(6)]),
        ("origin", [None] * 6),
        ("code", ["0012", "12"] * 3),
        ("size", [None] * 6),
        ("size", [12, 13] * 3),
        ("count", [None, 1.5] * 3),
        ("at", [None] * 6),
    ],
    ids=str,
)
def test_a_column_is_what_a_run_has_it_as_whatever_other_rows_look_like(
    tmp_path: Path, column: str, values: list[Any]
) -> None:
    config, table = of_a_run(tmp_path)
    first = open_data(config, 0, folder=tmp_path)
    few = {name: each[:6] for name, each in table.items()} | {column: values}
    other = open_data(replace(config, source=write(tmp_path / "few.csv", few)), 0, folder=tmp_path)
    assert other.info.several == first.info.several
    if column == "code":
        ids = {int(i) for i in other.train.values["categories"][:, 1]}
        assert ids == {int(first.train.values["categories"][i, 1]) for i in (0, 1)}


def test_a_string_in_a_column_of_numbers_of_a_run_is_named_by_its_row(tmp_path: Path) -> None:
    config, table = of_a_run(tmp_path)
    for column, words in (("size", "is no number"), ("at", "is no time of day such as 07:00")):
        path = write(tmp_path / f"{column}.csv", table | {column: [*table[column][:30], "?", *table[column][31:]]})
        with pytest.raises(UserError, match=rf"column {column}: '\?' in row 31 {words}"):
            open_data(replace(config, source=path), 0, folder=tmp_path)


def test_a_category_that_no_training_row_has_is_one_when_the_run_goes_on(tmp_path: Path) -> None:
    table = {"a": [float(i) for i in range(ROWS)], "note": [None] * ROWS, "kind": ["x", "y"] * (ROWS // 2)}
    write(tmp_path / "train.csv", table)
    write(tmp_path / "val.csv", table | {"note": ["new"] * ROWS})
    (tmp_path / "run").mkdir()
    config = DataConfig(str(tmp_path), target="kind")
    first, again = (open_data(config, 0, folder=tmp_path / "run") for _ in range(2))
    assert again.info.several == first.info.several is not None


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"data.target": "price"}, "table_mlp"),
        ({"data.target": "price", "task": "regression"}, "table_mlp"),
        ({"data.target": "rooms", "data.input": "review"}, "text_classifier"),
        ({"data.target": "tags", "data.input": "review"}, "text_classifier"),
        ({"data.target": "price", "data.input": "review", "task": "regression"}, "text_classifier"),
        ({"data.target": "price", "data.input": "town,rooms", "task": "recommendation"}, "matrix_factorisation"),
        ({"data.target": "price", "data.input": "town,rooms,review", "task": "recommendation"}, "two_tower"),
        ({"data.target": "price", "data.input": "town,rooms,size", "task": "recommendation"}, "dlrm"),
        ({"data.input": "town,rooms", "task": "recommendation"}, "matrix_factorisation"),
        ({"data.target": "price", "model.name": "mlp"}, "mlp"),
        ({"data.target": "price", "optimizer.loss": "MSELoss"}, "auto"),
    ],
)
def test_what_the_columns_make_of_an_auto_model(
    tmp_path: Path, suffix: str, settings: dict[str, str], model: str
) -> None:
    """The run is then named after it, before anything is opened."""
    texts = {"review": [f"one long enough review of the house number {i}" for i in range(ROWS)]}
    name = write(tmp_path / f"homes{suffix}", columns() | texts)
    assert with_task_defaults(build(None, {"data.source": name, **settings})).config.model.name == model


def visits() -> dict[str, list[Any]]:
    return {
        "size": [0.5 + i for i in range(ROWS)], "shop_id": [i % 5 for i in range(ROWS)],
        "visits": [i * 7 % 11 for i in range(ROWS)], "weekday": [i % 7 for i in range(ROWS)],
        "id": list(range(ROWS)), "y": [0.1 * i for i in range(ROWS)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("task", "described", "categories"),
    [
        ("auto", "", "shop_id"),  # `id` repeats nowhere: nothing is learnt of such a category
        ("auto", "weekday=category, shop_id=number", "weekday"),
        ("recommendation", "", "shop_id, id"),
        ("recommendation", "id=number", "shop_id, visits"),
    ],
)
def test_whole_numbers_are_categories_where_their_name_or_the_user_says_so(
    tmp_path: Path, task: str, described: str, categories: str
) -> None:
    name = write(tmp_path / "visits.csv", visits())
    run = tmp_path / "run"
    run.mkdir()
    source = open_data(DataConfig(source=name, target="y", columns=described), 0, task, run)
    numbers = [each for each in visits() if each not in (*categories.split(", "), "y")]
    assert source.notes[0].startswith(f"numbers: {', '.join(numbers)}; categories: {categories} (to change it")
    assert source.info.several["categories"].shape == (categories.count(",") + 1,)
    again = open_data(DataConfig(source=name, target="y"), 0, task, run)
    assert again.notes[0].partition(" (")[0] == source.notes[0].partition(" (")[0], "a run's columns stay what they are"


def test_ids_that_never_repeat_are_said(tmp_path: Path) -> None:
    table = {"id": [7000 + i for i in range(ROWS)], "x": [0.5 * i for i in range(ROWS)], "y": ["a", "b"] * (ROWS // 2)}
    notes = opened(write(tmp_path / "a.csv", table), "y").notes
    assert any(note.startswith("id has another value in nearly each row, and is taken as a number") for note in notes)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ("vists=number", "no input 'vists': did you mean visits"),
        ("visits=id", "write visits=number or visits=category"),
        ("size=category", "size holds double; only whole numbers may be either"),
    ],
)
def test_columns_that_are_described_wrongly_are_refused(tmp_path: Path, described: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_data(DataConfig(source=write(tmp_path / "v.csv", visits()), target="y", columns=described), 0)
