"""bf16: a cast to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.casts import Cast


@dataclass(frozen=True)
class Bf16(Cast):
    """Every element as bfloat16 (7 bits of fraction, the range of float32), rounded to nearest even.

    16 bits per element. Linear: sums are reduced in bfloat16. No error feedback: the error is that of one rounding.
    """

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16


CODEC = Bf16
