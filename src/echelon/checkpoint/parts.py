"""What each rank writes of a checkpoint by itself: its own state, and its shards of tensors that no rank holds whole.

A rank's part is one plain safetensors file. What belongs where stands in the file's metadata, and is taken over into
the checkpoint's tree once the file is there. Where a shard lies in its whole tensor stands there too, so that another
layout reads exactly the rows and columns that it needs, bit for bit.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import files
from echelon.checkpoint.hashed_file import yield_to_training
from echelon.checkpoint.staging import Staging
from echelon.checkpoint.tensors import (
    StreamedTensor,
    bytes_in_place,
    is_stored_plainly,
    map_tensor,
    read_tensors,
    to_stored,
    write_file,
)
from echelon.checkpoint.tree import flatten, moved, slots, unflatten
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.core.shards import Region
from echelon.core.state_tree import StateTree, StateView

WRITING_PART = "part of a checkpoint"
"""What patience with the disk calls it."""

RANKS = "ranks"
"""The key of a state under which each rank's own part lies, by rank: `state["ranks"][3]`."""

_KEY = "__parts__"
_TREE = "tree"
_SHARED = "shared"
_POLL_S = 0.02
_LAST_MOMENT_S = 0.5


@dataclass(frozen=True)
class ShardTensor:
    """What a rank holds of a tensor, and where it lies in the whole one."""

    tensor: Tensor
    region: Region


@dataclass(frozen=True)
class StoredShard:
    """A part of a tensor: its file, its name there, and where it lies in the whole."""

    file: str
    name: str
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that lies in shards, as the checkpoint's tree describes them; nothing is read yet.

    Attributes:
        dtype: where files hold the bytes of each element in its place; None: they hold the elements.
    """

    folder: Path
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]
    dtype: torch.dtype | None = None

    def read(self, region: Region | None = None) -> Tensor:
        """Return what lies in a region, or the whole tensor, on the CPU.

        Raises:
            ValueError: the shards do not cover it.
        """
        from safetensors import safe_open

        wanted = region if region is not None else Region.whole(self.shape)
        result: Tensor | None = None
        filled = 0
        for shard in self.shards:
            with safe_open(self.folder / shard.file, "pt") as file:
                stored = file.get_slice(shard.name)
                if 0 in wanted.local_shape:
                    return self._elements(file.get_tensor(shard.name)).new_empty(wanted.local_shape)
                for source, target in shard.region.blocks(wanted):
                    block = self._elements(stored[source] if source else file.get_tensor(shard.name))
                    if result is None:
                        result = torch.empty(wanted.local_shape, dtype=block.dtype)
                    result[target] = block
                    filled += block.numel()
        if result is None or filled < result.numel():
            raise ValueError(f"parts of a tensor of shape {self.shape} are missing")
        return result

    def _elements(self, block: Tensor) -> Tensor:
        return block if self.dtype is None else block.contiguous().view(self.dtype).squeeze(-1)


def take_parts(state: Any, file: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a state with every ShardTensor replaced by where it will lie in `file`, and the tensors for the file."""
    tensors: dict[str, Tensor] = {}

    def replaced(value: Any, where: str) -> Any:
        """Return a part of the state, which lies at `where`, without its tensors' data."""
        if isinstance(value, ShardTensor):
            plain = is_stored_plainly(value.tensor.dtype)
            tensors[where] = value.tensor if plain else bytes_in_place(value.tensor)
            runs = [[list(span) for span in dim] for dim in value.region.spans]
            kind = {} if plain else {"dtype": str(value.tensor.dtype).removeprefix("torch.")}
            part = {"file": file, "name": where, "runs": runs}
            return {_KEY: {"shape": list(value.region.shape), **kind, "parts": [part]}}
        if isinstance(value, Mapping):
            return {key: replaced(item, f"{where}.{key}") for key, item in value.items()}
        return value

    return replaced(state, "state"), tensors


def streamed_part(path: Path, tensors: Mapping[str, StreamedTensor]) -> StateTree:
    """Write tensors that are never in memory whole as a part of a checkpoint, which appears when it is whole.

    Returns:
        by name what stands for each in the checkpoint's state, and is read as a `StoredTensor`.

    Raises:
        OSError: the disk fails.
    """
    tree, _ = flatten({RANKS: {0: {}}, _SHARED: {}})
    _write_whole_file(path, tensors, tree)
    return {name: _whole_entry(path.name, name, tensor.shape) for name, tensor in tensors.items()}


def _whole_entry(file: str, name: str, shape: Sequence[int]) -> StateTree:
    runs = [[[0, size]] for size in shape]
    return {_KEY: {"shape": list(shape), "parts": [{"file": file, "name": name, "runs": runs}]}}


def merge(states: list[Any]) -> Any:
    """Join the states of several ranks: dicts key by key, parts of the same tensor, of all else the first."""
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    if _KEY in first:
        return {_KEY: {**first[_KEY], "parts": [part for state in states for part in state[_KEY]["parts"]]}}
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: merge([state[key] for state in states if key in state]) for key in keys}


