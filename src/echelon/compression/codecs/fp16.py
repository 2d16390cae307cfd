"""fp16: a cast to 16 bits.

Helps: As bf16, where gradients stay within +-65,504; more digits, less range.
Needs: gradients within the range of float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.casts import Cast


@dataclass(frozen=True)
class Fp16(Cast):
    """Every element as float16 (10 bits of fraction), rounded to nearest even; beyond 65,504 is refused like infinity.

    16 bits per element. Linear: sums are reduced in float16. Biased as any rounding to nearest is, by at most 2^-11 of
    an element (2^-25 below 6e-5): no error feedback.

    Paper: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
    """

    name: ClassVar[str] = "fp16"
    wire_dtype: ClassVar[torch.dtype] = torch.float16


CODEC = Fp16
