"""What can stand around any codec: clipping, momentum correction, error feedback, entropy coding. They compose.

A `Transform` sees the tensor before a codec encodes it and what was sent after it, and keeps memories of a value per
element; `chain` puts several around a codec. `Huffman` sees the encoded symbols. `with_transforms` is what specs use.
"""

from __future__ import annotations

from echelon.compression.transforms.base import weighted_sum
from echelon.compression.transforms.chain import Transformed, with_transforms, without_transforms
from echelon.compression.transforms.error_feedback import ErrorFeedback, resize
from echelon.compression.transforms.huffman import Huffman, entropy_coded
from echelon.compression.transforms.momentum import LocalClip, MomentumCorrection, momentum_of

__all__ = [
    "ErrorFeedback",
    "Huffman",
    "LocalClip",
    "MomentumCorrection",
    "Transformed",
    "entropy_coded",
    "momentum_of",
    "resize",
    "weighted_sum",
    "with_transforms",
    "without_transforms",
]
