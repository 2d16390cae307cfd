"""A part of the model that agrees as one: its values, what was agreed on last, and what is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.collectives import codec_state
from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.background import Background, Means, PendingMean
from echelon.sync.averaging.exchange import Exchange, Taking
from echelon.sync.averaging.period import TIMES
from echelon.sync.averaging.plan import AveragingPlan, MeanRule, Rule
from echelon.sync.averaging.values import Value, moments, plain_name

_PIECE = 1 << 17
_ROUNDED = 1e-6  # of what two float32 numbers that cancel were


@dataclass
class PendingAverage:
    """A mean on its way; it is applied after local step `due`.

    Attributes:
        means: of the replicas' deltas.
        deltas: this replica's own.
        outer_lr: how many times as far as the mean change of parameters replicas go.
        samples: that this replica's deltas weigh; 0: not known.
    """

    due: int
    means: PendingMean
    deltas: dict[str, Tensor]
    outer_lr: float = 1.0
    samples: int = 0


@dataclass(frozen=True)
class SavedReplica:
    """What a replica saved of itself: its tensors by name, or their moving averages, and a fragment's state.

    Attributes:
        fresh: no step was made since what was agreed on last, of all fragments, was applied.
    """

    tensors: StateView
    fragment: StateView
    step: int
    fresh: bool

    @classmethod
    def of(cls, sync: StateView, fragment: int, tensors: StateView) -> SavedReplica:
        """Take a fragment out of a strategy's state."""
        fragments = sync["fragments"]
        return cls(tensors, fragments[fragment], int(sync["step"]), all(f.get("fresh") for f in fragments))

    @property
    def weight(self) -> int:
        """What its values weigh in a mean."""
        return int(self.fragment["samples"]) if self.fragment["expected"] else 1


