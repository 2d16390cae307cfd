"""Synthetic images for `benchmarks.gpu`: `echelon train benchmarks.gpu_data:synthetic`."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.data import Dataset

_DISTINCT = 1024


class Images(Dataset[tuple[Tensor, int]]):
    """`count` random uint8 images (3, side, side) of 1000 classes, of which 1024 differ: an epoch may be long."""

    def __init__(self, count: int, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.count = count
        self.images = torch.randint(0, 256, (_DISTINCT, 3, side, side), generator=generator, dtype=torch.uint8)
        self.labels: list[int] = torch.randint(0, 1000, (_DISTINCT,), generator=generator).tolist()
        self.targets = [self.labels[i % _DISTINCT] for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.images[index % _DISTINCT], self.labels[index % _DISTINCT]


def synthetic() -> tuple[Images, Images, list[str]]:
    """Return images to train on and 64 to evaluate on; their number and side by ECHELON_BENCH_IMAGES and ..._SIDE."""
    count = int(os.environ.get("ECHELON_BENCH_IMAGES", "4096"))
    side = int(os.environ.get("ECHELON_BENCH_SIDE", "224"))
    return Images(count, side), Images(64, side), [str(i) for i in range(1000)]
