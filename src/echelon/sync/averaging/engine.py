"""Averaging: each replica trains by itself, and from time to time all of them agree (the loop's side of it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import codec_state
from echelon.collectives.base import Path
from echelon.collectives.route import Route, open_route
from echelon.collectives.times import ReduceTimes
from echelon.collectives.wire import SHOWN, WireCount
from echelon.compression.transforms.chain import forgetting_nothing
from echelon.core.listeners import closed_afterwards
from echelon.core.state_tree import StateTree, StateView
from echelon.models.tables import sparse_tables
from echelon.observe.phases import Phase
from echelon.sync.allreduce import AllReduce
from echelon.sync.averaging.background import Background
from echelon.sync.averaging.exchange import DeltaTransport, Exchange, RowDraws, sum_of_rows, weighted_sum
from echelon.sync.averaging.fragment import Fragment, SavedReplica, apart
from echelon.sync.averaging.period import PeriodChange, PeriodFollower
from echelon.sync.averaging.plan import AveragingPlan, MeanRule, Rule, stays
from echelon.sync.averaging.values import Value, cut, model_values
from echelon.sync.base import Agreement, SyncContext
from echelon.sync.buffers import mean_of_replicas, saved_buffers
from echelon.torch_compat import COMPILED, same_ranks_group, uses_nccl


class Averaging:
    """A `Sync` that follows a plan (when) and a rule (how).

    A replica steps by the mean gradient of its own units (samples, tokens); one that has none in a step takes none. An
    agreement averages parameters, buffers and, on request, moments, weighted by the units seen since the last one.

    What a codec leaves out of a replica's delta stays in that replica: it goes on from what was agreed on and its own
    rest. So the mean of the replicas is what it would be without a codec, and nothing is learnt twice; compressed are
    the differences between replicas alone, as in CHOCO-SGD (Koloskova et al. 2019, arXiv:1902.00340). Where replicas
    keep a share of their own anyway, and of linear codecs, the rest waits in the codec's error memory.
    """

    def __init__(
        self, context: SyncContext, plan: AveragingPlan, rule_for: Callable[[int], Rule], begins: bool = True
    ) -> None:
        """Prepare.

        Args:
            rule_for: returns the rule among so many replicas.
            begins: else it goes on from another one (see `leave`).
        """
        plan = plan.for_run(context.steps)
        self._context, self._plan, self._rule_for = context, plan, rule_for
        self._rule = rule_for(context.group.size() if context.group is not None else 1)
        self._step = 0  # local steps done; negative during the synchronous ones
        self._now = (0, 0)
        self._agreed: dict[bool, list[Tensor]] = {}
        self._wire = WireCount()
        self._first: AllReduce | None = None
        if plan.start and begins:
            self._step, self._first = -plan.start, AllReduce(context)
        self._route = open_route(context.path, context.group) if context.group is not None else None
        self._background: Background | None = None
        self._follower: PeriodFollower | None = None
        if plan.auto:
            self._follower = PeriodFollower(plan.control(), context.device, self._note)
            self._rule.settle(self._follower.period)
        runs = cut(model_values(context.model), plan.fragments)
        link = self._link()
        self._fragments = [
            Fragment(run, Exchange(link, run, f"fragment{i}") if link else None) for i, run in enumerate(runs)
        ]

    def _note(self, change: PeriodChange) -> None:
        """Tell of a change with the step of the run, synchronous ones counted."""
        self._context.noted(replace(change, step=change.step + self._plan.start))

    def _link(self) -> DeltaTransport | None:
        """Return how deltas travel: overlapped, in a process group and on a thread of their own."""
        if self._route is None:
            return None
        route = self._route
        if self._plan.overlap:
            self._background = Background(self._context.device)
            with closed_afterwards(with_nccl=uses_nccl(route.group)):
                route = Route(route.path, same_ranks_group(route.group))
        compression, codec = self._context.compression, None
        leaves = compression.encodes and stays(compression.codec, self._plan, self._rule.centred)
        compression = compression.without_whole_start() if leaves else compression
        if compression.encodes:
            codec = compression.for_run(self._plan.agreements(self._context.steps)).build()
            codec = forgetting_nothing(codec) if leaves else codec
        confirms = self._context.survives and codec is not None and codec.linear and codec.biased
        row_codec = compression.codec if compression.encodes and compression.codec.takes_rows else None
        return DeltaTransport(route, codec, self._context.seed, self._wire, leaves, confirms, row_codec)

    @property
    def module(self) -> nn.Module:
        """The wrapped model during synchronous steps, then the model itself."""
        return self._first.module if self._first else self._context.model

    @property
    def has_replica_state(self) -> bool:
        """True once steps are local, and there is more than one replica (or a centre beside it)."""
        return self._first is None and (self._route is not None or self._rule.centred)

    @property
    def needs_warmup_backward(self) -> bool:
        """Only synchronous steps go through DDP's buckets."""
        return self._first is not None and self._first.needs_warmup_backward

    def begin_step(self, units: int, global_units: int) -> int:
        """Return what losses are divided by: the replica's own units, so that its gradient is their mean."""
        self._now = (units, global_units)
        if self._follower is not None and self._first is None:
            self._follower.begin_step()
        return self._first.begin_step(units, global_units) if self._first else max(1, units)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Only synchronous steps communicate in backward."""
        return self._first.micro_batch(last) if self._first else nullcontext()

    def communication_began(self) -> Any:
        """Only synchronous steps communicate in backward."""
        return self._first.communication_began() if self._first else None

    def silent(self) -> AbstractContextManager[object]:
        """Only synchronous steps communicate in backward."""
        return self._first.silent() if self._first else nullcontext()

    @property
    def steps_together(self) -> bool:
        """Only synchronous steps are of all replicas."""
        return self._first is not None

    def leave_out(self) -> None:
        """Take no step, as a replica without samples; what is due is agreed on all the same.

        After the last synchronous step no gradient is encoded any more: it brings what codecs have left out until then.
        """
        first = self._first
        brings = self._step == -1 and first is not None and first.has_residual
        zeroes, tables = brings or self._step == 0, sparse_tables(self._context.model)
        for name, parameter in self._context.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if zeroes and name not in tables else None
        self._now = (0, self._now[1])
        if first is None:
            self._end_step(None)
        else:
            self._end_step(first.step if brings else first.leave_out)

    def step(self) -> None:
        """Update by the own gradient, then agree on what is due."""
        self._end_step(self._first.step if self._first else None)

    def _end_step(self, first: Callable[[], None] | None) -> None:
        """Update, by `first` while steps are synchronous, then agree on what is due."""
        self._agreed.clear()
        if self._first and first:
            if self._step == -1:
                self._first.recall()
            first()
        elif self._now[0] == 0 and self._step > 0:
            self._context.optimizer.zero_grad(set_to_none=True)  # no samples, no step
        else:  # the very first step makes the optimizer's state, which all replicas must have
            self._context.update()
        self._step += 1
        if self._first is None:
            self._agree()
        elif self._step == 0:
            self._leave_synchronous(self._first)

    def _agree(self) -> None:
        plan, optimizer, step = self._plan, self._context.optimizer, self._step
        for fragment in self._fragments:
            fragment.count(*self._now)
        if step == plan.last and self._route is not None:
            self._agree_at_end()
            return
        taking = [f for i, f in enumerate(self._fragments) if self._is_due(i)]
        landing = [f for f in self._fragments if f.pending and f.pending.due == step]
        if not taking and not landing:
            return
        self._context.clock.enter(Phase.COMMUNICATE)
        if self._follower is not None:
            self._follower.enter()
        for fragment in taking:
            tells = self._follower.take(step) if self._follower is not None else ()
            fragment.start(optimizer, plan, step, self._background, tells)
        for fragment in landing if plan.overlap_at(step) else [*landing, *taking]:
            fragment.apply(self._rule, optimizer, plan)
            if self._follower is not None:
                took_s = fragment.took_s if fragment in landing else None
                if self._follower.landed(step, fragment.times, took_s):
                    self._rule.settle(self._follower.period)
        if self._follower is not None:
            self._follower.leave()
        self._context.clock.enter(Phase.UPDATE)

    def _is_due(self, fragment: int) -> bool:
        """Whether a fragment's deltas are taken after this step."""
        if self._follower is not None:
            return self._step == self._follower.due
        return self._plan.is_due(fragment, self._step)

    def _agree_at_end(self) -> None:
        """Agree after the last step, so that no evaluation or checkpoint has to send whole parameters for it.

        Within a period replicas take their mean, without an outer step.
        """
        plan, optimizer, step = self._plan, self._context.optimizer, self._step
        self._context.clock.enter(Phase.COMMUNICATE)
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.apply(self._rule, optimizer, plan)
        whole = [self._is_due(i) and not plan.overlap for i in range(len(self._fragments))]
        for fragment, is_whole in zip(self._fragments, whole, strict=True):
            fragment.start(optimizer, plan.at_end(is_whole), step, self._background)
        for fragment, is_whole in zip(self._fragments, whole, strict=True):
            fragment.apply(self._rule if is_whole else MeanRule(), optimizer, plan.at_end(is_whole))
        self._context.clock.enter(Phase.UPDATE)

    def _leave_synchronous(self, first: AllReduce) -> None:
        """From now on steps are local."""
        self._drop(first)
        for fragment in self._fragments:
            fragment.re_anchor(self._context.optimizer, self._plan)

    def _drop(self, first: AllReduce) -> None:
        for group, n_bytes in first.bytes_sent().items():
            self._wire.add(group, n_bytes)
        first.close()
        self._first = None

    @contextmanager
    def agreed(self, averages: bool = False) -> Iterator[None]:
        """Give the model the centre where there is one, else the replicas' weighted mean; its own values after it.

        What is evaluated and then saved after the same step travels once.
        """
        if self._first:
            with self._first.agreed(averages):
                yield
            return
        centre = self._rule.centred and not averages
        if not centre and (self._route is None or (all(f.equal for f in self._fragments) and not averages)):
            yield
            return
        with self._own_values_afterwards() as values:
            if averages in self._agreed:
                for value, mean in zip(values, self._agreed[averages], strict=True):
                    value.write(mean)
            elif self._is_fresh and not averages:
                self._write_anchors()
            else:
                for fragment in self._fragments:
                    fragment.settle()
                    self._show(fragment, centre, averages)
                self._agreed[averages] = [value.tensor.detach().clone() for value in values]
            yield

    @contextmanager
    def _own_values_afterwards(self) -> Iterator[list[Value]]:
        """Give all values, which may be written to inside the block."""
        own = [(value, value.tensor.detach().clone()) for fragment in self._fragments for value in fragment.values]
        try:
            yield [value for value, _ in own]
        finally:
            for value, tensor in own:
                value.write(tensor)

    def _write_anchors(self) -> None:
        for fragment in self._fragments:
            for value in fragment.values:
                value.write(fragment.anchor(value))

    @property
    def _is_fresh(self) -> bool:
        """Whether the model was agreed on as a whole and no step made since: all replicas know what it is then."""
        return not self._plan.alpha and all(fragment.fresh for fragment in self._fragments)

    @property
    def in_flight(self) -> bool:
        """Whether a mean is on its way."""
        return any(fragment.pending is not None for fragment in self._fragments)

    def steps_to_agreement(self, averages: bool = False) -> int | None:
        """Return the steps to the next moment at which replicas have just applied a mean of the whole model.

        There is none of moving averages of the weights, of fragments that agree at different steps, nor where replicas
        keep a share of their own.
        """
        if self._first:
            return self._first.steps_to_agreement(averages)
        is_known = not averages and (self._is_fresh or all(fragment.equal for fragment in self._fragments))
        if self._route is None or averages in self._agreed or is_known:
            return 0
        plan = self._plan
        if averages or plan.alpha or len(self._fragments) > 1:
            return None
        if self._follower is None:
            return plan.steps_to_landing(self._step)
        due = next((f.pending.due for f in self._fragments if f.pending), 0)
        return (due or self._follower.due + plan.overlap_at(self._follower.due)) - self._step

    def agreed_of(self, replicas: Sequence[StateView], averages: bool = False) -> StateTree:
        """Return the centre where there is one, else the replicas' weighted mean."""
        if "first" in replicas[0]["sync"]:  # it may have ended since then
            return mean_of_replicas(saved_buffers(replicas, averages))
        agreed: StateTree = {}
        for i, fragment in enumerate(self._fragments):
            saved = [SavedReplica.of(r["sync"], i, r["ema" if averages else "model"]) for r in replicas]
            if averages or not saved[0].fragment["equal"] or self._rule.centred:
                known = {} if averages else fragment.known_of(saved[0], self._plan, self._rule.centred)
                agreed |= fragment.mean_of(saved, known, averages) | known
        return {name.removeprefix(COMPILED): tensor for name, tensor in agreed.items()}

    def _show(self, fragment: Fragment, centre: bool, averages: bool) -> None:
        """Write the centre, or the mean over the replicas, into the live tensors of a fragment.

        A mean of parameters that were taken after the last step travels already; one of their averages does not.
        """
        travels = self._plan.keep_progress and not averages
        averaged: list[Value] = []
        for value in fragment.values:
            at_centre = centre and value.kind == "parameter"
            known = fragment.anchor(value) if at_centre else None
            if travels:
                known = fragment.on_its_way(value, self._step + self._plan.overlap)
            if known is not None:
                value.write(known)
            else:
                averaged.append(value)
        if self._route is None or not averaged:
            return
        tensors: dict[str, Tensor] = {value.name: value.read() for value in averaged}
        weight = fragment.samples if fragment.expected else 1
        unsent = {} if averages else self._take_out_unsent(fragment, tensors, weight)
        whole, tables = ([v for v in averaged if v.is_table is by_rows] for by_rows in (False, True))
        total, sums, sent = weighted_sum(self._route, whole, tensors, weight, unsent)
        self._wire.add(SHOWN, sent)
        for value in whole if total else ():
            value.write(sums[value.name] / total)
        if tables and total:
            self._show_tables(fragment, tables, tensors, weight / total)

    def _show_tables(
        self, fragment: Fragment, tables: Sequence[Value], tensors: Mapping[str, Tensor], share: float
    ) -> None:
        """Write the mean of tables `(rows, D)`: what was agreed on last, and the mean way of rows from there."""
        assert self._route is not None
        ways = {value.name: apart(value, tensors[value.name], fragment.anchor(value)) for value in tables}
        sums, sent = sum_of_rows(self._route, ways, share, RowDraws())
        self._wire.add(SHOWN, sent)
        for value in tables:
            value.write(fragment.anchor(value) + sums[value.name])

    def _take_out_unsent(self, fragment: Fragment, tensors: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
        """Subtract from tensors what this replica's codec has not sent, which weighs the same of all replicas; returns
        what is to be added for it to their weighted sum.
        """
        assert self._route is not None
        unsent = {name: tensor for name, tensor in fragment.unsent().items() if name in tensors}
        if not unsent:
            return {}
        total = torch.full((1,), float(weight), device=next(iter(unsent.values())).device)
        self._wire.add(SHOWN, self._route.sum_(total))
        for name, tensor in unsent.items():
            tensors[name] -= tensor
            tensor *= float(total) / self._route.group.size()
        return unsent

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes sent by this rank, by group of values; `evaluation`: to show the mean."""
        sent = dict(self._wire.by_group)
        for group, n_bytes in self._first.bytes_sent().items() if self._first else ():
            sent[group] = sent.get(group, 0) + n_bytes
        return sent

    def reduce_times(self) -> ReduceTimes | None:
        """Only synchronous steps communicate in backward."""
        return self._first.reduce_times() if self._first else None

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did on this rank; synchronous steps at the start are not counted."""
        return codec_state.entropy_coded(shard for fragment in self._fragments for shard in fragment.shards())

    def density(self) -> float | None:
        """Return the share of the encoded elements that this rank sent last."""
        if self._first:
            return self._first.density()
        return codec_state.density(shard for fragment in self._fragments for shard in fragment.shards())

    def state_dict(self) -> StateTree:
        """Return anchors, counters, the rule's and the codec's memories, and means on their way."""
        if self._first:
            return {"step": self._step, "first": self._first.state_dict()}
        return {
            "step": self._step,
            "rule": self._rule.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            **({"period": self._follower.state_dict()} if self._follower is not None else {}),
        }

    def alike(self, state: StateView) -> list[Tensor]:
        """Return anchors, the rule's memory and means on their way: what only moves by what all have heard."""
        if "first" in state:
            return []
        means = [fragment["flight"].get("means") or {} for fragment in state["fragments"]]
        anchors = [fragment["anchor"] for fragment in state["fragments"]]
        momenta = [held for held in state["rule"].values() if isinstance(held, Mapping)]
        return [tensor for tensors in (*momenta, *anchors, *means) for tensor in tensors.values()]

    def load_state_dict(self, state: StateTree) -> None:
        """Take back what `state_dict` gave on this rank."""
        self._load([state], same_ranks=True)

    @property
    def decides(self) -> bool:
        """Whether the period is chosen as the run goes."""
        return self._follower is not None

    def replay(self, decided: Mapping[int, int]) -> None:
        """Choose these periods again after these steps of the run, synchronous ones counted."""
        if self._follower is not None:
            self._follower.replay([(step - self._plan.start, period) for step, period in decided.items()])

    def begin_anew(self) -> None:
        """Take the present parameters for what replicas have agreed on."""
        for fragment in self._fragments:
            fragment.re_anchor(self._context.optimizer, self._plan)

    def load_resharded(self, states: Sequence[StateView]) -> None:
        """Go on from what the former ranks agreed on; their weights since then are forgotten, their mean is not."""
        self._load(states, same_ranks=False)

    def _load(self, states: Sequence[StateView], same_ranks: bool) -> None:
        self._step = int(states[0]["step"])
        if "first" in states[0]:
            if self._first and same_ranks:
                self._first.load_state_dict(states[0]["first"])
            elif self._first:
                self._first.load_resharded([state["first"] for state in states])
            return
        if self._first:
            self._first.close()
            self._first = None
        self._rule.load_state_dict(states[0]["rule"])
        if self._follower is not None:
            period = states[0].get("period", {})
            unknown = {} if same_ranks or not period else {"tells": [0.0, 0.0]}  # of other ranks
            self._follower.load_state_dict({**period, **unknown}, self._step)
        for i, fragment in enumerate(self._fragments):
            if same_ranks:
                fragment.load_state_dict(states[0]["fragments"][i])
            else:
                fragment.load_resharded([SavedReplica.of(state, i, {}) for state in states], self._plan)

    @property
    def agreement(self) -> Agreement:
        """What replicas have in common after the last step."""
        plan, fragments = self._plan, self._fragments
        if self._first is not None or self._step == 0:  # local steps begin where the synchronous ones have led all
            return Agreement.REACHED
        travels = plan.overlap_at(self._step)
        if travels and any(f.pending and f.pending.due == self._step + travels for f in fragments):
            return Agreement.BEGUN
        if all(fragment.equal for fragment in fragments):
            return Agreement.REACHED
        if all(fragment.fresh for fragment in fragments):
            return Agreement.LANDED if any(fragment.moved_on for fragment in fragments) else Agreement.REACHED
        return Agreement.NONE

    @contextmanager
    def landed(self) -> Iterator[StateTree]:
        """Give the model, and this strategy's state, as agreed on at the step whose mean has just been applied."""
        with self._own_values_afterwards():
            self._write_anchors()
            yield {
                "step": self._step - self._plan.overlap,
                "rule": self._rule.state_dict(),
                "fragments": [fragment.landed() for fragment in self._fragments],
                **({"period": self._follower.state_dict()} if self._follower is not None else {}),
            }

    def leave(self) -> Callable[[dist.ProcessGroup | None, Path], Averaging]:
        """Let go of the group, at the last agreement; returns what builds the strategy for another one and a path.

        What is on its way to others ends first: their connections are broken by now.
        """
        if self._background:
            self._background.close()
        context = replace(self._context, group=None)
        build_first = self._first.leave() if self._first else None

        def build(group: dist.ProcessGroup | None, path: Path) -> Averaging:
            """Build the strategy for a group."""
            made = Averaging(replace(context, group=group, path=path), self._plan, self._rule_for, begins=False)
            made._go_on_from(self, dist.get_world_size(group) if group is not None else 1)
            for name, n_bytes in self._wire.by_group.items():
                made._wire.add(name, n_bytes)
            if self._first is not None and build_first is not None:
                made._first = build_first(group, path)
            return made

        return build

    def settle_step(self, made: bool) -> None:
        """Hear whether a synchronous step counts; what a round has moved is loaded anew from its beginning."""
        if self._first:
            self._first.settle_step(made)

    def shared_memory(self) -> StateTree:
        """Return all but what a codec has not sent: at an agreement it is alike on all ranks."""
        if self._first:
            return {"step": self._step, "first": self._first.shared_memory()}
        return {
            "step": self._step,
            "rule": self._rule.state_dict(),
            "fragments": [fragment.shared() for fragment in self._fragments],
            **({"period": self._follower.shared()} if self._follower is not None else {}),
        }

    def take_shared_memory(self, state: StateView) -> None:
        """Take over what `shared_memory` returned on a rank that is further."""
        self._step = int(state["step"])
        if self._first and "first" in state:
            self._first.take_shared_memory(state["first"])
            return
        if self._first:
            self._drop(self._first)
        self._rule.load_state_dict(state["rule"])
        if self._follower is not None:
            self._follower.take_shared(state["period"], self._step)
        for fragment, shared in zip(self._fragments, state["fragments"], strict=True):
            fragment.take_shared(shared)

    def _go_on_from(self, previous: Averaging, ranks: int) -> None:
        """Take over, in a group of so many ranks, all that this rank had in another one."""
        self._step = previous._step
        self._rule.load_state_dict(previous._rule.state_dict())
        if self._follower is not None and previous._follower is not None:
            self._follower.load_state_dict(previous._follower.shared(), self._step)
        for fragment, earlier in zip(self._fragments, previous._fragments, strict=True):
            fragment.go_on_from(earlier, ranks)

    def close(self) -> None:
        """Let what is on its way arrive, and end the threads."""
        if self._first:
            self._first.close()
        try:
            for fragment in self._fragments:
                fragment.settle()
        finally:
            if self._background:
                self._background.close()
