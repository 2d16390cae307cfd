"""Images of shapes and their masks, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32


def make_shapes(root: Path, parts: tuple[str, ...] = ("",), count: int = 12, sizes: tuple[int, ...] = (SIDE,)) -> Path:
    """Write images of a disc and a square, and masks: 0 beside, 1 the disc, 2 the square, 255 around some.

    Every third image is ignored in its lower half: batches have pixels that count unevenly.

    Args:
        sizes: longer sides of the images, one after the other; the shorter one is three quarters of it.
    """
    numbers = np.random.default_rng(0)
    for part in parts:
        for name in ("images", "masks"):
            (root / part / name).mkdir(parents=True)
        for i in range(count):
            width = sizes[i % len(sizes)]
            height = width * 3 // 4
            image, mask = draw(numbers, height, width)
            if i % 3 == 0:
                mask[height // 2 :] = 255
            Image.fromarray(image).save(root / part / "images" / f"{i:03}.png")
            Image.fromarray(mask).save(root / part / "masks" / f"{i:03}.png")
    return root


def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy image `(height, width, 3)` of a red disc and a green square, and its mask."""
    down, across = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.uint8)
    radius = height // 5
    top, left = numbers.integers(0, height - 2 * radius), numbers.integers(0, width - 2 * radius)
    mask[top : top + 2 * radius, left : left + 2 * radius] = 2
    y, x = numbers.integers(radius, height - radius), numbers.integers(radius, width - radius)
    mask[(down - y) ** 2 + (across - x) ** 2 < radius**2] = 1
    image = numbers.normal(90, 25, (height, width, 3))
    image[mask == 1, 0] += 110
    image[mask == 2, 1] += 110
    return image.clip(0, 255).astype(np.uint8), mask
