"""Synchronous SGD: in every step, gradients are summed over all replicas while backward still runs (Goyal et al. 2017).

Helps: Links that keep up, by themselves or with a codec. The result is the same as on one device.
Costs: all gradients are sent in each step, and each step waits for the slowest replica.
Needs: replicas of about the same speed.

g = sum over replicas of (1 / units of the global batch) * sum over local units of grad(loss_i). A unit is what the
task's loss is a mean over, such as a sample or a token. So a replica with a larger part of the batch has more weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives.base import Path
from echelon.collectives.codec_state import StepMemories, carried, common, left_out, merge, velocity_of
from echelon.collectives.hook import GradientHook
from echelon.collectives.piece_order import MOST_BYTES
from echelon.collectives.row_reducer import RowReducer
from echelon.collectives.times import ReduceTimes
from echelon.collectives.wire import is_small, ring_bytes
from echelon.compression import Compression
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.models.still_buffers import moving_buffers
from echelon.models.tables import sparse_tables
from echelon.observe.phases import Phase
from echelon.optim.kernels import laid_out_as
from echelon.sync.base import Agreement, Sync, SyncContext
from echelon.sync.buffers import averaged_buffers, mean_of_replicas, saved_buffers
from echelon.sync.layerwise import LayerwiseUpdate
from echelon.sync.settings import SyncSettings
from echelon.sync.state_bytes import Piece, StateBytes, by_hook
from echelon.sync.unreached import UnreachedParameters
from echelon.torch_compat import build_ddp, ignore_in_ddp, is_compiled


@dataclass(frozen=True)
class AllReduceSettings(SyncSettings):
    """Settings of `allreduce`: none."""

    name: ClassVar[str] = "allreduce"
    sums_in_backward: ClassVar[bool] = True

    @property
    def regroups(self) -> bool:
        """True: a step's sums need all replicas, and are applied by all or by none."""
        return True

    def check(self, compression: Compression) -> None:
        """Every codec can carry gradients."""

    def state_bytes(self, compression: Compression, piece: Piece) -> StateBytes:
        """Return the memory of the codec and of the vectors that gradients are reduced in."""
        return by_hook(compression, piece)

    def build(self, context: SyncContext) -> Sync:
        """Build the strategy."""
        return AllReduce(context)


STRATEGY = AllReduceSettings
_ROW_STEPS, _LOOKUPS = "rows.steps", "rows.lookups"  # in the state: on what the draws of a codec of rows depend


