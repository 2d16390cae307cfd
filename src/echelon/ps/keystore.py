"""One key of the parameters on its server: value, optimizer, version, and what has been counted into it.

What is done about gradients that were computed on older parameters stands at the end, as functions on flat tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.compression.base import working_dtype
from echelon.coordinator.runs import from_runs, to_runs
from echelon.coordinator.shares import MAX_SHARES
from echelon.core.state_tree import StateTree, StateView
from echelon.optim.kernels import give_velocities
from echelon.optim.own import LIBRARIES, ParamGroup, has_sgd_momentum
from echelon.ps.made_rows import OPTIMIZER, ROWS, UPDATES, VALUE, RowSlots, grow_state, grown, is_by_row, with_first
from echelon.ps.rows import RowVersions, row_gradient
from echelon.ps.table import KeyRange
from echelon.sync.ps import ServerSettings

_MEAN_SQUARE_DECAY = 0.95
_EPSILON = 1e-7  # below the root of a mean square

MakeOptimizer = Callable[[Sequence[nn.Parameter], Sequence[bool]], torch.optim.Optimizer]
"""Builds the optimizer for tensors, some of which have weight decay."""


class PushOutcome(IntEnum):
    """What became of a push."""

    APPLIED = 0
    PENDING = 1  # counted into a version that waits for others
    DUPLICATE = 2  # this task's gradient of this key was counted before
    LATE = 3  # the version is complete without it


class Push(NamedTuple):
    """A decoded gradient of one key: which task, on which version, from how many of the batch's units (of the loss).

    A gradient is a sum over units divided by `batch`; `scale` is a factor of the learning rate. `memory` is the
    message that the gradient lies in, where nothing else needs it any more: the new value may take its place. `absent`
    are the key's parts that it has no gradient of.
    """

    worker: str
    task: int
    step: int
    share: int
    shares: int
    units: int
    base: int
    lr: float
    batch: int
    gradient: Tensor
    scale: float = 1.0
    memory: Any = None
    absent: frozenset[int] = frozenset()


@dataclass
class _Gathered:
    """The gradients of one version that have come so far, of how many, for a batch of which size.

    `total` is the sum of shares in their order, the same bits whatever came first; `waiting` those before which one is
    missing; `absent` the parts of the key that none has a gradient of.
    """

    wanted: int
    batch: int
    total: Tensor | None = None
    shares: set[int] = field(default_factory=set)
    units: int = 0
    lr: float = 0.0
    waiting: dict[int, Tensor] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()

    def add(self, share: int, units: int, lr: float, gradient: Tensor, in_order: bool) -> None:
        """Count the gradient of a share, and sum it now or once those before it are there."""
        self.shares.add(share)
        self.units += units
        self.lr = lr
        turn = len(self.shares) - 1 - len(self.waiting)
        if in_order and share != turn:
            self.waiting[share] = gradient.clone()
            return
        self._sum(gradient)
        while (turn := turn + 1) in self.waiting:
            self._sum(self.waiting.pop(turn))

    def finish(self) -> Tensor:
        """Return the sum of all that came."""
        for share in sorted(self.waiting):
            self._sum(self.waiting.pop(share))
        assert self.total is not None
        return self.total

    def _sum(self, gradient: Tensor) -> None:
        if self.total is None:
            self.total = gradient.clone()
        elif gradient.is_sparse:
            self.total = (self.total + gradient).coalesce()
        else:
            self.total += gradient


@dataclass
class Applied:
    """Tasks whose gradient is counted: all below `watermark`, and those in `tasks`."""

    watermark: int = 0
    tasks: set[int] = field(default_factory=set)

    def __contains__(self, task: int) -> bool:
        return task < self.watermark or task in self.tasks

    def raise_to(self, watermark: int) -> None:
        """Forget tasks one by one that all are done."""
        if watermark > self.watermark:
            self.watermark = watermark
            self.tasks = {task for task in self.tasks if task >= watermark}


class KeyStore:
    """Value and optimizer of one key. In aggregating modes `version` is the step that is next, else it counts updates.

    In aggregating modes the value before the last update is kept, so that a task of that step can be computed again; of
    a table's key, the rows that it changed.
    `average` is the exponential moving average of the value, where `settings.ema` asks for it. `memory` is the message
    that the value lies in, if it does: it may be on its way to a worker, so the value must not be changed in place.
    `rows` counts updates by row where the key is of a table, whose gradients are sparse; else None. `made` are the
    slots in `value` of rows that are made one by one; None: all rows are here.
    """

    def __init__(self, key: KeyRange, value: Tensor, settings: ServerSettings, make_optimizer: MakeOptimizer) -> None:
        self.key, self.settings = key, settings
        self.value = value
        self.memory: Any = None
        self.version = 0
        self.applied = Applied()
        self.average = value.to(working_dtype(value.dtype), copy=True) if settings.ema else None
        self.averaged = 0
        self.before: Tensor | None = None
        self._rows_before: tuple[Tensor, Tensor] | None = None
        self._gathered: dict[int, _Gathered] = {}
        self.made = RowSlots() if key.begins is not None else None
        if self.made is None:
            views = [nn.Parameter(value[p.start : p.stop].view(p.shape)) for p in key.parts]
        else:
            self.value = value[:0]
            views = [nn.Parameter(self.value.view(0, key.width))]
        self._views, self._make_optimizer = views, make_optimizer
        self.optimizer = make_optimizer(views, [p.decay for p in key.parts])
        _set_rates(self.optimizer, {id(v): p.rate for v, p in zip(views, key.parts, strict=True)})
        self._step = _bare_step(self.optimizer)
        self._plain = _is_plain_sgd(self.optimizer) and not key.width
        self.rows = RowVersions(key.rows, self.made) if key.width else None
        if self._plain:
            for view in views:
                view.data = torch.empty(0, dtype=value.dtype)  # the optimizer is not used: no second copy
        corrects = has_sgd_momentum(self.optimizer) or settings.momentum_correction
        self._momenta = [group.get("momentum") if corrects else None for group in self.optimizer.param_groups]
        self._scales_by_staleness = bool(settings.by_staleness)
        self._pulled: dict[str, tuple[int, float, Tensor | None]] = {}
        self._mean_square: dict[str, Tensor] = {}

    def staleness_of(self, push: Push) -> int:
        """Return how many updates came between the pull that a gradient was computed on and now; of rows, the most."""
        if self.rows is not None:
            stale = self.rows.staleness(push.worker, push.task, push.gradient.indices()[0])
            return int(stale.max()) if len(stale) else 0
        return max(0, self.version - push.base)

    def scale_of(self, push: Push, now_s: float) -> float:
        """Return the factor of the learning rate for a gradient, from its staleness and age."""
        scale = 1.0
        if self._scales_by_staleness:
            scale *= staleness_factor(self.staleness_of(push))
        pulled = self._pulled.get(push.worker)
        if self.settings.decay_s > 0 and pulled is not None:
            scale *= age_factor(now_s - pulled[1], self.settings.decay_s)
        return scale

    def take(self, push: Push) -> PushOutcome:
        """Count a gradient, and update when its version is complete."""
        if self.settings.aggregates:
            return self._gather(push)
        if push.task in self.applied:
            return PushOutcome.DUPLICATE
        self.applied.tasks.add(push.task)
        if push.units == 0 < push.batch:  # a part without samples is no update
            return PushOutcome.APPLIED
        gradient = self._compensated(push)
        memory = push.memory if gradient is push.gradient else None
        share = push.units / push.batch if push.units < push.batch else 1.0
        self._update(gradient, push.lr * push.scale, memory, push.absent, share)
        self.version += 1
        return PushOutcome.APPLIED

    def _gather(self, push: Push) -> PushOutcome:
        if push.step < self.version:
            return PushOutcome.LATE if self.settings.backup else PushOutcome.DUPLICATE
        gathered = self._gathered.setdefault(push.step, _Gathered(push.shares, push.batch))
        if push.share in gathered.shares:
            return PushOutcome.DUPLICATE
        gathered.absent = gathered.absent & push.absent if gathered.shares else push.absent
        gathered.add(push.share, push.units, push.lr, push.gradient, in_order=not self.settings.backup)
        version = self.version
        while self._complete_next():
            pass
        return PushOutcome.APPLIED if self.version > version else PushOutcome.PENDING

    def _complete_next(self) -> bool:
        gathered = self._gathered.get(self.version)
        if gathered is None or len(gathered.shares) < max(1, gathered.wanted - self.settings.backup):
            return False
        self._complete(self._gathered.pop(self.version))
        return True

    def _complete(self, gathered: _Gathered) -> None:
        total = gathered.finish()
        if len(gathered.shares) < gathered.wanted and gathered.units:
            # The mean over those that came stands for the batch (Chen et al. 2016).
            total = total * (gathered.batch / gathered.units)
            total = total.coalesce() if total.is_sparse else total
        if self.rows is None:
            self.before = self.value.clone()
        else:
            changed = total.indices()[0].clone()
            self._rows_before = changed, self.row_values(changed)
        self._update(total, gathered.lr, absent=gathered.absent)
        self.version += 1

    def catch_up(self, step: int) -> int:
        """After a restart: complete every version before `step` with what came again; returns how many lacked some."""
        lacking = 0
        while self.settings.aggregates and self.version < step:
            gathered = self._gathered.pop(self.version, None)
            lacking += gathered is None or len(gathered.shares) < max(1, gathered.wanted - self.settings.backup)
            if gathered is None:
                self.version += 1
            else:
                self._complete(gathered)
        while self._complete_next():  # what came while the server was behind: nobody pushes it once more
            pass
        return lacking

    def _compensated(self, push: Push) -> Tensor:
        then = self._pulled.get(push.worker, (0, 0.0, None))[2]
        kind, strength = self.settings.compensation, self.settings.compensation_strength
        if kind == "none" or then is None:
            return push.gradient
        if kind == "constant":
            return compensate_constant(push.gradient, self.value, then, strength)
        square = self._mean_square.setdefault(push.worker, torch.zeros_like(self.value))
        return compensate_adaptive(push.gradient, self.value, then, square, strength)

    def _update(
        self,
        gradient: Tensor,
        lr: float,
        memory: Any = None,
        absent: frozenset[int] = frozenset(),
        share: float = 1.0,
    ) -> None:
        """Let the optimizer step on a gradient, which is of this share of a batch, at its rate."""
        if absent and self._plain:
            for part in (self.key.parts[i] for i in absent):
                if gradient[part.start : part.stop].any():  # a codec may decode more than nothing of nothing
                    gradient[part.start : part.stop] = 0
        if self._plain:
            self._descend(gradient, lr, memory)
        else:
            with torch.no_grad():
                self._optimize(gradient, lr, absent)
        if self.rows is not None:
            self.rows.updated(gradient.indices()[0])
        if self.average is not None:  # as the loop's own average: a short run is not one of its random start
            batches = self.averaged * share
            decay = min(self.settings.ema, (1 + batches) / (10 + batches))
            self.averaged += 1
            self.average.lerp_(self.value.to(self.average.dtype), 1 - decay**share)

    def _descend(self, gradient: Tensor, lr: float, memory: Any) -> None:
        """SGD in one pass: the new value is written over the gradient, and that memory can travel without a copy."""
        if memory is None and any(part.rate != 1.0 for part in self.key.parts):
            gradient = gradient.clone()  # a standby is sent the message that it lies in
        for part in self.key.parts:
            if part.rate != 1.0:
                gradient[part.start : part.stop] *= part.rate
        if memory is not None:
            self.value = torch.add(self.value, gradient, alpha=-lr, out=gradient)
        elif self.memory is None:
            self.value.add_(gradient, alpha=-lr)
        else:
            self.value = torch.add(self.value, gradient, alpha=-lr)
        self.memory = memory

    def _optimize(self, gradient: Tensor, lr: float, absent: frozenset[int]) -> None:
        if len(self._views) == 1:
            if self.made is not None:
                gradient = self._of_slots(gradient, self.made)
            whole = gradient if gradient.is_sparse else gradient.view(self.key.parts[0].shape)
            self._views[0].grad = None if absent else whole
        else:
            for i, (part, view) in enumerate(zip(self.key.parts, self._views, strict=True)):
                view.grad = None if i in absent else gradient[part.start : part.stop].view(part.shape)
            if absent and isinstance(self.optimizer, torch.optim.SGD):  # its hooks for this are left out
                give_velocities(self.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self._step(self.optimizer)

    def _of_slots(self, gradient: Tensor, made: RowSlots) -> Tensor:
        """Return a gradient of rows as one of their slots, `(slots, D)`; rows that are not here yet are made."""
        rows = gradient.indices()[0]
        self._make(rows[made.find(rows) < 0], made)
        slots, order = made.find(rows).sort()
        return torch.sparse_coo_tensor(
            slots[None], gradient.values()[order], self._views[0].shape, is_coalesced=True, check_invariants=False
        )

    def _make(self, rows: Tensor, made: RowSlots) -> None:
        """Let rows exist that do not yet, with their first values and the optimizer's first state."""
        assert self.key.begins is not None
        width, first = self.key.width, made.count
        view, (part,) = self._views[0], self.key.parts
        slots = grown(len(view), first + len(rows), self.key.rows)
        if slots > len(view):
            more = nn.Parameter(torch.zeros((slots - len(view), width), dtype=self.value.dtype))
            grow_state(self.optimizer, view, self._make_optimizer([more], [part.decay]))
            self.value = torch.cat([self.value, more.detach().view(-1)])
            view.data = self.value.view(slots, width)
        made.add(rows)
        view.data[first : made.count] = self.key.begins.values(rows, width, self.value.dtype)

    def note_pull(self, worker: str, now_s: float) -> None:
        """Remember which version a worker has, and where compensation needs it, the value."""
        wanted = self.settings.compensation != "none"
        self._pulled[worker] = (self.version, now_s, self.value.clone() if wanted else None)

    def forget(self, worker: str) -> None:
        """Drop what is remembered of a worker that is gone."""
        self._pulled.pop(worker, None)
        self._mean_square.pop(worker, None)
        if self.rows is not None:
            self.rows.forget(worker)

    def row_values(self, rows: Tensor) -> Tensor:
        """Return a copy of rows of a table's key, `(R, D)`; what was not made is as it begins, and is not kept."""
        table = self.value.view(-1, self.key.width)
        if self.made is None:
            return table[rows]
        slots = self.made.find(rows)
        return with_first(rows, slots >= 0, table[slots[slots >= 0]], self.key, table.dtype)

    def row_values_before(self, rows: Tensor) -> Tensor:
        """Return a copy of rows `(R, D)` as `row_values` does, as they were before the last update."""
        values = self.row_values(rows)
        if self._rows_before is not None and len(self._rows_before[0]):
            changed, before = self._rows_before
            at = torch.searchsorted(changed, rows).clamp(max=len(changed) - 1)
            was_changed = changed[at] == rows
            values[was_changed] = before[at[was_changed]]
        return values

    def set_workers(self, workers: int, batch_parts: int = 1) -> None:
        """Correct momentum and rates for asynchrony among so many workers, where the settings say so.

        Args:
            batch_parts: leases that each batch is cut into.
        """
        if self.rows is None and any(momentum is not None for momentum in self._momenta):  # it is SGD
            self._scales_by_staleness = self.settings.scales_by_staleness(workers, batch_parts)
        for group, wanted in zip(self.optimizer.param_groups, self._momenta, strict=True):
            if wanted is not None:
                group["momentum"] = self.settings.server_momentum(wanted, workers, batch_parts)

    def state(self, full: bool) -> StateTree:
        """Return a copy of the state: the value, and with `full` all that an update or a count depends on.

        Where rows are made one by one, `made` has those that exist in place of the value (see `made_rows`).
        """
        state: StateTree = {"version": self.version}
        state |= {"value": self.value.clone()} if self.made is None else {"made": self._made_state(self.made, full)}
        if self.average is not None:
            state |= {"average": self.average.clone(), "averaged": self.averaged}
        if full:
            optimizer = self.optimizer.state_dict()["state"]
            state |= {
                "optimizer": {
                    i: {k: _copy(v) for k, v in entry.items() if self.made is None or not is_by_row(v, self._views[0])}
                    for i, entry in optimizer.items()
                },
                "groups": _left_in_groups(self.optimizer),
                "watermark": self.applied.watermark,
                "task_runs": to_runs(self.applied.tasks),
                "then": {w: t.clone() for w, (_, _, t) in self._pulled.items() if t is not None},
                "pulled": {w: v for w, (v, _, _) in self._pulled.items()},
                "mean_square": {w: t.clone() for w, t in self._mean_square.items()},
            }
            if self.rows is not None and self.made is None:
                state["row_updates"] = self.rows.counts.clone()
        return state

    def _made_state(self, made: RowSlots, full: bool) -> dict[str, Tensor]:
        """Return copies of what is here of rows that exist, in ascending order of rows."""
        assert self.rows is not None
        rows, slots = made.in_order()
        view = self._views[0]
        state = {ROWS: rows.clone(), VALUE: view.detach()[slots]}
        if full:
            entries = self.optimizer.state.get(view, {})
            state[UPDATES] = self.rows.of(rows)
            state |= {f"{OPTIMIZER}{name}": value[slots] for name, value in entries.items() if is_by_row(value, view)}
        return state

    @torch.no_grad()
    def load_made(self, state: Mapping[str, Tensor]) -> None:
        """Take over R rows that exist, of `made` in a state, `(R, ...)` each; more may follow.

        Raises:
            ValueError: they are none of this key's, or are here already.
        """
        rows, made = state[ROWS], self.made
        fits = all(len(tensor) == len(rows) for tensor in state.values()) and bool((rows.diff() > 0).all())
        inside = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < self.key.rows)
        if made is None or self.rows is None or not fits or not inside or bool((made.find(rows) >= 0).any()):
            raise ValueError(f"not rows of key {self.key.index}")
        first, view = made.count, self._views[0]
        self._make(rows, made)
        here = slice(first, made.count)
        view.data[here] = state[VALUE]
        self.rows.load(here, state.get(UPDATES))
        for name, values in state.items():
            if name.startswith(OPTIMIZER):
                entries = self.optimizer.state[view]
                entry = entries.setdefault(name.removeprefix(OPTIMIZER), torch.zeros_like(view.data))
                entry[here] = values

    def gathered_tasks(self) -> set[int]:
        """Return the shares of versions that are not complete, as tasks."""
        return {step * MAX_SHARES + share for step, g in self._gathered.items() for share in g.shares}

    def whole_state(self) -> StateTree:
        """Return the state with what is gathered for versions that wait: what acknowledged pushes left here."""
        gathered = {
            step: {"wanted": g.wanted, "batch": g.batch, "samples": g.units, "lr": g.lr, "shares": sorted(g.shares),
                   "total": _packed(g.total),
                   "waiting": {share: _packed(t) for share, t in g.waiting.items()},
                   "absent": sorted(g.absent)}
            for step, g in self._gathered.items()
        }  # fmt: skip
        return {**self.state(full=True), "gathered": gathered}

    def load_state(self, state: StateTree, now_s: float) -> None:
        """Take over what `state` returned; workers count as having pulled now.

        Raises:
            ValueError: it is of another key.
        """
        if self.made is None:
            self._load_value(state)
        elif self.made.count:
            raise ValueError(f"key {self.key.index} has rows already")
        self.version = int(state["version"])
        self._gathered, self.before, self._rows_before = {}, None, None
        for step, g in state.get("gathered", {}).items():
            shares, lr = {int(s) for s in g["shares"]}, float(g["lr"])
            rest = {int(share): self._unpacked(gradient) for share, gradient in g.get("waiting", {}).items()}
            total = None if g["total"] is None else self._unpacked(g["total"])
            self._gathered[int(step)] = _Gathered(
                g["wanted"], g["batch"], total, shares, g["samples"], lr, rest, frozenset(g.get("absent", ()))
            )
        if "optimizer" in state:
            self._load_rest(state, now_s)
        if "made" in state:
            self.load_made(state["made"])

    def _unpacked(self, gradient: Any) -> Tensor:
        """Return a gradient of this key that `_packed` made ready to travel."""
        found: Tensor = row_gradient(gradient[ROWS], gradient[VALUE], self.key) if self.key.width else gradient
        return found

    def _load_value(self, state: StateTree) -> None:
        value = state.get("value")
        if not isinstance(value, Tensor) or value.shape != self.value.shape or value.dtype != self.value.dtype:
            raise ValueError(f"not the state of key {self.key.index}")
        if self.memory is not None:
            self.value, self.memory = torch.empty_like(self.value), None
        with torch.no_grad():
            self.value.copy_(value)
            if self.average is not None:
                self.average.copy_(state.get("average", value))
                self.averaged = int(state.get("averaged", 0))

    def _load_rest(self, state: StateTree, now_s: float) -> None:
        """Take over what updates and counts depend on."""
        whole = self.optimizer.state_dict()
        if not self._plain:  # of a momentum that workers keep now, nothing is
            saved = state["optimizer"]
            if self.made is not None:  # what it has of rows follows
                saved = {i: {**whole["state"].get(i, {}), **entry} for i, entry in saved.items()}
            self.optimizer.load_state_dict({**whole, "state": saved})
            for group, entries in zip(self.optimizer.param_groups, state.get("groups", ()), strict=False):
                group.update(entries)
        self.applied = Applied(int(state["watermark"]), counted_tasks(state))
        self._pulled = {w: (v, now_s, state["then"].get(w)) for w, v in state["pulled"].items()}
        self._mean_square = dict(state["mean_square"])
        if self.rows is not None and self.made is None:
            if "row_updates" in state:
                self.rows.counts.copy_(state["row_updates"])
            else:  # memories begin anew
                self.rows.counts.zero_()


