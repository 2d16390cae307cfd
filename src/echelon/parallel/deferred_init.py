"""Building a model whose parameters have no memory yet, and giving each the values that it would have had.

A model is built on the meta device while every operation on tensors is written down. Later the operations are done in
the same order, with the same random numbers, but with memory for a tensor only from its first operation to its last:
so each rank meets every parameter once, whole, and keeps its part (Meta's torchdistx called this deferred
initialisation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon.torch_compat import (
    TorchDispatchMode,
    is_operator,
    schema_of,
    storage_key,
    tree_flatten,
    tree_map,
    trunc_normal_replaced,
)

OVERWRITES = ("aten::normal_", "aten::uniform_", "aten::fill_", "aten::zero_", "aten::copy_", "aten::trunc_normal_")
_RANDOM = ("normal", "uniform", "rand", "bernoulli", "trunc_normal", "exponential", "geometric", "random")


@dataclass(frozen=True)
class _View:
    """A tensor as it lay in its storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    random: bool


@dataclass
class Recording:
    """What was done while a model was built; `nbytes` of each storage, which are kept so that no number comes twice."""

    operations: list[_Operation] = field(default_factory=list)
    storages: dict[int, Any] = field(default_factory=dict)

    def view(self, tensor: Tensor) -> _View:
        """Describe a meta tensor of any shape."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self.storages.setdefault(key, storage)
        stride = tuple(int(step) for step in tensor.stride())
        return _View(key, tuple(tensor.shape), stride, int(tensor.storage_offset()), tensor.dtype)


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _meta_tensors((args, kwargs))
        result = function(*args, **kwargs)
        made = _meta_tensors(result)
        if given or made:
            self._note(function, args, kwargs, result)
        return result

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        recording = self._recording

        def described(value: Any) -> Any:
            """Return the place of a meta tensor in the recording; other values as they are."""
            return recording.view(value) if isinstance(value, Tensor) and value.is_meta else value

        reads = frozenset(recording.view(t).storage for t in _meta_tensors((args, kwargs)))
        made = frozenset(recording.view(t).storage for t in _meta_tensors(result))
        schema = schema_of(function)
        mutates = schema.is_mutable and isinstance(args[0] if args else None, Tensor)
        # A view of what is read is no write: it is described by its place, and trying the model out makes many.
        writes = (made - reads) | (frozenset((recording.view(args[0]).storage,)) if mutates else frozenset())
        whole = mutates and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()
        covers = schema.name in OVERWRITES and whole
        recording.operations.append(
            _Operation(
                function,
                tree_map(described, args),
                tree_map(described, kwargs),
                tree_map(described, result),
                reads,
                writes,
                recording.view(args[0]).storage if covers else None,
                schema.name.removeprefix("aten::").startswith(_RANDOM),
            )
        )


@contextmanager
def without_memory() -> Iterator[Recording]:
    """Build what is built inside the block on the meta device, and write down how."""
    recording = Recording()
    with torch.device("meta"), _Recorder(recording), _truncated_normals(recording):
        yield recording


@contextmanager
def _truncated_normals(recording: Recording) -> Iterator[None]:
    """Write down torch's own truncated normal: it looks at what it draws, and so leaves meta tensors alone."""

    def noting(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return torch's function, which draws at once on other tensors."""

        def noted(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
            """Record the draw on a meta tensor."""
            if not tensor.is_meta:
                return draw(tensor, mean, std, a, b, generator)
            view = recording.view(tensor)
            where = frozenset((view.storage,))
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            settings = (view, mean, std, a, b, generator)
            covered = view.storage if whole else None
            recording.operations.append(_Operation(draw, settings, {}, view, where, where, covered, random=True))
            return tensor

        return noted

    with trunc_normal_replaced(noting):
        yield


@dataclass(frozen=True)
class Draw:
    """The last operation that gave a whole tensor its values.

    Attributes:
        name: such as `normal_`, `uniform_`, `fill_` or `zero_`.
        numbers: what it was called with.
        constants: parts of the tensor that were filled afterwards: first element, shape and value.
    """

    name: str
    numbers: tuple[float, ...]
    constants: tuple[tuple[int, tuple[int, ...], float], ...] = ()


def last_draw(recording: Recording, tensor: Tensor) -> Draw | None:
    """Return how a meta tensor of any shape is drawn; None where it is more than a draw and some constants."""
    view = recording.view(tensor)
    found: Draw | None = None
    for operation in recording.operations:
        if view.storage not in operation.writes:
            continue
        name, numbers = _plain_call(operation)
        at = operation.args[0] if operation.args else None
        if operation.overwrites == view.storage:
            found = Draw(name, numbers) if name else None
        elif found is not None and name in ("fill_", "zero_") and isinstance(at, _View):
            filled = (at.offset, at.size, numbers[0] if numbers else 0.0)
            found = Draw(found.name, found.numbers, (*found.constants, filled))
        else:
            found = None
    return found


def _plain_call(operation: _Operation) -> tuple[str, tuple[float, ...]]:
    """Return the name of an operation on a tensor and numbers alone, and the numbers; an empty name: it is another."""
    values = [*operation.args[1:], *(v for k, v in operation.kwargs.items() if k != "generator")]
    if not is_operator(operation.function) or not all(isinstance(v, int | float) for v in values):
        return "", ()
    return schema_of(operation.function).name.removeprefix("aten::"), tuple(map(float, values))


@torch.no_grad()
def replay(
    recording: Recording,
    wanted: Mapping[str, Tensor],
    keep: Callable[[str, Tensor], None],
    without: Iterable[Tensor] = (),
) -> None:
    """Do what was recorded, on the CPU, and hand out each wanted tensor once it has its values.

    The generators are left as the recorded operations would have left them.

    Args:
        wanted: the meta tensors by name, any shape, as they are at the end; several names may share memory.
        keep: is given a name and the whole tensor, in an order of its own.
        without: meta tensors that nothing is drawn for; the generators then come out otherwise.
    """
    skipped = {recording.view(tensor).storage for tensor in without}
    views = {name: recording.view(tensor) for name, tensor in wanted.items()}
    names: dict[int, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.storage, []).append(name)
    needed = _needed(recording, set(names), skipped)
    last = {s: i for i in needed for s in _touched(recording.operations[i])}
    fresh = _overwritten_next(recording, needed)
    real: dict[int, Tensor] = {}
    for i in needed:
        operation = recording.operations[i]
        _perform(operation, recording, real)
        for storage in _touched(operation):
            if last[storage] == i:
                for name in names.pop(storage, ()):
                    keep(name, _as_view(real[storage], views[name]))
            if last[storage] == i or (i, storage) in fresh:
                real.pop(storage, None)
    if names:
        raise RuntimeError(f"nothing was recorded that makes {next(iter(names.values()))[0]}")


def _needed(recording: Recording, ends: set[int], skipped: set[int]) -> list[int]:
    """Return the operations that the wanted storages depend on, and all others that draw random numbers."""
    found: list[int] = []
    for i in range(len(recording.operations) - 1, -1, -1):
        operation = recording.operations[i]
        if operation.writes & ends or (operation.random and not operation.writes <= skipped):
            found.append(i)
            ends |= operation.reads
    return found[::-1]


def _overwritten_next(recording: Recording, needed: list[int]) -> set[tuple[int, int]]:
    """Return after which operation a storage's contents are of no use, for the next one writes all of it anew."""
    unused: set[tuple[int, int]] = set()
    before: dict[int, int] = {}
    for i in needed:
        operation = recording.operations[i]
        if operation.overwrites in before:
            unused.add((before[operation.overwrites], operation.overwrites))
        before |= dict.fromkeys(_touched(operation), i)
    return unused


def _touched(operation: _Operation) -> frozenset[int]:
    return operation.reads | operation.writes


def _perform(operation: _Operation, recording: Recording, real: dict[int, Tensor]) -> None:
    def tensor_of(view: _View) -> Tensor:
        """Return the real tensor of a recorded place; its storage is allocated at first use."""
        if view.storage not in real:
            n_bytes = recording.storages[view.storage].nbytes()
            real[view.storage] = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return _as_view(real[view.storage], view)

    def actual(value: Any) -> Any:
        """Return the real tensor, or the host for the meta device."""
        if isinstance(value, _View):
            return tensor_of(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

    args = tree_map(actual, operation.args, is_leaf=_is_view)
    kwargs = tree_map(actual, operation.kwargs, is_leaf=_is_view)
    result = operation.function(*args, **kwargs)
    described = tree_flatten(operation.results, is_leaf=_is_view)[0]
    for value, view in zip(tree_flatten(result)[0], described, strict=True):
        if isinstance(view, _View) and view.storage not in operation.reads:
            tensor_of(view).copy_(value)


def _is_view(value: Any) -> bool:
    return isinstance(value, _View)


def _as_view(storage: Tensor, view: _View) -> Tensor:
    return storage.view(view.dtype).as_strided(view.size, view.stride, view.offset)


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, Tensor) and value.is_meta]


@dataclass(frozen=True)
class DeferredInit:
    """A model without memory: how it was built, its tensors by name as they were then, and where they are to be."""

    recording: Recording
    tensors: Mapping[str, Tensor]
    device: torch.device

    def give_memory(self, modules: Sequence[nn.Module]) -> None:
        """Give what the modules hold by now memory on the device; what was not deferred keeps its values."""
        real = {name: tensor.detach().clone() for name, tensor in self.tensors.items() if not tensor.is_meta}
        for module in modules:
            module.to_empty(device=self.device)
            with torch.no_grad():
                for name, tensor in named_tensors(module).items():
                    if name in real:
                        tensor.copy_(real[name])

    def fill(self, keep: Callable[[str, Tensor], None], without: Iterable[Tensor] = ()) -> None:
        """Hand out the values of each tensor, any shape, that was deferred, whole, one after another; see `replay`."""
        wanted = {name: tensor for name, tensor in self.tensors.items() if tensor.is_meta}
        replay(self.recording, wanted, keep, without)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, also those that are not saved; tied ones under each name."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers(remove_duplicate=False))
    return found
