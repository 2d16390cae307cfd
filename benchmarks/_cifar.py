"""CIFAR-10 in memory: decoded once from the archive of JPEG folders into ignored `.npy` files."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks._common import DATA, REPOSITORY

ARCHIVE = REPOSITORY.parent / "shared" / "data" / "cifar10-imagefolder.tar.gz"
MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def arrays(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (images uint8 (N, 3, 32, 32), labels int64 (N,)) of `train` or `test`, mapped from disk.

    Raises:
        FileNotFoundError: neither the cache nor the archive is there.
    """
    images, labels = _cache(part)
    if not labels.exists():
        _decode()
    return np.load(images, mmap_mode="r"), np.load(labels)


def _cache(part: str) -> tuple[Path, Path]:
    return DATA / f"cifar10-{part}-images.npy", DATA / f"cifar10-{part}-labels.npy"


def _decode() -> None:
    if not ARCHIVE.exists():
        raise FileNotFoundError(
            f"{ARCHIVE} is not there: put CIFAR-10 as an archive of JPEG folders beside the checkout"
        )
    images: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[str]] = {"train": [], "test": []}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if not member.isfile() or not member.name.endswith(".jpg"):
                continue
            _, part, label, _ = member.name.split("/")
            file = archive.extractfile(member)
            assert file is not None
            images[part].append(np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1))
            labels[part].append(label)
    DATA.mkdir(exist_ok=True)
    classes = sorted(set(labels["train"]))
    for part in images:
        to_images, to_labels = _cache(part)
        _save(to_images, np.stack(images[part]))
        _save(to_labels, np.array([classes.index(label) for label in labels[part]], dtype=np.int64))


def _save(path: Path, array: np.ndarray) -> None:
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    with partial.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
