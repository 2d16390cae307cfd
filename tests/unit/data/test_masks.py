"""Folders of images and masks: how they are paired, checked, brought to one size and augmented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.config import DataConfig, build
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, TrainLoader, open_data
from echelon.data.cache import locked
from echelon.data.decode import as_picture
from echelon.data.masks import Frame, MaskedImages, pixel_counts, read_mask
from echelon.data.sources import kind_of
from echelon.run.defaults import with_task_defaults
from tests.unit.data.shapes import make_shapes

CPU = torch.device("cpu")


def settings(root: Path, **data: object) -> LoaderConfig:
    named = {"source": str(root), "root": str(root.parent), "loaders": 0, "batch_size": 5}
    return LoaderConfig(DataConfig(**named | data), seed=0, device=CPU)  # type: ignore[arg-type]


def opened(root: Path, **data: object) -> Source:
    return open_data(settings(root, **data).data, 0)


def write(values: np.ndarray, path: Path) -> None:
    Image.fromarray(values).save(path)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_global_batch_does_not_depend_on_ranks_or_loaders(tmp_path: Path, loaders: int) -> None:
    root = make_shapes(tmp_path / "data", sizes=(32, 48))
    source = opened(root)
    alone = TrainLoader(source, settings(root), Shard(0, 1))
    ranks = [TrainLoader(source, settings(root, loaders=loaders), Shard(rank, 2)) for rank in range(2)]
    try:
        for epoch in (0, 1):
            for whole, *parts in zip(alone.epoch(epoch), *(rank.epoch(epoch) for rank in ranks), strict=True):
                assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
                assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    finally:
        for each in (alone, *ranks):
            each.close()


def test_parts_of_a_folder_and_names_of_classes(tmp_path: Path) -> None:
    root = make_shapes(tmp_path / "a", ("train", "val", "test"), 6, sizes=(30,))
    (root / "classes.txt").write_text("beside\ndisc\nsquare\nhat\n")
    source = opened(root)
    assert (source.info.train_size, source.info.eval_size, len(source.test)) == (6, 6, 6)  # type: ignore[arg-type]
    assert source.info.classes == ("beside", "disc", "square", "hat") and source.info.image_size == 32
    assert source.info.class_counts[3] == 0 and "(hat)" in source.notes[0]
    source = opened(make_shapes(tmp_path / "b", ("train", "test"), 10))
    assert (source.info.train_size, source.info.eval_size, source.info.classes) == (9, 1, ("0", "1", "2"))
    assert with_task_defaults(build(None, {"data.source": str(root)})).config.training.epochs == 40


def test_masks_that_were_counted_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_shapes(tmp_path / "data")
    first = opened(root)
    monkeypatch.setattr("echelon.data.masks.read_mask", lambda path: pytest.fail(f"{path} is read"))
    assert opened(root).info == first.info


def test_pixels_that_were_counted_are_used_where_no_lock_can_be_made(tmp_path: Path) -> None:
    pairs = opened(make_shapes(tmp_path / "data")).train
    assert isinstance(pairs, MaskedImages)
    counts = pixel_counts(pairs, str(tmp_path / "root"))
    for lock in (tmp_path / "root" / "masks").glob("*.lock"):
        lock.unlink()
        lock.mkdir()
    assert (pixel_counts(pairs, str(tmp_path / "root")) == counts).all()


def test_what_may_all_be_there_is_read_without_a_lock_where_nobody_can_write() -> None:
    lock = Path("/sys/echelon.lock")  # where not even root makes a file
    with locked(lock, 1.0, "busy", is_required=False):
        pass
    with pytest.raises(UserError, match=r"/sys cannot be written"), locked(lock, 1.0, "busy"):
        pass


@pytest.mark.parametrize("numbers", [None, *np.random.default_rng(0).random((40, 4))], ids=str)
def test_an_image_and_its_mask_move_together(numbers: np.ndarray | None) -> None:
    mask = np.zeros((48, 64), np.uint8)
    mask[10:30, 20:50] = 1
    image = torch.from_numpy(np.stack([mask * 200] * 3))
    pixels, classes = np.full((3, 64, 64), 7, np.uint8), np.full((64, 64), -100, np.int64)
    frame = Frame.of(as_picture(image), 64, numbers)
    frame.place(image, torch.from_numpy(mask), pixels, classes)
    there = classes != -100
    assert ((pixels[0] > 100) != (classes == 1))[there].mean() < 0.02
    assert (pixels[:, ~there] == 7).all() and there.any()
    if numbers is None:
        assert (there[:48] == 1).all() and not there[48:].any()


def test_indices_of_a_palette_and_one_bit_are_class_numbers(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.uint8).reshape(2, 3)
    palette = Image.fromarray(numbers).convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0] * 128)
    palette.save(tmp_path / "palette.png")
    assert (read_mask(str(tmp_path / "palette.png")) == numbers).all()
    Image.fromarray(numbers > 2).save(tmp_path / "bits.png")
    assert (read_mask(str(tmp_path / "bits.png")) == (numbers > 2)).all()


def binary(root: Path) -> None:
    for file in (root / "masks").iterdir():
        write(np.where(np.asarray(Image.open(file)) > 0, 255, 0).astype(np.uint8), file)


def lossy(root: Path) -> None:
    (root / "masks" / "003.png").rename(root / "masks" / "003.jpg")


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no mask": (lambda root: (root / "masks" / "003.png").unlink(), "003.png: this image has no mask: add "),
    "no image": (
        lambda root: (root / "images" / "003.png").unlink(),
        "this mask has no image: add 003.jpg or the like",
    ),
    "colours": (
        lambda root: write(np.zeros((24, 32, 3), np.uint8), root / "masks" / "003.png"),
        r"003.png: this mask has colours \(RGB\): write the class number of each pixel",
    ),
    "size": (
        lambda root: write(np.zeros((24, 33), np.uint8), root / "masks" / "003.png"),
        "this mask is 33x24 pixels, its image 32x24: resize one",
    ),
    "ignored alone": (
        lambda root: write(np.full((24, 32), 255, np.uint8), root / "masks" / "003.png"),
        "003.png: all pixels of this mask are 255, which is ignored: write",
    ),
    "0 and 255": (binary, r"class 0 alone \(beside 255, which is ignored and is no class\): write the class numbers"),
    "beyond": (lambda root: (root / "classes.txt").write_text("a\nb\n"), "has class 2, and classes.txt names 0 to 1"),
    "jpeg": (lossy, "003.jpg: masks must be PNG"),
    "no number": (
        lambda root: write(np.full((24, 32), 900, np.uint16), root / "masks" / "003.png"),
        "has the number 900: class numbers are 0 to 254",
    ),
    "no masks": (lambda root: (root / "masks").rename(root / ".masks"), "no masks/ beside images/"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_folders_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    mistake, said = MISTAKES[name]
    root = make_shapes(tmp_path / "data", count=6)
    mistake(root)
    with pytest.raises(UserError, match=said) as refused:
        opened(root)
    assert "\n" not in str(refused.value)


def test_what_moves_images_alone_is_refused(tmp_path: Path) -> None:
    root = make_shapes(tmp_path / "data", count=6)
    source = opened(root)
    for data in ({"augment": "flip_crop"}, {"transform": "torch:flip"}):
        with pytest.raises(UserError, match=r"images alone, and .* has masks"):
            TrainLoader(source, settings(root, **data), Shard(0, 1))
    with pytest.raises(UserError, match="--task regression is for others, use --task segmentation"):
        open_data(settings(root).data, 0, "regression")


def test_folders_of_classes_are_still_folders_of_classes(tmp_path: Path) -> None:
    for name in ("cat", "images"):
        (tmp_path / name).mkdir()
    assert kind_of(str(tmp_path)).form == "a folder"


def test_a_pair_with_a_damaged_mask_is_refused_or_left_out(tmp_path: Path) -> None:
    root = make_shapes(tmp_path / "data", ("train", "val"), 6, sizes=(32,))
    (root / "train" / "masks" / "003.png").write_bytes(b"no image")
    with pytest.raises(
        UserError, match=r"003\.png: its mask cannot be decoded: .* --on-bad-image skip leaves the pair"
    ):
        opened(root)
    loader = TrainLoader(
        opened(root, on_bad_image="skip"), settings(root, on_bad_image="skip", batch_size=6), Shard(0, 1)
    )
    try:
        (batch,) = loader.epoch(0)
        ((path, reason),) = loader.bad_images
    finally:
        loader.close()
    assert len(batch.targets) == 5 and path.endswith("003.png") and "its mask cannot be decoded" in reason
