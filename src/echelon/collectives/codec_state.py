"""The state of codecs, by parameter: copies that undo a step, and the part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.collectives.buckets import Bucket
from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.compression.base import State
from echelon.compression.sparse import share_carried
from echelon.compression.transforms import huffman
from echelon.core.shards import overlaps
from echelon.core.state_tree import StateTree, StateView


class StateSnapshot:
    """Copies of states, made before a step so that a step that was void can be undone."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._copies: list[dict[str, Tensor]] = [{} for _ in states]
        self._numbers: list[dict[str, float]] = [{} for _ in states]

    def take(self) -> None:
        """Remember the states as they are now."""
        for state, copies, i in zip(self._states, self._copies, range(len(self._states)), strict=True):
            self._numbers[i] = dict(state.numbers)
            for key, tensor in (state.elementwise | state.factors).items():
                if key not in copies:
                    copies[key] = torch.empty_like(tensor)
                copies[key].copy_(tensor)

    def restore(self) -> None:
        """Put the states back to what they were."""
        for state, copies, numbers in zip(self._states, self._copies, self._numbers, strict=True):
            state.numbers = dict(numbers)
            for key, tensor in (state.elementwise | state.factors).items():
                tensor.copy_(copies[key])


@dataclass(frozen=True)
class StepMemories:
    """A rank's codec state of `state_dict`, in memory of its own: after the last step that was begun, and before it.

    Both are the same where the step was made by all: see `settled`.
    """

    after: StateTree
    before: StateTree

    def settled(self, made: bool) -> StepMemories:
        """Return the state of one moment: after the step if it was `made`, else before it."""
        state = self.after if made else self.before
        return StepMemories(state, state)


@dataclass(frozen=True)
class _StatePart:
    """Where a parameter and a state overlap: elements of the parameter, and of the state."""

    parameter: str
    of_parameter: slice
    of_state: slice

    @property
    def key(self) -> str:
        """The parameter and its first element here."""
        return f"{self.parameter}/{self.of_parameter.start}"


def entropy_coded(shards: Iterable[CodecShard]) -> dict[str, float]:
    """Sum what entropy coding did (see `compression.transforms.huffman`) over states; empty where there is none."""
    return huffman.entropy_coded(shard.state for shard in shards)


def density(shards: Iterable[CodecShard]) -> float | None:
    """Return the share of elements that this rank's last messages carried; None where no sparse codec has sent any."""
    return share_carried((shard.state, shard.span[1] - shard.span[0]) for shard in shards if shard.role == "sent")


def state_dict(bucket: Bucket, shards: Sequence[CodecShard]) -> StateTree:
    """Return a bucket's states as tensors and numbers under flat keys.

    - `sent.error/NAME/START`: elements of a parameter from START on, of one tensor of what this rank sends;
      `relay.error/...` of what it sends back as owner: over all ranks these cover each element once.
    - `factors.q/STATE`, `numbers.step/STATE`: what belongs to a whole state.
    """
    flat: StateTree = {}
    for h in shards:
        flat |= {f"numbers.{k}/{h.state.name}": v for k, v in h.state.numbers.items()}
        flat |= {f"factors.{k}/{h.state.name}": v for k, v in h.state.factors.items()}
        for kind, tensor in h.state.elementwise.items():
            for part in _parts(bucket, h):
                flat[f"{h.role}.{kind}/{part.key}"] = tensor[part.of_state]
    return flat


