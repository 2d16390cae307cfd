"""Curves for TensorBoard, beside the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Scalars:
    """Writes TensorBoard events to `RUN/tensorboard`; without a folder (ranks above 0) it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(str(folder / "tensorboard")) if folder is not None else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by name, such as `train/loss`, at an optimizer step: all in one event, which costs a third."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_summary(Summary(value=named), step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
