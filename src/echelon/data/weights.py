"""Weighted sampling: an epoch is N draws with replacement, as torch's WeightedRandomSampler makes them.

Which sample a draw takes is a function of (seed, epoch, place of the draw) alone, so each draw is used once, whatever
the number of ranks. A sample that is drawn again in an epoch is augmented anew.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.data.order import Indices, draw_uniforms
from echelon.tasks.nest import Nest

UNWEIGHTED, INVERSE_CLASS = "none", "inverse-class"
Weights = NDArray[np.float64]


def check_weights(spec: str) -> None:
    """Refuse a file of weights that is not there.

    Raises:
        UserError: names it.
    """
    if spec not in (UNWEIGHTED, INVERSE_CLASS) and not Path(spec).is_file():
        raise UserError(
            f"--sample-weights {spec}: no such file; write none, inverse-class, or a file with one weight for each "
            "training sample (.npy, or a number a line)"
        )


def read_weights(spec: str, info: DataInfo, labels: Nest) -> Weights | None:
    """Return the weight of each training sample; None where all are drawn once.

    Args:
        spec: `none`, `inverse-class`, or a file.
        labels: class numbers `(N,)` of the training samples, where the data has classes.

    Raises:
        UserError: the file, or the data, does not give N weights that can be drawn by.
    """
    if spec == UNWEIGHTED:
        return None
    if spec == INVERSE_CLASS:
        if not info.classes or not (isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"):
            raise UserError(
                f"--sample-weights inverse-class needs one class for each sample, and {info.name} has none: give a file"
            )
        weights: Weights = 1.0 / np.maximum(np.asarray(info.class_counts, np.float64), 1.0)[labels]
        return weights
    check_weights(spec)
    try:
        weights = np.load(spec, allow_pickle=False) if spec.endswith(".npy") else np.loadtxt(spec, ndmin=1)
        weights = np.asarray(weights, np.float64)
    except (ValueError, OSError) as error:
        raise UserError(f"--sample-weights {spec}: cannot be read: {' '.join(str(error).split())[:150]}") from None
    if weights.shape != (info.train_size,):
        raise UserError(
            f"--sample-weights {spec} has shape {weights.shape}: {info.name} has {info.train_size} training samples, "
            "each needs one weight"
        )
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise UserError(f"--sample-weights {spec}: weights are finite, not negative and not all zero")
    return weights


def weights_name(spec: str, weights: Weights | None) -> str:
    """Return what tells one sampling from another, for a checkpoint of the run."""
    return spec if weights is None else f"{spec} {zlib.crc32(weights.tobytes()):08x}"


def weighted_batches(weights: Weights, batch_size: int, seed: int, epoch: int) -> list[Indices]:
    """Return the global batches of one epoch: N draws in proportion to the weights, with replacement.

    Returns:
        `ceil(N / batch_size)` arrays of draws: draw d is of sample d % N, which was drawn
        d // N times before in this epoch.
    """
    n = len(weights)
    ends = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])
    drawn = np.minimum(np.searchsorted(ends, draw_uniforms(seed, epoch, n) * ends[-1], side="right"), last)
    draws = drawn + n * _times_before(drawn)
    return [draws[start : start + batch_size] for start in range(0, n, batch_size)]


def _times_before(drawn: Indices) -> Indices:
    """Return how often each entry's value stands before it.

    >>> _times_before(np.array([5, 3, 5, 5, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(drawn, kind="stable")
    in_order = drawn[order]
    begins = np.maximum.accumulate(np.where(np.r_[True, in_order[1:] != in_order[:-1]], np.arange(len(drawn)), 0))
    times = np.empty_like(drawn)
    times[order] = np.arange(len(drawn)) - begins
    return times
