"""Links that lead out of a data folder whose files or parts are known by name: used only where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from tests.unit.data.images import make_folder, make_shards
from tests.unit.data.shapes import make_shapes
from tests.unit.data.test_parallel_text import make_parallel
from tests.unit.data.test_texts import make_texts
from tests.unit.data.test_transcripts import make_transcribed, spoken

Made = tuple[str, dict[str, str], str]
"""The name, within a folder, of what is to lie elsewhere; settings of the data; its task."""


def _table(folder: Path) -> Made:
    folder.mkdir()
    for part in ("train", "val"):
        (folder / f"{part}.csv").write_text("a,b\n" + "".join(f"{i},{2 * i + 1}\n" for i in range(20)))
    return "train.csv", {"target": "b"}, "auto"


def _shards(folder: Path) -> Made:
    for part in ("train", "val"):
        make_shards(make_folder(folder.parent / f"{part}-files"), folder / part)
    return "train", {}, "auto"


def _one_shard(folder: Path) -> Made:
    make_shards(make_folder(folder.parent / "files"), folder)
    return min(file.name for file in folder.iterdir()), {}, "auto"


def _pairs(folder: Path) -> Made:
    make_parallel(folder)
    return "train.de", {"input": "en", "target": "de", "tokeniser": "bpe(300)"}, "auto"


def _masks(folder: Path) -> Made:
    make_shapes(folder, ("train", "val"))
    return "train", {}, "auto"


def _masks_alone(folder: Path) -> Made:
    make_shapes(folder)
    return "masks", {}, "auto"


def _one_text(folder: Path) -> Made:
    for part in ("train", "val"):
        make_texts(folder, part)
    return "train", {"context": "8"}, "language-modelling"


def _clips(folder: Path) -> Made:
    make_transcribed(folder / "clips")
    rows = [f"clips/{i:03}.wav,{text}" for i, text in enumerate(spoken(10))]
    (folder / "train.csv").write_text("\n".join(["path,text", *rows]))
    return "clips", {"input": "path", "target": "text"}, "speech-recognition"


def _saved(folder: Path) -> Made:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = {"a": list(range(40)), "b": [2.0 * i for i in range(40)]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(folder)
    return "train", {"target": "b"}, "auto"


@pytest.mark.parametrize("make", [_table, _shards, _one_shard, _pairs, _masks, _masks_alone, _one_text, _clips, _saved])
def test_a_link_out_of_the_folder_is_refused_unless_it_is_meant(make: Callable[[Path], Made], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    name, settings, task = make(folder)

    def opened(follow: bool) -> tuple[str, ...]:
        """Open the folder; returns its notes."""
        chosen = {**settings, **({"context": 8} if "context" in settings else {})}
        config = DataConfig(source=str(folder), root=str(tmp_path / "root"), follow_links=follow, **chosen)  # type: ignore[arg-type]
        return open_data(config, 0, task).notes

    assert not any("link" in note for note in opened(follow=False))
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"1 link leads out of the folder, the first one {name} -> .*--follow-links"):
        opened(follow=False)
    (note,) = (note for note in opened(follow=True) if "link" in note)
    assert note.endswith("followed")
    (tmp_path / "elsewhere").rename(folder / f"{name}.here")  # within the folder links are as good as files
    (folder / name).unlink()
    (folder / name).symlink_to(f"{name}.here")
    if (folder / name).is_file():
        assert not any("link" in note for note in opened(follow=False))


def test_names_of_sounds_that_lead_out_of_the_folder_of_a_table_are_as_links(tmp_path: Path) -> None:
    _, settings, task = _clips(tmp_path / "data")
    (tmp_path / "data" / "clips").rename(tmp_path / "clips")
    table = tmp_path / "data" / "train.csv"
    written = table.read_text()
    for place, first in (("../clips", r"\.\./clips/000.wav"), (str(tmp_path / "clips"), r"\.\./clips/000.wav")):
        table.write_text(written.replace("clips/", f"{place}/"))
        with pytest.raises(UserError, match=rf"10 links lead out of the folder, the first one {first} -> /"):
            open_data(DataConfig(str(table), **settings), 0, task)  # type: ignore[arg-type]
        followed = open_data(DataConfig(str(table), follow_links=True, **settings), 0, task)  # type: ignore[arg-type]
        assert any(note.endswith("followed") for note in followed.notes)


def test_names_in_a_saved_data_set_that_lead_out_of_it_are_as_links(tmp_path: Path) -> None:
    _, settings, task = _saved(tmp_path / "data")
    state = tmp_path / "data" / "train" / "state.json"
    (file,) = (tmp_path / "data" / "train").glob("*.arrow")
    file.rename(tmp_path / "elsewhere.arrow")
    state.write_text(state.read_text().replace(file.name, "../../elsewhere.arrow"))
    with pytest.raises(UserError, match=r"1 link leads out of the folder, the first one \.\./elsewhere.arrow -> "):
        open_data(DataConfig(str(tmp_path / "data"), **settings), 0, task)  # type: ignore[arg-type]
    source = open_data(DataConfig(str(tmp_path / "data"), follow_links=True, **settings), 0, task)  # type: ignore[arg-type]
    assert any(note.endswith("followed") for note in source.notes)


def test_images_that_a_saved_data_set_names_elsewhere_are_as_links(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    folder, features = (
        tmp_path / "data",
        datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    for i in range(12):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"{i}.png")
    cells = [{"bytes": None, "path": str(tmp_path / f"{i}.png")} for i in range(12)]
    rows = pa.table({"image": pa.array(cells, features["image"].pa_type), "label": [i % 2 for i in range(12)]})
    rows = rows.cast(features.arrow_schema)
    datasets.Dataset(datasets.table.InMemoryTable(rows)).save_to_disk(folder)  # which takes the images in
    (file,) = folder.glob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    given = {"source": str(folder), "target": "label"}
    with pytest.raises(UserError, match=r"12 links lead out of the folder, the first one \.\./0.png -> "):
        open_data(DataConfig(**given), 0)  # type: ignore[arg-type]
    source = open_data(DataConfig(**given, follow_links=True), 0)  # type: ignore[arg-type]
    assert any(note.endswith("followed") for note in source.notes)
