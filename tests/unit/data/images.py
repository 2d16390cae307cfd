"""Small image folders for tests."""

from __future__ import annotations

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