class AllReduce:
    """DistributedDataParallel with our communication hook; a single process has nothing to agree on."""

    def __init__(self, context: SyncContext) -> None:
        self._context = context
        self._hook: GradientHook | None = None
        self._unreached: UnreachedParameters | None = None  # where DDP does not look for them itself
        self._is_in_loop = False
        self.module: nn.Module = context.model
        self.has_replica_state = False
        self.steps_together = True
        self._left_out: dict[str, Tensor] = {}  # by former replicas' codecs, for the first gradient without any
        self.needs_warmup_backward = False
        self.in_flight = False
        self._ddp: DistributedDataParallel | None = None
        self._layerwise: LayerwiseUpdate | None = None  # of a path by priority
        self._tables = sparse_tables(context.model)
        self._rows: RowReducer | None = None
        self._exchange = context.cut_rows.exchange if context.cut_rows else None
        self._sent_before: dict[str, int] = {}  # in groups of before
        self._kept: StepMemories | None = None  # of the codec in the group that was left
        self._kept_scale = 1.0  # of the gradients that it remembers
        self._common: StateView = {}  # of the codec, from a rank that is further
        self._agreed: dict[bool, list[Tensor]] = {}  # buffers since the last step, by whether of moving averages
        if context.group is None:
            return
        averages, seed = context.averages_gradients, context.seed
        compression = context.compression.for_run(context.steps)
        if self._tables:
            self._rows = _row_reducer(context, self._tables)
        if not any(p.requires_grad and n not in self._tables for n, p in context.model.named_parameters()):
            return  # DDP refuses a model of which nothing is left to it: tables alone, or a frozen part of a pipeline
        self._ddp = context.ddp or _wrapped(context, self._tables)
        self._hook = GradientHook(context.group, compression, context.path, average=averages, seed=seed)
        if not context.path.by_priority:  # else backward waits for nobody
            self._hook.on_last_bucket = context.clock.only_waits
        self._hook.attach(self._ddp)
        self.module = self._ddp
        if not context.has_unused and any(p.requires_grad for p in context.model.parameters()):
            self._unreached = UnreachedParameters(context.model, context.group, self._hook)
        # DDP orders its buckets anew after its first backward, and more than two ranks round differently in another
        # order: a resumed run would not repeat the bits. Codecs work on buckets that do not depend on DDP's; a
        # compiled model would be compiled twice.
        compiled = is_compiled(context.model)
        unordered = self._hook.codec is None and self._hook.sums is None
        self.needs_warmup_backward = unordered and context.group.size() > 2 and not compiled
        if self._hook.sums is not None:
            self._layerwise = LayerwiseUpdate(self._ddp, context.optimizer, self._hook.sums, context.clock)

    def begin_step(self, units: int, global_units: int) -> int:
        """Gradients are summed over all replicas: they are divided by the size of the global batch."""
        self._agreed.clear()
        return global_units

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Keep gradients local until the last micro-batch."""
        if self._hook is None:
            return nullcontext()
        self._is_in_loop = True
        if last:
            return self._unreached.completing() if self._unreached else nullcontext()
        if self._unreached:
            self._unreached.accumulating()
        assert self._ddp is not None
        return self._ddp.no_sync()

    def communication_began(self) -> Any:
        """Return when the last bucket was handed over: from then on backward only waits."""
        if self._hook is None or self._layerwise is not None:
            return None
        return self._hook.last_ready_event if self._context.device.type == "cuda" else self._hook.last_ready_s

    def step(self) -> None:
        """Gradients are summed already: update."""
        self._agreed.clear()
        if self._left_out:
            self._catch_up()
        if self._unreached and self._is_in_loop:
            self._unreached.settle(self._layerwise.wait if self._layerwise else None)
        if self._layerwise is not None:
            self._layerwise.begin()
            return
        if self._rows:
            self._context.clock.enter(Phase.COMMUNICATE)
            self._rows.reduce()
            self._context.clock.enter(Phase.UPDATE)
        if self._confirms and self._context.group is not None:
            self._confirm(self._context.group)
        if self._hook is None:
            self._context.update()
            return
        scale = self._context.loss_scale()
        self._context.update()
        for switch in self._hook.take_switches():
            self._context.noted(switch)
        change = self._context.loss_scale() / scale
        self._hook.step_made()
        if change != 1.0:
            self._hook.rescale(change)

    def silent(self) -> AbstractContextManager[object]:
        """Reduce nothing."""
        if self._unreached and self._hook:
            self._unreached.silent = self._hook.silent
        return self._hook.silent() if self._hook else nullcontext()

    def leave_out(self) -> None:
        """Drop the gradients: no replica updates."""
        for parameter in self._context.model.parameters():
            parameter.grad = None

    def _catch_up(self) -> None:
        for name, parameter in self._context.model.named_parameters():
            if name in self._left_out and parameter.grad is not None:
                parameter.grad += self._left_out.pop(name).view_as(parameter).to(parameter)

    @property
    def has_residual(self) -> bool:
        """Whether codecs may have left something out of the gradients until now."""
        return bool(self._left_out) or (
            self._hook is not None and self._hook.codec is not None and self._hook.codec.biased
        )

    def recall(self) -> None:
        """Call back what codecs have left out, for this step's gradient: after it none is encoded any more."""
        group, hook = self._context.group, self._hook
        if group is None or hook is None or not self.has_residual:
            return
        own = left_out(self._merged([hook.state_dict()]), group.size() if self._context.averages_gradients else 1)
        for name, parameter in self._context.model.named_parameters():
            if parameter.grad is None or is_small(parameter) or name in self._tables:
                continue
            total = own[name].to(parameter) if name in own else parameter.new_zeros(parameter.numel())
            dist.all_reduce(total, group=group)
            hook.wire.add("weights", ring_bytes(total.nbytes, group.size(), total.is_cuda))
            self._left_out[name] = total

    def agreed(self, averages: bool = False) -> AbstractContextManager[object]:
        """Average BatchNorm statistics over the replicas, once after a step; each keeps its own."""
        self._finish_update()
        known = self._agreed.setdefault(averages, [])
        return averaged_buffers(self._context.model, self._context.group, known)

    def steps_to_agreement(self, averages: bool = False) -> int | None:
        """Return 0 where there are no statistics to average, or they were averaged since the last step."""
        alone = self._context.group is None or next(moving_buffers(self._context.model), None) is None
        return 0 if alone or self._agreed.get(averages) else None

    def agreed_of(self, replicas: Sequence[StateView], averages: bool = False) -> StateTree:
        """Return the mean of the replicas' BatchNorm statistics."""
        return mean_of_replicas(saved_buffers(replicas, averages))

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes sent by this rank, by group of parameters."""
        parts = (self._hook, self._rows, self._exchange)
        own = [self._sent_before, *(part.wire.by_group for part in parts if part)]
        return {group: sum(each.get(group, 0) for each in own) for counts in own for group in counts}

    @property
    def _confirms(self) -> bool:
        """Whether no rank updates before all have their sums.

        What a linear codec leaves out is known with the last sum alone: who lacks that one could not keep its memory.
        """
        codec = self._hook.codec if self._hook else None
        return self._context.survives and codec is not None and codec.linear and codec.biased

    def _confirm(self, group: dist.ProcessGroup) -> None:
        assert self._hook is not None
        nothing = torch.zeros(1, device=self._context.device)
        dist.all_reduce(nothing, group=group)
        self._hook.wire.add("small", ring_bytes(nothing.nbytes, group.size(), nothing.is_cuda))

    def leave(self) -> Callable[[dist.ProcessGroup | None, Path], AllReduce]:
        """Let go of the group and of what gradients are reduced with; returns what builds the strategy for another one
        and a path.

        All ranks of that group call it; None: this rank is alone from then on. What a codec remembers goes along, once
        `settle_step` has said of which moment.
        """
        context, sent = replace(self._context, group=None, ddp=None), self.bytes_sent()
        if self._hook:
            self._hook.close()
            self._kept, self._sent_before = self._hook.memories(), dict(sent)  # it may be left again before it is built
            self._kept_scale = context.loss_scale()
        if self._unreached:
            self._unreached.close()
        self._hook = self._unreached = self._rows = None
        self._ddp, self.module, self._context = None, context.model, context  # the group is not kept by who has left it

        def build(group: dist.ProcessGroup | None, path: Path) -> AllReduce:
            """Build the strategy for a group."""
            made = AllReduce(replace(context, group=group, path=path))
            made._sent_before = dict(sent)
            made._take_over(self._kept, self._common, self._kept_scale)
            self._kept, self._common = None, {}
            return made

        return build

    agreement = Agreement.REACHED

    def settle_step(self, made: bool) -> None:
        """Hear, between two groups, whether the step that was begun last counts: if not, codecs forget it.

        Where it was made by others alone, this rank's memories are those after it all the same: what they have summed
        this rank had sent. But where losses are scaled less since then, all have left the step out, for its gradients
        had overflowed, and codecs forget it.
        """
        if self._kept is not None:
            overflowed = self._context.loss_scale() < self._kept_scale
            self._kept = self._kept.settled(made and not overflowed)

    def shared_memory(self) -> StateTree:
        """Return what a codec has alike on all ranks, between two groups."""
        return common(self._kept.after) if self._kept is not None else {}

    def take_shared_memory(self, state: StateView) -> None:
        """Take over, between two groups, what `shared_memory` returned on a rank that is further."""
        self._common = state

    def _take_over(self, memories: StepMemories | None, shared: StateView, scale: float) -> None:
        """Go on with memories of gradients that were scaled so, and with what a rank that is further has shared."""
        hook = self._hook
        if hook is None or hook.codec is None or self._context.group is None:
            return
        if memories is not None:
            numels = {name: parameter.numel() for name, parameter in self._context.model.named_parameters()}
            hook.load_state_dict(carried(memories.after, numels, self._context.group.size()))
            if (change := self._context.loss_scale() / scale) != 1.0:
                hook.rescale(change)
        if shared:
            hook.load_common(merge([shared], {}))

    def break_off(self, made: bool) -> None:
        """Reduce nothing any more; unless its update was `made`, codecs forget the step that was begun last."""
        if self._hook:
            self._hook.close()
            if not made:
                self._hook.undo_step()

    def common_state(self) -> StateTree:
        """Return what of `state_dict` all replicas have alike."""
        return common(self.state_dict())

    def load_common_state(self, state: StateView) -> None:
        """Take over what `common_state` returned in another replica; what codecs have not sent begins anew."""
        if self._hook and state:
            self._hook.load_common(merge([state], {}))

    def reduce_times(self) -> ReduceTimes | None:
        """Return the hook's; on a GPU the host does not see when the network is done."""
        return self._hook.times if self._hook and self._context.device.type == "cpu" else None

    def entropy_coded(self) -> Mapping[str, float]:
        """Return what entropy coding did on this rank."""
        return self._hook.entropy_coded() if self._hook else {}

    def density(self) -> float | None:
        """Return the share of the encoded elements that this rank sent last."""
        return self._hook.density() if self._hook else None

    def state_dict(self) -> StateTree:
        """Return the hook's state: error-feedback memories and step counters."""
        self._finish_update()
        counted = ((_ROW_STEPS, self._rows), (_LOOKUPS, self._exchange))
        steps = {key: part.steps for key, part in counted if part}
        if self._hook:
            return {**self._hook.state_dict(), **steps}
        if steps:
            return dict(steps)
        return {f"sent.error/{name}/0": total for name, total in self._left_out.items()}

    def alike(self, state: StateView) -> list[Tensor]:
        """Return nothing: what codecs remember is each rank's own."""
        return []

    def load_state_dict(self, state: StateTree) -> None:
        """Take back the hook's state; of a codec whose last rank goes on alone, what `load_resharded` makes of it."""
        self._agreed.clear()
        state = self._without_row_steps(state)
        if self._hook and state:
            self._hook.load_state_dict(state)
        elif any(key.startswith("numbers.") for key in state):
            self.load_resharded([state])
        elif state:
            self._left_out = left_out(self._merged([state]))

    def load_resharded(self, states: Sequence[StateView]) -> None:
        """Divide the memories of other ranks; the sum over all ranks is kept.

        Alone there is no codec: what was left out joins the first gradient, and momentum goes back to the optimizer; a
        momentum that the optimizer had goes to codecs that apply it.
        """
        merged = self._merged(states)
        if self._hook is None:
            velocity = velocity_of(merged)
            # What waits of a velocity has had its momentum: the optimizer's multiplies it by 1 / (1 - m) again.
            share = 1 - float(self._context.optimizer.param_groups[0].get("momentum", 0.0))
            self._left_out = {n: e * share if n in velocity else e for n, e in left_out(merged).items()}
            self._give_momentum_back(velocity)
        else:
            if merged:
                self._hook.load_state_dict(merged)
            self._take_momentum(self._hook)

    def _merged(self, states: Sequence[StateView]) -> StateTree:
        plain = [self._without_row_steps(state) for state in states]
        return merge(plain, {name: parameter.numel() for name, parameter in self._context.model.named_parameters()})

    def _without_row_steps(self, state: StateView) -> StateTree:
        """Take over how many reductions and lookups of rows there were; returns the other entries."""
        if self._rows and _ROW_STEPS in state:
            self._rows.steps = int(state[_ROW_STEPS])
        if self._exchange and _LOOKUPS in state:
            self._exchange.steps = int(state[_LOOKUPS])
        return {key: value for key, value in state.items() if key not in (_ROW_STEPS, _LOOKUPS)}

    def _give_momentum_back(self, velocity: Mapping[str, Tensor]) -> None:
        if not self._context.optimizer.param_groups[0].get("momentum"):
            return  # one that has none of its own, such as AdamW
        scale = self._context.loss_scale()
        for name, parameter in self._context.model.named_parameters():
            if name in velocity:
                kept = laid_out_as(parameter, (velocity[name] / scale).view_as(parameter).to(parameter))
                self._context.optimizer.state[parameter]["momentum_buffer"] = kept

    def _take_momentum(self, hook: GradientHook) -> None:
        if hook.codec is None or hook.codec.absorbs_momentum is None:
            return
        states = self._context.optimizer.state
        named = dict(self._context.model.named_parameters())
        kept = {n: states[p].pop("momentum_buffer", None) for n, p in named.items() if p in states}
        # Where the update is divided over replicas (zero1), each momentum is with one of them.
        holders = torch.tensor([float(kept.get(name) is not None) for name in named], device=self._context.device)
        dist.all_reduce(holders, group=self._context.group)
        velocity: dict[str, Tensor] = {}
        for (name, parameter), count in zip(named.items(), holders.tolist(), strict=True):
            if count:
                momentum = kept.get(name)
                # Row-major on every rank, for sums go by memory: a momentum's order may differ from its parameter's.
                velocity[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                if momentum is not None:
                    velocity[name].copy_(momentum)
                dist.all_reduce(velocity[name], group=self._context.group)
                velocity[name] *= self._context.loss_scale() / count
        hook.take_velocity(velocity)

    def _finish_update(self) -> None:
        """Update what still waits for its sum: what is read now is of the last step."""
        if self._layerwise is not None:
            self._layerwise.finish()

    def close(self) -> None:
        """End the hook's communication thread."""
        self._finish_update()
        if self._unreached:
            self._unreached.close()
        if self._hook:
            self._hook.close()


def _row_reducer(context: SyncContext, tables: Mapping[str, nn.Parameter]) -> RowReducer | None:
    """Build what reduces the rows of tables; None: no other rank has the same.

    Raises:
        UserError: it is for a loop of somebody else's, or sums are in the order of the forward pass.
    """
    if context.path.by_priority:
        raise UserError(
            f"--collective with order=priority: {next(iter(tables))} makes sparse gradients, whose rows are summed at "
            "the end of the step: leave out order=priority, or --sparse-tables"
        )
    if context.averages_gradients:
        raise UserError(
            f"{next(iter(tables))} makes sparse gradients, which are summed at the step here, after a loop of your own "
            "may have clipped them: use sync local(8), or build it with sparse=False"
        )
    cut_rows, codec = context.cut_rows, context.compression.codec
    group = context.group if cut_rows is None else cut_rows.group
    if group is None:
        return None
    return RowReducer(tables, group, codec if codec.takes_rows else None, context.seed, cut_rows is not None)


def _wrapped(context: SyncContext, tables: Collection[str]) -> DistributedDataParallel:
    if tables:
        ignore_in_ddp(context.model, list(tables))
    return build_ddp(
        context.model,
        process_group=context.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=context.has_unused,
        bucket_cap_mb=MOST_BYTES / 2**20 if context.path.by_priority else None,  # what is ready may travel
        init_sync=False,  # replicas begin alike already: see `same_start`
        **_no_buffers_in_steps(),
    )


def _no_buffers_in_steps() -> dict[str, Any]:
    """Buffers are averaged for evaluation instead; torch 2.15 renamed the argument."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
