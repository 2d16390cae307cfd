"""Replicas begin alike: each makes its weights by the seed, and all compare checksums instead of sending weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.errors import UserError

_DIGEST_BYTES = 32


def equalise(model: nn.Module, group: dist.ProcessGroup | None, apart: Collection[str] = ()) -> int:
    """Give every replica the first one's parameters and buffers, where some replica has others.

    Args:
        apart: names of those of which each replica has a part of its own.

    Returns:
        the bytes that this rank sent: none where all are alike, but for a checksum.

    Raises:
        UserError: the replicas have different models.
    """
    if group is None or dist.get_world_size(group) == 1:
        return 0
    tensors = [(name, t.detach()) for name, t in (*model.named_parameters(), *model.named_buffers())]
    tensors = [(name, tensor) for name, tensor in tensors if name not in apart]
    if not tensors:
        return 0
    forms = "".join(f"{name} {tuple(tensor.shape)} {tensor.dtype};" for name, tensor in tensors)
    form = hashlib.sha256(forms.encode()).digest()
    own = torch.tensor(
        [*form, *_digest([tensor for _, tensor in tensors])], dtype=torch.uint8, device=tensors[0][1].device
    )
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    if any(not torch.equal(row[:_DIGEST_BYTES], rows[0][:_DIGEST_BYTES]) for row in rows):
        raise UserError("the ranks have built different models: names or shapes of their parameters are not the same")
    if all(torch.equal(row, rows[0]) for row in rows):
        return 0
    for _, tensor in tensors:
        held = tensor.contiguous()
        dist.broadcast(held, group=group, group_src=0)
        tensor.copy_(held)
    sends = dist.get_group_rank(group, dist.get_rank()) == 0
    return (len(rows) - 1) * sum(tensor.nbytes for _, tensor in tensors) if sends else 0


def _digest(tensors: list[Tensor]) -> bytes:
    """Return the SHA-256 of the tensors' values, in row-major order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
