"""A worker's model between forward and backward: it pushes gradients to the servers and waits for their values.

Each gradient is pushed while backward still runs, as soon as a key of the table is
complete; the forward pass of a layer waits only for its own parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.compression.sparse import share_carried
from echelon.compression.transforms import entropy_coded
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.models.still_buffers import moving_buffers
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.tables import fetch_rows
from echelon.ps.client import Client, PushInfo, RowsOf
from echelon.ps.copies import ServersCopy
from echelon.ps.momentum import SgdTerms, WorkerMomentum
from echelon.ps.rows import of_keys
from echelon.ps.server_tables import ServerTables
from echelon.ps.spans import KeySpan, spans_of, whole_shapes
from echelon.ps.table import KeyRange, KeyTable
from echelon.sync.ps import ServerSettings


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker takes part: the settings of `ps(...)`, and whose time waiting counts as communication.

    `clip_norm`: each worker's gradient is clipped to this norm before it is pushed; 0: not at all. `reads_ahead`: the
    model reads its parameters before its layers are called, as a compiled one does: then all are waited for before the
    forward pass. `momentum`: what the worker does to its gradients; None: the servers do it.
    """

    settings: ServerSettings
    clip_norm: float
    clock: PhaseClock
    reads_ahead: bool = False
    momentum: SgdTerms | None = None


@dataclass
class _Round:
    """One task's progress through the model.

    Attributes:
        missing: how many parameters of each key have no gradient yet; a key leaves at 0, or in `step`.
        came: parameters whose gradient came.
        rows: those of tables that are here, by number of the parameter.
        forward_began: when, and how long had been waited for values by then; None: not yet, or it has ended.
    """

    info: PushInfo
    missing: dict[int, int]
    loaded: set[int] = field(default_factory=set)
    came: set[int] = field(default_factory=set)
    rows: dict[int, Tensor] = field(default_factory=dict)
    forward_began: tuple[float, float] | None = None


