"""Names of the axes of a device mesh, outermost (slowest links) first."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """One way of dividing a model or its data over ranks."""

    DP = "dp"
    PP = "pp"
    FSDP = "fsdp"
    TP = "tp"
