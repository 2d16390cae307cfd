"""Tar shards: the batches of a folder, read by ranges; what cannot be read is refused in one line."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, check_source, labelled_files, open_data
from echelon.data.base import DataRequest
from echelon.data.labelled_files import OpenFiles
from echelon.data.sources import outline_of
from tests.unit.data.images import make_folder, make_image, make_shards, write_tar

ALONE = Shard(0, 1)


def config(source: Path, **more: object) -> DataConfig:
    return DataConfig(source=str(source), root=str(source.parent / "root"), batch_size=5, **more)  # type: ignore[arg-type]


def batches(data: DataConfig, shard: Shard = ALONE, first: int = 0) -> list[torch.Tensor]:
    loader = TrainLoader(open_data(data, 1), LoaderConfig(data, 1, torch.device("cpu")), shard)
    try:
        return [torch.cat([b.inputs.flatten(1), b.targets[:, None]], 1) for b in loader.epoch(2, first)]
    finally:
        loader.close()


@pytest.mark.parametrize("label", ["cls", "txt", "json"])
@pytest.mark.parametrize("loaders", [0, 2])
def test_batches_are_those_of_the_folder_for_every_world_size_and_after_a_stop(
    tmp_path: Path, label: str, loaders: int
) -> None:
    folder = make_folder(tmp_path / "files", per_class=9)
    shards = config(make_shards(folder, tmp_path / "shards", label), loaders=loaders)
    wanted = batches(config(folder, loaders=0))
    assert all(map(torch.equal, batches(shards), wanted))
    assert all(map(torch.equal, batches(shards, first=1), wanted[1:]))
    parts = zip(*(batches(shards, Shard(rank, 3)) for rank in range(3)), strict=True)
    assert all(torch.equal(torch.cat(part), whole) for part, whole in zip(parts, wanted, strict=True))
    info = open_data(shards, 1).info
    assert info.classes == (("cat", "dog") if label == "txt" else ("0", "1"))


def test_a_rank_reads_the_bytes_of_its_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = config(
        make_shards(make_folder(tmp_path / "files", per_class=8), tmp_path / "shards"), loaders=0, image_size=40
    )
    source = open_data(data, 1)
    loader = TrainLoader(source, LoaderConfig(data, 1, torch.device("cpu")), Shard(1, 2))
    read = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *place: read.append(place) or real(*place))  # type: ignore[func-returns-value]
    monkeypatch.setattr(labelled_files, "_MOST_OPEN", 2)  # of four
    seen = sum(len(batch.targets) for batch in loader.epoch(0))
    assert len(read) == seen < source.info.train_size


@dataclass
class Reads:
    """What was read of shards: archives that were gone through, by path, and ranges of members, by file and offset."""

    archives: list[str]
    members: list[tuple[str, int]]


def reads_of(data: DataConfig, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Begin as a run does, with batch `first` of the epoch, and stop before `last`."""
    found, through, pread = Reads([], []), tarfile.open, os.pread

    def opened(name: Path, *args: object, **kwargs: object) -> object:
        found.archives.append(str(name))
        return through(name, *args, **kwargs)  # type: ignore[call-overload]

    def ranged(descriptor: int, size: int, offset: int) -> bytes:
        found.members.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), offset))
        return pread(descriptor, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", opened)
        patch.setattr(os, "pread", ranged)
        outline_of(DataRequest(data, 1))
        loader = TrainLoader(open_data(data, 1), LoaderConfig(data, 1, torch.device("cpu")), ALONE)
        found.members.clear()  # what was looked at before the first batch
        epoch = loader.epoch(0, first)
        for _ in range(first, last):
            next(epoch)
        epoch.close()
        loader.close()
    return found


def test_a_resume_goes_through_no_shard_again_and_reads_the_members_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_folder(tmp_path / "files", per_class=20)
    data = config(make_shards(files, tmp_path / "shards"), loaders=0, image_size=40)
    count = len(list((tmp_path / "shards").rglob("*.tar")))
    begun = reads_of(data, 0, 3, monkeypatch)
    assert len(set(begun.archives)) == count > 2, "each is gone through once, for its index"
    resumed = reads_of(data, 3, 6, monkeypatch)
    assert len(set(resumed.archives)) <= 1, "the first one alone, for what the shards hold"
    assert len(begun.members) == len(set(begun.members)) == len(resumed.members) == 15
    assert not {*begun.members} & {*resumed.members}, "no sample's bytes are read again"


def test_parts_by_folder_and_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "files", per_class=10)
    for part in ("train", "test"):
        make_shards(folder, tmp_path / "two" / part, per_shard=20)
    two = open_data(config(tmp_path / "two"), 0)
    assert (two.info.train_size, two.info.eval_size, len(two.test)) == (18, 2, 20)  # type: ignore[arg-type]
    one = next((tmp_path / "two" / "train").iterdir())
    assert open_data(config(one), 0).info.train_size == 16
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in ("set-train-000", "set-train-001", "set-val-000"):
        (flat / f"{name}.tar").write_bytes(one.read_bytes())
    source = open_data(config(flat), 0)
    assert (source.info.train_size, source.info.eval_size, source.test) == (40, 20, None)
    (flat / "more.tar").write_bytes(one.read_bytes())
    with pytest.raises(UserError, match=r"is more.tar of train, val or test\?"):
        open_data(config(flat), 0)


