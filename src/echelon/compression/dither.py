"""Dither for stochastic rounding: floor(x + u), u uniform on [0, 1), is x on average.

Numbers are not drawn one by one. One table holds the 131,072 values (k + 1/2) / 131,072 in an order fixed by an integer
hash; each stretch of 131,072 elements (fewer where blocks do not divide it) reads the table from an offset hashed from
(seed, tensor, step, sender, stretch). Over the offsets every element's dither is exactly uniform, so rounding is
unbiased to 2**-17 of a level; and all devices give the same bits at the price of one addition per element.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PERIOD = 1 << 17

_U64 = npt.NDArray[np.uint64]


def _hash(words: _U64) -> _U64:
    """splitmix64, elementwise."""
    with np.errstate(over="ignore"):
        x = words + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def table(device: torch.device) -> Tensor:
    """Return the table twice over: float32 [2 * PERIOD]; do not write to it."""
    order = np.argsort(_hash(np.arange(PERIOD, dtype=np.uint64)), kind="stable")
    once = ((order + 0.5) / PERIOD).astype(np.float32)
    return torch.from_numpy(np.concatenate([once, once])).to(device)


def offsets(key: int, count: int) -> list[int]:
    """Return where each of `count` stretches starts to read the table, from the message's key."""
    stretches = np.arange(count, dtype=np.uint64) + np.uint64(key)
    return [int(v) for v in _hash(_hash(stretches)) & np.uint64(PERIOD - 1)]


def gathered(key: int, n: int, stretch: int, device: torch.device) -> Tensor:
    """Return the dither of n elements in stretches of that length: float32 [n], as if read window by window."""
    starts = torch.tensor(offsets(key, -(-n // stretch)), device=device)
    index = torch.arange(n, device=device)
    return table(device)[starts[index // stretch] + index % stretch]
