"""Data sets of the library `datasets`: saved ones, and those of its cache."""

from __future__ import annotations

import importlib.util
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, check_source, open_data
from echelon.data.sources import kind_of
from echelon.data.sources.function import Function

datasets = pytest.importorskip("datasets", reason="needs the extra hf")
KINDS = datasets.ClassLabel(names=["zebra", "ape"])


def save(folder: Path, **splits: object) -> str:
    datasets.DatasetDict(splits).save_to_disk(folder)
    return str(folder)


def texts(count: int, known: bool = True) -> object:
    rows = {"text": [f"where is card number {i} of mine" for i in range(count)], "label": [i % 2 for i in range(count)]}
    rows |= {} if known else {"label": [-1] * count}
    return datasets.Dataset.from_dict(
        rows, features=datasets.Features({"text": datasets.Value("string"), "label": KINDS})
    )


def pictures(count: int, target: dict[str, object] | None = None) -> object:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 9, 9, 3), dtype=np.uint8)
    rows = {"image": [Image.fromarray(each) for each in pixels], **(target or {"label": [i % 2 for i in range(count)]})}
    label = {} if target else {"label": KINDS}
    return (
        datasets.Dataset.from_dict(rows)
        .cast_column("image", datasets.Image())
        .cast(datasets.Features({"image": datasets.Image(), **label}))
        if label
        else datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    )


def opened(source: str, **more: object) -> object:
    return open_data(DataConfig(source=source, root=f"{source.removeprefix('hf:')}-root", batch_size=8, **more), 1)  # type: ignore[arg-type]


def test_a_column_of_parts_divides_a_table_and_no_images(tmp_path: Path) -> None:
    rows = {"a": [i / 3 for i in range(20)], "y": [float(i) for i in range(20)], "split": ["train", "test"] * 10}
    data = opened(save(tmp_path / "table", train=datasets.Dataset.from_dict(rows)), target="y")
    assert (data.info.columns, data.info.train_size, data.info.eval_size, len(data.test)) == (("a",), 9, 1, 10)
    with pytest.raises(UserError, match="--split a is for tables, and not for images"):
        opened(save(tmp_path / "images", train=pictures(20)), split="a")


def test_texts_with_class_labels(tmp_path: Path) -> None:
    source = save(tmp_path / "a", train=texts(40), test=texts(10), unsupervised=texts(5, known=False))
    data = opened(source, tokeniser="characters")
    assert (data.info.task, data.info.classes) == ("text_classification", ("ape", "zebra"))
    assert (data.info.train_size, data.info.eval_size, len(data.test)) == (36, 4, 10)
    assert "the split unsupervised is not used" in data.notes
    outline = kind_of(source).outline(_request(source))
    assert outline is not None and outline.task == "text_classification"
    glue = opened(save(tmp_path / "b", train=texts(40), validation=texts(8), test=texts(10, known=False)))
    assert (glue.info.train_size, glue.info.eval_size, glue.test) == (40, 8, None)
    assert "the test split has no label: it is not used" in glue.notes


def _request(source: str) -> object:
    from echelon.data.base import DataRequest

    return DataRequest(DataConfig(source=source))


def test_numbers_are_a_table(tmp_path: Path) -> None:
    rows = {"a": [float(i) for i in range(30)], "b": list(range(30)), "y": [i / 2 for i in range(30)]}
    source = save(tmp_path / "a", train=datasets.Dataset.from_dict(rows))
    data = opened(source, target="y", input="a,b")
    assert (data.info.task, data.info.train_size, data.info.eval_size) == ("regression", 24, 6)
    with pytest.raises(UserError, match=r"a, part train: no column 'z'"):
        opened(source, target="z")
    with pytest.raises(UserError, match="name the column to predict with --target: a, b, y"):
        opened(source)


def test_images_are_shuffled_and_divided_as_others(tmp_path: Path) -> None:
    source = save(tmp_path / "a", train=pictures(30), validation=pictures(6).select([5, 1, 2]))
    data = opened(source)
    assert data.info.classes == ("zebra", "ape") and data.info.class_counts == (15, 15)
    assert [int(label) for label in data.evaluation.labels] == [1, 1, 0]
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 9, 3), dtype=np.uint8)
    assert np.array_equal(data.evaluation[0][0].permute(1, 2, 0), pixels[5])
    config = DataConfig(source=source, batch_size=8, loaders=0)
    batches = [
        [batch.inputs for batch in _epoch(TrainLoader(data, LoaderConfig(config, 1, torch.device("cpu")), shard))]
        for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2))
    ]
    assert all(torch.equal(a, torch.cat([b, c])) for a, b, c in zip(*batches, strict=True))


def _epoch(loader: TrainLoader) -> list:  # type: ignore[type-arg]
    try:
        return list(loader.epoch(0))
    finally:
        loader.close()


def test_images_with_classes_by_other_columns(tmp_path: Path) -> None:
    source = save(tmp_path / "a", train=pictures(12, {"kind": ["b", "a"] * 6, "size": [0.5] * 12}))
    assert opened(source, target="kind").info.classes == ("a", "b")
    for more, words in (
        ({}, "name the column of classes with --target: image, kind, size"),
        ({"target": "size"}, "column size holds double, and no classes"),
        ({"target": "kidn"}, "train: no column 'kidn': did you mean kind"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            opened(source, **more)
        assert "\n" not in str(raised.value)


def test_a_name_is_loaded_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("a,y\n" + "".join(f"{i},{i / 2}\n" for i in range(30)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    name = f"hf:{tmp_path / 'mine'}"
    assert not Function().takes(name) and opened(name, target="y").info.train_size == 24


def test_a_hub_out_of_reach_is_said_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        hubs = ("http://127.0.0.1:1", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for hub, words in zip(hubs, ("cannot be reached", "cannot be reached|has not answered"), strict=True):
            monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub)
            began = time.monotonic()
            with pytest.raises(UserError, match=f"hf:nowhere: it is not in the cache of datasets, and {hub} ({words})"):
                opened("hf:nowhere")
            assert time.monotonic() - began < 20  # 2 of them for the hub, the others for a busy machine
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "a", train=texts(4))
    next((tmp_path / "a" / "train").glob("*.arrow")).write_bytes(b"cut")
    for name in (source, f"hf:{tmp_path / 'nothing'}"):
        with pytest.raises(UserError, match="datasets cannot load it") as raised:
            opened(name)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="needs the name of a data set"):
        check_source("hf:")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package datasets: pip install 'echelon\[hf\]'"):
        check_source(source)