def join_parts(state: Any, folder: Path) -> Any:
    """Replace what `take_parts` left by `StoredTensor` tensors of a checkpoint's folder."""
    if isinstance(state, Mapping):
        if _KEY in state:
            shape = tuple(state[_KEY]["shape"])
            kind = state[_KEY].get("dtype")
            dtype = None if kind is None else getattr(torch, kind)
            return StoredTensor(folder, shape, tuple(_shard(part, shape) for part in state[_KEY]["parts"]), dtype)
        return {key: join_parts(value, folder) for key, value in state.items()}
    return state


def _shard(part: StateView, shape: tuple[int, ...]) -> StoredShard:
    spans = tuple(tuple((start, stop) for start, stop in dim) for dim in part["runs"])
    return StoredShard(part["file"], part["name"], Region(shape, spans))


def whole(state: Any) -> Any:
    """Read every `StoredTensor` tensor of a state in full."""
    if isinstance(state, StoredTensor):
        return state.read()
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    return state


def part_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"part-{rank:05d}.safetensors"


class WrittenTensors:
    """Where tensors lie in files that ranks write, found by their memory, so that nothing is written twice."""

    def __init__(self) -> None:
        """Know of none."""
        self._at: dict[Hashable, tuple[str, str]] = {}
        self._alive: list[Tensor] = []  # else their memory could become that of others

    def add(self, tensor: Tensor, file: str, name: str) -> None:
        """Remember where a tensor of any shape lies."""
        if tensor.numel():
            self._at[_memory(tensor)] = file, name
            self._alive.append(tensor)

    def refer(self, tree: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return a tree that says of tensors that lie in a file where, and the tensors, any shape, that lie in none."""
        found = {name: self._at.get(_memory(tensor)) for name, tensor in tensors.items()}
        at = {name: place for name, place in found.items() if place is not None}
        return moved(tree, lambda name: at.get(name)), {n: t for n, t in tensors.items() if n not in at}


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class AlikeTensors:
    """Tensors of a rank's own state that others have too, bit for bit; each is written by one of them.

    Attributes:
        tensors: in the state.
        ranks: that have them.
    """

    tensors: Sequence[Tensor] = ()
    ranks: Sequence[int] = ()

    def writers(self, by_name: Mapping[str, Tensor]) -> dict[str, int]:
        """Return which rank writes which (any shape), by name: all ranks say the same, and write about as much each."""
        alike = {_memory(tensor) for tensor in self.tensors if tensor.numel()}
        load = dict.fromkeys(sorted(self.ranks, reverse=True), 0)
        chosen: dict[str, int] = {}
        for name, tensor in by_name.items():
            if _memory(tensor) in alike:
                chosen[name] = min(load, key=lambda rank: load[rank])
                load[chosen[name]] += tensor.nbytes
        return chosen


@dataclass(frozen=True)
class RankPart:
    """What a rank writes: tensors by name, and the tree that says where they belong.

    Attributes:
        is_read_soon: rank 0 averages what is in it.
    """

    tensors: Mapping[str, Tensor]
    tree: Any
    is_read_soon: bool = False

    @classmethod
    def of(
        cls, rank: int, state: StateView, shared: StateView, shards: Mapping[str, Tensor], alike: AlikeTensors
    ) -> RankPart:
        """Describe a rank's part.

        Args:
            state: the rank's own.
            shared: what else it says, with `shards` taken out by `take_parts`.
            shards: the rank's pieces by name, any shape.
            alike: what of its own state another rank may write.

        Raises:
            TypeError: a value that a checkpoint cannot hold.
        """
        tree, tensors = flatten({RANKS: {rank: state}, _SHARED: shared})
        writers = alike.writers(tensors)
        start = f"{RANKS}.{rank}."

        def place(name: str) -> tuple[str, str]:
            """Return in which file a tensor lies, and its name there: as the rank that writes it calls it."""
            writer = writers.get(name, rank)
            return part_file(writer), name if writer == rank else f"{RANKS}.{writer}.{name.removeprefix(start)}"

        own = {name: tensor for name, tensor in tensors.items() if writers.get(name, rank) == rank}
        return cls({**own, **shards}, moved(tree, place))

    def written(self, rank: int, entries: Set[str] = frozenset()) -> WrittenTensors:
        """Return where the tensors of the rank's own state lie, or those of some of its entries alone."""
        found = WrittenTensors()
        for name, tensor in self.tensors.items():
            _, _, inner = name.partition(f"{RANKS}.{rank}.")
            if inner and (not entries or inner.partition(".")[0] in entries):
                found.add(tensor, part_file(rank), name)
        return found


class StoredPart:
    """A rank's part that is on the disk.

    Attributes:
        own_tree: the rank and its own state, as an item of the tree of all ranks' states.
    """

    def __init__(self, path: Path, written: WrittenTensors) -> None:
        """Read what the file says of itself; `written` learns where lies what is read.

        Raises OSError, or SafetensorError for a file that is no part.
        """
        from safetensors import safe_open

        self._folder, self._written = path.parent, written
        with safe_open(path, "pt") as file:
            tree = json.loads(file.metadata()[_TREE])
            self.names = frozenset(file.keys())
        found = dict(tree["dict"])
        self._shared_tree = found[_SHARED]
        (self.own_tree,) = found[RANKS]["dict"]

    def own(self, keys: Collection[str]) -> StateView:
        """Return some entries of the rank's own state; their tensors are the files, mapped: not to be changed."""
        tree = {"dict": [item for item in self.own_tree[1]["dict"] if item[0] in keys]}
        state: StateView = unflatten(tree, mapped(self._folder, tree, self._written))
        return state

    def shared(self) -> StateView:
        """Read what the rank says beside its own state; shards stay where they lie."""
        state: StateView = unflatten(self._shared_tree, read_tensors(self._folder, slots(self._shared_tree)))
        return state


def mapped(folder: Path, tree: Any, written: WrittenTensors) -> dict[str, Tensor]:
    """Return the tensors of a tree that lie in ranks' files, by name, without reading them; `written` learns where."""
    found: dict[str, Tensor] = {}
    for slot in slots(tree):
        if slot.file:
            found[slot.name] = map_tensor(folder, slot)
            written.add(found[slot.name], slot.file, slot.name)
    return found


def check_complete(parts: Sequence[StoredPart]) -> None:
    """Refuse parts that refer to what no rank has written. Raises ValueError."""
    names = {part_file(part.own_tree[0]): part.names for part in parts}
    for part in parts:
        for slot in slots(part.own_tree[1]):
            if slot.name not in names[slot.file]:
                raise ValueError(f"rank {part.own_tree[0]} expects {slot.name} in {slot.file}, which does not hold it")


class PartWriter:
    """Writes a rank's parts behind the training, one file after the other.

    With patience a file that the disk does not take now is tried again, until it is written or patience is over.
    """

    def __init__(self, deadline_s: float = 600.0, patience: Patience | None = None) -> None:
        self._deadline_s = deadline_s + (patience.limit_s if patience is not None else 0.0)
        self._patience = patience
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: OSError | UserError | None = None

    def write(self, by_file: Mapping[Path, RankPart]) -> None:
        """Copy the parts' tensors, then write each to its file in the background; a file appears when it is whole.

        Raises:
            UserError: the one before could not be written.
        """
        self.wait()
        stagings = [self._staging, *(Staging() for _ in range(len(by_file) - 1))]  # a base is written once
        staged = {
            file: replace(part, tensors=staging.copy(part.tensors))
            for (file, part), staging in zip(by_file.items(), stagings, strict=True)
        }
        self._thread = threading.Thread(target=self._run, args=(staged,), name="echelon-parts")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a file is under way, or waits for the disk."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the file under way.

        Raises:
            UserError: it could not be written.
            TimeoutError: the disk is stuck.
        """
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise TimeoutError(f"a part of a checkpoint is not written after {self._deadline_s:g} s: a stuck disk?")
            self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise UserError(f"cannot write a part of a checkpoint: {failure.strerror or failure}") from failure
        if failure is not None:
            raise failure

    def _run(self, by_file: Mapping[Path, RankPart]) -> None:
        yield_to_training()
        try:
            for file, part in by_file.items():
                write = functools.partial(
                    _write_whole_file, file, to_stored(part.tensors), part.tree, part.is_read_soon
                )
                if self._patience is None:
                    write()
                else:
                    self._patience.insist(WRITING_PART, write)
        except (OSError, UserError) as error:  # raised by `wait`, where it can be handled
            self._failure = error


def _write_whole_file(
    file: Path, tensors: Mapping[str, Tensor | StreamedTensor], tree: Any, is_read_soon: bool = False
) -> None:
    unfinished = file.with_suffix(".unfinished")
    try:
        sha256 = write_file(unfinished, tensors, {_TREE: json.dumps(tree)}, is_read_soon)
        files.note_sum(file, sha256)
        unfinished.rename(file)
    except Exception:
        with suppress(OSError):  # gives a full disk its room back; the next try writes over what is left
            unfinished.unlink(missing_ok=True)
        raise


class GivenUp(Exception):
    """Parts of a checkpoint will not come: the ranks that were to write them are gone."""


def await_parts(folder: Path, names: Sequence[str], deadline_s: float, given_up: threading.Event | None = None) -> None:
    """Wait until the ranks' files in a folder are whole.

    Args:
        given_up: set when what is missing will not come; what comes within a moment still counts.

    Raises:
        GivenUp: it does not come.
        UserError: some did not come in time.
    """
    end = time.monotonic() + deadline_s
    while missing := [name for name in names if not (folder / name).exists()]:
        if given_up is not None and given_up.is_set():
            end = min(end, time.monotonic() + _LAST_MOMENT_S)
            if time.monotonic() >= end:
                raise GivenUp(f"{len(missing)} parts are missing")
        if time.monotonic() > end:
            raise UserError(
                f"{len(missing)} ranks did not write their parts of a checkpoint to {folder} within {deadline_s:g} s: "
                "put --run on storage that all machines share"
            )
        time.sleep(_POLL_S)