def test_an_index_is_made_once_and_again_when_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "files", per_class=4)
    data = config(make_shards(folder, tmp_path / "shards"))
    first = open_data(data, 0)
    with monkeypatch.context() as patched:
        patched.setattr("echelon.data.tar_index._samples_of", None)
        assert open_data(data, 0).info == first.info
    make_image(folder / "dog" / "9.jpg")
    make_shards(folder, tmp_path / "shards", per_shard=9)
    (tmp_path / "shards" / "001.tar").unlink()
    assert open_data(data, 0).info.train_size + open_data(data, 0).info.eval_size == 9
    shard = str(tmp_path / "shards" / "000.tar")
    with pytest.raises(UserError, match=r"000.tar: it changed while the run reads it"):
        OpenFiles([shard], [1]).read(0, 0, 1)


def test_an_image_that_is_damaged_is_named(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "s.tar", {f"{i}.{e}": b"ab" for i in range(6) for e in ("jpg", "cls")})
    with pytest.raises(UserError, match=re.escape(f"{shard}: 0: cannot be decoded (it is no image)")):
        open_data(config(_labelled(shard)), 0)


def _labelled(shard: Path) -> Path:
    return write_tar(
        shard, {k: v for i in range(6) for k, v in {f"{i}.jpg": b"ab", f"{i}.cls": b"%d" % (i % 2)}.items()}
    )


def _pairs(count: int = 6, **more: bytes) -> dict[str, bytes]:
    members = {f"{i}.{e}": b"%d" % (i % 2) for i in range(count) for e in ("jpg", "cls")}
    return members | {name.replace("_", "."): content for name, content in more.items()}


def _without(name: str) -> dict[str, bytes]:
    return {key: content for key, content in _pairs().items() if key != name}


def _cut(by: int) -> Callable[[Path], None]:
    def cut(shard: Path) -> None:
        write_tar(shard, _pairs())
        os.truncate(shard, by)

    return cut


