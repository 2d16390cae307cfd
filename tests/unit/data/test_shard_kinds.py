"""Shards of sounds, of sounds with what is said, and of texts: the batches of a folder of the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, TrainLoader, open_data
from echelon.data.base import DataRequest
from echelon.data.sources import outline_of
from echelon.tasks import nest
from tests.unit.data.images import make_folder, make_shards, write_tar
from tests.unit.data.test_sounds import make_sounds
from tests.unit.data.test_texts import make_texts
from tests.unit.data.test_transcripts import make_transcribed

ALONE = Shard(0, 1)


def config(source: Path, **more: object) -> DataConfig:
    return DataConfig(source=str(source), root=str(source.parent / "root"), batch_size=5, loaders=0, **more)  # type: ignore[arg-type]


def batches(data: DataConfig) -> list[torch.Tensor]:
    source, loading = open_data(data, 1), LoaderConfig(data, 1, torch.device("cpu"))
    made = []
    for loader, given in (
        (train := TrainLoader(source, loading, ALONE), train.epoch(1)),
        (evaluation := EvalLoader(source, loading, ALONE), evaluation),
    ):
        made += [leaf for batch in given for leaf in nest.leaves((batch.inputs, batch.targets))]
        loader.close()
    return made


def same(first: DataConfig, second: DataConfig) -> bool:
    made, again = batches(first), batches(second)
    return len(made) == len(again) > 2 and all(map(torch.equal, made, again))


@pytest.mark.parametrize("make", [make_sounds, make_texts])
def test_samples_with_classes_are_those_of_a_folder(tmp_path: Path, make: object) -> None:
    folder = make(tmp_path / "files")  # type: ignore[operator]
    shards = make_shards(folder, tmp_path / "shards")
    assert same(config(shards, context=16), config(folder, context=16))
    info = open_data(config(shards, context=16), 0).info
    assert info.task == {make_sounds: "speech_classification", make_texts: "text_classification"}[make]
    assert outline_of(DataRequest(config(shards), 0)) is not None


def test_what_is_said_stands_beside_sounds(tmp_path: Path) -> None:
    folder = make_transcribed(tmp_path / "files", count=12)
    files = sorted(folder.iterdir())
    for part in range(2):
        write_tar(
            tmp_path / "shards" / f"{part}.tar", {f.name: f.read_bytes() for f in files[12 * part : 12 * part + 12]}
        )
    assert open_data(config(tmp_path / "shards"), 0).info.task == "speech_recognition"
    assert same(config(tmp_path / "shards"), config(folder))


def test_shards_of_another_kind_are_refused(tmp_path: Path) -> None:
    sounds, images = make_sounds(tmp_path / "sounds"), make_folder(tmp_path / "images", per_class=4)
    both = make_shards(sounds, tmp_path / "both")
    make_shards(images, both / "train")
    (both / "train" / "000.tar").rename(both / "zzz.tar")
    for rest in (both / "train").iterdir():
        rest.unlink()
    (both / "train").rmdir()
    with pytest.raises(UserError, match=r"zzz.tar: it holds images, and .*000.tar sounds: use shards of one kind"):
        open_data(config(both), 0)
    alone = make_shards(sounds, tmp_path / "alone")
    with pytest.raises(UserError, match=r"a transcript of each sound is to be in a .txt beside it"):
        open_data(config(alone), 0, "speech-recognition")
    with pytest.raises(UserError, match="is shards of sounds with classes, which --task regression does not take"):
        open_data(config(alone), 0, "regression")
