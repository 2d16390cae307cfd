"""What a rank knows to be done when it begins a step, and when it has updated: from there it can go on with others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from echelon.checkpoint import copy_state
from echelon.core.state_tree import StateView
from echelon.core.task import BestResult, Stagnation
from echelon.records.kinds import Number
from echelon.sync.base import Overlapped
from echelon.torch_compat import foreach_copy_, registered_buffers
from echelon.trainer.generators import Generators, GeneratorStates
from echelon.trainer.loop import TrainingRun
from echelon.trainer.saving import Saver
from echelon.trainer.state import Cursor, RunParts


@dataclass(frozen=True)
class _Registered:
    """Which tensors modules of a model have as buffers at a moment.

    Attributes:
        live: of each module that has some.
        tensors: what was in each.
    """

    live: list[dict[str, Tensor | None]]
    tensors: list[dict[str, Tensor | None]]

    @classmethod
    def of(cls, model: nn.Module) -> _Registered:
        """Note them."""
        live = registered_buffers(model)
        return cls(live, [dict(named) for named in live])

    def restore(self) -> None:
        """Put them back: a forward pass may have assigned others since, of any shape."""
        for live, tensors in zip(self.live, self.tensors, strict=True):
            live.clear()
            live.update(tensors)


class _Copies:
    """Copies of a model's buffers, written over in each step; those on the CPU by one operation.

    A BatchNorm alone has three buffers, and with the caches as a step leaves them each operation takes a microsecond.
    A forward pass may assign a buffer anew: then they are laid out again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lay_out()

    def _lay_out(self) -> None:
        live = list(self._model.buffers())
        self.registered = _Registered.of(self._model)
        self._laid_out = [buffer for named in self.registered.tensors for buffer in named.values()]
        self.copies = [buffer.clone() for buffer in live]
        flat = [i for i, buffer in enumerate(live) if _is_plain(buffer)]
        flat.sort(key=lambda i: -live[i].element_size())  # so that each begins at a multiple of its elements' size
        self._live = [live[i].detach().view(-1).view(torch.uint8).numpy() for i in flat]
        self._whole = np.empty(sum(array.size for array in self._live), np.uint8)
        parts = torch.from_numpy(self._whole).split([array.size for array in self._live])
        for i, part in zip(flat, parts, strict=True):
            self.copies[i] = part.view(live[i].dtype).view(live[i].shape)
        others = [i for i in range(len(live)) if i not in set(flat)]
        self._others = [self.copies[i] for i in others], [live[i] for i in others]

    def _is_as_laid_out(self) -> bool:
        present = [buffer for named in self.registered.live for buffer in named.values()]
        return len(present) == len(self._laid_out) and all(map(is_, present, self._laid_out))

    def take(self) -> list[Tensor]:
        """Copy the buffers, over the last copy; returns the copies, in the model's order."""
        if not self._is_as_laid_out():
            self._lay_out()
        if self._live:
            np.concatenate(self._live, out=self._whole)
        if self._others[0]:
            with torch.no_grad():
                foreach_copy_(*self._others)
        return self.copies


