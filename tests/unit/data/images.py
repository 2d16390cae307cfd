"""Small image folders for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def make_image(path: Path, size: tuple[int, int] = (40, 40), seed: int = 0, mode: str = "RGB") -> Path:
    """Write a smooth random image; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path)
    return path


def make_folder(root: Path, per_class: int = 3, classes: tuple[str, ...] = ("cat", "dog"), side: int = 40) -> Path:
    """Write `root/CLASS/N.jpg`."""
    for c, name in enumerate(classes):
        for i in range(per_class):
            make_image(root / name / f"{i}.jpg", (side, side), seed=100 * c + i)
    return root


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write a plain tar archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def make_shards(folder: Path, to: Path, label: str = "cls", per_shard: int = 4) -> Path:
    """Pack an image folder's samples, in its order, into `to/000.tar`, `to/001.tar`, ..."""
    names = sorted(each.name for each in folder.iterdir())
    samples = [(c, file) for c, name in enumerate(names) for file in sorted((folder / name).iterdir())]
    for start in range(0, len(samples), per_shard):
        members = {}
        for i, (c, file) in enumerate(samples[start : start + per_shard], start):
            text = {"cls": f"{c}\n", "txt": names[c], "json": f'{{"width": 40, "label": {c}}}'}[label]
            members |= {f"{i:04}{file.suffix}": file.read_bytes(), f"{i:04}.{label}": text.encode()}
        write_tar(to / f"{start // per_shard:03}.tar", members)
    return to
