"""Which statistics of a model move: those of frozen normalisation stay, so that nothing of them needs to travel."""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import Tensor, nn

_STILL = "echelon_still"


def keep_still(module: nn.Module, names: Set[str]) -> None:
    """Note that buffers of a module's own, by these names, stay as they are."""
    setattr(module, _STILL, frozenset(names))


def still_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own buffers that stay as they are."""
    names: frozenset[str] = getattr(module, _STILL, frozenset())
    return names


def moving_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a model that may change, each once, in the order of `model.buffers()`."""
    seen: set[int] = set()
    for module in model.modules():
        still = still_buffers(module)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in still and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer
