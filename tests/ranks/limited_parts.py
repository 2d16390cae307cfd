"""Ratings whose reader takes its process into a cgroup of its own, where it may have little memory from then on."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

IDS = 7_600_000
TABLE_BYTES = IDS * 33 * 4  # of `two_tower`: a vector of 32 and a bias
LIMITS, LIMIT_BYTES = "ECHELON_TEST_LIMITS", TABLE_BYTES // 4


def ratings() -> tuple[TensorDataset, TensorDataset]:
    """Return pairs of ids with a rating each; where LIMITS names a folder of cgroups, the process is limited first."""
    if LIMITS in os.environ:
        own = Path(os.environ[LIMITS]) / str(os.getpid())
        if not own.exists():
            own.mkdir()
            limit = next(each for each in ("memory.limit_in_bytes", "memory.max") if (own / each).exists())
            (own / limit).write_text(str(LIMIT_BYTES))
            (own / "cgroup.procs").write_text(str(os.getpid()))
    draw = torch.Generator().manual_seed(0)
    users, items = torch.randint(IDS, (4096,), generator=draw), torch.randint(7, (4096,), generator=draw)
    users[0] = IDS - 1
    columns = (users, items, torch.randn(4096, 1, generator=draw))
    return TensorDataset(*(c[:3584] for c in columns)), TensorDataset(*(c[3584:] for c in columns))
