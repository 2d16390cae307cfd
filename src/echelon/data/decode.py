"""From an image file to pixels: uint8, RGB, channels first. EXIF orientation is ignored."""

from __future__ import annotations

import contextlib
import functools
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_JPEG = b"\xff\xd8\xff"
# From this size on the decoder's own scaling by 1/2, 1/4 or 1/8 saves more than reading the header first costs.
_LARGE_BYTES = 512 * 1024
_SIXTEEN_BITS = ("PNG", "PPM")  # whose numbers are of 16 bits where Pillow holds them in 32
_RGB = 3  # torchvision.io.ImageReadMode.RGB


class CannotDecode(Exception):
    """The image is damaged, or no image; says why in a few words."""


class Picture(NamedTuple):
    """An image whose size is known and whose pixels may still have to be decoded.

    Args:
        height: in pixels.
        width: in pixels.
        load: called with the smallest scale that is still useful (1: full size), gives `(C, h, w)` uint8 with
            `height >= h >= height * scale`.
    """

    height: int
    width: int
    load: Callable[[float], Tensor]


def as_picture(pixels: Tensor) -> Picture:
    """Wrap decoded pixels `(C, h, w)`."""
    return Picture(pixels.shape[-2], pixels.shape[-1], lambda scale: pixels)


def open_picture(path: str) -> Picture:
    """Open an image file of any common format as RGB.

    torchvision decodes ordinary JPEGs (1.1 times as fast as Pillow for photos, twice for thumbnails); Pillow all else,
    and what torchvision cannot read.

    Raises:
        CannotDecode: here, or later from `load`.
    """
    return picture_of(contents_of(path))


def contents_of(path: str) -> bytes:
    """Read an image file.

    Raises:
        CannotDecode: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path costs more than the reading
            return file.readall()
    except OSError as error:
        raise CannotDecode(error.strerror or str(error)) from error


def picture_of(data: bytes) -> Picture:
    """Open what an image file holds (`open_picture`).

    Raises:
        CannotDecode: here, or later from `load`.
    """
    decode = _jpeg_decoder() if data.startswith(_JPEG) and len(data) < _LARGE_BYTES else None
    if decode is not None:
        try:
            return as_picture(decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), _RGB, False))
        except RuntimeError:
            pass  # an unusual JPEG or a damaged one: Pillow tells which
    return _open_with_pillow(data)


@functools.cache
def _jpeg_decoder() -> Callable[[Tensor, int, bool], Tensor] | None:
    """Return torchvision's JPEG decoder; None in a release without it (deprecated since 0.29): Pillow does it all.

    The operator itself: its wrapper in `torchvision.io` warns of that, and takes half as long as a small image.
    """
    with contextlib.suppress(ImportError):
        import torchvision.io  # noqa: F401 - registers it
    return getattr(torch.ops.image, "decode_jpeg", None)


def rgb_tensor(image: Any) -> Tensor:
    """Convert a Pillow image of any mode to `(3, h, w)` uint8: transparency is dropped, 16 bits become 8."""
    if image.mode.startswith("I") or image.mode == "F":
        if image.mode == "F":
            raise CannotDecode("its pixels are floating-point numbers")
        if image.mode == "I" and image.format not in _SIXTEEN_BITS:
            raise CannotDecode("its pixels are 32-bit numbers, of which nobody knows what is white: give 8 or 16 bits")
        grey = np.clip(np.asarray(image, dtype=np.int64) >> 8, 0, 255).astype(np.uint8)
        return torch.from_numpy(grey).expand(3, *grey.shape)
    if image.mode == "P":
        image = image.convert("RGBA")
    pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _open_with_pillow(data: bytes) -> Picture:
    from PIL import Image

    errors = (
        *(OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error),
        Image.DecompressionBombError,
    )
    try:
        image = Image.open(io.BytesIO(data))
    except errors as error:
        raise CannotDecode(_reason(error)) from error
    width, height = image.size

    def load(scale: float) -> Tensor:
        """Decode the image, a JPEG at the least size that is still useful."""
        try:
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                image.draft(None, (max(1, int(width * scale)), max(1, int(height * scale))))
            image.load()
        except errors as error:
            raise CannotDecode(_reason(error)) from error
        return rgb_tensor(image)

    return Picture(height, width, load)


def _reason(error: BaseException) -> str:
    if "cannot identify image file" in str(error):
        return "it is no image"
    return (str(error) or type(error).__name__).splitlines()[0]
