"""State that differs per rank, brought to rank 0 for saving and picked out again after loading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.parts import RANKS
from echelon.checkpoint.tensors import as_bytes, from_bytes, stage
from echelon.checkpoint.tree import flatten, slots, unflatten
from echelon.core.errors import UserError
from echelon.core.state_tree import StateView

_ALIGNMENT = 16  # of each tensor among the bytes: it can then be used where it lies
_CHUNK_BYTES = 64 << 20  # bounds what rank 0 holds on its device


def gather_rank_state(local: StateView, group: dist.ProcessGroup | None = None) -> dict[int, StateView]:
    """Bring every rank's own state to rank 0 of `group`: {rank in group: state} there, an empty dict elsewhere.

    Collective: every rank of the group calls it; sizes and kinds of tensors may differ. The states travel as uint8
    tensors (a JSON tree, then the tensors' bytes), nothing is pickled. Tensors arrive on the CPU, in memory of their
    own. Waits are bounded by the group's timeout. Raises TypeError for a value that a checkpoint cannot hold.
    """
    tree, tensors = flatten(local)
    device = _device(group)
    text = _padded(torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8), ord(" "))
    parts = [_padded(as_bytes(tensor.resolve_conj().resolve_neg())) for tensor in tensors.values()]
    sizes = torch.tensor([text.numel(), sum(part.numel() for part in parts)], dtype=torch.int64, device=device)
    all_sizes = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_sizes, sizes, group=group)
    payload = torch.cat([part.to(device) for part in (text, *parts)])
    totals = [int(size.sum()) for size in all_sizes]
    gathered = _gather_bytes(payload, totals, group)
    return {rank: _unpack(data, int(all_sizes[rank][0])) for rank, data in enumerate(gathered)}


def broadcast_state(state: StateView | None, source: int, group: dist.ProcessGroup | None) -> tuple[StateView, int]:
    """Bring one rank's state to all of `group`; returns it, its tensors on the CPU, and the bytes that this rank sent.

    Collective, like `gather_rank_state`. The bytes are those of a tree, which is how they travel at best: the source is
    counted with a copy for each other rank.

    Args:
        state: on the rank `source` of the group; ignored elsewhere.
    """
    device, is_source = _device(group), dist.get_rank(group) == source
    text, payload = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    if is_source:
        tree, tensors = flatten(state or {})
        text = _padded(torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8), ord(" "))
        parts = [_padded(as_bytes(tensor.detach().resolve_conj().resolve_neg())) for tensor in tensors.values()]
        payload = torch.cat([part.to(device) for part in (text, *parts)])
    sizes = torch.tensor([text.numel(), payload.numel()], dtype=torch.int64, device=device)
    dist.broadcast(sizes, group=group, group_src=source)
    if not is_source:
        payload = torch.empty(int(sizes[1]), dtype=torch.uint8, device=device)
    for chunk in payload.split(_CHUNK_BYTES):
        dist.broadcast(chunk, group=group, group_src=source)
    sent = int(sizes[1]) * (dist.get_world_size(group) - 1) if is_source else 0
    return _unpack(payload.cpu(), int(sizes[0])), sent


def copy_state(state: StateView) -> StateView:
    """Return a state whose tensors have memory of their own, on the CPU."""
    tree, tensors = flatten(state)
    copied: StateView = unflatten(tree, stage(tensors))
    return copied


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
    """Bring payloads of `totals` bytes to rank 0, as CPU tensors; where they arrive on a GPU, a chunk at a time."""
    if dist.get_rank(group) != 0:
        for chunk in payload.split(_CHUNK_BYTES):
            dist.send(chunk, group=group, group_dst=0)
        return []
    received = [payload.cpu()]
    for source, total in enumerate(totals[1:], start=1):
        received.append(torch.empty(total, dtype=torch.uint8))
        for window in received[-1].split(_CHUNK_BYTES):
            chunk = window if payload.device == window.device else torch.empty_like(window, device=payload.device)
            dist.recv(chunk, group=group, group_src=source)
            if chunk is not window:
                window.copy_(chunk)
    return received


def _padded(data: Tensor, fill: int = 0) -> Tensor:
    """Return bytes whose number is a multiple of the alignment."""
    missing = -data.numel() % _ALIGNMENT
    return torch.nn.functional.pad(data, (0, missing), value=fill) if missing else data


def _unpack(data: Tensor, text_bytes: int) -> StateView:
    tree = json.loads(bytes(data[:text_bytes].numpy()))
    tensors, offset = {}, text_bytes
    for slot in slots(tree):
        n_bytes = slot.empty().nbytes
        piece = data[offset : offset + n_bytes]
        tensors[slot.name] = (
            piece.view(slot.dtype).view(slot.shape) if slot.strides is None else from_bytes(piece, slot)
        )
        offset += n_bytes + -n_bytes % _ALIGNMENT
    return unflatten(tree, tensors)