class Fragment:
    """Takes deltas, lets them travel, applies their mean.

    Attributes:
        values: its parameters and buffers.
        samples: seen by this replica since deltas were taken last.
        expected: seen by all replicas since then, samples that could not be decoded included.
        equal: nothing has moved on any replica since they took an agreed value.
        fresh: no step was made since what was agreed on last was applied.
        pending: what is on its way.
        moved_on: the replica has trained while what was agreed on last travelled, and goes on with that, too.
        times: what all replicas told with the mean that was applied last, [replicas, numbers]; None: nothing.
        with_unsent: this replica went on from what was agreed on and what its codec had not sent of its own.
    """

    def __init__(self, values: list[Value], exchange: Exchange | None) -> None:
        """Prepare; without an exchange (a single replica) a delta is its own mean."""
        self.values = values
        self.samples = self.expected = 0
        self.equal, self.fresh = True, False
        self.pending: PendingAverage | None = None
        self.moved_on = self.with_unsent = False
        self.times: Tensor | None = None
        self._exchange = exchange
        self._left_out: dict[str, Tensor] = {}
        self._common: StateView = {}
        self._anchor = {v.name: v.read() for v in values}

    def count(self, samples: int, expected: int) -> None:
        """Count a step's samples."""
        self.samples += samples
        self.expected += expected
        self.equal = self.fresh = False

    def anchor(self, value: Value) -> Tensor:
        """Return what was agreed on last: the tensor itself."""
        return self._anchor[value.name]

    def re_anchor(self, optimizer: torch.optim.Optimizer, plan: AveragingPlan) -> None:
        """Take parameters, and moments that are averaged, for agreed on: synchronous steps kept them the same.

        Buffers differ by now: what was agreed on stays their first values.
        """
        self.equal = False
        for value in self._averaged(optimizer, plan):
            if value.kind != "buffer":
                self._anchor[value.name] = value.read()

    def start(
        self,
        optimizer: torch.optim.Optimizer,
        plan: AveragingPlan,
        step: int,
        background: Background | None,
        tells: Sequence[float] = (),
    ) -> None:
        """Take the deltas and let them travel, with what this replica tells others: at once, or in the background."""
        values, samples, expected = self._averaged(optimizer, plan), self.samples, self.expected
        deltas = {}
        for value in values:
            own, anchor = value.read(), self._anchor.get(value.name)  # a new moment has none: it comes from 0
            deltas[value.name] = own if anchor is None else apart(value, own, anchor)
        self.samples = self.expected = 0
        taking = Taking(step, tuple(tells))
        if background is None:
            means = PendingMean.at_once(self._mean(values, deltas, (samples, expected), plan, taking))
        else:
            means = background.submit(lambda: self._mean(values, deltas, (samples, expected), plan, taking))
        travels = plan.overlap_at(step)
        progress = deltas if plan.keep_progress and travels else {}
        self.pending = PendingAverage(step + travels, means, progress, plan.outer_lr, samples)

    def _mean(
        self,
        values: Sequence[Value],
        deltas: dict[str, Tensor],
        seen: tuple[int, int],
        plan: AveragingPlan,
        taking: Taking,
    ) -> Means:
        """Return the mean of all replicas' deltas; `seen`: samples of this replica and of all."""
        samples, expected = seen
        if not self.values:  # nothing travels, and what the others agree on it has
            return {} if expected else None
        if self._exchange is None:
            return self._alone(deltas) if samples else None
        with torch.no_grad():
            if plan.optimizer_state == "average":
                values = self._exchange.had_by_all(values)
            return self._exchange.mean(values, deltas, samples, self.with_unsent, taking)

    def _alone(self, deltas: dict[str, Tensor]) -> Means:
        """Return deltas with what former replicas' codecs had left out of theirs."""
        left_out, self._left_out = self._left_out, {}
        return {n: d + left_out[n].view_as(d).to(d) if n in left_out else d for n, d in deltas.items()}

    def apply(self, rule: Rule, optimizer: torch.optim.Optimizer, plan: AveragingPlan) -> None:
        """Wait for the mean and apply it: w <- alpha w + (1 - alpha) agreed, or agreed + steps since then.

        What a codec has not sent of this replica's own is part of what it goes on from (see `Averaging`).
        """
        assert self.pending is not None
        means, deltas, outer_lr = self.pending.means.result(), self.pending.deltas, self.pending.outer_lr
        self.pending = None
        self.times = means.get(TIMES) if means is not None else None
        if means is None:
            return
        self.with_unsent, self.moved_on = self._leaves_unsent, bool(deltas)
        late = self.moved_on if plan.keep_progress else plan.overlap > 0
        self.equal, self.fresh = not (rule.centred or late or plan.alpha or self.with_unsent), True
        plain = MeanRule()
        for value in self._averaged(optimizer, plan):
            if value.name not in means:  # a moment that came after the deltas were taken, or that not all have
                continue
            own, mean = value.read(), _outer_step(value, means[value.name], outer_lr)
            anchor = self._anchor.setdefault(value.name, torch.zeros_like(own))
            chosen: Rule = rule if value.kind == "parameter" else plain
            since = _way_since(value, own, anchor, deltas[value.name]) if deltas else None
            agreed = chosen.agree(value.name, own, anchor, mean)
            if value.kind == "moment":  # a variance that decayed to nothing is none, not what rounding left below it
                agreed.masked_fill_((agreed < 0) & (agreed.abs() <= _ROUNDED * mean.abs()), 0)
            if (unsent := self._unsent(value)) is not None:
                agreed = agreed + unsent
            if since is not None:
                agreed = _moved_on(value, agreed, own, since)
            value.write(torch.lerp(agreed, own, plan.alpha) if plan.alpha else agreed)
        if plan.optimizer_state == "reset":
            for value in self.values:
                if value.owner in optimizer.state:
                    optimizer.state[value.owner].clear()

    @property
    def took_s(self) -> float:
        """Seconds of the last mean with which replicas told each other something; 0: there was none."""
        return self._exchange.took_s if self._exchange is not None else 0.0

    @property
    def _leaves_unsent(self) -> bool:
        return self._exchange is not None and any(self._exchange.leaves_unsent(value) for value in self.values)

    def _unsent(self, value: Value) -> Tensor | None:
        """Return what stays in this replica's value since its codec has not sent it; None: nothing does."""
        return self._exchange.unsent(value) if self._exchange is not None else None

    def _averaged(self, optimizer: torch.optim.Optimizer, plan: AveragingPlan) -> list[Value]:
        extra = moments(optimizer, self.values) if plan.optimizer_state == "average" else []
        return [*self.values, *extra]

    def on_its_way(self, value: Value, due: int) -> Tensor | None:
        """Return what replicas agree on with the mean that is due after that step; None if there is none."""
        if self.pending is None or self.pending.due != due:
            return None
        means = self.pending.means.result()
        if means is None or value.name not in means:
            return None
        return self._anchor[value.name] + _outer_step(value, means[value.name], self.pending.outer_lr)

    def known_of(self, replica: SavedReplica, plan: AveragingPlan, centred: bool) -> StateTree:
        """Return what is agreed on already, by name: all that was just applied, a mean on its way of the last step, or
        the centre's parameters.
        """
        anchor, pending = replica.fragment["anchor"], replica.fragment["flight"]
        if replica.fresh and not plan.alpha:
            return {v.name: self._as_held(v, anchor[v.name]) for v in self.values}
        if plan.keep_progress and pending and pending["due"] == replica.step + plan.overlap:
            means, outer_lr = pending["means"] or {}, float(pending.get("outer_lr", 1.0))
            moved = [(v, _outer_step(v, means[v.name], outer_lr)) for v in self.values if v.name in means]
            return {v.name: self._as_held(v, anchor[v.name] + step) for v, step in moved}
        at_centre = [v for v in self.values if centred and v.kind == "parameter"]
        return {v.name: self._as_held(v, anchor[v.name]) for v in at_centre}

    def unsent(self) -> dict[str, Tensor]:
        """Return, by name, what is in values since this replica's codec has not sent it; nothing while a mean is on its
        way, for what the codec has not sent of that one is not in them yet.
        """
        if not self.with_unsent or self.pending is not None:
            return {}
        unsent = {value.name: self._unsent(value) for value in self.values}
        return {name: tensor for name, tensor in unsent.items() if tensor is not None}

    def mean_of(self, replicas: Sequence[SavedReplica], known: StateView, averages: bool) -> StateTree:
        """Return the weighted mean of what replicas saved, by name, of all values but those that are known.

        What their codecs had not sent (see `unsent`) weighs the same of all; in moving averages nobody can tell it.
        """
        total = sum(replica.weight for replica in replicas)
        held = [v for v in self.values if v.name not in known and plain_name(v) in replicas[0].tensors]
        dtype = torch.float64 if any(v.tensor.dtype == torch.float64 for v in held) else torch.float32
        amends = self._amends(replicas, total) if total and not averages else {}
        means: StateTree = {}
        for value in held if total else ():
            copies = [(replica.tensors[plain_name(value)], replica.weight) for replica in replicas if replica.weight]
            mean = _weighted_mean(copies, total, dtype)
            if value.name in amends:
                mean += amends[value.name].view_as(mean)
            means[value.name] = self._as_held(value, mean)
        return means

    def _amends(self, replicas: Sequence[SavedReplica], total: int) -> dict[str, Tensor]:
        """Return, by name, what a weighted mean lacks of what codecs had not sent: all of it, in equal shares."""
        amends: dict[str, Tensor] = {}
        for replica in replicas:
            lacks = 1 - len(replicas) * replica.weight / total
            if lacks and replica.fragment.get("with_unsent") and not replica.fragment["flight"]:
                for name, error in codec_state.left_out(self._merged([replica.fragment["codec"]])).items():
                    amends[name] = amends.get(name, torch.zeros_like(error)).add_(error, alpha=lacks)
        return amends

    def _as_held(self, value: Value, values: Tensor) -> Tensor:
        return (values if value.tensor.is_floating_point() else values.round()).to(value.tensor.dtype)

    def shards(self) -> list[CodecShard]:
        """Return the codec's states."""
        return self._exchange.shards() if self._exchange else []

    def settle(self) -> None:
        """Wait until what is on its way has arrived; it is applied when it is due."""
        if self.pending is not None:
            self.pending.means.result()

    def state_dict(self) -> StateTree:
        """Return everything that a resume needs, not copied; waits for what is on its way."""
        pending: StateTree = {}
        waiting = {f"sent.error/{name}/0": total for name, total in self._left_out.items()}
        if self.pending is not None:
            pending = {
                "due": self.pending.due, "means": self.pending.means.result(), "deltas": self.pending.deltas,
                "outer_lr": self.pending.outer_lr, "samples": self.pending.samples,
            }  # fmt: skip
        return {
            "anchor": dict(self._anchor),
            "samples": self.samples,
            "expected": self.expected,
            "equal": self.equal,
            "fresh": self.fresh,
            "moved_on": self.moved_on,
            "with_unsent": self.with_unsent,
            "flight": pending,
            "codec": self._exchange.state_dict() if self._exchange else waiting,
        }

    def landed(self) -> StateTree:
        """Return, where a mean was just applied, the state of the step at which it was taken (not copied)."""
        return {
            **self.state_dict(), "samples": 0, "expected": 0, "equal": True, "fresh": True, "moved_on": False,
            "with_unsent": False,
        }  # fmt: skip

    def load_state_dict(self, state: StateView) -> None:
        """Take back what `state_dict` gave on this rank."""
        self._load_common_part(state)
        if self._exchange:
            self._exchange.load_state_dict(state["codec"])
        else:
            self._left_out = codec_state.left_out(self._merged([state["codec"]]))

    def shared(self) -> StateTree:
        """Return, at an agreement, what is alike on all ranks."""
        state = self.state_dict()
        return {**state, "codec": codec_state.common(state["codec"])}

    def take_shared(self, state: StateView) -> None:
        """Take over what `shared` returned on another rank, whose values this one has; what this one's codec has not
        sent stays.
        """
        self._load_common_part(state)
        self._common = state["codec"]
        if self.with_unsent and not self.equal:  # of the other rank's own
            self._write_anchors()
            self.with_unsent = False

    def go_on_from(self, previous: Fragment, ranks: int) -> None:
        """Take over a fragment of this rank, at an agreement, in a group of so many ranks."""
        state = previous.state_dict()
        self._load_common_part(state)
        if self._exchange is None:
            self._left_out = {} if self.with_unsent else codec_state.left_out(self._merged([state["codec"]]))
            self.with_unsent = False
            return
        numels = {v.name: v.tensor.numel() for v in self.values}
        self._exchange.load_state_dict(codec_state.carried(state["codec"], numels, ranks))
        if previous._common:
            self._exchange.load_common(codec_state.merge([previous._common], {}))
        if self.with_unsent and not self.equal:  # it weighs otherwise among so many
            self._write_anchors(with_unsent=True)

    def load_resharded(self, replicas: Sequence[SavedReplica], plan: AveragingPlan) -> None:
        """Take over what is the same on all former ranks; what codecs left out is divided, its sum kept.

        Each rank goes on from what those agreed on, which a mean on its way does not move. Between agreements that has
        what codecs left out in it: it is not to be learnt again.
        """
        state, is_known = replicas[0].fragment, bool(self.known_of(replicas[0], plan, centred=False))
        self._load_shared(state)
        with_unsent = bool(state.get("with_unsent")) and not is_known
        merged = self._merged([replica.fragment["codec"] for replica in replicas])
        if self._exchange:
            self.with_unsent = with_unsent
            if merged:  # all ranks have the same of what is in their values, whatever their shares of a batch
                self._exchange.load_state_dict(codec_state.without_owners(merged) if with_unsent else merged)
        else:
            replaced = self.pending is not None and not self.pending.deltas  # values will be, by what lands
            self._left_out = {} if with_unsent and not replaced else codec_state.left_out(merged)
        if self.pending and self.pending.deltas and (means := self.pending.means.result()):
            self.pending.deltas = self._taken_over(self.pending, means, replicas, is_known)
            self.pending.samples = 1  # all ranks have the same

    def _taken_over(
        self, pending: PendingAverage, means: dict[str, Tensor], replicas: Sequence[SavedReplica], is_known: bool
    ) -> dict[str, Tensor]:
        """Return what the values that all former ranks agreed on have of a mean on its way.

        Args:
            is_known: they are what the mean makes of the anchor, the outer step included.
        """
        travelling = [replica.fragment["flight"] for replica in replicas]
        weights = [int(each.get("samples", 0)) for each in travelling]
        taken = {name: mean for name, mean in means.items() if name != TIMES}
        for value in self.values:
            mean = means[value.name]
            if is_known:
                taken[value.name] = _outer_step(value, mean, pending.outer_lr)
            elif replicas[0].fragment.get("with_unsent"):
                unsent = self._unsent(value)
                taken[value.name] = mean if unsent is None else mean + unsent
            elif sum(weights):  # what the codec made of them brings what it had left out before
                deltas = [(each["deltas"][value.name], n) for each, n in zip(travelling, weights, strict=True) if n]
                taken[value.name] = _weighted_mean(deltas, sum(weights), mean.dtype).to(mean.device)
        return taken

    def _merged(self, codecs: Sequence[StateView]) -> StateTree:
        return codec_state.merge(codecs, {v.name: v.tensor.numel() for v in self.values})

    def _write_anchors(self, with_unsent: bool = False) -> None:
        """Give the values what was agreed on, and what the codec has not sent of them."""
        for value in self.values:
            agreed, unsent = self._anchor[value.name], self._unsent(value) if with_unsent else None
            value.write(agreed if unsent is None else agreed + unsent)

    def _load_common_part(self, state: StateView) -> None:
        self._load_shared(state)
        self.samples, self.expected = int(state["samples"]), int(state["expected"])
        self.equal, self.fresh = bool(state["equal"]), bool(state.get("fresh"))
        self.moved_on, self.with_unsent = bool(state.get("moved_on")), bool(state.get("with_unsent"))

    def _load_shared(self, state: StateView) -> None:
        device = self.values[0].tensor.device if self.values else torch.device("cpu")
        self._anchor = {name: tensor.to(device).clone() for name, tensor in state["anchor"].items()}
        self.pending = None
        if state["flight"]:
            saved = state["flight"]["means"]
            means = PendingMean.at_once(None if saved is None else {n: t.to(device) for n, t in saved.items()})
            deltas = {n: t.to(device) for n, t in state["flight"].get("deltas", {}).items()}
            outer_lr, samples = float(state["flight"].get("outer_lr", 1.0)), int(state["flight"].get("samples", 0))
            self.pending = PendingAverage(int(state["flight"]["due"]), means, deltas, outer_lr, samples)