def load_state_dict(bucket: Bucket, shards: Sequence[CodecShard], saved: StateView) -> None:
    """Take over, in place, what `state_dict` returned for the same bucket, or what `merge` made of several ranks'.

    A single worker encodes nothing: of what it saved all but what waited to be sent begins anew.

    Raises:
        ValueError: it was saved by another codec, model or number of ranks; nothing was changed.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    from_one = not any(key.startswith("numbers.") for key in saved)
    for h in shards:
        for name, factor in h.state.factors.items():
            copies.append((factor, factor if from_one else _find(saved, f"factors.{name}/{h.state.name}", factor)))
        for kind, tensor in h.state.elementwise.items():
            for part in _parts(bucket, h):
                own = tensor[part.of_state]
                key = f"{h.role}.{kind}"
                begins_anew = from_one and f"total.{key}/{part.parameter}" not in saved
                copies.append((own, torch.zeros_like(own) if begins_anew else _saved_part(saved, key, part, own, h)))
    for own, found in copies:
        own.copy_(found)
    for h in shards:
        for name in h.state.numbers:
            value = saved.get(f"numbers.{name}/{h.state.name}", saved.get(f"numbers.{name}/*"))
            h.state.numbers[name] = h.state.numbers[name] if value is None else value


def _saved_part(saved: StateView, kind: str, part: _StatePart, target: Tensor, shard: CodecShard) -> Tensor:
    total = saved.get(f"total.{kind}/{part.parameter}")
    if total is None:
        return _find(saved, f"{kind}/{part.key}", target)
    return total[part.of_parameter] / shard.holders


def _find(saved: StateView, key: str, like: Tensor) -> Tensor:
    found = saved.get(key)
    if not isinstance(found, Tensor) or found.shape != like.shape:
        raise ValueError(
            f"saved compression state has no {key!r} of shape {tuple(like.shape)}: another codec, model or "
            "number of ranks wrote it"
        )
    return found


def common(saved: StateView) -> StateTree:
    """Return what is the same on all ranks of a `state_dict`: counters and factors, which codecs draw and sum by."""
    return {key: value for key, value in saved.items() if key.startswith(("numbers.", "factors."))}


def load_common(shards: Iterable[CodecShard], saved: StateView) -> None:
    """Take over, in place, what `common` returned on another rank; memories stay."""
    for h in shards:
        for name, factor in h.state.factors.items():
            factor.copy_(_find(saved, f"factors.{name}/{h.state.name}", factor))
        for name in h.state.numbers:
            value = saved.get(f"numbers.{name}/{h.state.name}", saved.get(f"numbers.{name}/*"))
            h.state.numbers[name] = h.state.numbers[name] if value is None else value


def carried(saved: StateView, numels: Mapping[str, int], ranks: int) -> StateTree:
    """Return what a rank can load that leaves its group for another one of `ranks`, and keeps its own memories.

    Elements have other owners from now on, and over all ranks the sum of what waits stays what it was.

    Args:
        saved: its own `state_dict`.
        numels: elements of each parameter.
    """
    merged = without_owners(merge([saved], numels))
    for key in [key for key in merged if key.startswith("total.sent.")]:
        # As an owner among others it may have elements of parameters that it owned nothing of.
        merged.setdefault(key.replace("total.sent.", "total.relay.", 1), torch.zeros_like(merged[key]))
        merged[key] = merged[key] * ranks  # a rank loads its part of the sum over all
    return merged


def without_owners(merged: StateTree) -> StateTree:
    """Let what owners were to send back join what ranks are to send themselves, in what `merge` returned."""
    for key in [key for key in merged if key.startswith("total.relay.")]:
        own = key.replace("total.relay.", "total.sent.", 1)
        if own in merged:
            merged[own] += merged[key]
        merged[key] = torch.zeros_like(merged[key])
    return merged


def take_velocity(bucket: Bucket, shards: Sequence[CodecShard], velocity: Mapping[str, Tensor]) -> None:
    """Share out a velocity, kept until now for the sum of all ranks' gradients, among those who apply it from now on.

    Args:
        velocity: by parameter, of its shape.
    """
    for h in shards:
        for part in _parts(bucket, h):
            if h.role == "sent" and "velocity" in h.state.elementwise and part.parameter in velocity:
                own = velocity[part.parameter].reshape(-1)[part.of_parameter]
                h.state.elementwise["velocity"][part.of_state] = own / h.holders


def rescale(shards: Iterable[CodecShard], factor: float) -> None:
    """Multiply what is remembered of gradients, whose scale has changed by that factor."""
    for h in shards:
        for tensor in h.state.elementwise.values():
            tensor.mul_(factor)
        if "threshold" in h.state.numbers:
            h.state.numbers["threshold"] *= factor


def left_out(merged: StateView, divisor: int = 1) -> dict[str, Tensor]:
    """Return, by parameter, the sum of what `merge` found to wait in error feedback, both ways: float64 [elements].

    Args:
        divisor: of a sum that is averaged: what the ranks send is not divided yet, and what owners send back is.
    """
    found: dict[str, Tensor] = {}
    for key, total in merged.items():
        kind, _, name = key.partition("/")
        if kind in ("total.sent.error", "total.relay.error"):
            part = total / divisor if kind == "total.sent.error" else total
            found[name] = found[name] + part if name in found else part
    return found


def velocity_of(merged: StateView) -> dict[str, Tensor]:
    """Return, by parameter, the velocity of all ranks' sum that `merge` found: float64 [elements]."""
    return {key.partition("/")[2]: total for key, total in merged.items() if key.startswith("total.sent.velocity/")}


def merge(saved: Sequence[StateView], numels: Mapping[str, int]) -> StateTree:
    """Turn the states of all ranks into one that any number of ranks can load; the sum of each tensor is kept.

    Args:
        saved: each old rank's `state_dict`.
        numels: elements of each parameter.
    """
    merged: StateTree = {}
    for one in saved:
        for key, value in one.items():
            kind, _, rest = key.partition("/")
            if kind.startswith("numbers."):
                merged.setdefault(key, value)
                merged[f"{kind}/*"] = max(value, merged.get(f"{kind}/*", value))
            elif kind.startswith("factors."):
                merged.setdefault(key, value)
            else:
                name, _, offset = rest.rpartition("/")
                total = merged.setdefault(f"total.{kind}/{name}", torch.zeros(numels[name], dtype=torch.float64))
                total[int(offset) : int(offset) + value.numel()] += value.to("cpu", torch.float64)
    return merged


def _parts(bucket: Bucket, shard: CodecShard) -> list[_StatePart]:
    return [
        _StatePart(member.name, both.in_first, both.in_second)
        for member in bucket.members
        for both in overlaps([member.span], [shard.span])
    ]