class PsStrategy:
    """What a strategy answers whose state the ps servers hold."""

    has_replica_state = False
    in_flight = False
    steps_together = True  # a worker's ranks
    needs_warmup_backward = False  # servers add in the order in which gradients come

    def communication_began(self) -> Any:
        """Return nothing: no rank waits at the end of backward."""
        return None

    def bytes_sent(self) -> Mapping[str, int]:
        """Return nothing: the coordinator counts what is pushed and pulled."""
        return {}

    def reduce_times(self) -> None:
        """Return nothing: what a worker waits for is a phase, what it hides is not timed."""
        return None

    def entropy_coded(self) -> Mapping[str, float]:
        """Return nothing: this rank encodes nothing."""
        return {}

    def density(self) -> float | None:
        """Return nothing: this rank encodes nothing."""
        return None

    def state_dict(self) -> StateTree:
        """Return nothing: the servers hold the state."""
        return {}

    def alike(self, state: StateView) -> list[Tensor]:
        """Return nothing: the servers hold the state."""
        return []

    def load_state_dict(self, state: StateTree) -> None:
        """Do nothing: the servers hold the state."""

    def load_resharded(self, states: Sequence[StateView]) -> None:
        """Do nothing: the servers hold the state."""

    def steps_to_agreement(self, averages: bool = False) -> int | None:
        """Return 0: what is evaluated is the servers' copy."""
        return 0

    def agreed_of(self, replicas: Sequence[StateView], averages: bool = False) -> StateTree:
        """Refuse it: the servers' copy is saved, and no worker's own state.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the servers' copy is saved")


class ParameterServer(PsStrategy):
    """A worker's model between forward and backward: waits for values, pushes gradients.

    Attributes:
        copy: the servers' copy that is evaluated at present.
    """

    def __init__(
        self,
        model: nn.Module,
        table: KeyTable,
        client: Client,
        options: WorkerOptions,
        called: nn.Module | None = None,
    ) -> None:
        """Wrap a model; `called`: what computes with its parameters in its place, such as the same compiled."""
        self.held = model
        self.copy: ServersCopy | None = None
        self.module = model if called is None else called
        self._waits_inside = not options.reads_ahead
        self._table, self._client, self._settings = table, client, options.settings
        self._clip, self._clock = options.clip_norm, options.clock
        self._momentum = WorkerMomentum(options.momentum) if options.momentum else None
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in trained], [p for _, p in trained]
        shapes = whole_shapes(model)
        self._spans = spans_of([math.prod(shapes.get(name, p.shape)) for name, p in trained], table)
        self._by_parameter: list[list[KeySpan]] = [[] for _ in self._parameters]
        self._by_key: dict[int, list[KeySpan]] = {}
        for span in self._spans:
            self._by_parameter[span.parameter].append(span)
            self._by_key.setdefault(span.key.index, []).append(span)
        self._of_key = {key: {span.parameter for span in spans} for key, spans in self._by_key.items()}
        self._version = [-1] * len(self._parameters)
        self._tables = {
            index: [span.key for span in spans]
            for index, spans in enumerate(self._by_parameter)
            if spans and spans[0].key.width
        }
        of_servers = {self._names[i]: keys for i, keys in self._tables.items() if keys[0].begins is not None}
        self.server_tables = ServerTables(client, of_servers, table.torch_dtype, self._clock)
        fetch_rows(model, of_servers, self.server_tables)
        self._places = {key.index: key.index + 1 for key in table.keys} if self._settings.by_priority else {}
        self._last = False
        self._round: _Round | None = None
        self._in_pieces: set[int] = set()  # parameters whose gradients come in pieces, from where backward starts anew
        self._pieces_known = False
        self._batch_lr = 0.0  # learning rate of a whole batch, in the present task
        self._fired: dict[int, None] | None = None  # modules that were called, in order
        self._lazy: set[int] = set()
        self._attach()

    def begin(self, info: PushInfo) -> None:
        """Begin a task; `begin_step` fills in its units."""
        missing = {key: len(parameters) + self._waits(parameters) for key, parameters in self._of_key.items()}
        self._round, self._batch_lr = _Round(info, missing), info.lr
        self.server_tables.begin(info.task, info.step)
        self._client.open_task(info.task, len(self._table.keys))

    def _waits(self, parameters: Set[int]) -> bool:
        """Whether gradients of parameters leave no earlier than in `step`."""
        return self._clip > 0 or not self._pieces_known or not parameters.isdisjoint(self._in_pieces)

    def begin_step(self, units: int, global_units: int) -> int:
        """Return what sums over units are divided by: where they are added to others', the units of the batch.

        Else each is an update of its own: the mean over its units, at a rate that is this share of the batch's.
        """
        alone = self.of_units(units, global_units)
        if not self._waits_inside:
            self.load_all()
        return max(1, units) if alone else global_units

    def of_units(self, units: int, global_units: int) -> bool:
        """Say how many units of a batch the task has, by which its rate goes; returns whether it is an update alone."""
        assert self._round is not None
        info = replace(self._round.info, units=units, batch=global_units)
        alone = not self._settings.aggregates and units < global_units
        rate = self._batch_lr * units / global_units if alone else self._batch_lr
        self._round.info = replace(info, lr=rate)
        return alone

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Push during the last micro-batch's backward only."""
        return self._as_last(last)

    def silent(self) -> AbstractContextManager[object]:
        """Push nothing in backward."""
        return self._as_last(False)

    def leave_out(self) -> None:
        """Push no gradient of this lease: it is done all the same."""
        self.server_tables.end()
        for parameter in self._parameters:
            parameter.grad = None
        self.step()

    def step(self) -> None:
        """Push what backward gave no gradient for, and let go of the gradients: the servers update."""
        assert self._round is not None
        if self._clip:
            nn.utils.clip_grad_norm_([p for p in self._parameters if p.grad is not None], self._clip)
        for key in self._table.keys:
            if self._round.missing[key.index] > 0 and not key.width:
                self._push(key)
        for index, keys in self._tables.items():
            if self._round.missing[keys[0].index] > 0:
                self._push_rows(index)
        for parameter in self._parameters:
            parameter.grad = None
        self.server_tables.end()
        self._pieces_known |= bool(self._round.came)
        self._round = None

    def load_all(self) -> None:
        """Wait for all parameters that the step begins with.

        Raises:
            RunOver: the run ended before they were there.
        """
        assert self._round is not None
        version = self._round.info.step
        for index in range(len(self._parameters)):
            self._load(index, version)

    @torch.no_grad()
    def set_parameters(self, values: Mapping[int, Tensor]) -> None:
        """Set the parameters from values by key, 1-D each; the next task loads its own again.

        Tables of which only servers have rows are left out.
        """
        for name, parameter, spans in zip(self._names, self._parameters, self._by_parameter, strict=True):
            if name in self.server_tables:
                continue
            _set(parameter, ((span, values[span.key.index][span.in_key]) for span in spans))
        self._version = [-1] * len(self._parameters)

    def key_values(self) -> dict[int, Tensor]:
        """Return the parameters as they are here, by key, without those whose rows servers make."""
        return {key.index: self._value_of(key) for key in self._table.keys if key.begins is None}

    def _value_of(self, key: KeyRange) -> Tensor:
        value = torch.empty(key.numel, dtype=self._table.torch_dtype)
        for span in self._by_key[key.index]:
            flat = self._parameters[span.parameter].detach().reshape(-1)
            value[span.in_key] = flat[span.in_parameter].cpu()
        return value

    def copied_rows(self, key: KeyRange, name: str, first: int, count: int) -> Tensor:
        """Return a part of what `copy` has of a key's rows that servers make (see `Client.read_rows`).

        Raises:
            TagLost: a server died meanwhile.
        """
        assert self.copy is not None
        return self._client.read_rows(key, self.copy.tag, name, first, count)

    @contextmanager
    def agreed(self, averages: bool = False) -> Iterator[None]:
        """Give the model, inside the block, what is evaluated of `copy`: its average, where the servers have one.

        Its own buffers come back afterwards; the next step loads its parameters again.
        """
        assert self.copy is not None
        with self._with_buffers(self.copy.buffers), self.server_tables.of_copy(self.copy.tag):
            self.set_parameters(self.copy.averages if self._settings.ema else self.copy.values)
            yield

    @contextmanager
    def saved(self) -> Iterator[dict[str, Tensor]]:
        """Give the model the values of `copy`, as a checkpoint has them; yields the average's state, or nothing."""
        assert self.copy is not None
        with self._with_buffers(self.copy.buffers):
            average: dict[str, Tensor] = {}
            if self._settings.ema:
                self.set_parameters(self.copy.averages)
                average = {name: tensor.detach().clone() for name, tensor in self.held.state_dict().items()}
            self.set_parameters(self.copy.values)
            yield average

    @contextmanager
    def _with_buffers(self, flat: Tensor) -> Iterator[None]:
        own = self.flat_buffers()
        if len(flat) == len(own):
            self.load_buffers(flat)
        try:
            yield
        finally:  # a copy may be lost while it is evaluated
            self.load_buffers(own)

    def flat_buffers(self) -> Tensor:
        """Return all floating-point buffers that move (BatchNorm statistics), 1-D float32 on the CPU."""
        floats = [b.detach().reshape(-1).float().cpu() for b in moving_buffers(self.held) if b.is_floating_point()]
        return torch.cat(floats) if floats else torch.empty(0)

    @torch.no_grad()
    def load_buffers(self, flat: Tensor) -> None:
        """Set all floating-point buffers that move, from `flat_buffers`, 1-D."""
        start = 0
        for buffer in moving_buffers(self.held):
            if buffer.is_floating_point():
                buffer.copy_(flat[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did to this worker's pushes since it started; empty without it."""
        return entropy_coded(state for state, _ in self._client.sent_states())

    def density(self) -> float | None:
        """Return the share of elements that this worker's last pushes carried; None without a sparse codec."""
        return share_carried(self._client.sent_states())

    def close(self) -> None:
        """Leave the run."""
        self._client.close()

    @contextmanager
    def _as_last(self, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def _attach(self) -> None:
        """Hook every module that has parameters of its own, and every parameter's gradient.

        Some modules use their children's parameters without calling them (attention's output projection). So the first
        pass loads everything at the start, and only modules that it has seen called wait for themselves later.
        """
        index_of = {id(p): i for i, p in enumerate(self._parameters)}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: self._gradient(index_of[id(p)]))
        for module in self.held.modules():
            index = index_of.get(id(getattr(module, "weight", None)))
            if index in self._tables and self._names[index] not in self.server_tables:
                module.register_forward_pre_hook(
                    lambda m, args, kwargs, i=index: self._pull_rows(i, args[0] if args else kwargs["input"]),
                    with_kwargs=True,
                )
        if not self._waits_inside:
            return
        owners: dict[int, list[int]] = {}
        for number, module in enumerate(self.module.modules()):
            own = [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of]
            if own and module is not self.module:
                owners[number] = own
                module.register_forward_pre_hook(lambda m, a, n=number: self._before(n, owners[n]))
        self.module.register_forward_pre_hook(lambda m, a: self._before_all(owners))
        self.module.register_forward_hook(lambda m, a, out: self._after_all(owners))

    def _before_all(self, owners: dict[int, list[int]]) -> None:
        if self._round is None:
            return
        if self._settings.by_priority and not self._round.loaded:
            self._round.forward_began = time.perf_counter(), self._client.stats.waited_s["parameters"]
        waits = {index for number in self._lazy for index in owners[number]}
        for index in range(len(self._parameters)):
            if index not in waits:
                self._load_once(index)
        if not self._lazy:
            self._fired = {}

    def _before(self, number: int, indices: list[int]) -> None:
        if self._fired is not None:
            self._fired.setdefault(number)
        if self._round is not None:
            for index in indices:
                self._load_once(index)

    def _after_all(self, owners: Mapping[int, list[int]]) -> None:
        self._count_overlap()
        if self._fired is None:
            return
        called, self._fired = [*self._fired], None
        self._lazy = set(called)
        if self._settings.by_priority:
            turns: dict[int, int] = {}  # of parameters; others are waited for before the first layer
            for turn, number in enumerate(called):
                for index in owners[number]:
                    turns.setdefault(index, turn)
            first = {key: min(turns.get(index, -1) for index in of) for key, of in self._of_key.items()}
            self._places = {key: place for place, key in enumerate(sorted(first, key=lambda k: (first[k], k)), 1)}

    def _count_overlap(self) -> None:
        """Count for how long the task's first forward pass computed while values still came: nothing is pushed yet, so
        what came was for this pass.
        """
        if self._round is None or self._round.forward_began is None:
            return
        (began_s, waited_s), self._round.forward_began = self._round.forward_began, None
        stats = self._client.stats
        stats.overlapped_s += max(0.0, stats.arrived_s - began_s - (stats.waited_s["parameters"] - waited_s))

    def _load_once(self, index: int) -> None:
        assert self._round is not None
        if index not in self._round.loaded:
            self._round.loaded.add(index)
            self._load(index, self._round.info.step)

    @torch.no_grad()
    def _load(self, index: int, version: int) -> None:
        """Wait for a parameter's keys and copy them, unless it holds that version; rows of a table come apart."""
        if index in self._tables:
            return
        if self._settings.aggregates and self._version[index] == version:
            return
        self._clock.enter(Phase.COMMUNICATE)
        spans = self._by_parameter[index]
        _set(self._parameters[index], ((span, self._piece(span, version)) for span in spans))
        self._version[index] = version
        self._clock.enter(Phase.FORWARD)

    def _piece(self, span: KeySpan, version: int) -> Tensor:
        """Wait for a span's values; with a momentum of its own a worker predicts those at the time of its update."""
        assert self._round is not None
        value = self._client.value(span.key, version)[span.in_key]
        if self._momentum is None:
            return value
        return self._momentum.ahead(span.key, span.in_key, value, self._round.info.lr)

    @torch.no_grad()
    def _pull_rows(self, index: int, ids: Tensor) -> None:
        """Wait for the rows of a table that are looked up and are not here yet."""
        table, current = self._parameters[index], self._round
        if current is None or not ids.numel():
            return
        rows = ids.detach().reshape(-1).long().cpu().unique()
        if int(rows[0]) < 0 or int(rows[-1]) >= len(table):
            return  # torch says so itself
        have = current.rows.get(index)
        if have is not None:
            rows = rows[~torch.isin(rows, have)]
        current.rows[index] = rows if have is None else torch.cat([have, rows])
        self._clock.enter(Phase.COMMUNICATE)
        wanted = [(key, start, within) for key, start, within in of_keys(self._tables[index], rows) if len(within)]
        of = RowsOf(current.info.task, current.info.step)
        found = self._client.rows([(key, within) for key, _, within in wanted], of)
        for (_, start, within), values in zip(wanted, found, strict=True):
            table.detach().index_copy_(0, (within + start).to(table.device), values.to(table.device))
        self._clock.enter(Phase.FORWARD)

    def _push_rows(self, index: int) -> None:
        """Push the gradients of the rows of a table that were touched."""
        gradient = self._rows_gradient(index)
        if gradient is None:
            for key in self._tables[index]:
                self._client.push_rows(key, None, torch.empty(0), self._info_of(key))
            return
        rows, values = gradient
        first = 0
        for key, _, within in of_keys(self._tables[index], rows):
            self._client.push_rows(key, within, values[first : first + len(within)], self._info_of(key))
            first += len(within)

    def _rows_gradient(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the gradient of a table: rows `(R,)`, ascending, and values `(R, D)`; None: there is none."""
        if self._names[index] in self.server_tables:
            return self.server_tables.gradient(self._names[index])
        gradient = self._parameters[index].grad
        if gradient is None:
            return None
        gradient = gradient.detach().coalesce()
        return gradient.indices()[0].cpu(), gradient.values().cpu()

    def _gradient(self, index: int) -> None:
        """Push the keys whose gradient is complete with that of a parameter.

        Reentrant checkpointing runs a backward in backward, and what such parts share gets its gradient in pieces. The
        first step tells of which parameters that is so: in it nothing leaves before the end.

        Raises:
            UserError: another piece came of what has left already.
        """
        current = self._round
        if not self._last or current is None:
            return
        keys = list({span.key.index: span.key for span in self._by_parameter[index]}.values())
        if index in current.came:
            self._in_pieces.add(index)
            if any(current.missing[key.index] == 0 for key in keys):
                raise UserError(
                    f"--sync ps: {self._names[index]} got more of its gradient after that had left for the servers, "
                    "unlike in earlier steps: parts of the model that share it are checkpointed with "
                    "use_reentrant=True; use use_reentrant=False"
                )
            return
        current.came.add(index)
        for key in keys:
            current.missing[key.index] -= 1
        complete = [key for key in keys if current.missing[key.index] == 0]
        if index in self._tables:
            if complete:
                self._push_rows(index)
            return
        for key in complete:
            self._push(key)

    def _push(self, key: KeyRange) -> None:
        assert self._round is not None
        gradient, absent = self._flat_gradient(key), self._absent(key)
        info = self._info_of(key)
        is_update = len(absent) < len(key.parts) and (info.units > 0 or not info.batch)
        if self._momentum is not None and is_update:
            gradient = self._momentum.apply(key, gradient, lambda: self._value_of(key), absent)
        self._client.push(key, gradient, info, absent)

    def _info_of(self, key: KeyRange) -> PushInfo:
        """Return what a key's server must know of its gradient."""
        assert self._round is not None
        info = self._round.info
        return replace(info, place=self._places[key.index]) if self._places else info

    def _absent(self, key: KeyRange) -> list[int]:
        """Return the parts of a key, by number, that got no gradient: the servers leave them as they are.

        A part may be of several parameters: it is absent if all of them are.
        """
        spans = self._by_key[key.index]
        there = [span.in_key for span in spans if self._parameters[span.parameter].grad is not None]
        if len(there) == len(spans):
            return []
        return [
            i
            for i, part in enumerate(key.parts)
            if not any(here.start < part.stop and part.start < here.stop for here in there)
        ]

    def _flat_gradient(self, key: KeyRange) -> Tensor:
        """Return a key's gradient: a view where it lies in one parameter, else a copy."""
        pieces = []
        for span in self._by_key[key.index]:
            parameter = self._parameters[span.parameter]
            if parameter.grad is None:
                count = span.in_key.stop - span.in_key.start
                pieces.append(torch.zeros(count, dtype=self._table.torch_dtype))
            else:
                pieces.append(parameter.grad.detach().reshape(-1)[span.in_parameter].cpu())
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _set(parameter: nn.Parameter, pieces: Iterable[tuple[KeySpan, Tensor]]) -> None:
    """Write spans' values into a parameter; as a whole where its memory has another order, such as channels_last."""
    own = parameter.detach()
    flat = own.view(-1) if own.is_contiguous() else torch.empty(own.numel(), dtype=own.dtype, device=own.device)
    for span, values in pieces:
        flat[span.in_parameter] = values.to(flat.device)
    if not own.is_contiguous():
        own.copy_(flat.view(own.shape))
