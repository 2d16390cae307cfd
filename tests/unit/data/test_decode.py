from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.data import decode
from echelon.data.decode import CannotDecode, open_picture
from tests.unit.data.images import make_image


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        *[(mode, ".jpg") for mode in ("RGB", "L", "CMYK")],
        *[(mode, ".png") for mode in ("RGB", "L", "RGBA", "LA", "P", "1", "I;16")],
        *[("RGB", suffix) for suffix in (".webp", ".bmp", ".tif", ".gif", ".ppm")],
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if mode == "I;16":
        Image.fromarray(np.full((30, 40), 200 * 256, dtype=np.uint16)).save(path)
        expected = np.full((30, 40, 3), 200)
    else:
        make_image(path, (40, 30), mode="L" if mode in ("L", "LA", "1", "I;16") else "RGB")
        Image.open(path).convert(mode).save(path)
        expected = np.asarray(Image.open(path).convert("RGB")).astype(int)
    pixels = open_picture(str(path)).load(1.0)
    assert pixels.shape == (3, 30, 40)
    assert pixels.dtype == torch.uint8
    difference = np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.mean() < 3  # the two JPEG decoders interpolate colour a little differently


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    path = make_image(tmp_path / "a.jpg", (40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(path).save(path, exif=exif)
    assert open_picture(str(path)).load(1.0).shape == (3, 30, 40)


def test_large_jpegs_are_scaled_by_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(make_image(tmp_path / "a.jpg", (400, 300)))
    whole = open_picture(path).load(1.0).float()
    monkeypatch.setattr(decode, "_LARGE_BYTES", 0)
    picture = open_picture(path)
    assert (picture.height, picture.width) == (300, 400)
    half = picture.load(0.4)
    assert half.shape == (3, 150, 200)
    assert (torch.nn.functional.avg_pool2d(whole, 2) - half.float()).abs().mean() < 3


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "cut png", "folder", "missing"])
def test_damaged_images_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jpg"
    if kind == "text":
        path.write_text("I am no image")
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        source = make_image(tmp_path / ("b.png" if "png" in kind else "b.jpg"), (90, 90)).read_bytes()
        path.write_bytes(source[: len(source) // 2])
    with pytest.raises(CannotDecode) as raised:
        open_picture(str(path)).load(1.0)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(("dtype", "words"), [("int32", "32-bit numbers, .*: give 8 or 16 bits"), ("float32", "float")])
def test_numbers_whose_white_nobody_knows_are_refused(tmp_path: Path, dtype: str, words: str) -> None:
    path = tmp_path / "a.tif"
    Image.fromarray(np.full((4, 4), 200, dtype=dtype)).save(path)
    with pytest.raises(CannotDecode, match=words):
        open_picture(str(path)).load(1.0)


def test_grey_of_16_bits_is_read_where_pillow_holds_it_in_32(tmp_path: Path) -> None:
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P5 2 1 65535\n" + bytes([200, 0, 100, 0]))
    assert open_picture(str(path)).load(1.0)[0].tolist() == [[200, 100]]
