"""Synthetic images for `benchmarks.gpu`: `echelon train benchmarks.gpu_data:synthetic`."""

from __future__ import annotations

import os

import torch
from torch.utils.data import TensorDataset


def synthetic() -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Return random uint8 images (N, 3, S, S) of 1000 classes; N and S by ECHELON_BENCH_IMAGES and ..._SIDE."""
    count = int(os.environ.get("ECHELON_BENCH_IMAGES", "4096"))
    side = int(os.environ.get("ECHELON_BENCH_SIDE", "224"))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 1000, (count,), generator=generator)
    return TensorDataset(images, labels), TensorDataset(images[:64], labels[:64]), [str(i) for i in range(1000)]
