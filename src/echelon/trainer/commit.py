"""What a rank knows to be done when it begins a step, and when it has updated: from there it can go on with others."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from echelon.checkpoint import copy_state
from echelon.core.state_tree import StateView
from echelon.core.task import BestResult, Stagnation
from echelon.records.kinds import Number
from echelon.sync.base import Overlapped
from echelon.torch_compat import foreach_copy_
from echelon.trainer.loop import TrainingRun
from echelon.trainer.state import Cursor, RunParts

_MT19937_BYTES = 624 * 4 + 4  # of words, and of the place among them


class _NumpyDraws:
    """The state of numpy's generator, read again only when it has moved: to read it takes longer than all the rest.

    Whether it has moved is seen in its memory. The second number of a normal pair is kept elsewhere: while there is
    one, the state is read every time.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._address = 0
        self._memory = b""
        self._state: Mapping[str, Any] = {}

    def state(self) -> Mapping[str, Any]:
        """Return the state, as `numpy.random.get_state(legacy=False)` does."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state(legacy=False)
        is_known = generator is self._generator
        if not is_known:
            self._generator, self._address = generator, generator.ctypes.state_address
        memory = ctypes.string_at(self._address, _MT19937_BYTES)
        if not is_known or memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state


class _PythonDraws:
    """The state of Python's generator, read again only when it has moved: to read it makes 625 numbers.

    Whether it has moved is seen in its memory, where that lies as in CPython: the place, then the words.
    """

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._state = random.getstate()
        numbers = self._state[1]
        self._memory = struct.pack("=i624I", numbers[-1], *numbers[:-1])
        self._address = id(self._generator) + object.__basicsize__
        room = type(self._generator).__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
        self._is_seen = room and ctypes.string_at(self._address, _MT19937_BYTES) == self._memory

    def state(self) -> tuple[Any, ...]:
        """Return the state, as `random.getstate()` does."""
        if not self._is_seen:
            return random.getstate()
        memory = ctypes.string_at(self._address, _MT19937_BYTES)
        if memory != self._memory or self._generator.gauss_next != self._state[2]:
            self._memory, self._state = memory, random.getstate()
        return self._state


class KeptDraws:
    """What is copied before each step, so that this takes little: buffers in place, one copy at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._live = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._live]
        self._numpy, self._python = _NumpyDraws(), _PythonDraws()

    def buffers(self) -> list[Tensor]:
        """Copy the buffers, over the last copy."""
        if self._live:
            with torch.no_grad():
                foreach_copy_(self._copies, self._live)
        return self._copies

    def of_numpy(self) -> Mapping[str, Any]:
        """Return the state of numpy's generator."""
        return self._numpy.state()

    def of_python(self) -> tuple[Any, ...]:
        """Return the state of Python's generator."""
        return self._python.state()


