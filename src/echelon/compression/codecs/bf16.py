"""bf16: every element in 16 bits, with the range of float32.

Helps: Any link that slows the run a little: half the bytes, at the same accuracy.
Costs: nearly no computation.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.casts import Cast


@dataclass(frozen=True)
class Bf16(Cast):
    """Round every element to bfloat16 (7 bits of fraction), to the nearest even.

    Linear: the backend sums messages as they are, in bfloat16. Rounding to the nearest is biased, but by at most
    2^-8 of an element, so there is no error feedback. 16 bits per element.

    Paper: Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.
    """

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16


CODEC = Bf16
