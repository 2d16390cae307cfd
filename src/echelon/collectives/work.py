"""What the thread does with DDP's buckets: along a path as they are, or through those of a codec."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.collectives import codec_state
from echelon.collectives.adaptation import Adaptation
from echelon.collectives.buckets import Bucket, BucketLayout, lay_out
from echelon.collectives.comm_thread import DdpBucket
from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.collectives.reducer import Coding, PlainReducer, Reducer, is_finite, make_reducer, make_small_reducer
from echelon.collectives.route import Route
from echelon.collectives.wire import WireCount, is_small
from echelon.core.shards import FlatTensor
from echelon.core.state_tree import StateTree, StateView


class PathWork:
    """Sums whole buckets along a path."""

    def __init__(self, route: Route, average: bool, wire: WireCount) -> None:
        self._reducer = PlainReducer(route, average)
        self._wire = wire

    def work(self, bucket: DdpBucket) -> None:
        """Sum a bucket in place and complete its future."""
        sent = self._reducer.reduce_(bucket.buffer)
        small = sum(g.numel() for g in bucket.gradients if is_small(g))
        small_bytes = sent * small // max(bucket.buffer.numel(), 1)
        self._wire.add("small", small_bytes)
        self._wire.add("weights", sent - small_bytes)
        bucket.future.set_result(bucket.buffer)

    def fail(self, bucket: DdpBucket, error: BaseException) -> None:
        """Raise an error in a bucket's future."""
        _raise_in(bucket, error)

    def state_dict(self) -> StateTree:
        """Return nothing: a path keeps no state."""
        return {}

    def load_state_dict(self, saved: StateView) -> None:
        """Accept an empty state.

        Raises:
            ValueError: it is of a codec.
        """
        if saved:
            raise ValueError(f"without a codec there is no state to restore, but there is {sorted(saved)[0]!r}")


@dataclass
class _Arrival:
    """DDP's bucket, and how many of its gradients still wait for the codec's."""

    bucket: DdpBucket
    left: int


@dataclass
class _Filling:
    """A bucket's vector and the gradients that have been copied into it."""

    bucket: Bucket
    flat: Tensor
    reducer: Reducer
    snapshot: codec_state.StateSnapshot
    came: list[tuple[_Arrival, Tensor, FlatTensor]] = field(default_factory=list)

    def view(self, member: FlatTensor) -> Tensor:
        """Return a gradient's part of the vector, in its own shape."""
        return self.flat[slice(*member.span)].view(member.shape)


