"""bf16: a cast to 16 bits.

Helps: Any link that bounds the run a little: half the bytes for nearly no computation, at the same accuracy.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.casts import Cast


@dataclass(frozen=True)
class Bf16(Cast):
    """Every element as bfloat16 (7 bits of fraction, the range of float32), rounded to nearest even.

    16 bits per element. Linear: sums are reduced in bfloat16. Biased as any rounding to nearest is, by at most 2^-8 of
    an element: no error feedback.

    Paper: Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.
    """

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16


CODEC = Bf16
