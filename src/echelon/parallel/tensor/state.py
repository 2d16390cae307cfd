"""Whole tensors under plain names, from a split model and into one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole model's state on every rank, in the original order; all ranks of the mesh call it together."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, the same on every rank, into a split model.

    Raises:
        ValueError: names or shapes are not the model's.
    """
    own = model.state_dict()
    if set(own) != set(state):
        raise ValueError(f"names differ: {sorted(set(own) ^ set(state))[:4]}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)}, the model's is {tuple(tensor.shape)}")
        if isinstance(tensor, DTensor):
            given = state[name].to(tensor.dtype).to(tensor.to_local().device)
            part = distribute_tensor(given, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        else:
            tensor.copy_(state[name])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
