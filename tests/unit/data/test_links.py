"""Links that lead out of a data folder whose files or parts are known by name: used only where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from tests.unit.data.images import make_folder, make_shards
from tests.unit.data.shapes import make_shapes
from tests.unit.data.test_parallel_text import make_parallel
from tests.unit.data.test_texts import make_texts

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


@pytest.mark.parametrize("make", [_table, _shards, _one_shard, _pairs, _masks, _masks_alone, _one_text])
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
