"""Named tensors to and from safetensors files, through `torch.distributed.checkpoint` (DCP).

DCP's planner and storage are called here step by step, as `dcp.save(no_dist=True)` does: that function warns on each
call, hides a full disk inside a CheckpointException, and `async_save` refuses a process group that has only NCCL.
DCP's usual storage keeps a pickle beside the tensors; its safetensors storage keeps none.

DCP is imported on first use: it costs up to 3 s that a process which only reads records should not pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from echelon.checkpoint.files import sync, temporary, write_durable
from echelon.checkpoint.tree import Slot, is_permuted
from echelon.core.errors import UserError

# What safetensors and DCP's reader both know; any other dtype is stored as its bytes.
_STORED_AS_THEY_ARE = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
)


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to CPU memory of their own, keeping their memory order; done when it returns.

    Copies from a GPU go through page-locked memory, all in flight at once.
    """
    staged = {name: _copy_to_cpu(tensor) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return staged


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors into `folder` (one safetensors file and its index). Raises OSError, as on a full disk."""
    from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter

    # A tensor without elements has no bytes: its slot in the tree says all there is.
    stored = {name: _to_stored(tensor) for name, tensor in tensors.items() if tensor.numel()}
    planner, writer = DefaultSavePlanner(), HuggingFaceStorageWriter(path=str(folder))
    planner.set_up_planner(stored, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def read_tensors(folder: Path, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Read the tensors that `slots` name from the files of `write_tensors`, and no others.

    Raises ValueError or RuntimeError when the files do not hold them.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader

    wanted = list(slots)
    stored = {slot.name: _stored_like(slot) for slot in wanted if 0 not in slot.shape}
    planner, reader = DefaultLoadPlanner(), HuggingFaceStorageReader(path=str(folder))
    metadata = reader.read_metadata()
    planner.set_up_planner(stored, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    return {
        slot.name: _from_stored(stored[slot.name], slot) if slot.name in stored else slot.empty() for slot in wanted
    }


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_cuda:
        return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    # Same memory order on both sides: otherwise copy_ goes through unpinned memory that it does not wait for.
    tensor = tensor if is_permuted(tensor) else tensor.contiguous()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _to_stored(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.dtype in _STORED_AS_THEY_ARE else as_bytes(tensor)


def _stored_like(slot: Slot) -> Tensor:
    if slot.dtype in _STORED_AS_THEY_ARE:
        return slot.empty()
    return torch.empty(slot.empty().numel() * slot.dtype.itemsize, dtype=torch.uint8)


def _from_stored(stored: Tensor, slot: Slot) -> Tensor:
    return stored if slot.dtype in _STORED_AS_THEY_ARE else from_bytes(stored, slot)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in the default order as a uint8 tensor of shape [n_bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, slot: Slot) -> Tensor:
    """Return the tensor of `as_bytes`, in memory of its own and in the memory order of `slot`.

    Raises RuntimeError when the number of bytes is another.
    """
    result = slot.empty()
    # A copy first: bytes cut out of a larger buffer need not be aligned for the wider dtype.
    plain = data.clone().view(slot.dtype).reshape(slot.shape)
    return plain if slot.strides is None else result.copy_(plain)


def export_weights(module_state: Mapping[str, Tensor], path: Path) -> None:
    """Write a module's `state_dict()` to one safetensors file at `path`, whole or not at all.

    Tensors that share memory (tied weights) are written once per name. An older file at `path` is replaced.
    Raises UserError when it cannot be written.
    """
    from safetensors.torch import save

    unfinished = temporary(path)
    tensors = {name: tensor.contiguous() for name, tensor in stage(module_state).items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Not save_file: it hides a full disk inside an error of its own.
            write_durable(unfinished, save(tensors, metadata={"format": "pt"}))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write the weights to {path}: {error.strerror or error}") from error
