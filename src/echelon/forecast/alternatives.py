"""What other ways to communicate would cost a run's model: bytes on the wire and time to encode, recorded at its end.

The report predicts from it what each would gain (`echelon.reporting.report.predictions`); it knows no strategy itself.
Nothing is sent but single numbers, with which ranks wait for each other: codecs run on made-up gradients of the model's
shapes, and what they send comes straight back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import codec_state
from echelon.collectives.buckets import Bucket, lay_out
from echelon.collectives.compressed_all_reduce import CompressedAllReduce
from echelon.collectives.messages import Mailbox
from echelon.collectives.reducer import is_finite
from echelon.collectives.rounds import LinearAllReduce
from echelon.collectives.schedule import Ring
from echelon.collectives.wire import framing_bytes, ring_bytes
from echelon.compression import Compression
from echelon.compression.base import Codec
from echelon.compression.registry import CODECS
from echelon.core.errors import UserError
from echelon.core.shards import FlatTensor
from echelon.core.spec import Spec
from echelon.forecast.link_rates import LinkProbe, LinkRates
from echelon.models.tables import sparse_tables
from echelon.records.kinds import Alternative, Alternatives
from echelon.sync.averaging.period import SHARE
from echelon.sync.averaging.plan import AveragingPlan
from echelon.sync.averaging.settings import AveragingSettings
from echelon.sync.registry import STRATEGIES
from echelon.trainer.loop import TrainingRun
from echelon.trainer.resolved import ResolvedRun

TRIED = (
    *(Spec(name) for name in ("none", "bf16", "int8", "sign")),
    Spec("topk", (), (("density", 0.01),)), Spec("powersgd", (), (("rank", 2),)),
)  # fmt: skip
"""Codecs that are tried beside the run's own."""
AVERAGED = (
    *(Spec("local", (), (("period", period),)) for period in (4, 8)),
    Spec("local", (), (("period", 8), ("overlap", 2))),
    *(Spec("diloco", (), (("period", period),)) for period in (8, 20)),
    Spec("local", (), (("period", "auto"),)),
)  # fmt: skip
"""Strategies that send the model once in so many steps, outside of backward."""

_EACH_STEP = AveragingPlan(1)
_BUDGET_S = 1.0
_TURNS = (3, 12)
_OTHER_BYTES = 1 << 26  # more than the caches of a core
_MOST_NUMEL = 1 << 22  # of a larger model, some buckets stand for the others
_SIZED = 1 << 16  # elements by which the stages of a codec are compared
_MOST_SAMPLED = 200


@dataclass(frozen=True)
class Cost:
    """One way to communicate: bytes that a rank sends at a time, in how many rounds, and seconds to encode and decode.

    Attributes:
        tail: share of it that comes last, when backward has nothing left to hide it behind.
        network_s: that its messages take, without encoding.
        sums: whether its messages are summed on their way.
        buckets: that are sent, each in its own rounds; that of biases and the like is not counted beside encoded ones.
        small_bytes, small_s: of these bytes and seconds, what biases and the like take, which no codec acts on.
    """

    n_bytes: float
    rounds: float
    coding_s: float
    tail: float
    network_s: float
    sums: bool
    buckets: int
    small_bytes: float = 0.0
    small_s: float = 0.0

    def times(self, more: float) -> Cost:
        """Return it with encoded messages of so many times the bytes."""
        n_bytes, network_s = self.n_bytes - self.small_bytes, self.network_s - self.small_s
        return replace(
            self, n_bytes=self.small_bytes + more * n_bytes, network_s=self.small_s + more * max(0.0, network_s)
        )

    def beside(self, small: float, rates: LinkRates) -> Cost:
        """Return it with so many bytes that are summed as they are, in a round of their own."""
        seconds = rates.seconds(small, 1, sums=True)
        return replace(
            self, n_bytes=self.n_bytes + small, rounds=self.rounds + 1, network_s=self.network_s + seconds,
            small_bytes=small, small_s=seconds,
        )  # fmt: skip

    def mixed(self, other: Cost, share: float) -> Cost:
        """Return the mean where a share of messages are the other's."""
        names = ("n_bytes", "rounds", "coding_s", "tail", "network_s")
        means = {name: (1 - share) * getattr(self, name) + share * getattr(other, name) for name in names}
        return replace(self, **means)