def _damaged(shard: Path) -> None:
    content = bytearray(write_tar(shard, _pairs()).read_bytes())
    content[2048 : 2048 + 300] = b"x" * 300
    shard.write_bytes(content)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda shard: shard.write_bytes(b""), "no tar archive that can be read"),
    "no tar": (lambda shard: shard.write_text("hello " * 400), "no tar archive that can be read"),
    "no samples": (lambda shard: write_tar(shard, {"README": b"hello"}), "holds no samples"),
    "cut within a member": (_cut(6 * 1024 + 513), "cut off"),
    "cut between members": (_cut(6 * 1024), "no end-of-archive block"),
    "damaged": (_damaged, "no member's header: the archive is damaged"),
    "no class": (lambda shard: write_tar(shard, _without("3.cls")), "sample 3 has no .cls as the first .* only .jpg"),
    "no image": (lambda shard: write_tar(shard, _without("3.jpg")), "sample 3 has no image .* only .cls"),
    "no classes at all": (lambda shard: write_tar(shard, {"1.jpg": b"", "2.jpg": b""}), "sample 1 has no class"),
    "two images": (lambda shard: write_tar(shard, _pairs(**{"2_png": b""})), "several images .*--input jpg"),
    "empty class": (lambda shard: write_tar(shard, _pairs() | {"2.cls": b" "}), "2.cls is empty, or no text"),
    "own class each": (lambda shard: write_tar(shard, _pairs() | {f"{i}.cls": b"%d" % i for i in range(6)}),
                       "6 samples have 6 different labels: are these classes"),
    "nothing known": (lambda shard: write_tar(shard, {"1.pth": b"", "1.cls": b"1"}), "1 has no image .* only .pth"),
    "two dots": (lambda shard: write_tar(shard, {"1.v1.jpg": b"", "1.cls": b"1"}), "--input v1.jpg"),
    "no json": (lambda shard: write_tar(shard, {"1.jpg": b"", "1.json": b"{"}), "1.json is no JSON"),
    "no field": (lambda shard: write_tar(shard, {"1.jpg": b"", "1.json": b'{"x": 1}'}), "no class .*--target names"),
    "gzip inside": (lambda shard: shard.write_bytes(gzip.compress(b"hello")), "compressed .gzip.*gunzip"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_shards_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    make, words = REFUSED[name]
    make(tmp_path / "shards.tar")
    with pytest.raises(UserError, match=words) as raised:
        open_data(config(tmp_path / "shards.tar"), 0)
    assert len(str(raised.value).splitlines()) == 1


def test_what_is_refused_of_several_shards(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "files", per_class=4)
    make_shards(folder, tmp_path / "a")
    make_shards(folder, tmp_path / "a" / "more", "txt")
    (tmp_path / "a" / "more" / "000.tar").rename(tmp_path / "a" / "002.tar")
    for rest in (tmp_path / "a" / "more").iterdir():
        rest.unlink()
    (tmp_path / "a" / "more").rmdir()
    with pytest.raises(UserError, match=r"002.tar: its classes are in .txt, those of .*000.tar in .cls"):
        open_data(config(tmp_path / "a"), 0)
    make_shards(folder, tmp_path / "b" / "train")
    write_tar(tmp_path / "b" / "val" / "0.tar", {"x.jpg": b"", "x.cls": b"7"})
    with pytest.raises(UserError, match=r"0.tar: sample x has the class '7', which the train part has not"):
        open_data(config(tmp_path / "b"), 0)
    (tmp_path / "b" / "train" / "000.tar").rename(tmp_path / "b" / "train" / "000.tar.gz")
    with pytest.raises(UserError, match=r"000.tar.gz: it is compressed \(gzip\).*gunzip 000.tar.gz"):
        check_source(str(tmp_path / "b"))


def test_the_field_and_the_image_may_be_named(tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    image = make_image(tmp_path / "x.png").read_bytes()
    members = {}
    for i in range(8):
        members |= {
            f"{i}.seen.png": image,
            f"{i}.jpg": b"",
            f"{i}.json": b'{"label": 1, "kind": "%s"}' % b"ab"[i % 2 :][:1],
        }
    source = open_data(config(write_tar(shard, members), input="seen.png", target="kind"), 0)
    assert source.info.classes == ("a", "b")
    with pytest.raises(UserError, match=r"0.json has no field 'sort': --target names another"):
        open_data(config(shard, input="seen.png", target="sort"), 0)