def counted_tasks(state: StateView) -> set[int]:
    """Return the tasks beyond its watermark that a key's whole state has counted; older ones list each of them."""
    return from_runs(state["task_runs"]) if "task_runs" in state else set(state["tasks"])


def _set_rates(optimizer: torch.optim.Optimizer, rates: Mapping[int, float]) -> None:
    """Cut the groups of an optimizer that has no state yet by the factors of the learning rate, as `lr_scale`."""
    if set(rates.values()) <= {1.0}:
        return
    cut: list[ParamGroup] = []
    for group in optimizer.param_groups:
        for rate in dict.fromkeys(rates[id(p)] for p in group["params"]):
            same = [p for p in group["params"] if rates[id(p)] == rate]
            cut.append({**group, "params": same, "lr_scale": rate})
    optimizer.param_groups[:] = cut


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the optimizer's step without torch's wrappers (profiling, hooks): for a small key they cost the most.

    A user's own class may have wrappers that it needs.
    """
    step: Any = type(optimizer).step
    while type(optimizer).__module__.startswith(LIBRARIES) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update is no more than value - lr * gradient."""
    extras = ("momentum", "weight_decay", "maximize", "differentiable")
    return type(optimizer) is torch.optim.SGD and not any(g[name] for g in optimizer.param_groups for name in extras)


