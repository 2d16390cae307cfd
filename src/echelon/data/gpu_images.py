"""JPEG files decoded, cropped and resized on a GPU, some batches ahead of training, by nvImageCodec.

The processor only reads the files, so few cores feed a fast GPU. Pixels differ from those of the processor's way by
rounding. What is no whole JPEG file, and what the GPU cannot decode, the processor does.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.core.errors import UserError
from echelon.data.assemble import ImageRows
from echelon.data.base import BadSample
from echelon.data.decode import CannotDecode, Picture, as_picture, picture_of
from echelon.data.images import EncodedImages
from echelon.data.order import Indices
from echelon.data.pool import LoaderFailed

logger = logging.getLogger(__name__)
LIBRARY = "nvidia.nvimgcodec"
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_AT_ONCE = 32 << 20  # bytes of files: decoded they take about ten times that
_AHEAD = 3  # batches that are under way or wait
_READERS = 4  # threads: reading files waits for the storage
Decode = Callable[[Sequence[bytes], int], Sequence[Any]]
"""Decodes image files on a CUDA stream to arrays `(H, W, 3)` there; None for a file that it cannot."""


@dataclass(frozen=True)
class Decoded:
    """A batch on the device: pixels 0 to 255, float32 `(N, C, S, S)`, labels `(N,)`, and the samples that are bad."""

    pixels: Tensor
    labels: Tensor
    bad: list[BadSample]


def check_library() -> None:
    """Refuse where nvImageCodec is not installed.

    Raises:
        UserError: says what to install.
    """
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(LIBRARY) is not None:
            return
    raise UserError("--decode gpu needs nvImageCodec: install echelon[gpu-jpeg], or use --decode cpu")


def nvimagecodec(device: torch.device) -> Decode:
    """Return what decodes with nvImageCodec on a GPU: RGB, as the file's pixels lie (EXIF orientation is ignored)."""
    codec: Any = importlib.import_module(LIBRARY)
    kinds = codec.BackendKind
    on_gpu = [codec.Backend(kind) for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)]
    place = torch.cuda.current_device() if device.index is None else device.index
    decoder = codec.Decoder(device_id=place, backends=on_gpu)
    settings = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)

    def decode(files: Sequence[bytes], stream: int) -> Sequence[Any]:
        """Decode them all in one call."""
        images: Sequence[Any] = decoder.decode(list(files), params=settings, cuda_stream=stream)
        return images

    return decode


class GpuImages:
    """Makes batches of images on a device.

    Args:
        rows: of images that lie in `files`.
        decode: on the device.
        timeout_s: how long a batch is waited for.

    Attributes:
        by_processor: JPEG files that the GPU could not decode.
    """

    def __init__(
        self, rows: ImageRows, files: EncodedImages, device: torch.device, decode: Decode, timeout_s: float
    ) -> None:
        self._rows, self._files, self._device, self._decode, self._timeout_s = rows, files, device, decode, timeout_s
        self.by_processor = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="image-reader")
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="image-maker")

    def run(self, epoch: int, batches: Sequence[Indices]) -> Iterator[Decoded]:
        """Give the batches of some draws in order, made ahead; may be left before its end.

        Raises:
            UserError: an image cannot be decoded, unless they are to be skipped.
            LoaderFailed: a batch took too long.
        """
        waiting: deque[Future[Decoded]] = deque()
        rest = iter(batches)
        try:
            for draws in itertools.islice(rest, _AHEAD):
                waiting.append(self._maker.submit(self._make, epoch, draws))
            while waiting:
                made = self._waited_for(waiting.popleft())
                for draws in itertools.islice(rest, 1):
                    waiting.append(self._maker.submit(self._make, epoch, draws))
                yield made
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._maker, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _waited_for(self, batch: Future[Decoded]) -> Decoded:
        try:
            return batch.result(timeout=self._timeout_s)
        except TimeoutError as error:
            raise LoaderFailed(
                f"no batch of images was read and decoded for {self._timeout_s:.0f} s: is the storage stuck?"
            ) from error

    def _make(self, epoch: int, draws: Indices) -> Decoded:
        """Make one batch, and wait until the device has."""
        if self._stream is None:
            return self._made(epoch, draws, 0)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            made = self._made(epoch, draws, self._stream.cuda_stream)
        self._settle()
        return made

    def _settle(self) -> None:
        """Wait until the device has done what was asked for."""
        if self._stream is not None:
            self._stream.synchronize()

    def _made(self, epoch: int, draws: Indices, stream: int) -> Decoded:
        rows, indices = self._rows, draws % len(self._rows.labels)
        files = list(self._readers.map(self._contents, indices.tolist()))
        pixels = torch.zeros((len(draws), *rows.specs[0].shape), device=self._device)
        numbers = rows.crop_draws(epoch, draws)
        bad: list[BadSample] = []
        for places in _slices(files):
            images = self._images([files[row] for row in places], stream)
            for row, image in zip(places, images, strict=True):
                try:
                    pixels[row] = rows.fitted(
                        self._picture(files[row], image), None if numbers is None else numbers[row]
                    )
                except CannotDecode as error:
                    bad.append(rows.refused_or_skipped(row, int(indices[row]), error))
            self._settle()  # before the library may free the images
        labels = torch.from_numpy(rows.labels[indices]).to(self._device)
        return Decoded(pixels.round_(), labels, bad)

    def _images(self, files: Sequence[bytes | CannotDecode], stream: int) -> list[Any]:
        """Return what the GPU makes of files; None where it makes nothing."""
        images: list[Any] = [None] * len(files)
        whole = [(i, file) for i, file in enumerate(files) if isinstance(file, bytes) and _is_whole_jpeg(file)]
        if len(whole) < 2:  # the library's way with several threads may wait for ever with one
            return images
        found = self._decode([file for _, file in whole], stream)
        for (i, _), image in zip(whole, found, strict=True):
            images[i] = image
        missed = sum(image is None for image in found)
        if missed and not self.by_processor:
            logger.warning(
                "--decode gpu: the GPU cannot decode %d of %d JPEG files: the processor does", missed, len(found)
            )
        self.by_processor += missed
        return images

    def _picture(self, file: bytes | CannotDecode, image: Any) -> Picture:
        if isinstance(file, CannotDecode):
            raise file
        if image is None:
            return picture_of(file)
        return as_picture(torch.as_tensor(image, device=self._device).permute(2, 0, 1))

    def _contents(self, i: int) -> bytes | CannotDecode:
        try:
            return self._files.contents(i)
        except CannotDecode as error:
            return error


def _is_whole_jpeg(file: bytes) -> bool:
    """Whether a file is a JPEG that is not cut off: the GPU would fill up what lacks, and say nothing."""
    return file.startswith(_JPEG) and file[-64:].rstrip(b"\0").endswith(_JPEG_END)


def _slices(files: Sequence[bytes | CannotDecode]) -> Iterator[list[int]]:
    """Yield the places of files that are decoded together: the memory of those of a whole batch may be large."""
    places: list[int] = []
    n_bytes = 0
    for i, file in enumerate(files):
        size = len(file) if isinstance(file, bytes) else 0
        if places and n_bytes + size > _AT_ONCE:
            yield places
            places, n_bytes = [], 0
        places.append(i)
        n_bytes += size
    if places:
        yield places
