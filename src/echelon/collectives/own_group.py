"""A process group for what travels behind the computation: nobody else's collectives come between."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of the same ranks with the same timeout; all of them call it together."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout = group._get_backend(device).options._timeout
    assert isinstance(timeout, timedelta)
    made = dist.new_group(dist.get_process_group_ranks(group), timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
