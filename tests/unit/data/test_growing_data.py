"""Data of every kind that grows under a run: an epoch in progress keeps its samples, each once; new ones come after."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, TrainLoader, open_data
from tests.unit.data.images import make_image

BEGUN, NEW = 20, 6


def write_csv(folder: Path, count: int) -> dict[str, str]:
    rows = [f"{i},{'red' if i % 2 else 'blue'},{i / 7}" for i in range(count)]
    folder.mkdir(exist_ok=True)
    (folder / "train.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    return {"source": str(folder / "train.csv"), "target": "y"}


def write_divided(folder: Path, count: int) -> dict[str, str]:
    rows = [f"{i},{'red' if i % 2 else 'blue'},{'val' if i < 4 else 'train'},{i / 7}" for i in range(count + 4)]
    folder.mkdir(exist_ok=True)
    (folder / "t.csv").write_text("\n".join(["a,b,split,y", *rows]) + "\n")
    return {"source": str(folder / "t.csv"), "target": "y"}


def write_jsonl(folder: Path, count: int) -> dict[str, str]:
    lengths = [3 + i % 5 + 9 * (i >= BEGUN) for i in range(count)]  # new texts are longer
    lines = [f'{{"text": "{" ".join(["word" + str(i)] * n)}", "kind": "{"ab"[i % 2]}"}}' for i, n in enumerate(lengths)]
    folder.mkdir(exist_ok=True)
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    return {"source": str(folder / "t.jsonl"), "input": "text", "target": "kind", "root": str(folder / "cache")}


def write_parquet(folder: Path, count: int) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    table = pa.table(
        {"u": [i % 5 for i in range(count)], "v": [i % 4 for i in range(count)], "r": np.arange(count) / 3}
    )
    parquet.write_table(table, folder / "t.parquet")
    return {"source": str(folder / "t.parquet"), "target": "r"}


def write_shards(folder: Path, count: int) -> dict[str, str]:
    (folder / "train").mkdir(parents=True, exist_ok=True)
    for first in range(0, count, 10):
        shard = folder / "train" / f"{9 - first // 10}.tar"  # later ones sort first
        if first < BEGUN and shard.exists():
            continue
        with tarfile.open(shard, "w") as archive:
            for i in range(first, min(first + 10, count)):
                image = make_image(folder / "image.jpg", (16, 16), seed=i)
                for suffix, content in (("jpg", image.read_bytes()), ("cls", str(i % 2).encode())):
                    member = tarfile.TarInfo(f"{i:03}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                image.unlink()
    return {"source": str(folder), "root": str(folder.parent / "index")}


def write_sounds(folder: Path, count: int) -> dict[str, str]:
    soundfile = pytest.importorskip("soundfile")
    for i in range(count):
        file = folder / ("no" if i % 2 else "yes") / f"{'a' if i >= BEGUN else 'm'}{i}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            soundfile.write(file, np.sin(np.arange(4000 + 300 * i) * (i + 1) / 50).astype(np.float32), 8000)
    return {"source": str(folder)}


def write_transcripts(folder: Path, count: int) -> dict[str, str]:
    settings = write_sounds(folder, count)
    for file in folder.rglob("*.wav"):
        file.with_suffix(".txt").write_text(f"it is {file.parent.name}")
    return settings


def write_pairs(folder: Path, count: int) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for language, word in (("en", "word"), ("de", "wort")):
        lines = [" ".join([word + str(i)] * (2 + i % 3 + 9 * (i >= BEGUN))) for i in range(count)]
        (folder / f"train.{language}").write_text("\n".join(lines) + "\n")
    return {
        "source": str(folder),
        "input": "en",
        "target": "de",
        "tokeniser": "bpe(300)",
        "root": str(folder / "cache"),
    }


def write_texts(folder: Path, count: int) -> dict[str, str]:
    for i in range(count):
        file = folder / "ab"[i % 2] / f"{'a' if i >= BEGUN else 'm'}{i}.txt"  # later ones sort first
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join([f"word{i}"] * (3 + i % 5 + 9 * (i >= BEGUN))))
    return {"source": str(folder), "root": str(folder.parent / "cache")}


WRITERS = [
    write_csv, write_divided, write_jsonl, write_parquet, write_shards, write_sounds, write_transcripts,
    write_pairs, write_texts,
]  # fmt: skip
Writer = Callable[[Path, int], dict[str, str]]


def opened(settings: dict[str, str], run: Path) -> Source:
    return open_data(DataConfig(batch_size=4, loaders=0, **settings), 0, folder=run)  # type: ignore[arg-type]


def batches(source: Source, settings: dict[str, str], epoch: int, shard: Shard) -> list[tuple[list[int], torch.Tensor]]:
    """Return the numbers of the samples in each batch of an epoch, and its targets, as one rank has them."""
    config = DataConfig(batch_size=4, loaders=0, **settings)  # type: ignore[arg-type]
    loader = TrainLoader(source, LoaderConfig(config, 0, torch.device("cpu")), shard)
    try:
        return [(batch.samples.tolist(), batch.targets) for batch in loader.epoch(epoch)]  # type: ignore[union-attr]
    finally:
        loader.close()


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_new_samples_come_once_each_from_the_next_epoch_on(write: Writer, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    run.mkdir()
    settings = write(data, BEGUN)
    before = opened(settings, run)
    assert before.sample_index is not None and not before.sample_index.is_kept
    before.sample_index.keep(run)
    as_begun = batches(before, settings, 1, Shard(0, 1))
    write(data, BEGUN + NEW)
    grown = opened(settings, run)
    assert grown.sample_index is not None and grown.sample_index.added == NEW
    assert (grown.info.train_size, grown.info.eval_size) == (before.info.train_size, before.info.eval_size)
    with pytest.raises(
        UserError, match=r"6 samples are new since the run began, such as .* `echelon resume .* --rescan`"
    ):
        grown.sample_index.check(run)
    grown.sample_index.grown(epoch=2).keep(run)
    after = opened(settings, run)
    assert after.sample_index is not None and not after.sample_index.added
    assert after.info.train_size == before.info.train_size + NEW and after.info.eval_size == before.info.eval_size
    assert [(stage.epoch, stage.count) for stage in after.info.stages] == [
        (0, before.info.train_size),
        (2, after.info.train_size),
    ]
    again = batches(after, settings, 1, Shard(0, 1))
    assert [samples for samples, _ in again] == [samples for samples, _ in as_begun]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again, as_begun, strict=True))
    seen = [i for rank in range(2) for samples, _ in batches(after, settings, 2, Shard(rank, 2)) for i in samples]
    assert len(set(seen)) == len(seen) == after.info.train_size
    if write is not write_sounds and write is not write_transcripts:  # what a model's size may follow
        assert after.info.inputs == before.info.inputs and after.info.targets == before.info.targets


@pytest.mark.parametrize("write", [write_csv, write_pairs])
def test_rows_that_are_gone_or_changed_are_refused(write: Writer, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    run.mkdir()
    settings = write(data, BEGUN)
    sample_index = opened(settings, run).sample_index
    assert sample_index is not None
    sample_index.keep(run)
    write(data, BEGUN - 2)
    with pytest.raises(UserError, match="2 of the run's 20 rows are gone: put them back"):
        opened(settings, run)
    write(data, BEGUN + NEW)
    file = next(each for each in sorted(data.iterdir()) if each.is_file())
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:3], lines[4], lines[3], *lines[5:]]))
    with pytest.raises(UserError, match="some of the run's 20 rows are not what they were"):
        opened(settings, run)


def test_whole_numbers_that_are_floats_by_new_rows_are_the_rows_that_they_were(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "t.csv"
    run.mkdir()
    settings = {"source": str(file), "target": "y"}
    rows = [f"{i * 3},,{i / 7}" for i in range(BEGUN)]
    file.write_text("\n".join(["a,b,y", *rows]) + "\n")
    settings["input"] = "a"
    sample_index = opened(settings, run).sample_index
    assert sample_index is not None
    sample_index.keep(run)
    file.write_text("\n".join(["a,b,y", *rows, "1.5,,2"]) + "\n")
    grown = opened(settings, run).sample_index
    assert grown is not None and grown.added == 1
