"""fp16: every element in 16 bits, more exact than bf16 but with a smaller range.

Helps: The same links as bf16, if gradients stay within +-65,504.
Costs: nearly no computation.
Needs: gradients within the range of float16: larger ones are refused like infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echelon.compression.casts import Cast


@dataclass(frozen=True)
class Fp16(Cast):
    """Round every element to float16 (10 bits of fraction), to the nearest even.

    Linear: the backend sums messages as they are, in float16. Rounding to the nearest is biased, but by at most
    2^-11 of an element (2^-25 below 6e-5), so there is no error feedback. 16 bits per element.

    Paper: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
    """

    name: ClassVar[str] = "fp16"
    wire_dtype: ClassVar[torch.dtype] = torch.float16


CODEC = Fp16
