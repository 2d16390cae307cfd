"""Finding the large elements without sorting: a threshold from a sample, then one pass over the tensor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.chunks import CHUNK

_SAMPLE = 1 << 18
_SMALL = 1 << 14
_TRIES = 4

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the indices where |x| > threshold, ascending, int64; x is 1-D and contiguous."""
    if x.device.type == "cpu":
        return torch.from_numpy(_above(x.numpy(), threshold))
    return torch.nonzero(x.abs() > threshold).view(-1)


def _above(x: _Floats, threshold: float) -> _Ints:
    """Scan in pieces that stay in the cache."""
    magnitude = np.empty(min(CHUNK, x.size), x.dtype)
    large = np.empty(magnitude.size, np.bool_)
    limit = x.dtype.type(threshold)
    found: list[_Ints] = []
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK]
        np.abs(piece, out=magnitude[: piece.size])
        np.greater(magnitude[: piece.size], limit, out=large[: piece.size])
        found.append(np.flatnonzero(large[: piece.size]) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def sampled_threshold(x: Tensor, count: float) -> float:
    """Return a threshold that about `count` of the |x| exceed, from at most 262,144 evenly spaced elements."""
    if x.numel() == 0:
        return 0.0
    sample = x[:: -(-x.numel() // _SAMPLE)].abs()
    rank = round(count * sample.numel() / x.numel())
    if rank >= sample.numel():
        return 0.0
    return float(torch.kthvalue(sample, sample.numel() - rank).values)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest |x|, ascending, int64: exactly k, ties broken alike on every call.

    On a CPU a sampled threshold, set to let through somewhat more than k, leaves few candidates for the exact choice.
    """
    if x.device.type != "cpu":
        return torch.topk(x.abs(), k, sorted=False).indices.sort().values
    values = x.numpy()
    candidates: _Ints | None = None
    if x.numel() > _SMALL and k * 8 <= x.numel():
        candidates = _candidates(x, values, k)
    chosen = np.abs(values if candidates is None else values[candidates])
    if k < chosen.size:
        best = np.sort(np.argpartition(chosen, chosen.size - k)[chosen.size - k :])
    else:
        best = np.arange(chosen.size)
    return torch.from_numpy(best if candidates is None else candidates[best]).to(torch.int64)


def _candidates(x: Tensor, values: _Floats, k: int) -> _Ints | None:
    """Return at least k indices, ascending, that include the k largest; None if the sample did not help."""
    expected = k * min(_SAMPLE, x.numel()) / x.numel()
    slack = 1.05 + 4 / max(expected, 1.0) ** 0.5
    for _ in range(_TRIES):
        found = _above(values, sampled_threshold(x, slack * k))
        if found.size >= k:
            return found if found.size <= values.size // 2 else None
        slack *= 2
    return None