def _weighted_mean(copies: Sequence[tuple[Tensor, int]], total: int, dtype: torch.dtype) -> Tensor:
    """Return sum_i n_i x_i / total in a type, of tensors of one shape [...] with their weights.

    A piece after the other: each fits a processor's cache, and nothing but the mean itself takes memory.
    """
    shape = copies[0][0].shape
    mean = torch.empty(shape.numel(), dtype=dtype)
    flat = [(tensor.reshape(-1), weight) for tensor, weight in copies]
    for start in range(0, mean.numel(), _PIECE):
        piece = mean[start : start + _PIECE].zero_()
        for tensor, weight in flat:
            piece += tensor[start : start + _PIECE].to(dtype) * weight
        piece /= total
    return mean.reshape(shape)


def _outer_step(value: Value, mean: Tensor, outer_lr: float) -> Tensor:
    """Return how far replicas go by a mean change, of its shape; buffers and moments take the mean."""
    return mean * outer_lr if outer_lr != 1 and value.kind == "parameter" else mean


def apart(value: Value, current: Tensor, agreed: Tensor) -> Tensor:
    """Return current - agreed, both of one shape, in `current`'s memory; a mask's -inf in a buffer is no distance of
    NaN, nor is it one that a table of narrow numbers is what was agreed on, rounded.
    """
    if value.kind == "buffer":
        return torch.where(current == agreed, 0.0, current - agreed)
    if value.is_table and value.tensor.dtype != agreed.dtype:
        return torch.where(current == agreed.to(value.tensor.dtype), 0.0, current - agreed)
    return current.sub_(agreed)


def _way_since(value: Value, current: Tensor, anchor: Tensor, delta: Tensor) -> Tensor:
    """Return how far a replica has gone since a delta was taken, of its shape; of a table, in rows that it has not
    touched since, nothing at all, or rounding would have them travel again.
    """
    if value.is_table:
        return apart(value, current.clone(), anchor).sub_(delta)
    return apart(value, current.clone(), anchor + delta)


def _moved_on(value: Value, agreed: Tensor, current: Tensor, since: Tensor) -> Tensor:
    """Return what was agreed on and the way of this replica since it was taken.

    A variance that another replica's way is added to could turn negative: there the agreed value stays.
    """
    moved = agreed + since
    if value.kind == "parameter" or not bool((current >= 0).all()):
        return moved
    return torch.where((moved < 0) & (agreed >= 0), agreed, moved)
