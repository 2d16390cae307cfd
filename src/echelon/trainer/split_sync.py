"""A strategy between replicas that are split: each rank agrees with those that hold the same pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives.times import ReduceTimes
from echelon.core.state_tree import StateTree, StateView
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.base import Placement
from echelon.parallel.local_shards import LocalShards
from echelon.parallel.reach import ReachedMarks
from echelon.sync.base import Rescuable, Sync
from echelon.sync.buffers import averaged_buffers


class SplitSync:
    """A `Sync` whose forward goes through the split model, and whose inner strategy sees the pieces alone.

    Gradients reach the inner strategy after backward, when the replica's own sums are made: through the backward of
    `LocalShards`, where it reduces them as those of any model.
    """

    def __init__(self, module: nn.Module, pieces: LocalShards, make: Callable[[], Sync], clock: PhaseClock) -> None:
        """Wrap what `make` builds over `pieces`; it is made anew when a checkpoint of another split is loaded."""
        self.module, self._pieces, self._make, self._clock = module, pieces, make, clock
        self._inner = make()
        self._begun = False
        self._marks: ReachedMarks | None = None  # of replicas

    @property
    def _placement(self) -> Placement:
        return self._pieces.placement

    @property
    def has_replica_state(self) -> bool:
        """As the inner strategy says."""
        return self._inner.has_replica_state

    @property
    def needs_warmup_backward(self) -> bool:
        """The pieces have their own, inside the first step."""
        return False

    def begin_step(self, units: int, global_units: int) -> int:
        """Return what the inner strategy divides by."""
        return self._inner.begin_step(units, global_units)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Nothing between replicas happens during backward."""
        return nullcontext()

    def silent(self) -> AbstractContextManager[object]:
        """Nothing between replicas happens during backward."""
        return nullcontext()

    @property
    def steps_together(self) -> bool:
        """As the inner strategy says."""
        return self._inner.steps_together

    def leave_out(self) -> None:
        """Drop the gradients of the model's parameters, and let the inner strategy do without those of the pieces."""
        self._pieces.drop_gradients()
        self._inner.leave_out()

    def communication_began(self) -> Any:
        """Nothing between replicas happens during backward."""
        return None

    def step(self) -> None:
        """Give the pieces their gradients, reduce them where the strategy does so in backward, and update."""
        self._pieces.take_gradients()
        if self._inner.module is not self._pieces:
            self._clock.enter(Phase.COMMUNICATE)
            self._reduce()
            self._clock.enter(Phase.UPDATE)
        self._inner.step()

    def _reduce(self) -> None:
        parameters = self._pieces.trainable()
        unused = self._unused(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        blank = self._inner.needs_warmup_backward and not self._begun
        self._begun = True
        for pending in ([torch.zeros_like(g) for g in gradients], gradients) if blank else (gradients,):
            for parameter in parameters:
                parameter.grad = None
            self._pieces.pending(pending)
            with self._inner.micro_batch(last=True):
                self._inner.module().backward()
        for parameter in unused:  # what a codec had left out of earlier gradients may have come: it is not lost
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def _unused(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that no replica has a gradient of."""
        group = self._placement.replica_group
        if group is None:
            return [p for p in parameters if p.grad is None]
        self._marks = self._marks or ReachedMarks(group, parameters[0].device)
        own = [p.grad is not None for p in parameters]
        marks = self._marks.agreed(own, not all(own))
        return [] if marks is None else [p for p, mark in zip(parameters, marks, strict=True) if not mark]

    @contextmanager
    def agreed(self, averages: bool = False) -> Iterator[None]:
        """Agree between replicas, and on buffers (BatchNorm statistics) also inside of each."""
        group = self._placement.data_group if not self._inner.has_replica_state else None
        if group is None and self._placement.mesh is not None and self._placement.layout.fsdp > 1:
            group = self._placement.mesh["fsdp"].get_group()
        with self._inner.agreed(averages), averaged_buffers(self._pieces, group):
            yield

    def steps_to_agreement(self, averages: bool = False) -> int | None:
        """As the inner strategy says; statistics inside of a replica are averaged beside it."""
        return self._inner.steps_to_agreement(averages)

    def agreed_of(self, replicas: Sequence[StateView], averages: bool = False) -> StateTree:
        """Return what the inner strategy makes of replicas that held the same pieces."""
        return self._inner.agreed_of(replicas, averages)

    @property
    def in_flight(self) -> bool:
        """As the inner strategy says."""
        return self._inner.in_flight

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes that went to other replicas."""
        return self._inner.bytes_sent()

    def reduce_times(self) -> ReduceTimes | None:
        """Nothing between replicas happens during backward."""
        return None

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did between replicas."""
        return self._inner.entropy_coded()

    def density(self) -> float | None:
        """Return the share of the encoded elements that went to other replicas last."""
        return self._inner.density()

    def state_dict(self) -> StateTree:
        """Return the inner strategy's state."""
        return self._inner.state_dict()

    def break_off(self, made: bool) -> None:
        """As the inner strategy, where it encodes."""
        if isinstance(self._inner, Rescuable):
            self._inner.break_off(made)

    def common_state(self) -> StateTree:
        """As the inner strategy."""
        return self._inner.common_state() if isinstance(self._inner, Rescuable) else {}

    def load_common_state(self, state: StateView) -> None:
        """As the inner strategy."""
        if isinstance(self._inner, Rescuable):
            self._inner.load_common_state(state)

    def alike(self, state: StateView) -> list[Tensor]:
        """Return what the inner strategy has alike on the ranks that hold the same pieces."""
        return self._inner.alike(state)

    def load_state_dict(self, state: StateTree) -> None:
        """Take back the inner strategy's state."""
        self._inner.load_state_dict(state)

    def load_resharded(self, states: Sequence[StateView]) -> None:
        """Take over the state of other replicas, of ranks that held the same pieces."""
        self._inner.load_resharded(states)

    def restart(self) -> None:
        """Begin anew from the present parameters: what was kept between steps belongs to other pieces."""
        self._inner.close()
        self._inner = self._make()
        self._begun = False

    def begin_anew(self) -> None:
        """Begin anew from the present parameters."""
        self.restart()

    def close(self) -> None:
        """End the inner strategy's threads."""
        self._inner.close()