def record_alternatives(run: TrainingRun, resolved: ResolvedRun) -> int:
    """Record what other codecs and periods would cost; all ranks call it together. Returns the bytes that it sent.

    Only for replicas that are whole models and reduce gradients in each step; for others nothing is written. Nor where
    only touched rows of tables travel: other ways send whole tables, or as many rows as the data has it.
    """
    world, described = run.world, resolved.described.strategy.compression
    if world.group is None or world.size < 2:  # one that others have left, too
        return 0
    if run.parts.split is not None or not resolved.sync.sums_in_backward:
        return 0
    if sparse_tables(run.parts.local_model):
        return 0
    probe = LinkProbe(world)
    parameters = {n: p for n, p in run.parts.local_model.named_parameters() if p.requires_grad}
    total = sum(p.nbytes for p in parameters.values())
    rates = probe.rates(total, total // (4 * world.size))  # of eight bits an element, a chunk for each rank
    settled = _settled(resolved)
    costs = _measure_codecs(parameters, probe, settled, rates)
    if world.leads:
        rows = _rows(costs, settled, described, max(1, run.world.notes.step))
        run.progress.record.write(Alternatives({"strategy.compression": described}, rates.latency_s, rows))
    return probe.sent_bytes


def _rows(costs: Mapping[str, Cost], settled: Mapping[str, Compression], own: str, steps: int) -> list[Alternative]:
    """Return what each way costs in a run of so many steps; the run's own as its steps are, without begin and end."""
    rows = []
    for spec, cost in costs.items():
        row = _row(spec, cost if spec == own else _over_run(cost, settled[spec].for_run(steps), costs))
        rows.append(replace(row, fewest_messages=settled[spec].codec.fewest_messages))
    for sync in AVERAGED:
        strategy: AveragingSettings = STRATEGIES.bind(sync)
        agreements = min(steps, strategy.messages(steps))
        for encoded in [e for e in ("none", "int8", "sign") if e in costs and _go_together(strategy, Spec(e))]:
            compression = strategy.settled(settled[encoded], steps)
            cost = replace(_over_run(costs[encoded], compression, costs), tail=1.0)
            fewest = settled[encoded].codec.fewest_messages
            row = replace(_row(encoded, cost, str(sync), strategy.plan()), fewest_messages=fewest)
            if most := strategy.longest_period(steps):
                rows.append(replace(row, period=most, follows=SHARE))
            else:
                rows.append(replace(row, share=agreements / steps))
    return rows


def _over_run(cost: Cost, compression: Compression, costs: Mapping[str, Cost]) -> Cost:
    """Return the mean cost of a run's messages, of which the first and last may be (nearly) whole, or larger."""
    codec, messages = compression.codec, compression.messages
    whole = codec.whole_steps(messages)
    steady = range(whole.first, messages - whole.last)[:: 1 + messages // _MOST_SAMPLED]
    stages = [codec.at(step).bits_per_element(_SIZED) for step in steady]
    more = fmean(stages) / codec.at(messages).bits_per_element(_SIZED) if stages else 1.0
    more = 1.0 if math.isnan(more) else more  # of a codec whose sizes only values tell
    scaled = cost.times(more)
    nearly_whole = costs.get("bf16" if codec.linear else "int8")
    if nearly_whole is None or not messages:
        return scaled
    return scaled.mixed(nearly_whole, min(1.0, (whole.first + whole.last) / messages))


def _settled(run: ResolvedRun) -> dict[str, Compression]:
    """Return the run's codec and the others that go with the optimizer, with momentum where they want it, by spec."""
    settled = {run.described.strategy.compression: run.compression}
    for spec in TRIED:
        with suppress(UserError):  # a combination that a run would be refused for is no alternative to this one
            other = run.compressed_by(Compression(CODECS.bind(spec))).compression
            if other != run.compression:  # however the run's own is written
                settled[str(spec)] = other
    return settled


def _go_together(strategy: AveragingSettings, codec: Spec) -> bool:
    try:
        strategy.check(Compression(CODECS.bind(codec)))
    except UserError:  # a combination that a run would be refused for is no alternative to this one
        return False
    return True


def _row(compression: str, cost: Cost, sync: str = "", plan: AveragingPlan = _EACH_STEP) -> Alternative:
    settings = {"strategy.sync": sync} if sync else {}
    if compression != "none" or not sync:
        settings["strategy.compression"] = compression
    return Alternative(
        settings, plan.period, cost.n_bytes, cost.rounds, cost.coding_s, cost.tail, plan.overlap, cost.network_s,
        sums=cost.sums, buckets=cost.buckets,
    )  # fmt: skip


@torch.no_grad()
def _measure_codecs(
    parameters: Mapping[str, Tensor], probe: LinkProbe, codecs: Mapping[str, Compression], rates: LinkRates
) -> dict[str, Cost]:
    """Measure what each codec costs for gradients like these parameters, within about a second; all ranks call it.

    Args:
        codecs: what travels, by spec.
        rates: of the network, which `Cost.coding_s` does not hold.
    """
    world = probe.world
    buckets = lay_out(reversed(list(parameters.items()))).buckets
    weights = [bucket for bucket in buckets if bucket.group != "small"]
    small = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets if bucket.group == "small")
    chosen = list(_within(weights, _MOST_NUMEL))
    scale = sum(c.numel for c in weights) / max(1, sum(c.numel for c in chosen))
    tail = weights[-1].numel / sum(c.numel for c in weights) if weights else 1.0
    on_gpu = world.device.type == "cuda"
    costs: dict[str, Cost] = {}
    for spec, compression in codecs.items():
        if not compression.encodes:
            total = sum(c.numel * c.dtype.itemsize for c in weights) + small
            sent = ring_bytes(total, world.size, on_gpu)
            seconds = rates.seconds(sent, len(buckets), sums=True)
            costs[spec] = Cost(sent, len(buckets), 0.0, tail, seconds, sums=True, buckets=len(buckets))
            continue
        trials = [_Trial(compression.build(), bucket, probe) for bucket in chosen]
        turn_s = _time(trials, probe, _BUDGET_S / len(codecs))
        coding_s = max(0.0, turn_s - rates.latency_s * sum(t.rounds for t in trials)) * scale
        n_bytes = sum(t.n_bytes for t in trials) * scale
        rounds: float = round(sum(t.rounds for t in trials) * scale)
        network_s = rates.seconds(n_bytes, rounds, sums=compression.codec.linear)
        linear = compression.codec.linear
        cost = Cost(n_bytes, rounds, coding_s, tail, network_s, sums=linear, buckets=len(weights))
        costs[spec] = cost.beside(ring_bytes(small, world.size, on_gpu), rates) if small else cost
    return costs


def _within(buckets: list[Bucket], most: int) -> Iterator[Bucket]:
    """Yield buckets up to a number of elements, at least one."""
    taken = 0
    for bucket in buckets:
        if taken and taken + bucket.numel > most:
            return
        taken += bucket.numel
        yield bucket


def _time(trials: list[_Trial], probe: LinkProbe, budget_s: float) -> float:
    """Return the median seconds of a turn of all trials, after a first turn that is not counted.

    As in training: a thread of its own is woken for each turn, other memory has been gone through since the last one
    (a codec that finds its tensors in the caches takes half as long), and the ranks wait for each other in each round.
    All ranks take as many turns.
    """
    device = probe.world.device
    other = torch.zeros(_OTHER_BYTES // 4, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @torch.no_grad()
    def turn() -> None:
        """Do every trial once."""
        for trial in trials:
            trial.turn()

    def timed(thread: Executor) -> float:
        """Return the seconds of one turn on a thread, which all ranks begin together."""
        other.add_(1.0)
        wait()
        probe.meet()
        began = time.perf_counter()
        thread.submit(turn).result()
        wait()
        return time.perf_counter() - began

    begins = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1, initializer=begins) as thread:
        least, most = _TURNS
        turns = min(most, max(least, round(budget_s / probe.most(timed(thread)))))
        return median(timed(thread) for _ in range(turns))


@dataclass(frozen=True)
class _Loop(Mailbox):
    """A post whose messages come straight back, as if the others had sent the like, once all have got there.

    Attributes:
        sent: bytes of each exchange so far.
    """

    sent: list[int] = field(default_factory=list)
    meet: Callable[[], None] = lambda: None

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> tuple[dict[int, Tensor], int]:
        """Return the messages that were to be sent, after all ranks have met."""
        self.meet()
        self.sent.append(sum(m.nbytes + framing_bytes(1, m.is_cuda) for m in outgoing.values()))
        return {place: outgoing[place] for place in incoming}, self.sent[-1]

    def announce(self, outgoing: Mapping[int, Tensor], senders: Any) -> tuple[dict[int, int], int]:
        """Return the lengths that were to be announced, after all ranks have met."""
        self.meet()
        self.sent.append(sum(8 + framing_bytes(1, m.is_cuda) for m in outgoing.values()))
        return {place: outgoing[place].numel() for place in senders}, self.sent[-1]


class _Trial:
    """A bucket's reduction as the hook does it, between this rank and itself.

    Attributes:
        n_bytes, rounds: of the last turn.
    """

    def __init__(self, codec: Codec, bucket: Bucket, probe: LinkProbe) -> None:
        self.n_bytes = self.rounds = 0
        world = probe.world
        self._meet = probe.meet if world.device.type != "cuda" else lambda: None  # there a round is only queued
        generator = torch.Generator().manual_seed(bucket.number)
        rank, size = world.rank, world.size
        usable = bucket.numel if codec.linear else max(size, bucket.numel - bucket.numel % size)  # chunks of one length
        self._gradient = torch.randn(usable, generator=generator).to(bucket.device, bucket.dtype) * 1e-3
        self._flat = torch.empty_like(self._gradient)
        self._linear: LinearAllReduce | None = None
        if codec.linear:
            pieces = list(bucket.members)
            whole = [FlatTensor("cell", (usable,), (0, usable))]
            self._linear = LinearAllReduce(codec, pieces if codec.shaped else whole, self._flat, (rank, size), 0)
            shards = self._linear.shards
        else:
            mailbox = _Loop(cast(dist.ProcessGroup, None), Ring(range(size), rank), meet=self._meet)
            self._coded, self._mailbox = CompressedAllReduce(codec, mailbox, self._flat, "trial", 0), mailbox
            shards = self._coded.shards
        self._size, self._snapshot = size, codec_state.StateSnapshot([h.state for h in shards])

    def turn(self) -> None:
        """Copy the gradient in, reduce, look whether it is finite, copy it out: the hook's work on a bucket."""
        self._flat.copy_(self._gradient)
        self._snapshot.take()
        if self._linear is not None:
            self.rounds = 0
            self.n_bytes = self._linear.sum_(self._flat, self._sum, average=False)
        else:
            self._mailbox.sent.clear()
            self.n_bytes = self._coded.sum_(self._flat)
            self.rounds = len(self._mailbox.sent)
        is_finite(self._flat)
        self._flat.clone()

    def _sum(self, message: Tensor) -> int:
        self._meet()
        self.rounds += 1
        message.mul_(self._size)
        return ring_bytes(message.nbytes, self._size, message.is_cuda)
