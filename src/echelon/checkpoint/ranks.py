"""State that differs per rank, brought to rank 0 for saving and picked out again after loading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.store import RANKS
from echelon.checkpoint.tensors import as_bytes, from_bytes
from echelon.checkpoint.tree import flatten, slots, unflatten
from echelon.core.errors import UserError
from echelon.core.state_tree import StateView

_CHUNK_BYTES = 64 << 20  # bounds what rank 0 holds on its device to this much per rank


def gather_rank_state(local: StateView, group: dist.ProcessGroup | None = None) -> dict[int, StateView]:
    """Bring every rank's own state to rank 0 of `group`: {rank in group: state} there, an empty dict elsewhere.

    Collective: every rank of the group calls it; sizes and kinds of tensors may differ. The states travel as uint8
    tensors (a JSON tree, then the tensors' bytes), nothing is pickled. Tensors arrive on the CPU.
    Waits are bounded by the group's timeout. Raises TypeError for a value that a checkpoint cannot hold.
    """
    tree, tensors = flatten(local)
    device = _device(group)
    text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    parts = [as_bytes(tensor.resolve_conj().resolve_neg()) for tensor in tensors.values()]
    sizes = torch.tensor([text.numel(), sum(part.numel() for part in parts)], dtype=torch.int64, device=device)
    all_sizes = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_sizes, sizes, group=group)
    payload = torch.cat([part.to(device) for part in (text, *parts)])
    totals = [int(size.sum()) for size in all_sizes]
    gathered = _gather_bytes(payload, totals, group)
    return {rank: _unpack(data, int(all_sizes[rank][0])) for rank, data in enumerate(gathered)}


def pick_rank_state(state: StateView, rank: int) -> StateView:
    """Return what `rank` saved under `state["ranks"]`.

    Raises UserError when the checkpoint has no part for that rank, as when the world has grown.
    """
    parts: Mapping[Any, StateView] = state.get(RANKS, {})
    if rank not in parts:
        raise UserError(f"the checkpoint holds the state of ranks {sorted(parts)}, not of rank {rank}")
    return parts[rank]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _gather_bytes(payload: Tensor, totals: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather payloads of `totals` bytes on rank 0, as CPU tensors; in chunks, padded because gather wants one size."""
    is_root = dist.get_rank(group) == 0
    received = [torch.empty(total, dtype=torch.uint8) for total in totals] if is_root else []
    for start in range(0, max(totals), _CHUNK_BYTES):
        width = min(_CHUNK_BYTES, max(totals) - start)
        chunk = payload.new_zeros(width)
        piece = payload[start : start + width]
        chunk[: piece.numel()] = piece
        slots_ = [torch.empty_like(chunk) for _ in totals] if is_root else None
        dist.gather(chunk, slots_, group=group, group_dst=0)
        for target, source in zip(received, slots_ or []):
            window = target[start : start + width]
            window.copy_(source[: window.numel()])
    return received


def _unpack(data: Tensor, text_bytes: int) -> StateView:
    tree = json.loads(bytes(data[:text_bytes].numpy()))
    tensors, offset = {}, text_bytes
    for slot in slots(tree):
        end = offset + slot.empty().nbytes
        tensors[slot.name] = from_bytes(data[offset:end], slot)
        offset = end
    return unflatten(tree, tensors)
