"""Finding the large elements without sorting: a threshold from a sample, then one pass over the tensor."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.base import (
    State,
    moved,
    refuse_nonfinite,
    refuse_nonfinite_elements,
    refuse_nonfinite_together,
)
from echelon.compression.chunks import CHUNK
from echelon.compression.native import kernels_for

_SAMPLE = 1 << 18
_SMALL = 1 << 16
_TRIES = 4

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]


def above(x: Tensor, threshold: float, state: State) -> Tensor:
    """Return the indices where |x| > threshold, ascending, int64; x is 1-D and contiguous.

    Raises:
        NonFiniteError: x holds NaN or infinity, named by the state.
    """
    if (kernels := kernels_for(x)) is not None:
        indices, peak = kernels.above(x, threshold)
        refuse_nonfinite(peak, state)
        return indices
    if x.device.type == "cpu":
        return torch.from_numpy(_above(x.numpy(), threshold, state))
    refuse_nonfinite_elements(x, state)
    return torch.nonzero(x.abs() > threshold).view(-1)


def _above(x: _Floats, threshold: float, state: State) -> _Ints:
    """Scan in pieces that stay in the cache; the check for NaN and infinity costs no pass over memory of its own."""
    magnitude = np.empty(min(CHUNK, x.size), x.dtype)
    large = np.empty(magnitude.size, np.bool_)
    limit = x.dtype.type(threshold)
    found: list[_Ints] = []
    peaks: list[np.floating] = []
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK]
        np.abs(piece, out=magnitude[: piece.size])
        peaks.append(magnitude[: piece.size].max())
        np.greater(magnitude[: piece.size], limit, out=large[: piece.size])
        found.append(np.flatnonzero(large[: piece.size]) + start)
    refuse_nonfinite(np.max(peaks) if peaks else 0.0, state)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def sampled(x: Tensor, count: int) -> Tensor:
    """Return |x| of evenly spaced elements of a 1-D tensor: enough to hold 1,500 of its `count` largest, or 262,144.

    The distance is prime: one that shares a factor with a matrix's width would look at some of its columns alone.
    """
    size = min(max(1500 * x.numel() // max(count, 1), _SMALL), _SAMPLE)
    return x[:: _prime(x.numel() // size)].abs()


def _prime(least: int) -> int:
    """Return the smallest prime that is no less; 1 for up to 1."""
    found = max(least, 1)
    while any(found % divisor == 0 for divisor in range(2, math.isqrt(found) + 1)):
        found += 1
    return found


def quantile(sample: Tensor, count: float) -> float:
    """Return a threshold that about `count` of a sample's elements, 1-D, exceed."""
    rank = round(count)
    if rank >= sample.numel():
        return 0.0
    return float(torch.kthvalue(sample, sample.numel() - rank).values)


@dataclass(frozen=True)
class Ask:
    """What a search wants to know of its tensor x, about a number t.

    Attributes:
        what: `sampled`: how many elements of the sample exceed t; `quantile`: the threshold that t elements of the
            sample exceed; `above`: how many elements of x exceed t, whose indices are then kept.
    """

    what: Literal["sampled", "quantile", "above"]
    number: float


Search = Generator[Ask, float, bool]
"""Asks, and returns whether what was last found above a threshold is what it wanted."""


def search(asking: Search, x: Tensor, sample: Tensor, state: State) -> Tensor | None:
    """Answer a search on x [n]; returns the indices that it found, None if it is not content with them.

    Raises:
        NonFiniteError: x holds NaN or infinity, named by the state.
    """
    found: Tensor | None = None
    ask = next(asking)
    while True:
        if ask.what == "above":
            found = above(x, ask.number, state)
            answer = float(found.numel())
        elif ask.what == "quantile":
            answer = quantile(sample, ask.number)
        else:
            answer = float((sample > ask.number).sum())
        try:
            ask = asking.send(answer)
        except StopIteration as stop:
            return found if stop.value else None


def search_together(
    searches: Sequence[Search], tensors: Sequence[Tensor], samples: Sequence[Tensor], states: Sequence[State]
) -> list[Tensor | None]:
    """Do what `search` does to several tensors [n]; what they ask at a time is answered in few launches."""
    refuse_nonfinite_together(tensors, states)
    sizes, sample_rows = torch.stack(list(tensors)).abs_(), torch.stack(list(samples))
    found: list[Tensor | None] = [None] * len(tensors)
    waiting = {i: next(asking) for i, asking in enumerate(searches)}
    while waiting:
        answers = _quantiles(sample_rows, _asked(waiting, "quantile"))
        if wanted := _asked(waiting, "sampled"):
            counts = (sample_rows > _limits(wanted, sample_rows)).sum(dim=1).tolist()
            answers |= {i: float(counts[i]) for i in wanted}
        if wanted := _asked(waiting, "above"):
            for i, indices in _all_above(sizes, wanted).items():
                found[i], answers[i] = indices, float(indices.numel())
        for i, answer in answers.items():
            try:
                waiting[i] = searches[i].send(answer)
            except StopIteration as stop:
                del waiting[i]
                found[i] = found[i] if stop.value else None
    return found