def _left_in_groups(optimizer: torch.optim.Optimizer) -> list[ParamGroup]:
    """Return copies of what steps have left in each group beside its settings, such as timm's Adan its step count."""
    settings = {*optimizer.defaults, "params", "lr_scale"}
    return [{k: _copy(v) for k, v in group.items() if k not in settings} for group in optimizer.param_groups]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _packed(gradient: Tensor | None) -> Any:
    """Return a copy of a gradient as a state has it: of rows, their numbers and their values."""
    if gradient is None or not gradient.is_sparse:
        return _copy(gradient)
    return {ROWS: gradient.indices()[0].clone(), VALUE: gradient.values().clone()}


def compensate_constant(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> Tensor:
    """Return g + strength * g*g*(now - then); all 1-D, of one shape.

    Delay compensation (Zheng et al. 2017, DC-ASGD, arXiv:1609.08326): the diagonal of the outer product of gradients
    stands for the Hessian.
    """
    return gradient + strength * gradient * gradient * (now - then)


def compensate_adaptive(gradient: Tensor, now: Tensor, then: Tensor, mean_square: Tensor, strength: float) -> Tensor:
    """Return the compensated gradient with lambda_t = strength / sqrt(MS + 1e-7); updates `mean_square` in place.

    The adaptive form of DC-ASGD, per worker: MS <- 0.95 MS + 0.05 g*g; all 1-D, of one shape.
    """
    square = gradient * gradient
    mean_square.mul_(_MEAN_SQUARE_DECAY).add_(square, alpha=1 - _MEAN_SQUARE_DECAY)
    return gradient + strength * (mean_square + _EPSILON).rsqrt() * square * (now - then)


def staleness_factor(staleness: int) -> float:
    """Return the factor of the learning rate: 1 / max(1, staleness) (Zhang et al. 2016, arXiv:1511.05950)."""
    return 1.0 / max(1, staleness)


def age_factor(age_s: float, decay_s: float) -> float:
    """Return the weight exp(-age / decay) of a gradient whose parameters were pulled `age_s` ago."""
    return math.exp(-max(0.0, age_s) / decay_s)
