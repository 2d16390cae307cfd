"""Curves for TensorBoard, beside the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Scalars:
    """Writes TensorBoard events to `RUN/tensorboard`; without a folder (ranks above 0) it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard")) if folder is not None else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by name, such as `train/loss`, at an optimizer step."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
