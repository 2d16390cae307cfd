"""Loops of the codecs in C, compiled at their first use on the machine that runs them; numpy's give the same bits.

`kernels_for(tensors)` is None where the numpy loop must do: the caller has one.
"""

from echelon.compression.native.kernels import (
    Dither,
    Kernels,
    Packing,
    Rounding,
    kernels_for,
    kernels_on,
    streaming_kernels_for,
    switched_off,
    why_numpy,
)

__all__ = [
    "Dither",
    "Kernels",
    "Packing",
    "Rounding",
    "kernels_for",
    "kernels_on",
    "streaming_kernels_for",
    "switched_off",
    "why_numpy",
]
