"""Sharding of parameters, gradients and optimizer state over the ranks of a replica, block by block (`fully_shard`).

Zhao et al. 2023, arXiv:2304.11277; each rank keeps 1/N of every tensor (rows), gathers a block's parameters for its
forward and backward, and keeps its part of the summed gradient. Between replicas `sync` acts on the shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from echelon.core.errors import UserError
from echelon.torch_compat import BatchNormBase


def shard(
    model: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, param_dtype: torch.dtype | None = None
) -> None:
    """Shard a model in place over a 1-D mesh: each block by itself, then what is left with the root.

    Gradients are summed, not averaged: losses are divided by the global batch.

    Args:
        narrow: type of the gathered copies that forward and backward use; gradients are summed in float32.

    Raises:
        UserError: a parameter has no rows to share, or narrow ones would be BatchNorm's.
    """
    if param_dtype is not None and any(isinstance(m, BatchNormBase) for m in model.modules()):
        raise UserError(
            f"--parallel fsdp={mesh.size()} with --precision bf16-params: BatchNorm's statistics would be lost in "
            "bfloat16; use --precision bf16, or dp=N"
        )
    policy = MixedPrecisionPolicy()
    if param_dtype:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UserError(f"--parallel fsdp={mesh.size()}: the parameter {name} is a single number and has no rows")
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    for block in blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: a forward pass without backward leaves the root's, which then grow stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