@dataclass(frozen=True)
class Draws:
    """The state of this process's generators, and of the model's buffers, before a step.

    `replica`: all else that a replica has, where it trains by itself until all agree again; empty: sums keep all alike.
    """

    of_torch: Tensor
    of_python: tuple[Any, ...]
    of_numpy: Mapping[str, object]
    buffers: list[Tensor]
    replica: StateView

    @classmethod
    def of(cls, run: TrainingRun, copies: KeptDraws | None = None) -> Draws:
        """Copy them.

        Args:
            copies: what they are copied to; left out: to others.
        """
        copies = copies or KeptDraws(run.parts.local_model)
        sync = run.parts.sync
        replica = {} if sync.steps_together else copy_state({**replica_state(run.parts), "sync": sync.state_dict()})
        return cls(torch.get_rng_state(), copies.of_python(), copies.of_numpy(), copies.buffers(), replica)

    @classmethod
    def begun(cls, run: TrainingRun) -> Draws:
        """Copy them where replicas have begun to agree, but for what they agree on: see `landed`."""
        own = {key: value for key, value in replica_state(run.parts).items() if key not in ("parameters", "buffers")}
        of_numpy = np.random.get_state(legacy=False)
        return cls(torch.get_rng_state(), random.getstate(), of_numpy, [], copy_state(own))

    def landed(self, run: TrainingRun) -> Draws:
        """Return what was `begun` with a copy of what replicas have agreed on since, and nothing trained after it."""
        sync = run.parts.sync
        assert isinstance(sync, Overlapped), "nothing lands with other strategies"
        with sync.landed() as state:
            live = replica_state(run.parts)
            agreed = copy_state({"parameters": live["parameters"], "buffers": live["buffers"], "sync": state})
        return replace(self, buffers=list(agreed["buffers"].values()), replica={**self.replica, **agreed})

    @torch.no_grad()
    def restore(self, run: TrainingRun) -> None:
        """Put them back."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # type: ignore[arg-type]
        if self.replica:
            state = copy_state(self.replica)  # an optimizer goes on with the tensors that it is given
            take_replica_state(run.parts, state, with_buffers=True)
            run.parts.sync.load_state_dict(dict(state["sync"]))
        for buffer, value in zip(run.parts.local_model.buffers(), self.buffers, strict=True):
            buffer.copy_(value)


def replica_state(run_parts: RunParts) -> StateView:
    """Return what a replica has after an update: parameters, buffers, optimizer, scaler, moving average (live)."""
    model = run_parts.local_model
    return {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "optimizer": run_parts.optimizer.state_dict(),
        "scaler": run_parts.scaler.state_dict(),
        "ema": run_parts.ema.state_dict() if run_parts.ema else {},
    }


@torch.no_grad()
def take_replica_state(run_parts: RunParts, state: StateView, with_buffers: bool) -> None:
    """Take over what `replica_state` returned, here or on another rank; its tensors become the optimizer's."""
    model = run_parts.local_model
    for name, parameter in model.named_parameters():
        parameter.copy_(state["parameters"][name])
    if with_buffers:
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])
    run_parts.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        run_parts.scaler.load_state_dict(dict(state["scaler"]))
    if run_parts.ema and state["ema"]:
        run_parts.ema.load_state_dict(state["ema"])


@dataclass(frozen=True)
class Commit:
    """How far a rank is.

    Attributes:
        between: what is due after the step is done too: the next one may have begun. Then `draws` is from before it.
        best, best_loss, stagnation, owes_evaluation: of the run's checkpoints (see `Saver`).
        reason: why the run completes before its last step.
    """

    step: int
    between: bool
    epoch: int
    batch: int
    stagnation: Stagnation
    owes_evaluation: bool
    reason: str
    best: Number | None = None
    best_loss: Number | None = None
    draws: Draws | None = None

    @classmethod
    def begun(cls, run: TrainingRun, cursor: Cursor, reason: str) -> Commit:
        """Note how far a rank is where replicas have begun to agree: it counts once that has `landed`."""
        noted = Noted.of(run, cursor, reason, between=False).commit()
        return replace(noted, between=True, draws=Draws.begun(run))

    def landed(self, run: TrainingRun) -> Commit:
        """Return what was `begun`, with what replicas have agreed on."""
        assert self.draws is not None
        return replace(self, draws=self.draws.landed(run))

    @property
    def place(self) -> tuple[int, bool]:
        """Orders commits: that of a rank which is further is greater."""
        return self.step, self.between

    def cursor(self) -> Cursor:
        """Return the cursor of this moment."""
        return Cursor(self.epoch, self.batch, self.step)


class Noted(NamedTuple):
    """What a commit is made of: noted twice in each step, where a commit takes longer to make."""

    step: int
    between: bool
    epoch: int
    batch: int
    stagnation: Stagnation
    owes_evaluation: bool
    reason: str
    best: BestResult | None
    draws: Draws | None

    @classmethod
    def of(cls, run: TrainingRun, cursor: Cursor, reason: str, between: bool, copies: KeptDraws | None = None) -> Noted:
        """Note how far a rank is now; `copies`: see `Draws.of`."""
        saver, draws = run.saver, Draws.of(run, copies) if between else None
        return cls(
            cursor.step, between, cursor.epoch, cursor.batch, saver.stagnation, saver.owes_evaluation, reason,
            saver.best, draws,
        )  # fmt: skip

    def commit(self) -> Commit:
        """Return the commit."""
        value, loss = BestResult.numbers(self.best)
        return Commit(
            self.step, self.between, self.epoch, self.batch, self.stagnation, self.owes_evaluation, self.reason,
            value, loss, self.draws,
        )  # fmt: skip