def _asked(asks: Mapping[int, Ask], what: str) -> dict[int, float]:
    return {i: ask.number for i, ask in asks.items() if ask.what == what}


def _limits(wanted: Mapping[int, float], matrix: Tensor) -> Tensor:
    """Return the thresholds of a matrix's rows as a column; infinity where none is asked for."""
    numbers = np.array([wanted.get(i, math.inf) for i in range(len(matrix))])
    return moved(numbers, matrix.device).to(matrix.dtype).unsqueeze(1)


def _quantiles(samples: Tensor, wanted: Mapping[int, float]) -> dict[int, float]:
    """Do what `quantile` does with rows of samples."""
    answers: dict[int, float] = {}
    for count in sorted(set(wanted.values())):
        rank, rows = samples.shape[1] - round(count), [i for i, number in wanted.items() if number == count]
        values = torch.kthvalue(samples, rank, dim=1).values.tolist() if rank > 0 else [0.0] * len(samples)
        answers |= {i: values[i] for i in rows}
    return answers


def _all_above(sizes: Tensor, wanted: Mapping[int, float]) -> dict[int, Tensor]:
    """Return the indices, ascending, where rows of magnitudes exceed the thresholds that are asked for."""
    large = sizes > _limits(wanted, sizes)
    counts = large.sum(dim=1).tolist()
    columns = torch.nonzero(large)[:, 1].split(counts)
    return {i: columns[i] for i in wanted}


def largest_together(tensors: Sequence[Tensor], k: int, states: Sequence[State]) -> list[Tensor]:
    """Do what `largest` does to several tensors [n], all as long, in few launches."""
    refuse_nonfinite_together(tensors, states)
    found = torch.topk(torch.stack(list(tensors)).abs_(), k, dim=1, sorted=False).indices
    return list(found.sort(dim=1).values)


def by_length(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of 1-D tensors that are equally long, length by length."""
    alike: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(tensor.numel(), []).append(i)
    return list(alike.values())


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return x[indices]; both 1-D. (Several times faster than indexing.)"""
    return torch.index_select(x, 0, indices)


def scatter(target: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write values at distinct indices of a 1-D tensor, in place; through numpy, three times as fast, where it can."""
    values = values.to(target.dtype)
    if target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64):
        target.numpy()[indices.numpy()] = values.numpy()
    else:
        target[indices] = values


def largest(x: Tensor, k: int, state: State) -> Tensor:
    """Return the indices of the k largest |x| of x [n], ascending, int64 [k]; ties are broken alike on every call.

    On a CPU a sampled threshold, set to let through somewhat more than k, leaves few candidates for the exact choice.

    Raises:
        NonFiniteError: x holds NaN or infinity, named by the state.
    """
    if x.device.type != "cpu":
        refuse_nonfinite_elements(x, state)
        return torch.topk(x.abs(), k, sorted=False).indices.sort().values
    values = x.numpy()
    candidates: _Ints | None = None
    if x.numel() > _SMALL and k * 8 <= x.numel():
        candidates = _candidates(x, k, state)
    if candidates is None:
        refuse_nonfinite_elements(x, state)
    chosen = np.abs(values if candidates is None else np.take(values, candidates))
    if k < chosen.size:
        best = np.sort(np.argpartition(chosen, chosen.size - k)[chosen.size - k :])
    else:
        best = np.arange(chosen.size)
    return torch.from_numpy(best if candidates is None else candidates[best]).to(torch.int64)


def _candidates(x: Tensor, k: int, state: State) -> _Ints | None:
    """Return at least k indices, ascending, that include the k largest; None if the sample did not help."""
    sample = sampled(x, k)
    expected = k * sample.numel() / x.numel()
    slack = 1.05 + 4 / max(expected, 1.0) ** 0.5
    for _ in range(_TRIES):
        found = above(x, quantile(sample, slack * expected), state).numpy()
        if found.size >= k:
            return found if found.size <= x.numel() // 2 else None
        slack *= 2
    return None