def _is_plain(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and buffer.device.type == "cpu" and buffer.is_contiguous()


class KeptDraws:
    """What is kept of before each step, so that this takes little: buffers are copied in place, one copy at a time."""

    def __init__(self, model: nn.Module, of_layers: bool = True) -> None:
        """Take the model; `of_layers`: they draw from torch's generator as it is, else it is seeded in each step."""
        self._copies, self._generators = _Copies(model), Generators(of_layers)
        self._draws = Draws(self._generators.states(), self._copies.take(), {}, self._copies.registered)

    def take(self) -> Draws:
        """Copy the buffers, over the last copy; returns them with the generators' states."""
        buffers, states = self._copies.take(), self._generators.states()
        if states is not self._draws.generators or buffers is not self._draws.buffers:
            self._draws = replace(self._draws, generators=states, buffers=buffers, registered=self._copies.registered)
        return self._draws


@dataclass(frozen=True)
class Draws:
    """The state of this process's generators, and of the model's buffers, before a step.

    Attributes:
        replica: all else that a replica has, where it trains by itself until all agree again; empty: sums keep all
            alike.
        registered: the tensors that `buffers` are copies of.
    """

    generators: GeneratorStates
    buffers: list[Tensor]
    replica: StateView
    registered: _Registered

    @classmethod
    def of(cls, run: TrainingRun, copies: KeptDraws | None = None) -> Draws:
        """Copy them.

        Args:
            copies: what they are copied to; left out: to others.
        """
        draws, sync = (copies or KeptDraws(run.parts.local_model)).take(), run.parts.sync
        if sync.steps_together:
            return draws
        return replace(draws, replica=copy_state({**replica_state(run.parts), "sync": sync.state_dict()}))

    @classmethod
    def begun(cls, run: TrainingRun) -> Draws:
        """Copy them where replicas have begun to agree, but for what they agree on: see `landed`."""
        own = {key: value for key, value in replica_state(run.parts).items() if key not in ("parameters", "buffers")}
        return cls(GeneratorStates.read(), [], copy_state(own), _Registered([], []))

    def landed(self, run: TrainingRun) -> Draws:
        """Return what was `begun` with a copy of what replicas have agreed on since, and nothing trained after it."""
        sync = run.parts.sync
        assert isinstance(sync, Overlapped), "nothing lands with other strategies"
        with sync.landed() as state:
            live = replica_state(run.parts)
            agreed = copy_state({"parameters": live["parameters"], "buffers": live["buffers"], "sync": state})
        buffers, registered = list(agreed["buffers"].values()), _Registered.of(run.parts.local_model)
        return replace(self, buffers=buffers, replica={**self.replica, **agreed}, registered=registered)

    @torch.no_grad()
    def restore(self, run: TrainingRun) -> None:
        """Put them back."""
        self.generators.restore()
        self.registered.restore()
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
        best, best_loss, stagnation, owes_evaluation, evaluated_epochs: of the run's checkpoints (see `Saver`).
        reason: why the run completes before its last step.
    """

    step: int
    between: bool
    epoch: int
    batch: int
    stagnation: Stagnation
    owes_evaluation: bool
    reason: str
    evaluated_epochs: int = 0
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

    def made(self) -> Commit:
        """Return what is done once the step that had begun was made."""
        return replace(self, step=self.step + 1, batch=self.batch + 1, between=False, draws=None)

    def evaluated(self, saver: Saver) -> Commit:
        """Return it with an evaluation that was made since then: a round that is trained again does not repeat it."""
        return replace(
            self, stagnation=saver.stagnation, owes_evaluation=False, evaluated_epochs=saver.evaluated_epochs
        )

    @property
    def place(self) -> tuple[int, bool, int]:
        """Orders commits: that of a rank which is further is greater."""
        return self.step, self.between, self.evaluated_epochs

    def cursor(self) -> Cursor:
        """Return the cursor of this moment."""
        return Cursor(self.epoch, self.batch, self.step)


class Noted(NamedTuple):
    """What a commit is made of: noted in each step, where a commit takes longer to make."""

    step: int
    between: bool
    epoch: int
    batch: int
    stagnation: Stagnation
    owes_evaluation: bool
    reason: str
    evaluated_epochs: int
    best: BestResult | None
    draws: Draws | None

    @classmethod
    def of(cls, run: TrainingRun, cursor: Cursor, reason: str, between: bool, copies: KeptDraws | None = None) -> Noted:
        """Note how far a rank is now; `copies`: see `Draws.of`."""
        saver, draws = run.saver, Draws.of(run, copies) if between else None
        return cls(
            cursor.step, between, cursor.epoch, cursor.batch, saver.stagnation, saver.owes_evaluation, reason,
            saver.evaluated_epochs, saver.best, draws,
        )  # fmt: skip

    def commit(self) -> Commit:
        """Return the commit."""
        value, loss = BestResult.numbers(self.best)
        return Commit(
            self.step, self.between, self.epoch, self.batch, self.stagnation, self.owes_evaluation, self.reason,
            self.evaluated_epochs, value, loss, self.draws,
        )  # fmt: skip