class CodecWork:
    """Copies DDP's buckets into the codec's, and reduces one of these when its last gradient came.

    A backward pass in which a result is not finite (an overflow of half precision) changes no codec's state: all ranks
    see the same result, so all of them undo it.
    """

    def __init__(self, coding: Coding, wire: WireCount) -> None:
        self._coding, self._wire = coding, wire
        self._early: list[DdpBucket] = []
        self._arrivals: list[_Arrival] = []
        self._fillings: list[_Filling] = []
        self._layout: BucketLayout | None = None
        self._saved: StateView | None = None
        self._void, self._reduced, self._told = False, 0, False
        self._begun: list[_Filling] = []  # buckets whose states this step has moved
        self._broken: BaseException | None = None

    def work(self, bucket: DdpBucket) -> None:
        """Copy a DDP bucket's gradients into the codec's buckets, and reduce each that is full."""
        if self._broken is not None:
            raise RuntimeError(f"gradients cannot be reduced after an earlier failure: {self._broken}")
        if bucket.first:
            self._begin()
        if self._layout is None:
            # Unattached, the parameters are known when their first backward ends.
            self._early.append(bucket)
            if not bucket.last:
                return
            self.build(lay_out((n, g) for b in self._early for n, g in zip(b.names, b.gradients, strict=True)))
            early, self._early = self._early, []
            for one in early:
                self._take(one)
            return
        self._take(bucket)

    def fail(self, bucket: DdpBucket, error: BaseException) -> None:
        """Raise an error in the futures of this bucket and of all that wait, and refuse all later ones."""
        # Ranks may now be at different collectives: nothing can be reduced in this group any more.
        self._broken = self._broken or error
        self._drop(error)
        _raise_in(bucket, error)

    def state_dict(self) -> StateTree:
        """Return the codec's states by parameter and place; before the first backward, what was loaded."""
        if self._layout is None:
            return dict(self._saved or {})
        flat: StateTree = {}
        for filling in self._fillings:
            flat |= codec_state.state_dict(filling.bucket, filling.reducer.shards)
        return flat

    def load_state_dict(self, saved: StateView) -> None:
        """Restore what `state_dict` returned; before the buckets are laid out it is kept until they are."""
        if self._layout is None:
            self._saved = saved
            return
        for filling in self._fillings:
            codec_state.load_state_dict(filling.bucket, filling.reducer.shards, saved)

    def take_velocity(self, velocity: Mapping[str, Tensor]) -> None:
        """Apply from now on, before encoding, a momentum, of each parameter's shape, that the optimizer has applied."""
        for filling in self._fillings:
            codec_state.take_velocity(filling.bucket, filling.reducer.shards, velocity)

    def load_common(self, saved: StateView) -> None:
        """Take over counters and factors of another rank; see `codec_state.common`."""
        codec_state.load_common(self.shards(), saved)

    def memories(self) -> codec_state.StepMemories:
        """Return copies of the states after the step that was begun last and before it, in a group that is left."""
        after = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state_dict().items()}
        self.undo_step()
        before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state_dict().items()}
        return codec_state.StepMemories(after, before)

    def undo_step(self) -> None:
        """Put the states back to what they were before the step that was begun last, unless it was made."""
        for filling in self._begun:
            filling.snapshot.restore()
        self._begun.clear()

    def step_made(self) -> None:
        """Hear that the step's sums have been applied: it is not undone any more."""
        self._begun.clear()

    def shards(self) -> list[CodecShard]:
        """Return the codec's states."""
        return [shard for filling in self._fillings for shard in filling.reducer.shards]

    def adaptations(self) -> list[Adaptation]:
        """Return what chooses codecs, of each bucket whose codec adapts."""
        return [a for filling in self._fillings if (a := filling.reducer.adaptation) is not None]

    def _begin(self) -> None:
        self._drop(RuntimeError("a new backward began before the last one's gradients had all arrived"))
        for filling in self._fillings:
            filling.came.clear()
        self._void, self._reduced = False, 0
        self._begun.clear()

    def _drop(self, error: BaseException) -> None:
        for bucket in [a.bucket for a in self._arrivals] + self._early:
            _raise_in(bucket, error)
        self._arrivals, self._early = [], []

    def build(self, layout: BucketLayout) -> None:
        """Allocate the buckets' vectors and their reducers, and restore what was loaded before."""
        for bucket in layout.buckets:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            reducer = self._reducer(bucket, flat)
            snapshot = codec_state.StateSnapshot([h.state for h in reducer.shards])
            self._fillings.append(_Filling(bucket, flat, reducer, snapshot))
        self._layout = layout
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)

    def _reducer(self, bucket: Bucket, flat: Tensor) -> Reducer:
        name = f"cell{bucket.number}"  # codecs draw by it: another name would train otherwise
        if bucket.group == "small":
            return make_small_reducer(self._coding, name, flat)
        return make_reducer(self._coding, list(bucket.members), name, flat)

    def _take(self, bucket: DdpBucket) -> None:
        assert self._layout is not None
        arrival = _Arrival(bucket, len(bucket.names))
        self._arrivals.append(arrival)
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            place = self._layout.places[name]
            filling = self._fillings[place.bucket]
            filling.view(place.member).copy_(gradient)
            filling.came.append((arrival, gradient, place.member))
            if len(filling.came) == len(filling.bucket.members):
                self._reduce(filling)

    def _reduce(self, filling: _Filling) -> None:
        filling.snapshot.take()
        self._begun.append(filling)
        self._wire.add(filling.bucket.group, filling.reducer.reduce_(filling.flat))
        if not is_finite(filling.flat):
            self._void = True
            self._tell(filling)
        self._reduced += 1
        if self._void and self._reduced == len(self._fillings):
            for one in self._fillings:
                one.snapshot.restore()
        for arrival, gradient, member in filling.came:
            gradient.copy_(filling.view(member))
            arrival.left -= 1
            if arrival.left == 0:
                self._arrivals.remove(arrival)
                arrival.bucket.future.set_result(arrival.bucket.buffer)

    def _tell(self, filling: _Filling) -> None:
        """Warn once, with names: gradients still are this rank's own."""
        if self._told:
            return
        self._told = True
        largest = self._coding.codec.largest
        names = [member.name for _, gradient, member in filling.came if not _fits(gradient, largest)]
        whose = f"the gradient of {', '.join(map(repr, names[:3]))} is" if names else "a gradient of another rank is"
        beyond = "" if largest == math.inf else f" or beyond {largest:g}, the most that this codec can send"
        warnings.warn(
            f"{whose} not finite{beyond}: what it is sent with is NaN on all ranks, and the codec forgets the step "
            "(usual now and then where losses are scaled; it is said once)",
            UserWarning,
            stacklevel=2,
        )


def _fits(gradient: Tensor, largest: float) -> bool:
    bounded = largest == math.inf or not gradient.numel() or float(gradient.abs().max()) <= largest
    return bounded and is_finite(gradient)


def _raise_in(bucket: DdpBucket, error: BaseException) -> None:
    if not bucket.future.done():
        bucket.future.set_exception(_in_future(error))  # type: ignore[arg-type]


def _in_future(error: BaseException) -> Exception:
    """Return what a future can hold: one of a CUDA device pickles what it is given to find tensors in it.

    Where that fails the future would stay open, and backward wait for it.
    """
    if isinstance(error, Exception):
        try:
            pickle.dumps(error)
        except Exception:  # noqa: BLE001 - any class may raise anything; it is said in words below
            pass
        else:
            return error
    in_words = RuntimeError(f"{type(error).__name__}: {error}")
    in_words.__cause__ = error
    return in_words
