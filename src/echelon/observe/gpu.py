"""A GPU's own counters, through NVML (package `nvidia-ml-py`)."""

from __future__ import annotations

import math
from typing import Any


class Gpu:
    """One GPU by its UUID; NVML is opened at the first look.

    Args:
        uuid: as torch or nvidia-smi names it, with or without `GPU-`.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._handle: Any = None

    def read(self) -> tuple[float, float, float]:
        """Return utilisation in percent, bytes in use and bytes in all; NaN for a counter that this GPU does not have.

        Raises:
            RuntimeError: NVML is absent, knows no such GPU, or lost it.
        """
        import pynvml  # type: ignore[import-untyped]

        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            busy = self._busy(pynvml)
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML has no counters of {self._uuid}: {error}") from error
        return busy, float(memory.used), float(memory.total)

    def _busy(self, pynvml: Any) -> float:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except pynvml.NVMLError_NotSupported:  # a part of a GPU (MIG) has no such counter
            return math.nan
