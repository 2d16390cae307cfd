"""Copies of tensors in the processor's memory, which is used again for the next ones.

Fresh memory costs more than the copy: the system clears it page by page, and a virtual machine may have to ask its
host for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.checkpoint.tree import is_permuted


class Staging:
    """Memory for copies of one set of tensors after the other, as a run's checkpoints are.

    The copies hold until the next ones are taken.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors of any shape and device, by name, in their memory order; done when it returns.

        Copies from a GPU go through page-locked memory, all in flight at once.
        """
        buffers, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            self._copies[name] = _copy(tensor.detach().resolve_conj().resolve_neg(), buffers.pop(name, None))
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._copies)

    def clear(self) -> None:
        """Give the memory back, once the copies are not needed."""
        self._copies = {}


def _copy(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if tensor.is_cuda and not is_permuted(tensor):
        # Same memory order on both sides: otherwise copy_ goes through unpinned memory that it does not wait for.
        tensor = tensor.contiguous()
    if buffer is None or not _fits(buffer, tensor):
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    ordered = torch.empty_like(tensor, device="meta").stride()  # without the gaps that the tensor may have
    same = buffer.dtype == tensor.dtype and buffer.shape == tensor.shape and buffer.stride() == ordered
    return same and buffer.is_pinned() == tensor.is_cuda
